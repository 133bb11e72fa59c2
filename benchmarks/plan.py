"""Which contenders meet: those of a full run, or the grid that the command line asks for."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from .results import OPERATIONS, Contender

KB, MB = 1 << 10, 1 << 20
SIZES = (4, 64, KB, 4 * KB, 16 * KB, 64 * KB, 256 * KB, MB, 4 * MB, 16 * MB, 64 * MB, 256 * MB)
LARGE = (16 * MB, 64 * MB)
"""Where the bounds are looked at."""
RANKS = (2, 4, 8)

HOSTS_OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
"""What is measured between hosts."""

IN_CACHE = 256 * KB
"""Where copies are measured too, since large buffers leave the cache."""

OWN_FRONT_ENDS = ("torchcomm", "watched")
"""Those that no other backend has."""

Meeting = list[Contender]
"""Contenders that take turns."""


def full(backends: Sequence[str]) -> list[Meeting]:
    """Returns what a run without options measures."""
    meetings = []
    for ranks in RANKS:
        for size in SIZES:
            if size * ranks <= 512 * MB:  # more takes minutes, and says nothing new
                contenders = meeting("all_reduce", size, ranks, backends)
                if ranks == 2 and MB <= size <= 64 * MB:  # as many elements, half the bytes
                    contenders += meeting("all_reduce", size // 2, 2, backends, dtype="bfloat16")
                if ranks == 2 and size == 4:  # compared with each other to a fraction of a us
                    for frontend in OWN_FRONT_ENDS:
                        contenders += meeting(
                            "all_reduce", 4, 2, ("torchcomms",), frontend=frontend
                        )
                meetings.append(contenders)
        if ranks == 2:
            meetings.append([Contender("all_reduce", 4, "fake", 2)])
            for size in (4, 64 * KB, 16 * MB):
                meetings.append(meeting("all_reduce", size, 2, backends, frontend="backend"))
            for size in (64 * KB, 16 * MB):
                meetings.append(meeting("all_reduce", size, 2, backends, frontend="torchcomm"))
            for size in (4, 64 * KB, MB, 16 * MB):
                meetings.append(meeting("all_reduce", size, 2, backends, mode="async"))
        for op in OPERATIONS[1:]:
            sizes = (0,) if op == "barrier" else (4, 64 * KB, *LARGE)
            if ranks == 8:
                sizes = sizes[:1]
            meetings += [meeting(op, size, ranks, backends) for size in sizes]
    return meetings


def hosts_sizes(op: str) -> tuple[int, ...]:
    """Returns the sizes at which an operation is measured between hosts."""
    if op == "all_reduce":
        return 4, KB, 64 * KB, MB, 16 * MB, 64 * MB
    return KB, MB, 16 * MB


def grid(
    operations: Iterable[str],
    sizes: Sequence[int],
    ranks: Iterable[int],
    dtypes: Sequence[str],
    modes: Sequence[str],
    frontends: Sequence[str],
    backends: Sequence[str],
    network: str = "",
) -> list[Meeting]:
    """Returns every combination."""
    return [
        meeting(op, size, count, backends, dtype, mode, frontend, network)
        for count in ranks
        for op in operations
        for dtype in dtypes
        for mode in modes
        for frontend in frontends
        for size in ((0,) if op == "barrier" else sizes)
    ]


def meeting(
    op: str,
    size: int,
    ranks: int,
    backends: Sequence[str],
    dtype: str = "float32",
    mode: str = "sync",
    frontend: str = "dist",
    network: str = "",
) -> Meeting:
    """Returns one contender for each backend that has the operation."""
    contenders = []
    for backend in backends:
        if backend == "mpi":
            # It has no bfloat16 and one front end, which is compared with every one of torch.
            if dtype != "float32" or (op == "send_recv" and mode == "async"):
                continue
            contenders.append(Contender(op, size, "mpi", ranks, dtype, mode, "mpi4py"))
        elif backend == "torchcomms" or frontend not in OWN_FRONT_ENDS:
            contenders.append(Contender(op, size, backend, ranks, dtype, mode, frontend, network))
    return contenders


def cores() -> int:
    """Returns how many this process may use."""
    return len(os.sched_getaffinity(0))
