"""What one rank does in one round: several lives of groups, and perhaps a fault in the last."""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import random
import signal
import subprocess
import threading
import time
import traceback
from typing import Any, NamedTuple

import torch.distributed as dist

import torchcomms_pg
from harness.leaks import descriptors, library_threads, mappings
from harness.ranks import wait_for
from torchcomms_pg.testing.rank import report

from .operations import Team, WrongValueError, draw, perform

TIMEOUT = 6.0  # of every operation, seconds


class Round(NamedTuple):
    """What a seed has drawn for all ranks of a round."""

    backend: str  # of all groups; watched, if it is not this project's
    seed: int
    size: int
    threads: int
    lives: int
    steps: int  # of each thread in each life
    fault: str
    victim: int
    when: int  # step of the last life at which the fault comes


class Report(NamedTuple):
    """What became of a rank. Memory in MiB, after each life."""

    operations: int
    error: str  # of an operation: expected where there is a fault
    wrong: str  # never expected
    faulted_at: float  # time.monotonic() of the fault, or 0
    ended_at: float
    memory: list[float]


# Others are told, and fail; by the name of what the victim does.
FATAL = ("kill", "abort", "stay away", "raise", "destroy", "exit")
# Nothing fails.
HARMLESS = ("none", "stop for a while", "come late", "hold the GIL")


def main(plan: Round, store: str) -> Report:
    """Runs in a process of its own, unless it dies as planned; reports when it gets on."""
    worker = _Rank(plan, store)
    try:
        for life in range(plan.lives):
            worker.live(life)
    except Exception:
        worker.wrong = worker.wrong or traceback.format_exc()
    return worker.report()


class _Rank:
    def __init__(self, plan: Round, store: str) -> None:
        self.plan = plan
        self.rank = int(os.environ["RANK"])
        self.store = store
        self.operations = 0
        self.reported_at = 0.0
        self.lock = threading.Lock()  # of both
        self.error = ""
        self.wrong = ""
        self.faulted_at = 0.0
        self.memory: list[float] = []
        self.held: tuple[int, int] | None = None

    def report(self) -> Report:
        return Report(
            self.operations,
            self.error,
            self.wrong,
            self.faulted_at,
            time.monotonic(),
            self.memory,
        )

    def live(self, life: int) -> None:
        plan = self.plan
        timeout = datetime.timedelta(seconds=TIMEOUT)
        # Children are told apart from the ranks of other lives by the file.
        store = dist.FileStore(f"{self.store}-{life}", plan.size)
        if plan.backend != "torchcomms":
            torchcomms_pg.watch(timeout=timeout)
        dist.init_process_group(
            plan.backend, store=store, rank=self.rank, world_size=plan.size, timeout=timeout
        )
        generator = random.Random(f"{plan.seed}/{life}")
        teams = [self._teams(generator) for _ in range(plan.threads)]
        # Whoever leaves before would fail their making, and not an operation.
        self._meet(store, "has its groups")
        threads = [
            threading.Thread(target=self._run, args=(life, number, teams[number]))
            for number in range(1, plan.threads)
        ]
        for thread in threads:
            thread.start()
        self._run(life, 0, teams[0])
        for thread in threads:
            thread.join()
        if plan.backend == "gloo" and not self.error:  # whose connections end with the first
            self._meet(store, "has done all")
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
        del teams
        gc.collect()
        self._look_for_leaks()

    def _meet(self, store: dist.Store, what: str) -> None:
        store.set(f"{self.rank} {what}", "")
        store.wait([f"{rank} {what}" for rank in range(self.plan.size)])

    def _teams(self, generator: random.Random) -> list[Team]:
        """Groups of one thread; every rank makes all of them, in the same order."""
        everyone = list(range(self.plan.size))
        members = [everyone]
        for _ in range(2):
            members.append(sorted(generator.sample(everyone, generator.randint(1, len(everyone)))))
        groups = [(dist.new_group(ranks), ranks) for ranks in members]
        # On a rank outside a group torch gives a number instead.
        return [
            Team(group if isinstance(group, dist.ProcessGroup) else None, ranks)
            for group, ranks in groups
        ]

    def _run(self, life: int, thread: int, teams: list[Team]) -> None:
        plan = self.plan
        generator = random.Random(f"{plan.seed}/{life}/{thread}")
        try:
            for step in range(plan.steps):
                if life == plan.lives - 1 and thread == 0 and step == plan.when:
                    self._fault()
                team = generator.choice(teams)
                drawn = draw(generator, len(team.ranks), plan.backend)
                if self.rank in team.ranks:
                    perform(team, drawn)
                    self._count()
        except WrongValueError:
            self.wrong = traceback.format_exc()
        except Exception as error:
            self.error = self.error or f"{type(error).__name__}: {error}"
            # What other threads still do ends with it.
            with contextlib.suppress(Exception):
                dist.distributed_c10d._abort_process_group()

    def _count(self) -> None:
        with self.lock:
            self.operations += 1
            if time.monotonic() - self.reported_at > 1:
                report(self.operations)
                self.reported_at = time.monotonic()

    def _fault(self) -> None:
        if self.rank != self.plan.victim:
            return
        fault = self.plan.fault
        self.faulted_at = time.monotonic()
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "exit":
            os._exit(3)
        elif fault == "abort":
            dist.distributed_c10d._abort_process_group()
        elif fault == "stay away":
            time.sleep(TIMEOUT + 2)
            raise RuntimeError("this rank stayed away")
        elif fault == "raise":
            raise RuntimeError("this rank raised")
        elif fault == "destroy":
            dist.destroy_process_group()
        elif fault == "stop for a while":
            pause = f"kill -STOP $PPID; sleep {TIMEOUT / 4}; kill -CONT $PPID"
            subprocess.run(["sh", "-c", pause], check=True)
        elif fault == "come late":
            time.sleep(TIMEOUT / 4)
        elif fault == "hold the GIL":
            until = time.monotonic() + TIMEOUT / 4
            while time.monotonic() < until:
                sum(range(10_000_000))

    def _look_for_leaks(self) -> None:
        # One that has just been started has no name yet, and may be seen when it is about to end.
        if not wait_for(lambda: not library_threads()) and not self.error:
            self.wrong = self.wrong or f"threads were left: {library_threads()}"
        mapped = mappings("memfd:")
        held = (len(descriptors()), len(mapped))
        if self.held is None:
            self.held = held
        elif not self.error and (held[0] > self.held[0] + 2 or held[1] > self.held[1]):
            self.wrong = self.wrong or (
                f"descriptors and mappings grew from {self.held} to {held}: {mapped}"
            )
        self.memory.append(_memory())


def _memory() -> float:
    with open("/proc/self/status") as file:
        status: dict[str, Any] = dict(line.split(":", 1) for line in file)
    return int(status["VmRSS"].split()[0]) / 1024
