"""Runs ranks beside each other, each in a process forked from this one."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import IO, Any

import torch

from torchcomms_pg.plan import exchange, one_rank
from torchcomms_pg.plan.exchange import Key
from torchcomms_pg.plan.program import Program
from torchcomms_pg.plan.recorder import modules

_TAIL = 2000  # bytes of a rank's last output that an error has


class PlanError(RuntimeError):
    """Raised if a rank ends without saying what it called; the message has its last output."""


@dataclass(frozen=True)
class Job:
    """The job whose ranks are run.

    Attributes:
        command: the program and its arguments, or ``-m``, a module and its arguments.
        size: number of ranks.
        per_host: number of ranks on each host; ranks of a host follow each other.
        beside: most ranks that run at once, beside those that wait for an object of another.
        limit: seconds after which a rank is ended, an error.
    """

    command: tuple[str, ...]
    size: int
    per_host: int
    beside: int = 1
    limit: float = 600.0


class Runners:
    """Runs ranks of a job and keeps what they called, in ``programs``.

    The first rank starts alone. This process then imports the installed modules that the rank has
    imported, so that the ranks after it find them. A rank that receives a Python object waits
    until its sender, which is then run, too, has given it.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.programs: dict[int, Program] = {}
        self._objects: dict[Key, bytes] = {}
        self._at_work: dict[int, _Process] = {}
        self._left: list[int] = []
        self._imported = False

    def run(self, ranks: Iterable[int]) -> None:
        """Runs the ranks, except those that have been run.

        Raises:
            PlanError: a rank took longer than the limit, or its process ended without a word.
        """
        self._left = [rank for rank in dict.fromkeys(ranks) if rank not in self.programs]
        try:
            while self._left or self._at_work:
                self._start()
                self._listen()
                self._answer()
        finally:
            for process in self._at_work.values():
                process.kill()
            self._at_work.clear()

    def _start(self) -> None:
        moving = sum(process.wanted is None for process in self._at_work.values())
        for _ in range((self.job.beside if self._imported else 1) - moving):
            if self._left:
                rank = self._left.pop(0)
                self._at_work[rank] = _Process(rank, self.job)

    def _listen(self) -> None:
        links = {process.link: process for process in self._at_work.values()}
        soonest = min(process.deadline for process in links.values())
        for link in wait(list(links), max(0.0, soonest - time.monotonic())):
            assert isinstance(link, Connection)
            process = links[link]
            kind, what, more = process.read()
            if kind == "put":
                self._objects[what] = more
            elif kind == "get":
                self._import(more)
                process.wanted = what
            else:
                self._import(what.modules)
                known = next(iter(self.programs.values()), what)
                if known.made == what.made:
                    what.made = known.made  # spares most of the memory of large jobs
                self.programs[process.rank] = what
                self._at_work.pop(process.rank).end()
        for process in self._at_work.values():
            process.check()

    def _answer(self) -> None:
        """Gives waiting ranks what they wait for, and starts its senders."""
        for process in self._at_work.values():
            if process.wanted is None:
                continue
            sender = process.wanted[2]
            if process.wanted in self._objects:
                process.answer(self._objects[process.wanted])
            elif sender in self.programs:
                process.answer(b"")
            elif sender not in self._at_work:
                if sender in self._left:
                    self._left.remove(sender)
                self._left.insert(0, sender)
        if not self._left and all(process.wanted for process in self._at_work.values()):
            for process in list(self._at_work.values())[:1]:  # they wait for each other
                process.answer(b"")

    def _import(self, names: list[str]) -> None:
        if self._imported:
            return
        self._imported = True
        for name in names:
            with suppress(Exception):
                importlib.import_module(name)


class _Process:
    """A process that runs one rank. ``wanted`` is the key of the object that it waits for."""

    def __init__(self, rank: int, job: Job) -> None:
        self.rank = rank
        self.deadline = time.monotonic() + job.limit
        self.wanted: Key | None = None
        self._limit = job.limit
        self._output = tempfile.TemporaryFile()
        sys.stdout.flush()
        sys.stderr.flush()
        self.link, theirs = multiprocessing.Pipe()
        self._pid = os.fork()
        if self._pid == 0:
            self.link.close()
            _be(rank, job, theirs, self._output)
        theirs.close()

    def read(self) -> tuple[str, Any, Any]:
        """Returns a message of the process: its kind and two values.

        Raises:
            PlanError: it has ended without the last message.
        """
        try:
            message: tuple[str, Any, Any] = pickle.loads(self.link.recv_bytes())
            return message
        except (EOFError, ConnectionError):
            pass
        _, status = os.waitpid(self._pid, 0)
        code = os.waitstatus_to_exitcode(status)
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"
        raise PlanError(
            f"rank {self.rank} ended with {how} before it could say what it called. Its last "
            f"output:\n{self._tail()}"
        )

    def answer(self, content: bytes) -> None:
        """Gives the process the object that it waits for, or nothing."""
        self.wanted = None
        self.link.send_bytes(content)

    def check(self) -> None:
        """Raises `PlanError` if the process has taken longer than the limit."""
        if time.monotonic() > self.deadline:
            raise PlanError(
                f"rank {self.rank} has run for {self._limit:.0f} s, the limit of --limit. Its last "
                f"output:\n{self._tail()}"
            )

    def end(self) -> None:
        """Waits for the end of the process, which has sent its last message."""
        os.waitpid(self._pid, 0)
        self.link.close()
        self._output.close()

    def kill(self) -> None:
        """Ends the process."""
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(self._pid, 0)
        self.link.close()
        self._output.close()

    def _tail(self) -> str:
        size = self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, size - _TAIL))
        return self._output.read().decode(errors="replace")


def _be(rank: int, job: Job, link: Connection, output: IO[bytes]) -> None:
    """Runs a rank in this forked process, sends its program, and ends."""
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    gc.freeze()  # the collector would copy the pages of all that this process shares
    torch.set_num_threads(1)
    exchange.connect(link)
    program = one_rank.run(rank, job.size, job.per_host, list(job.command))
    program.modules = modules()
    link.send_bytes(pickle.dumps(("end", program, None), pickle.HIGHEST_PROTOCOL))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
