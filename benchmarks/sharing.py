"""Cores that ranks share: with each other, and with other programs. Counts beside the times."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from statistics import median

import torch
import torch.distributed as dist

from torchcomms_pg.testing.zygote import die_with_parent

Measured = dict[str, dict[str, float]]

ROUNDS = 5
CALLS = {"gloo": 100}
"""Calls a round, where they are not 500."""
FLOOR = "fake, sched_yield"
"""Torch's backend that does nothing, and one call of the scheduler."""

PROGRAMS = 10
"""Busy processes beside the ranks, on all cores."""
COMPUTE_SECONDS = 2e-3
STEPS = 30


def small(groups: dict[str, dist.ProcessGroup], meet: Callable[[], None]) -> Measured:
    """Measures synchronous all-reduces of 4 bytes. Every rank calls this together.

    Returns of each backend the microseconds of a call, this rank's microseconds of CPU time, how
    often it sleeps and how often another thread takes its CPU meanwhile: medians.
    """
    tensor = torch.ones(1)

    def reduce(group: dist.ProcessGroup) -> Callable[[], object]:
        return lambda: dist.all_reduce(tensor, group=group)

    def with_yield(group: dist.ProcessGroup) -> Callable[[], object]:
        def call() -> None:
            dist.all_reduce(tensor, group=group)
            os.sched_yield()

        return call

    calls = {name: reduce(group) for name, group in groups.items()}
    calls[FLOOR] = with_yield(groups["fake"])
    return in_turns(calls, meet, lambda name: CALLS.get(name, 500))


def busy(groups: dict[str, dist.ProcessGroup], meet: Callable[[], None], cpu: int) -> Measured:
    """Measures steps of 2 ms of computing and an all-reduce of 32 KB, as `small` does.

    `cpu` is the CPU to which this process is pinned; -1 for none. As under torchrun, each rank is
    in a session of its own, among which the kernel shares a CPU (`sched_autogroup_enabled`).
    """
    with contextlib.suppress(PermissionError):  # it leads a session already
        os.setsid()
    tensor, square = torch.ones(8192), torch.randn(128, 128)

    def step(group: dist.ProcessGroup) -> Callable[[], object]:
        def call() -> None:
            end = time.thread_time() + COMPUTE_SECONDS
            while time.thread_time() < end:
                square @ square
            dist.all_reduce(tensor, group=group)

        return call

    allowed = os.sched_getaffinity(0)
    pin({cpu} if cpu >= 0 else allowed)
    try:
        calls = {name: step(group) for name, group in groups.items()}
        return in_turns(calls, meet, lambda _: STEPS)
    finally:
        pin(allowed)


def pin(cpus: set[int]) -> None:
    """Lets all threads of this process run on these CPUs."""
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(task), cpus)


def in_turns(
    calls: dict[str, Callable[[], object]], meet: Callable[[], None], count: Callable[[str], int]
) -> Measured:
    """Makes the calls of each name in turns, so often in each round."""
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in calls}
    for turn in range(ROUNDS + 1):
        for name, call in calls.items():
            meet()
            start = used()
            for _ in range(count(name)):
                call()
            if turn > 0:  # the first round warms up
                ends = zip(start, used(), strict=True)
                found[name].append(tuple((end - begin) / count(name) for begin, end in ends))
    whats = ("time", "cpu", "sleeps", "switches")
    return {
        name: {what: median(values[i] for values in all) for i, what in enumerate(whats)}
        for name, all in found.items()
    }


def used() -> tuple[float, ...]:
    """Returns the microseconds that have passed and that this process has run; its switches."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    ran = usage.ru_utime + usage.ru_stime
    return time.perf_counter() * 1e6, ran * 1e6, usage.ru_nvcsw, usage.ru_nivcsw


@contextlib.contextmanager
def other_programs() -> Iterator[None]:
    """Runs busy processes, each in a session of its own, which end with this process."""
    command = [sys.executable, "-S", "-c", "while True: pass"]
    programs = []
    try:
        for _ in range(PROGRAMS):
            programs.append(
                subprocess.Popen(command, start_new_session=True, preexec_fn=die_with_parent)
            )
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()
