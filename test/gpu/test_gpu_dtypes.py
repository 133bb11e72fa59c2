"""Every dtype and every reduce op of GPU tensors, through torch.distributed and TorchComm."""

import functools

import pytest
import torch
import torch.distributed as dist

import torchcomms_pg
from harness import catalogue, gpus
from harness.document import reducible
from harness.gpus import on_ours
from harness.values import FLOAT8, MOVABLE, all_data, assert_reduced
from torchcomms_pg import ReduceOp

if reason := gpus.missing():
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.torch_version

FACTOR = 0.5
LENGTH = 1003

# Of float8 without AVG and PRODUCT, whose rounding NCCL does not promise.
ROUNDED = {(dtype, op) for dtype in FLOAT8 for op in ("AVG", "PRODUCT")}
REDUCIBLE = {
    dtype: [
        op for op, said in reducible().items() if said[dtype] != "-" and (dtype, op) not in ROUNDED
    ]
    for dtype in MOVABLE
}
MOVING = ("broadcast", "all_gather_single", "all_to_all_single")


def each(dtypes):
    return pytest.mark.parametrize("dtype", dtypes, ids=lambda dtype: str(dtype).split(".")[-1])


class Case(catalogue.Case):
    device = "cuda"

    def __init__(self, world, dtype, comm):
        super().__init__(world, 5)
        self.comm, self.dtype = comm, dtype


@functools.cache
def comm():
    """The default group's."""
    dist.all_reduce(torch.ones(1, device="cuda"))
    return torchcomms_pg.get_comm(device="cuda")


def reduce(world, dtype, op):
    rank, inputs = dist.get_rank(), all_data(world, (world, LENGTH), dtype)
    scaled = op == "PREMUL_SUM"
    wanted = [each * FACTOR for each in inputs] if scaled else inputs
    reference = dist.ReduceOp.SUM if scaled else getattr(dist.ReduceOp, op)
    theirs = dist._make_nccl_premul_sum(FACTOR) if scaled else reference
    ours = ReduceOp.PREMUL_SUM(FACTOR) if scaled else getattr(ReduceOp, op)

    tensor, part = inputs[rank].cuda(), gpus.empty((LENGTH,), dtype)
    dist.reduce_scatter_tensor(part, tensor.view(-1), theirs)
    assert_reduced(part.cpu(), [each[rank] for each in wanted], reference, "reduce_scatter_tensor")
    dist.all_reduce(tensor, theirs, async_op=True).wait()
    assert_reduced(tensor.cpu(), wanted, reference, "all_reduce")

    tensor, part = inputs[rank].cuda(), gpus.empty((LENGTH,), dtype)
    comm().reduce_scatter_single(part, tensor.view(-1), ours, True).wait()
    assert_reduced(part.cpu(), [each[rank] for each in wanted], reference, "reduce_scatter_single")
    comm().all_reduce(tensor, ours, False)
    assert_reduced(tensor.cpu(), wanted, reference, "TorchComm.all_reduce")


@each(list(REDUCIBLE))
@on_ours(1, 2, 3)
def test_every_dtype_is_reduced_with_every_op_that_takes_it(world, dtype):
    if dtype in FLOAT8 and not gpus.EMULATED and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("NCCL reduces 8-bit floats from compute capability 9.0")
    for op in REDUCIBLE[dtype]:
        try:
            reduce(world, dtype, op)
        except Exception as error:
            raise AssertionError(f"{op}: {error}") from error


@each((*MOVABLE, torch.uint16, torch.uint32, torch.uint64))
@on_ours(1, 2, 3)
def test_every_dtype_is_moved_bit_by_bit(world, dtype):
    for name in MOVING:
        for front in (None, comm()):
            cases = Case(world, dtype, front).over(("sync", "async"))
            catalogue.run(catalogue.TORCHCOMM[name], cases)
    catalogue.run(catalogue.TORCHCOMM["messages"], [Case(world, dtype, comm())])
