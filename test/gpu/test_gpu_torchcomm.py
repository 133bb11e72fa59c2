"""TorchComm on GPU tensors beside plain values: every operation, batches, groups, windows."""

import datetime
import functools

import pytest
import torch
import torch.distributed as dist

from harness import catalogue, gpus
from harness.catalogue import LAYOUTS
from harness.comms import make
from harness.gpus import on_ours
from harness.values import assert_reduced, assert_same, data
from torchcomms_pg import ReduceOp

if reason := gpus.missing():
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.torch_version

ROWS = 1000
WINDOW_SIZES = (1, 1025, 300_000)


def new_comm(name):
    patience = datetime.timedelta(minutes=1)
    return make(name, "auto", gpus.current_device(), timeout=patience)


@functools.cache
def comm():
    return new_comm("operations")


class Case(catalogue.Case):
    """One call of TorchComm on this GPU."""

    device = "cuda"

    @property
    def comm(self):
        return comm()


def group(case):
    """Operations that are launched as one."""
    first, second, async_op = case.mine(), case.mine(), case.how != "sync"
    with case.comm.group() as launch:
        case.comm.all_reduce(first, ReduceOp.SUM, async_op)
        case.comm.all_reduce(second, ReduceOp.SUM, async_op)
    launch.work.wait()
    for tensor in (first, second):
        assert_reduced(tensor.cpu(), case.inputs)


OPERATIONS = catalogue.TORCHCOMM | {"group": group}


@pytest.mark.product
@pytest.mark.parametrize("operation", OPERATIONS)
@on_ours(1, 2, 3)
def test_operations_are_those_of_plain_values(world, operation):
    catalogue.run(OPERATIONS[operation], Case(world, ROWS).over(("sync", "async"), LAYOUTS))


@on_ours(1, 2, 3)
def test_split_makes_a_communicator_of_some_ranks(world):
    rank = dist.get_rank()
    members = [0] if rank == 0 else list(range(1, world))
    part = comm().split(members, f"part{members[0]}")
    tensor = torch.full((100,), rank + 1.0, device="cuda")
    part.all_reduce(tensor, ReduceOp.SUM, True).wait()
    assert (tensor.cpu() == sum(member + 1 for member in members)).all()
    part.finalize()


@on_ours(1, 2)
def test_what_is_put_into_a_window_is_there_when_its_signal_is(world):
    rank, made = dist.get_rank(), new_comm("windows")
    after, before = (rank + 1) % world, (rank - 1) % world
    try:
        window = made.new_window(torch.zeros(max(WINDOW_SIZES), device="cuda"))
    except (NotImplementedError, RuntimeError) as error:
        made.finalize()
        # An older NCCL, or ranks that share a GPU through sockets.
        lacking = isinstance(error, NotImplementedError) or "cannot map" in str(error)
        if lacking and not gpus.EMULATED:
            pytest.skip(str(error))
        raise
    for async_op in (False, True):
        for size in WINDOW_SIZES:
            window.put(data(rank, size).cuda(), after, 0, async_op)
            window.signal(after, async_op)
            window.wait_signal(before, async_op).wait()
            got = window.get_tensor()
            assert_same(got[:size].cpu(), data(before, size), f"{size} elements")
            window.signal(before, async_op)  # has read them
            window.wait_signal(after, async_op).wait()
    mapped = window.map_remote_tensor(after)
    assert_same(mapped[: WINDOW_SIZES[-1]].cpu(), data(rank, WINDOW_SIZES[-1]), "mapped")
    window.tensor_deregister()
    made.finalize()
