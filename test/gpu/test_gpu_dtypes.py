"""Every dtype and every reduce op of GPU tensors, through torch.distributed and TorchComm."""

import functools

import pytest
import torch
import torch.distributed as dist

import torchcomms_pg
from harness import gpus
from harness.gpus import on_ours
from harness.values import (
    COMPLEX,
    FLOAT8,
    FLOATS,
    INTEGERS,
    MOVABLE,
    all_data,
    assert_reduced,
    assert_same,
)
from torchcomms_pg import ReduceOp

if reason := gpus.missing():
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.torch_version

ARITHMETIC = ("SUM", "PRODUCT", "MIN", "MAX", "AVG")
BITWISE = ("BAND", "BOR", "BXOR")
FACTOR = 0.5
LENGTH = 1003

# What docs/api.md says is reducible.
REDUCIBLE = {
    **dict.fromkeys(FLOATS, (*ARITHMETIC, "PREMUL_SUM")),
    **dict.fromkeys((*INTEGERS, torch.int16), (*ARITHMETIC, *BITWISE)),
    torch.bool: ("SUM", "PRODUCT", "MIN", "MAX", *BITWISE),
    **dict.fromkeys(COMPLEX, ("SUM", "AVG", "PREMUL_SUM")),
    **dict.fromkeys(FLOAT8, ("SUM", "MIN", "MAX")),
}


def each(dtypes):
    return pytest.mark.parametrize("dtype", dtypes, ids=lambda dtype: str(dtype).split(".")[-1])


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
    rank, root = dist.get_rank(), world - 1
    rows = [each.to(dtype) for each in all_data(world, (world, 5), torch.int64)]
    mine, column = rows[rank].cuda(), torch.stack([row[rank] for row in rows])

    tensor = mine.clone()
    dist.broadcast(tensor, root)
    assert_same(tensor.cpu(), rows[root], "broadcast")
    everything = gpus.empty((world * world, 5), dtype)
    dist.all_gather_into_tensor(everything, mine, async_op=True).wait()
    assert_same(everything.cpu(), torch.cat(rows), "all_gather_into_tensor")
    tensor = gpus.empty((world, 5), dtype)
    dist.all_to_all_single(tensor, mine)
    assert_same(tensor.cpu(), column, "all_to_all_single")

    tensor = mine.clone()
    comm().broadcast(tensor, root, True).wait()
    assert_same(tensor.cpu(), rows[root], "TorchComm.broadcast")
    everything = gpus.empty((world * world, 5), dtype)
    comm().all_gather_single(everything, mine, False)
    assert_same(everything.cpu(), torch.cat(rows), "all_gather_single")
    tensor = gpus.empty((world, 5), dtype)
    comm().all_to_all_single(tensor, mine, True).wait()
    assert_same(tensor.cpu(), column, "TorchComm.all_to_all_single")
    batch, tensor = comm().batch_op_create(), gpus.empty((world, 5), dtype)
    batch.send(mine, (rank + 1) % world)
    batch.recv(tensor, (rank - 1) % world)
    batch.issue(False)
    assert_same(tensor.cpu(), rows[(rank - 1) % world], "messages")
