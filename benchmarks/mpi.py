"""The same operations through mpi4py: started by mpirun, one process a rank."""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import sys
from array import array
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from .results import MEETS, Contender
from .team import LaunchedTeam, serve_launched
from .timing import Subject, power, run

INSTALL = "apt-get install openmpi-bin libopenmpi-dev && {python} -m pip install mpi4py"


def missing() -> str:
    """Returns the command that installs what is not there; empty if all is."""
    if shutil.which("mpirun") and importlib.util.find_spec("mpi4py"):
        return ""
    return INSTALL.format(python=sys.executable)


def team(ranks: int) -> LaunchedTeam:
    """Starts ranks under mpirun."""
    command = ["mpirun", "--oversubscribe", "-n", str(ranks)]
    command += [sys.executable, "-m", "benchmarks.mpi"]
    env = {
        "PYTHONPATH": str(Path(__file__).parent.parent),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMP_NUM_THREADS": "1",
    }
    return LaunchedTeam(ranks, command, env)


class MpiRank:
    """Serves a Team, as TorchRank does. Only float32: MPI has no bfloat16."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self.mpi = MPI
        self.comm = MPI.COMM_WORLD
        self.subjects: dict[Contender, Subject] = {}

    def prepare(self, contender: Contender) -> float:
        """Makes ready for `measure`. Returns the microseconds of a call, roughly."""
        subject = self._subject(contender)
        self.subjects[contender] = subject
        run(subject, 2, self.comm.Barrier)
        return min(run(subject, 3, self.comm.Barrier))

    def measure(self, contender: Contender, calls: int) -> array[float]:
        """Times so many calls and checks the result."""
        return run(self.subjects[contender], calls, self.comm.Barrier)

    def forget(self) -> None:
        """Frees the buffers of all subjects."""
        self.subjects.clear()

    def _subject(self, c: Contender) -> Subject:
        call, reset, wrong = self._bind(c)
        return Subject(call, reset, wrong, c.op in MEETS)

    def _start(self, c: Contender, name: str, *args: Any) -> Callable[[], object]:
        """Binds a call, or where it is asynchronous its I variant with a wait."""
        if c.mode == "sync":
            return partial(getattr(self.comm, name), *args)
        issue = partial(getattr(self.comm, "I" + name.lower()), *args)
        return lambda: issue().Wait()

    def _bind(
        self, c: Contender
    ) -> tuple[Callable[[], object], Callable[[], object], Callable[[int], str]]:
        rank, ranks, in_place = self.comm.rank, self.comm.size, self.mpi.IN_PLACE
        count, block = c.elements, c.elements // ranks
        pattern = (np.arange(count, dtype=np.int32) % 7).astype(np.float32)
        mine = pattern * (rank + 1)
        own = slice(block * rank, block * (rank + 1))
        sum_of_ranks = ranks * (ranks + 1) // 2
        out = np.zeros_like(mine)

        def check(wanted: Any, got: Any = None) -> Callable[[int], str]:
            return lambda _: differs(out if got is None else got, wanted)

        def blocks(part: Any) -> Any:
            return np.concatenate([part * (r + 1) for r in range(ranks)])

        clear = partial(out.fill, -1)
        if c.op == "barrier":
            return self._start(c, "Barrier"), nothing, never_wrong
        if c.op == "all_reduce":
            limit = float(np.finfo(np.float32).max)
            self.comm.Allreduce(in_place, mine)
            if problem := differs(mine, pattern * sum_of_ranks):
                raise AssertionError(f"wrong result: {problem}")
            call = self._start(c, "Allreduce", in_place, mine)
            return call, partial(mine.fill, 1), lambda n: differs(mine, power(ranks, n, limit))
        if c.op == "broadcast":
            reset = nothing if rank == 0 else partial(mine.fill, -1)
            return self._start(c, "Bcast", mine, 0), reset, check(pattern, mine)
        if c.op == "all_gather":
            data = pattern[:block] * (rank + 1)
            wanted = blocks(pattern[:block])
            return self._start(c, "Allgather", data, out), clear, check(wanted)
        if c.op == "gather":
            data = pattern[:block] * (rank + 1)
            wanted = blocks(pattern[:block])
            call = self._start(c, "Gather", data, out if rank == 0 else None, 0)
            return call, clear, check(wanted) if rank == 0 else never_wrong
        if c.op == "reduce":
            sums = pattern * sum_of_ranks
            call = self._start(c, "Reduce", mine, out, self.mpi.SUM, 0)
            return call, clear, check(sums) if rank == 0 else never_wrong
        if c.op == "reduce_scatter":
            part = out[:block]
            call = self._start(c, "Reduce_scatter_block", mine, part)
            return call, clear, check(pattern[own] * sum_of_ranks, part)
        if c.op == "all_to_all":
            return self._start(c, "Alltoall", mine, out), clear, check(blocks(pattern[own]))
        if c.op == "scatter":
            part = out[:block]
            call = self._start(c, "Scatter", mine if rank == 0 else None, part, 0)
            return call, clear, check(pattern[own], part)
        if c.op == "send_recv":
            return self._ping_pong(mine, pattern, out)
        raise ValueError(f"no such operation: {c.op}")

    def _ping_pong(
        self, mine: Any, pattern: Any, out: Any
    ) -> tuple[Callable[[], object], Callable[[], object], Callable[[int], str]]:
        peer = self.comm.rank ^ 1
        if peer >= self.comm.size:
            return nothing, nothing, never_wrong
        send, recv = partial(self.comm.Send, mine, peer), partial(self.comm.Recv, out, peer)
        first, second = (send, recv) if self.comm.rank < peer else (recv, send)

        def both() -> None:
            first()
            second()

        return both, partial(out.fill, -1), lambda _: differs(out, pattern * (peer + 1))


def differs(got: Any, wanted: Any) -> str:
    """Says where `got` is not `wanted`; empty if nowhere."""
    difference = np.flatnonzero(got != wanted)
    return f"element {difference[0]} of {got.size}" if difference.size else ""


def nothing() -> None:
    """Does nothing."""


def never_wrong(calls: int) -> str:
    """Checks nothing: there is no result."""
    return ""


def main() -> None:
    """Runs one rank."""
    from mpi4py import MPI

    gc.freeze()
    if not serve_launched(MPI.COMM_WORLD.rank, MpiRank):
        os._exit(1)  # MPI_Finalize would wait for ranks that have failed


if __name__ == "__main__":
    main()
