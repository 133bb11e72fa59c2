"""The same operations through mpi4py, in ranks that mpirun starts: they find each other through it.

From then on they are ranks like others.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from torch import Tensor

from harness import ROOT, TESTS
from harness.ranks import RankFailure
from torchcomms_pg.testing.rank import serve
from torchcomms_pg.testing.zygote import die_with_parent

from . import programs
from .front_ends import Issue
from .rank import Rank
from .results import Contender
from .team import CALL_SECONDS, Team

INSTALL = "apt-get install openmpi-bin libopenmpi-dev && {python} -m pip install mpi4py"
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(TESTS), os.environ.get("PYTHONPATH", "")]),
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMP_NUM_THREADS": "1",
}


def missing() -> str:
    """Returns the command that installs what is not there; empty if all is."""
    if shutil.which("mpirun") and importlib.util.find_spec("mpi4py"):
        return ""
    return INSTALL.format(python=sys.executable)


class MpiTeam(Team):
    """Ranks under mpirun, which connect to a socket whose path they are given."""

    def __init__(self, world: int) -> None:
        super().__init__(world, MpiRank)

    def make_processes(self, *_: object) -> None:
        """Starts mpirun and waits for its ranks."""
        # Not the name of a shared memory file: short, since a socket's path lies in it.
        with tempfile.TemporaryDirectory(prefix="bench") as folder:
            path = f"{folder}/s"
            command = ["mpirun", "--oversubscribe", "-n", str(self.world)]
            command += [sys.executable, "-m", "benchmarks.mpi", path]
            self.outputs = [tempfile.TemporaryFile()] * self.world
            with Listener(path, "AF_UNIX", backlog=self.world) as listener:
                listener._listener._socket.settimeout(1.0)  # type: ignore[attr-defined]
                self.process = subprocess.Popen(
                    command,
                    env={**os.environ, **ENVIRONMENT},
                    stdin=subprocess.DEVNULL,
                    stdout=self.outputs[0],
                    stderr=self.outputs[0],
                    start_new_session=True,
                    preexec_fn=die_with_parent,
                )
                found = self._accept(listener)
        self.pids = [found[rank][0] for rank in range(self.world)]
        self.connections = [found[rank][1] for rank in range(self.world)]

    def _accept(self, listener: Listener) -> dict[int, tuple[int, Connection]]:
        deadline = time.monotonic() + CALL_SECONDS
        found: dict[int, tuple[int, Connection]] = {}
        while len(found) < self.world:
            try:
                connection = listener.accept()
                rank, pid = connection.recv()
                found[rank] = pid, connection
            except TimeoutError:
                if self.process.poll() is None and time.monotonic() < deadline:
                    continue
                self.process.kill()
                output = self.output(0)[-1500:].strip()
                raise RankFailure(f"mpirun did not start {self.world} ranks: {output}") from None
        return found

    def exit_code(self, rank: int, timeout: float = 10.0) -> int | None:
        """Returns that of mpirun, which ends when a rank dies and alone knows how."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def close(self) -> None:
        """Ends every process, and mpirun."""
        super().close()
        if self.process.poll() is None:
            self.process.kill()


class MpiRank(Rank):
    """Measures over MPI. Only float32: MPI has no bfloat16."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        from mpi4py import MPI

        self.module, self.comm = MPI, MPI.COMM_WORLD

    def meet(self) -> None:
        """Returns once all ranks have called this."""
        self.comm.Barrier()

    def front_end(self, contender: Contender) -> Mpi:
        """Returns the way to call MPI."""
        return Mpi(self.comm, contender.mode == "async")

    def made(self, call: programs.Call) -> dict[str, programs.Run]:
        """Makes a call of programs."""
        return {"mpi": call.mpi and call.mpi(self.module)}


class Mpi:
    """The methods of an mpi4py communicator, on the memory of tensors."""

    def __init__(self, comm: Any, asynchronous: bool) -> None:
        from mpi4py import MPI

        self.sum = MPI.SUM
        self.comm, self.in_place = comm, MPI.IN_PLACE
        self.asynchronous = asynchronous

    def bind(self, name: str, *args: Any) -> Issue:
        """Binds a method."""
        method, *arguments = self._method(name, *args)
        if self.asynchronous:
            method = "I" + method.lower()
        memory = [each.numpy() if isinstance(each, Tensor) else each for each in arguments]
        return partial(getattr(self.comm, method), *memory)

    def _method(self, name: str, *args: Any) -> tuple[Any, ...]:
        match name, args:
            case "all_reduce", (data, op):
                return "Allreduce", self.in_place, data, op
            case "broadcast", (data, root):
                return "Bcast", data, root
            case "reduce", (data, root, op):
                buffers = (self.in_place, data) if self.comm.rank == root else (data, None)
                return "Reduce", *buffers, op, root
            case "all_gather_single", (out, data):
                return "Allgather", data, out
            case "reduce_scatter_single", (out, data, op):
                return "Reduce_scatter_block", data, out, op
            case "all_to_all_single", (out, data):
                return "Alltoall", data, out
            case "gather", (out, data, root):
                return "Gather", data, whole(out), root
            case "scatter", (out, data, root):
                return "Scatter", whole(data), out, root
            case "send" | "recv", (data, peer):
                return name.capitalize(), data, peer
            case "barrier", ():
                return ("Barrier",)
        raise ValueError(f"no such operation: {name}")


def whole(blocks: Sequence[Tensor]) -> Tensor | None:
    """Returns the tensor that holds equal blocks one after the other; None without blocks."""
    return blocks[0].as_strided((len(blocks) * blocks[0].numel(),), (1,)) if blocks else None


def main(path: str) -> None:
    """Runs one rank."""
    from mpi4py import MPI

    die_with_parent()
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    rank = MPI.COMM_WORLD.rank
    os.environ["RANK"] = str(rank)
    connection = Client(path, "AF_UNIX")
    connection.send((rank, os.getpid()))
    if not serve(connection):
        os._exit(1)  # MPI_Finalize would wait for ranks that have failed


if __name__ == "__main__":
    main(sys.argv[1])
