"""A rank of a group that runs a program of test/failures/partings up to its hang."""

import datetime
import os
import pathlib
import threading
import types

import torch
import torch.distributed as dist

import torchcomms_pg
from harness import gpus, lockstep
from harness.ranks import connect_store
from torchcomms_pg.testing.rank import receive, report

JOINING = datetime.timedelta(seconds=30)


def run(path, backend, args, world, limits):
    """Runs the program's main() over a backend. Returns what `places_of` its error does, or None.

    Groups of other backends than torchcomms are watched. `limits`: seconds for each rank.
    """
    rank = int(os.environ["RANK"])
    limit = datetime.timedelta(seconds=limits[rank])
    if backend != "torchcomms":
        torchcomms_pg.watch(timeout=limit)
    device = torch.device("cpu")
    if backend.startswith("nccl"):
        gpus.take_device(world)
        device = torch.device("cuda", torch.cuda.current_device())
    store = connect_store(*args)
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world,
        timeout=JOINING,
    )
    operations = (dist.all_reduce, dist.broadcast, dist.barrier)
    if device.type == "cuda":
        operations = map(_on_gpu, operations)
    all_reduce, broadcast, barrier = operations
    at = types.SimpleNamespace(
        rank=rank,
        world=world,
        device=device,
        ones=lambda size: torch.ones(size, device=device),
        all_reduce=all_reduce,
        broadcast=broadcast,
        barrier=barrier,
        away=lambda: (report("away"), receive()),
    )
    said = []
    # The frames of a thread of its own begin as a program's do, and not in the pool of ranks.
    thread = threading.Thread(target=lambda: said.append(_error_of(path, at, limit, store)))
    thread.start()
    thread.join()
    return said[0]


def _on_gpu(operation):
    """Has the host wait for the operation, as a program does that reads the result."""

    def waits(*given):
        operation(*given)
        torch.cuda.synchronize()

    return waits


def _set_timeout(limit):
    if dist.get_backend() == "torchcomms":
        torchcomms_pg.get_comm().set_timeout(limit)


def _error_of(path, at, limit, store):
    if at.device.type == "cuda":
        torch.cuda.set_device(at.device)  # each thread has its own
    at.all_reduce(at.ones(7))
    store.set("it begins", "")
    _set_timeout(limit)
    try:
        lockstep.load(pathlib.Path(path)).main(at)
        at.barrier()
    except torchcomms_pg.CommError as error:
        return places_of(error), str(error)
    except torch.distributed.DistBackendError:
        # torch's engine passes on a base class of the error; the next call has all of it.
        try:
            at.barrier()
        except torchcomms_pg.CommError as error:
            return places_of(error), str(error)
    return None


def places_of(error):
    """Returns [(file, line)] of where the ranks parted, by a CommError."""
    return [(pathlib.Path(place.file).name, place.line) for place in error.parted_at]
