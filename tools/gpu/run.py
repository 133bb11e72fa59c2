"""Runs a check: its processes, their time limit, and what became of them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path

from gpu.check import Check
from gpu.devices import Device

ROOT = Path(__file__).resolve().parents[2]
# Of this package, of the reference values and the simulated accelerator, and of the backend.
FOLDERS = (ROOT / "tools", ROOT / "test", ROOT)

GRACE_SECONDS = 5.0  # for the others once a rank has failed: they may wait for it for ever
EXIT_SECONDS = 30.0  # from the last answer to the end of the processes
KILL_SECONDS = 10.0

# What NCCL says to ranks that share a GPU: up to 2.29, and from 2.30 on.
REFUSALS = ("Duplicate GPU detected", "Multiple Ranks are using the same GPU")


@dataclass(frozen=True)
class Outcome:
    """What became of a check."""

    check: Check
    result: str  # ok, FAILED or skipped
    detail: str  # a line
    seconds: float = 0.0
    report: str = ""  # what does not fit into a line: figures, or all there is about a failure


@dataclass(frozen=True)
class Runner:
    """Makes checks on one device.

    Attributes:
        device: where.
        catalogue: the module whose CHECKS has them.
        logs: the folder for what the ranks print.
    """

    device: Device
    catalogue: str
    logs: Path

    def run(self, check: Check, seconds: float) -> Outcome:
        """Makes a check, within the seconds or its own limit, whichever is less."""
        if reason := self.unfit(check):
            return Outcome(check, "skipped", reason)
        limit = min(check.seconds, seconds)
        if limit < 1:
            return Outcome(check, "FAILED", "not made: the time for all checks was over")
        begin = time.monotonic()
        deadline = begin + limit
        with tempfile.TemporaryDirectory(prefix="gpu-check-", ignore_cleanup_errors=True) as folder:
            ranks = [
                self._start(check, rank, Path(folder), deadline) for rank in range(check.ranks)
            ]
            try:
                _collect(ranks, deadline)
                _see_off(ranks)
            finally:
                for rank in ranks:
                    rank.end()
        return _judge(check, ranks, limit, time.monotonic() - begin)

    def unfit(self, check: Check) -> str:
        """Says why a check cannot be made on this device; empty where it can."""
        if check.cuda and self.device.type != "cuda":
            return "needs libnccl or torch's nccl, which only a GPU has"
        if check.gpus > self.device.count():
            return f"needs {check.gpus} GPUs, torch sees {self.device.count()}"
        return ""

    def _start(self, check: Check, rank: int, folder: Path, deadline: float) -> Rank:
        environment = dict(os.environ, OMP_NUM_THREADS="1")
        path = [*map(str, FOLDERS), os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(path).rstrip(os.pathsep)
        # Checks of failures look at what is raised.
        environment.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        environment["TORCH_FR_DUMP_TEMP_FILE"] = str(folder / "trace_")  # what failed groups write
        if self.device.type == "cuda":
            environment.setdefault("NCCL_DEBUG", "WARN")
        if check.shares_a_gpu:
            environment |= self.device.environment(rank)
        arguments = [self.catalogue, check.id, self.device.type, str(rank), str(folder)]
        return Rank(
            [*arguments, str(deadline)], environment, self.logs / f"{check.id}-rank{rank}.log"
        )


class Rank:
    """A process of a check, and what it has answered."""

    def __init__(self, arguments: list[str], environment: dict[str, str], log: Path) -> None:
        self.result, self.text = "", ""
        self.answered = 0.0
        self.log = log
        self.answers, theirs = Pipe(duplex=False)
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "gpu.rank", *arguments, str(theirs.fileno())],
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        theirs.close()

    def receive(self) -> None:
        """Reads the answer, which is there or is never to come."""
        self.answered = time.monotonic()
        try:
            self.result, self.text = self.answers.recv()
        except (EOFError, OSError):
            code = self.process.wait()
            self.result, self.text = "FAILED", f"its process ended with {code}, without a result"

    def end(self) -> None:
        """Ends the process, if it has not ended by itself."""
        if self.process.poll() is None:
            self.process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may hold it
                self.process.wait(KILL_SECONDS)
        self.answers.close()

    def printed(self) -> str:
        """Returns the end of what the process has printed."""
        return self.log.read_text(errors="replace")[-4000:].strip()


def _collect(ranks: list[Rank], deadline: float) -> None:
    waiting: dict[Connection, Rank] = {rank.answers: rank for rank in ranks}
    while waiting and (left := deadline - time.monotonic()) > 0:
        for ready in wait(list(waiting), left):
            assert isinstance(ready, Connection)
            rank = waiting.pop(ready)
            rank.receive()
            if rank.result == "FAILED":
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)


def _see_off(ranks: list[Rank]) -> None:
    """A process that has done its work must also end."""
    deadline = time.monotonic() + EXIT_SECONDS
    for rank in ranks:
        if rank.result in ("ok", "skipped"):
            try:
                code = rank.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                rank.result, rank.text = (
                    "FAILED",
                    f"its process did not end in {EXIT_SECONDS:.0f} s",
                )
            else:
                if code != 0:
                    rank.result, rank.text = "FAILED", f"its process ended with {code} at its exit"


def _judge(check: Check, ranks: list[Rank], limit: float, seconds: float) -> Outcome:
    failed = [rank for rank in ranks if rank.result == "FAILED"]
    hung = [rank for rank in ranks if not rank.result]
    if not failed and not hung:
        for rank in ranks:
            if rank.result == "skipped":
                return Outcome(check, "skipped", rank.text, seconds)
        detail, _, report = ranks[0].text.partition("\n")
        return Outcome(check, "ok", detail, seconds, report and f"{check.id}: {report}")
    if check.shares_a_gpu and (refusal := _refusal(ranks)):
        return Outcome(check, "skipped", f"NCCL refuses ranks on one GPU: {refusal}", seconds)
    if failed:
        # The others may have failed because this one did.
        first = min(failed, key=lambda rank: rank.answered)
        detail = f"rank {ranks.index(first)}: {first.text}"
    else:
        numbers = ", ".join(str(ranks.index(rank)) for rank in hung)
        detail = f"rank {numbers}: no end in {limit:.0f} s"
    lines = [f"{check.id}: {detail}"]
    for number, rank in enumerate(ranks):
        lines.append(f"--- rank {number}, {rank.result or 'killed'}; {rank.log} ends:")
        lines.append(rank.printed() or "(empty)")
    return Outcome(check, "FAILED", _shortened(detail), seconds, "\n".join(lines))


def _shortened(text: str, length: int = 160) -> str:
    return text if len(text) <= length else f"{text[:length]}..."


def _refusal(ranks: list[Rank]) -> str:
    for rank in ranks:
        for line in (rank.text + "\n" + rank.log.read_text(errors="replace")).splitlines():
            if any(words in line for words in REFUSALS):
                return line.strip()
    return ""
