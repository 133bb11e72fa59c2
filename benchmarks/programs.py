"""What programs call on their CPU groups, as they write it, over each backend in turns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from .plan import KB, MB
from .timing import timed

ROUNDS = 7
Make = Callable[[dist.ProcessGroup], Callable[[], object]]


@dataclass(frozen=True)
class Call:
    """A call and its budget; a `limit` of 0: none."""

    name: str
    make: Make
    calls: int
    """In a round."""
    limit: float = 0
    beside: str = ""
    """``gloo``: at least `limit` times faster; ``fake``: at most so many times as long; else us."""


def data_parallel_sync(group: dist.ProcessGroup) -> Callable[[], object]:
    """vLLM, `_run_ar` in vllm/v1/worker/dp_utils.py: what each rank wants of the next step."""
    ranks, me = group.size(), group.rank()

    def call() -> None:
        tensor = torch.zeros(4, ranks, dtype=torch.int32)
        tensor[0][me] = 5
        dist.all_reduce(tensor, group=group)

    return call


def scheduler_sync(group: dist.ProcessGroup) -> Callable[[], object]:
    """SGLang, `MLPSyncBatchInfo.all_gather`: six numbers of each rank's batch."""
    local = torch.arange(6, dtype=torch.int64)
    everyone = torch.empty((group.size(), 6), dtype=torch.int64)
    return lambda: dist.all_gather_into_tensor(everyone.flatten(), local, group=group)


def gather_objects(group: dist.ProcessGroup) -> Callable[[], object]:
    """`all_gather_object` of a small dictionary."""
    everyone: list[Any] = [None] * group.size()
    return lambda: dist.all_gather_object(everyone, {"rank": 1}, group=group)


def broadcast_objects(group: dist.ProcessGroup) -> Callable[[], object]:
    """`broadcast_object_list` of a small dictionary."""
    return lambda: dist.broadcast_object_list([{"step": 1}], src=0, group=group)


def asynchronous(group: dist.ProcessGroup) -> Callable[[], object]:
    """An all-reduce that is waited for at once."""
    tensor = torch.zeros(1)
    return lambda: dist.all_reduce(tensor, group=group, async_op=True).wait()


def functional_of(size: int, dtype: torch.dtype) -> Make:
    """A functional all-reduce, as DTensor and tensor parallelism call it."""

    def make(group: dist.ProcessGroup) -> Callable[[], object]:
        tensor = torch.zeros(size // dtype.itemsize, dtype=dtype)
        return lambda: functional.wait_tensor(functional.all_reduce(tensor, "sum", group))

    return make


CALLS = (
    Call("all_reduce, int32 4 x ranks (vLLM)", data_parallel_sync, 60, 25, "gloo"),
    Call("all_gather_into_tensor, int64 x 6 (SGLang)", scheduler_sync, 60, 40, "gloo"),
    Call("barrier", lambda group: lambda: dist.barrier(group=group), 60, 30, "gloo"),
    Call("all_gather_object", gather_objects, 40, 1.5, "fake"),
    Call("broadcast_object_list", broadcast_objects, 40, 1.5, "fake"),
    Call("all_reduce of 4 B, async_op, wait()", asynchronous, 60, 12),
    Call("functional all_reduce of 8 KB", functional_of(8 * KB, torch.bfloat16), 60, 1.3, "fake"),
    Call("functional all_reduce of 16 MB", functional_of(16 * MB, torch.bfloat16), 4),
)


def measure(
    groups: dict[str, dist.ProcessGroup], meet: Callable[[], None]
) -> dict[str, dict[str, float]]:
    """Returns the microseconds of each call by backend: medians. Every rank calls this together."""
    found: dict[str, dict[str, float]] = {}
    for call in CALLS:
        made = {}
        for name, group in groups.items():
            # What nobody sends cannot be unpickled; rank 0 gets its own.
            if name != "fake" or "object" not in call.name or group.rank() == 0:
                made[name] = call.make(group)
        times: dict[str, list[float]] = {name: [] for name in made}
        for turn in range(ROUNDS + 1):
            for name in groups:
                meet()
                if name not in made:
                    continue
                took = [timed(made[name]) for _ in range(call.calls)]
                if turn > 0:  # the first round warms up
                    times[name] += took
        found[call.name] = {name: median(all) for name, all in times.items()}
    return found
