"""Finds the ranks of a new communicator and the store for their rendezvous."""

from __future__ import annotations

import hashlib
import os
from datetime import timedelta

import torch
import torch.distributed as dist

from torchcomms_pg import _C, env

_servers: set[tuple[int, str]] = set()  # process id and port of each store's server that is kept


def find_ranks(rank: int | None, size: int | None) -> tuple[int, int]:
    """Returns rank and number of ranks: the arguments if given, else the launcher's variables.

    Raises:
        ValueError: only one of the two is given, they contradict each other, or neither the
            arguments nor the environment have them.
    """
    if (rank is None) != (size is None):
        given, missing = ("size", "rank") if rank is None else ("rank", "size")
        raise ValueError(f"new_comm: {given} is given and {missing} is not; pass both, or neither")
    if rank is not None and size is not None:
        if size < 1:
            raise ValueError(f"new_comm: size is {size}, wanted 1 or more")
        if not 0 <= rank < size:
            raise ValueError(f"new_comm: rank is {rank}, wanted 0 to {size - 1}")
        return rank, size
    found = env.launcher_ranks()
    if found is None:
        names = ", ".join("/".join(pair) for pair in env.LAUNCHERS)
        raise ValueError(
            "new_comm: neither arguments nor a launcher say which rank this is. Pass rank= and "
            "size=, or start the program with torchrun or mpirun; looked for the variables "
            f"{names}"
        )
    return found


def find_store(
    store: dist.Store | None, rank: int, size: int, name: str, timeout: timedelta
) -> dist.Store:
    """Returns the store for the rendezvous of the communicator `name`.

    The result is a part of the given store, or else of the TCPStore at MASTER_ADDR and MASTER_PORT.
    Rank 0 serves that TCPStore until its process ends, unless torchrun serves it. A single rank
    gets a store of its process.

    Raises:
        ValueError: no store is given, and the environment names none.
    """
    if store is None:
        if size == 1:
            store = dist.HashStore()
        else:
            store = _launcher_store(rank, size, timeout)
    if len(name) > 200:  # torch's store closes the connection at a key of 8 KiB
        name = f"{name[:100]}...{hashlib.sha256(name.encode()).hexdigest()}"
    return dist.PrefixStore(f"torchcomm/{name}", store)


def with_index(device: torch.device) -> torch.device:
    """Returns the device, with the index of the current device if `device` has no index."""
    index: int | None = device.index
    if device.type == "cpu" or index is not None:
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


def _launcher_store(rank: int, size: int, timeout: timedelta) -> dist.Store:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if env.read(name) is None]
    if missing:
        raise ValueError(
            f"new_comm: no store was given, and {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set, so that the {size} ranks do not know "
            "where to meet. Pass store=, for example torch.distributed.TCPStore(...), or set "
            "MASTER_ADDR and MASTER_PORT to the host of rank 0 and a free port of it"
        )
    # rendezvous() uses torchrun's own store if one exists. All callers of a process share one
    # server.
    store: dist.Store = next(iter(dist.rendezvous("env://", rank, size, timeout=timeout)))[0]
    # The server must outlive the communicator: other ranks may already use it for their next one
    # while rank 0 ends the first.
    server = (os.getpid(), os.environ["MASTER_PORT"])
    if rank == 0 and server not in _servers:
        _servers.add(server)
        _C.keep_store(store)
    return store
