"""Makes TorchComms in ranks, and groups that depend on a variable."""

import datetime
import os
import threading

import pytest
import torch
import torch.distributed as dist

from harness.ranks import connect_store
from torchcomms_pg.testing.rank import receive, report


def torchcomms():
    import torchcomms_pg

    return torchcomms_pg


each_backend = pytest.mark.parametrize("backend", ("shm", "gloo"))


def make(name, backend="shm", device="cpu", **options):
    """Returns a communicator of all ranks over the default group's store, whose failures raise."""
    options.setdefault("abort_process_on_timeout_or_error", False)
    options.setdefault("timeout", datetime.timedelta(seconds=20))
    return torchcomms().new_comm(
        backend,
        device,
        name,
        store=dist.distributed_c10d._get_default_store(),
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        **options,
    )


def two_in_one_process(args):
    """Called in a rank: two of its threads are a communicator's ranks, until `Ranks.tell`."""
    store = connect_store(*args)
    comms = {}

    def join(rank):
        options = {"store": store, "rank": rank, "size": 2}
        comms[rank] = torchcomms().new_comm("shm", torch.device("cpu"), "pair", **options)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    report("there")
    receive()
    for comm in comms.values():
        comm.finalize()


def new_group_with(variable):
    """Returns a new group, created while this variable of the environment is 1."""
    os.environ[variable] = "1"
    try:
        return dist.new_group()
    finally:
        del os.environ[variable]
