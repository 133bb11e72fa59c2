"""What groups cost: time to make them, threads, files, memory, and the speed of each."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist


def cost(
    counts: list[int], make: Callable[[], dist.ProcessGroup], meet: Callable[[], None]
) -> list[dict[str, float]]:
    """Makes groups up to each of `counts` and uses them. Every rank calls this together.

    Returns a record for none and for each count. What a process uses is counted after every
    group has all-reduced 4 B and 1 MB, since memory and connections may come with use.
    """
    groups: list[dist.ProcessGroup] = []
    small, large = torch.zeros(1), torch.zeros(1 << 18)
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
            meet()
            record = {"groups": float(count), **usage(), "new_group_ms": median(making)}
            one = [timed(small, groups[-1]) for _ in range(200)]
            meet()
            # Twice over all: each time another group.
            turns = [timed(small, group) for _ in range(2) for group in groups]
            records.append({**record, "one_us": median(one), "turns_us": median(turns)})
    finally:
        for group in groups:
            dist.destroy_process_group(group)
    return records


def timed(data: torch.Tensor, group: dist.ProcessGroup) -> float:
    """Returns the microseconds of one all-reduce."""
    start = time.perf_counter()
    dist.all_reduce(data, group=group)
    return (time.perf_counter() - start) * 1e6


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


def slowest(answers: list[list[dict[str, float]]]) -> list[dict[str, float]]:
    """Merges the records of all ranks: the largest of each value."""
    merged = []
    for records in zip(*answers, strict=True):
        merged.append({name: max(record[name] for record in records) for name in records[0]})
    return merged
