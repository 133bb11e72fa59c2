"""Groups of emulated GPUs on several hosts: the first CPU tensor has the ranks connected."""

import datetime
import functools
import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist

import emulated

if reason := emulated.available():
    pytest.skip(reason, allow_module_level=True)

import torchcomms_pg
from failures.test_interrupts import Handler, interrupt, signal_until_done
from harness import gpus, ranks
from harness.ranks import connect_store, on_own_ranks, time_limit
from hosts.test_hosts import move
from torchcomms_pg.testing.rank import report

pytestmark = pytest.mark.torch_version

SECOND = datetime.timedelta(seconds=1)


class Meshes:
    """Counts what this process connects through Gloo; calls `hold`, if set, before that."""

    def __init__(self):
        self.made, self.real, self.hold = 0, dist.ProcessGroupGloo, None
        dist.ProcessGroupGloo = self

    def __call__(self, *args):
        self.made += 1
        if self.hold:
            self.hold()
        return self.real(*args)

    def __getattr__(self, name):
        return getattr(self.real, name)


on_emulated_ranks = functools.partial(
    on_own_ranks, init=False, started_with=emulated.environment, timeout=45
)


def start(port, prefix, world, timeout=40):
    """The meshes of a default group whose rank 0 is on a host of its own, and a store."""
    move("abbb")
    meshes = Meshes()
    gpus.torchcomms(port, prefix, world, timeout)
    return meshes, connect_store(port, f"{prefix}/beside")


@on_emulated_ranks(3)
def test_hosts_are_connected_for_cpu_tensors_with_the_first_of_them(port, prefix, world):
    meshes, store = start(port, prefix, world)
    rank = dist.get_rank()
    tensor = torch.full((1000,), float(rank), device="cuda")
    dist.all_reduce(tensor)
    assert tensor.tolist() == [3.0] * 1000
    dist.new_group(list(range(world)))
    dist.barrier()
    made = meshes.made
    dist.barrier()  # before it nobody needs any
    assert made == 0
    # A message between two ranks connects these.
    cpu = torch.full((1000,), 7.0 * (rank == 0))
    if rank == 1:
        store.wait(["received"])
    elif rank == 0:
        dist.send(cpu, 2)
    else:
        dist.recv(cpu, 0)
        assert cpu.tolist() == [7.0] * 1000
        store.set("received", "")
    made = meshes.made
    dist.barrier()  # before it nobody needs more
    assert made == (rank != 1)
    dist.all_reduce(cpu := torch.ones(3))
    assert cpu.tolist() == [3.0] * 3
    objects = [None] * world
    dist.all_gather_object(objects, rank)
    assert objects == [0, 1, 2] and meshes.made == [2, 1, 1][rank]  # and a rail
    dist.destroy_process_group()


@on_emulated_ranks(2)
def test_a_rank_that_has_left_before_the_first_cpu_tensor_is_named(port, prefix, world):
    meshes, store = start(port, prefix, world)
    dist.all_reduce(torch.ones(1, device="cuda"))
    if dist.get_rank() == 1:
        dist.destroy_process_group()
        store.set("gone", "")
        store.wait(["told"])
        return
    store.wait(["gone"])
    connecting = threading.Event()
    meshes.hold = connecting.set
    with time_limit(0, 20, "finding who has left"):  # the deadline is after 40 s
        with pytest.raises(torchcomms_pg.CommError, match="rank 1 has left") as raised:
            dist.all_reduce(torch.ones(1))
    assert raised.value.ranks == [1]
    # The connecting is in a thread of its own, which may be held up.
    assert connecting.wait(20) and meshes.made == 1
    store.set("told", "")
    dist.destroy_process_group()


def send_to_none(port, prefix, world, timeout, error, told):
    """Rank 0 cannot be connected with rank 1, and raises `error`, of which rank 1 is told."""
    meshes, store = start(port, prefix, world)
    dist.distributed_c10d._set_pg_timeout(timeout, dist.group.WORLD)
    if dist.get_rank() == 1:
        meshes.hold = lambda: store.wait(["raised"])
        store.wait(["raised"])
        with pytest.raises(torchcomms_pg.CommError, match=told):
            dist.recv(torch.ones(1), 0)
    else:
        meshes.hold = lambda: report(os.getpid())
        Handler(interrupt)
        with pytest.raises(error):
            dist.send(torch.ones(1), 1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        store.set("raised", "")
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "timeout, error, told",
    [(40 * SECOND, KeyboardInterrupt, "interrupt"), (2 * SECOND, torchcomms_pg.CommError, "timed")],
    ids=("ctrl-c", "the deadline"),
)
def test_a_wait_for_the_first_connections_ends(timeout, error, told):
    with ranks.Ranks(2, init=False, started_with=emulated.environment) as processes:
        processes.start(send_to_none, *processes.store_args(), 2, timeout, error, told)
        if error is KeyboardInterrupt:
            signal_until_done(processes)
        ranks.check(processes.wait(45))


@on_emulated_ranks(2)
def test_why_a_rank_cannot_be_connected_is_in_the_error_of_all(port, prefix, world):
    meshes, _ = start(port, prefix, world, timeout=30)

    def refuse():
        if dist.get_rank() == 1:
            raise RuntimeError("no such interface")

    meshes.hold = refuse
    tensor = torch.ones(1, device="cuda")
    dist.all_reduce(tensor)
    with time_limit(0, 20, "the error"):  # the deadline is after 30 s
        with pytest.raises(torchcomms_pg.CommError, match="no such interface.*GLOO_SOCKET_IFNAME"):
            dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()


@on_emulated_ranks(2)
def test_a_rank_missing_at_the_first_cpu_tensor_is_named_at_the_timeout(port, prefix, world):
    _, store = start(port, prefix, world)
    dist.distributed_c10d._set_pg_timeout(2 * SECOND, dist.group.WORLD)
    if dist.get_rank() == 0:
        with pytest.raises(torchcomms_pg.CommError) as raised:
            dist.all_reduce(torch.ones(1))
        # A rank that is held up while it asks has not always time to learn who is missing.
        assert raised.value.ranks == [1] or "cannot be known" in str(raised.value)
        store.set("told", "")
    else:
        store.wait(["told"])
    dist.destroy_process_group()
