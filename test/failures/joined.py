"""A group of either front end over either library."""

import datetime
import os

import torch
import torch.distributed as dist

import torchcomms_pg
from harness.ranks import connect_store


def join(kind, args, world, limit):
    """(communicator, store) of a process group or of a TorchComm, with a deadline of `limit` s.

    The deadline holds once all ranks have done an operation, however late they were.
    """
    rank, store = int(os.environ["RANK"]), connect_store(*args)
    joining = datetime.timedelta(seconds=30)
    if kind == "dist":
        options = {"store": store, "rank": rank, "world_size": world}
        dist.init_process_group("torchcomms", timeout=joining, **options)
        comm = torchcomms_pg.get_comm()
        dist.all_reduce(torch.ones(7))
    else:
        options = {"store": store, "rank": rank, "size": world, "timeout": joining}
        options["abort_process_on_timeout_or_error"] = False
        comm = torchcomms_pg.new_comm(kind, "cpu", "tested", **options)
        comm.all_reduce(torch.ones(7), torchcomms_pg.ReduceOp.SUM, async_op=False)
    comm.set_timeout(datetime.timedelta(seconds=limit))
    return comm, store
