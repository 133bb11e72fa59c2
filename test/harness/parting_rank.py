"""A rank of a group that runs a program of test/failures/partings up to its hang."""

import datetime
import os
import pathlib
import threading
import types

import torch
import torch.distributed as dist

import torchcomms_pg
from harness import lockstep
from harness.rank_process import receive, report
from harness.ranks import connect_store

JOINING = datetime.timedelta(seconds=30)


def run(path, watched, args, world, limit):
    """Runs the program's main(). Returns the lines and the text of the error that ends it."""
    rank = int(os.environ["RANK"])
    limit = datetime.timedelta(seconds=limit)
    if watched:
        torchcomms_pg.watch(timeout=limit)
    dist.init_process_group(
        "gloo" if watched else "torchcomms",
        store=connect_store(*args),
        rank=rank,
        world_size=world,
        timeout=JOINING,
    )
    dist.all_reduce(torch.ones(7))
    if not watched:
        torchcomms_pg.get_comm().set_timeout(limit)
    at = types.SimpleNamespace(
        rank=rank,
        world=world,
        ones=torch.ones,
        all_reduce=dist.all_reduce,
        broadcast=dist.broadcast,
        barrier=dist.barrier,
        away=lambda: (report("away"), receive()),
    )
    ended = []
    # The frames of a thread of its own begin as a program's do, and not in the pool of ranks.
    thread = threading.Thread(target=lambda: ended.append(_error_of(path, at)))
    thread.start()
    thread.join()
    return ended[0]


def _error_of(path, at):
    try:
        lockstep.load(pathlib.Path(path)).main(at)
        dist.barrier()
    except torchcomms_pg.CommError as error:
        places = [(pathlib.Path(place.file).name, place.line) for place in error.parted_at]
        return places, str(error)
    return None
