"""The messages of programs.CALLS as programs of mpi4py send them.

Each function takes the module `mpi4py.MPI` and returns the call of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Make = Callable[[Any], Callable[[], object]]


def all_reduce(mpi: Any) -> Callable[[], object]:
    """The smallest, beside which messages are judged."""
    data = values(4)
    return lambda: mpi.COMM_WORLD.Allreduce(mpi.IN_PLACE, data, mpi.SUM)


def there_and_back(size: int) -> Make:
    """One after the other."""

    def make(mpi: Any) -> Callable[[], object]:
        comm = mpi.COMM_WORLD
        peer = comm.rank ^ 1
        sent, received = values(size), values(size)

        def first() -> None:
            comm.Send(sent, peer)
            comm.Recv(received, peer)

        def second() -> None:
            comm.Recv(received, peer)
            comm.Send(sent, peer)

        return first if comm.rank == 0 else second

    return make


def at_once(size: int) -> Make:
    """A message to the next rank and one from the previous rank, which are waited for together."""

    def make(mpi: Any) -> Callable[[], object]:
        comm = mpi.COMM_WORLD
        following, previous = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        sent, received = values(size), values(size)

        def call() -> None:
            mpi.Request.Waitall([comm.Isend(sent, following), comm.Irecv(received, previous)])

        return call

    return make


def apart(size: int) -> Make:
    """The same between two ranks; each message is waited for by itself."""

    def make(mpi: Any) -> Callable[[], object]:
        comm = mpi.COMM_WORLD
        peer = comm.rank ^ 1
        sent, received = values(size), values(size)

        def call() -> None:
            requests = comm.Isend(sent, peer), comm.Irecv(received, peer)
            for request in requests:
                request.Wait()

        return call

    return make


def one_way(mpi: Any) -> Callable[[], object]:
    """From rank 0 to rank 1."""
    comm, data = mpi.COMM_WORLD, values(4)
    if comm.rank:
        return lambda: comm.Recv(data, 0)
    return lambda: comm.Send(data, 1)


def in_flight(count: int) -> Make:
    """So many messages of 4 B one way at once, which are waited for together."""

    def make(mpi: Any) -> Callable[[], object]:
        comm = mpi.COMM_WORLD
        arrays = [values(4) for _ in range(count)]
        move, peer = (comm.Irecv, 0) if comm.rank else (comm.Isend, 1)
        return lambda: mpi.Request.Waitall([move(array, peer) for array in arrays])

    return make


def values(size: int) -> Any:
    """Returns an array of so many bytes of float32."""
    return torch.zeros(size // 4).numpy()
