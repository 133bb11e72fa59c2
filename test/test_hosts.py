"""Ranks of one host share memory; between hosts CPU tensors go over Gloo."""

import ctypes
import os

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks, init_default_group
from values import all_data, assert_reduced

import torchcomms_pg
from torchcomms_pg import as_gloo

CLONE_NEWUTS = 0x04000000

pytestmark = pytest.mark.beyond_gloo


def move(rank):
    """Gives this rank a host name of its own, in a namespace that ends with it; False: it may not.

    Rank 0 stays where it is, all others are together elsewhere.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    libc = ctypes.CDLL(None, use_errno=True)
    if rank > 0:
        if libc.unshare(CLONE_NEWUTS) != 0:
            return False
        libc.sethostname(b"elsewhere", len(b"elsewhere"))
    return True


def on_two_hosts(function, world, *args):
    if os.geteuid() != 0:
        pytest.skip("a host name of its own needs root")
    with Ranks(world, init=False) as ranks:
        outcomes = ranks.run(function, ranks.store_args(), *args, timeout=40)
    if None in outcomes:
        pytest.skip("this machine does not let a process have a host name of its own")
    return outcomes


def library(group):
    """Which library carries the CPU tensors of a group: Gloo has no windows."""
    return "shm" if group._get_backend(torch.device("cpu")).supports_window else "gloo"


def operate(args, backend):
    rank = int(os.environ["RANK"])
    if not move(rank):
        return None
    if backend == "gloo":
        as_gloo.install()
    init_default_group(*args, rank, 3, 20, backend)
    inputs = all_data(3, 70_001)
    tensor = inputs[rank].clone()
    dist.all_reduce(tensor, async_op=True).wait()
    assert_reduced(tensor, inputs)
    outputs = [None] * 3
    dist.all_gather_object(outputs, {"rank": rank})
    assert outputs == [{"rank": r} for r in range(3)]
    if rank == 0:
        dist.send(inputs[0], 2, tag=7)
    if rank == 2:
        dist.recv(tensor, 0, tag=7)
        assert torch.equal(tensor, inputs[0])
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(7, 3))
    model(inputs[rank][:70].view(10, 7)).sum().backward()
    # Of the ranks that share a host, and of others.
    together = dist.new_group([1, 2])
    apart = dist.new_group([0, 2])
    for group, members in ((together, (1, 2)), (apart, (0, 2))):
        if rank in members:
            tensor = inputs[rank].clone()
            dist.all_reduce(tensor, group=group)
            assert_reduced(tensor, [inputs[r] for r in members])
    groups = (dist.group.WORLD, together if rank else None, apart if rank != 1 else None)
    has_windows = hasattr(dist.group.WORLD._get_backend(torch.device("cpu")), "supports_window")
    used = [group and has_windows and library(group) for group in groups]
    dist.destroy_process_group()
    return used


@pytest.mark.parametrize("backend", ["torchcomms", "gloo"])
def test_groups_of_several_hosts_go_over_gloo_and_those_of_one_through_memory(backend):
    for rank, (world, together, apart) in enumerate(on_two_hosts(operate, 3, backend)):
        if world:
            assert world == "gloo"
            assert together == (None if rank == 0 else "shm")
            assert apart == (None if rank == 1 else "gloo")


def share_memory(args):
    rank = int(os.environ["RANK"])
    if not move(rank):
        return None
    init_default_group(*args, rank, 2, 20)
    store = dist.distributed_c10d._get_default_store()
    with pytest.raises(RuntimeError) as error:
        torchcomms_pg.new_comm("shm", "cpu", "here", store=store, rank=rank, size=2)
    dist.destroy_process_group()
    return str(error.value)


def test_shared_memory_names_the_ranks_on_different_hosts_with_their_hosts():
    for message in on_two_hosts(share_memory, 2):
        assert "'here'" in message and "different hosts" in message
        assert "rank 0 on host" in message and "rank 1 on host 'elsewhere'" in message
