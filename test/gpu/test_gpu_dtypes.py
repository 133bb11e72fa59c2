"""Every dtype and every reduce op of GPU tensors, through torch.distributed and TorchComm."""

import functools

import pytest
import torch
import torch.distributed as dist

import torchcomms_pg
from harness import catalogue, gpus
from harness.document import reducible
from harness.gpus import on_ours
from harness.values import FLOAT8, MOVABLE

if reason := gpus.missing():
    pytest.skip(reason, allow_module_level=True)

pytestmark = [pytest.mark.torch_version, pytest.mark.product]

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


@functools.cache
def comm():
    """The default group's."""
    dist.all_reduce(torch.ones(1, device="cuda"))
    return torchcomms_pg.get_comm(device="cuda")


def run(operations, world, rows, **others):
    """Runs them over torch.distributed and over TorchComm."""
    for name in operations:
        for front in (None, comm()):
            cases = Case(world, rows, comm=front, **others).over(("sync", "async"))
            catalogue.run(catalogue.TORCHCOMM[name], cases)


@each(list(REDUCIBLE))
@on_ours(1, 2, 3)
def test_every_dtype_is_reduced_with_every_op_that_takes_it(world, dtype):
    if dtype in FLOAT8 and not gpus.EMULATED and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("NCCL reduces 8-bit floats from compute capability 9.0")
    run(("all_reduce", "reduce_scatter_single"), world, 335, dtype=dtype, ops=REDUCIBLE[dtype])


@each((*MOVABLE, torch.uint16, torch.uint32, torch.uint64))
@on_ours(1, 2, 3)
def test_every_dtype_is_moved_bit_by_bit(world, dtype):
    run(MOVING, world, 5, dtype=dtype)
    catalogue.run(catalogue.TORCHCOMM["messages"], [Case(world, 5, comm=comm(), dtype=dtype)])
