"""What groups cost: time to make them, threads, files, memory, and the speed of each."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
import torch.distributed as dist

from .timing import timed


def cost(
    counts: list[int], make: Callable[[], dist.ProcessGroup], meet: Callable[[], None]
) -> list[dict[str, float]]:
    """Makes groups up to each of `counts` and uses them. Every rank calls this together.

    Returns a record for none and for each count. What a process uses is counted after every
    group has all-reduced 4 B and 1 MB, since memory and connections may come with use.
    """
    groups: list[dist.ProcessGroup] = []
    small, large = torch.zeros(1), torch.zeros(1 << 18)
    calls: list[Callable[[], object]] = []
    making: list[float] = []
    records = [{"groups": 0.0, **usage()}]
    try:
        for count in counts:
            while len(groups) < count:
                meet()
                start = time.perf_counter()
                groups.append(make())
                making.append((time.perf_counter() - start) * 1e3)
                dist.all_reduce(small, group=groups[-1])
                dist.all_reduce(large, group=groups[-1])
                calls.append(partial(dist.all_reduce, small, group=groups[-1]))
            meet()
            record = {"groups": float(count), **usage(), "new_group_ms": median(making)}
            one = [timed(calls[-1]) for _ in range(200)]
            meet()
            # Twice over all: each time another group.
            turns = [timed(call) for _ in range(2) for call in calls]
            records.append({**record, "one_us": median(one), "turns_us": median(turns)})
    finally:
        for group in groups:
            dist.destroy_process_group(group)
    return records


def usage() -> dict[str, float]:
    """Returns what this process uses: threads, files, and memory in KB."""
    values: dict[str, float] = {"files": len(os.listdir("/proc/self/fd"))}
    names = {"Threads": "threads", "RssAnon": "private_kb", "RssShmem": "shared_kb"}
    with open("/proc/self/status") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name in names:
                values[names[name]] = float(value.split()[0])
    return values
