"""One way to make a TorchComm in a rank, and groups that depend on a variable."""

import datetime
import os
import threading

import pytest
import torch
import torch.distributed as dist

from harness.rank_process import receive, report
from harness.ranks import connect_store


def torchcomms():
    import torchcomms_pg

    return torchcomms_pg


each_backend = pytest.mark.parametrize("backend", ("shm", "gloo"))


def make(name, backend="shm", device="cpu", **options):
    """A communicator of all ranks that raises what fails, over the store of the default group."""
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
    """Called in a rank, which is there until it is told more; two ranks are threads of it."""
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
    """A new group that is created with the variable of the environment set to 1."""
    os.environ[variable] = "1"
    try:
        return dist.new_group()
    finally:
        del os.environ[variable]
