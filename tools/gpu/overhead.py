"""What an operation costs the host, beside torch's own backends, in one process.

On one rank NCCL itself has next to nothing to do, so that what is measured is what the backends
add. The backends take turns, round by round, and medians are compared.
"""

from __future__ import annotations

import gc
import importlib.metadata
import time
from collections.abc import Callable, Sequence
from statistics import quantiles
from typing import NamedTuple

import torch
import torch.distributed as dist
from benchmark.table import align
from benchmark.table import time as microseconds

from gpu.devices import Cuda
from gpu.here import Here

OURS = "torchcomms"
# Where torch has them, from 2.14 on: the two that "nccl" may stand for.
ALSO = ("nccl2", "nccl-legacy")
ROUNDS = 25
CALLS = 100  # between two waits for the device: NCCL's queue takes about 1000
LENGTH = 16

Call = Callable[[], None]


class Contender(NamedTuple):
    """A backend, its group of one rank, and where its tensors are."""

    backend: str
    group: dist.ProcessGroup
    device: torch.device


class Quartiles(NamedTuple):
    """Host microseconds for one operation, over the rounds."""

    low: float
    median: float
    high: float


def eager(here: Here) -> str:
    """Operations one by one, synchronous and asynchronous."""
    return _compare(here, {"sync": _loop(False), "async": _loop(True)})


def in_graph(here: Here) -> str:
    """Operations that a graph replays."""
    return _compare(here, {"in a graph": _captured})


def _compare(here: Here, modes: dict[str, Callable[[Call, Call], Call]]) -> str:
    """Fails where torchcomms takes longer than torch's `nccl`, beyond the spread of the rounds."""
    reference = here.kind.reference
    here.start(reference)
    contenders = _contenders(here)
    rows: dict[str, dict[str, Quartiles]] = {}
    for name, operation in (("all_reduce", _all_reduce), ("all_gather_into_tensor", _all_gather)):
        for mode, prepare in modes.items():
            calls = {}
            for contender in contenders:
                calls[contender.backend] = prepare(
                    operation(contender, False), operation(contender, True)
                )
            rows[f"{name}, {mode}"] = _measure(here, calls)
            del calls
            gc.collect()  # graphs go before their group
    here.stop()
    text = f"host us per operation, {', '.join(c.backend for c in contenders)}\n{_table(rows)}"
    slower = [what for what, row in rows.items() if row[OURS].low > row[reference].high]
    if slower and reference == "nccl":
        raise AssertionError(f"{text}\nslower than nccl: {'; '.join(slower)}")
    first = next(iter(rows))
    told = ", ".join(f"{name} {microseconds(q.median)}" for name, q in rows[first].items())
    return f"{first}: {told} us\n{text}"


def _contenders(here: Here) -> list[Contender]:
    reference = here.kind.reference
    names = [OURS, reference]
    if reference == "nccl":
        known = importlib.metadata.entry_points(group="torch.distributed.backends").names
        names += [name for name in ALSO if name in known]
    found = []
    for name in names:
        device = here.reference_device if name == reference else here.device
        group = dist.new_group(backend=name)
        assert isinstance(group, dist.ProcessGroup)
        found.append(Contender(name, group, device))
    return found


def _all_reduce(contender: Contender, async_op: bool) -> Call:
    tensor = torch.zeros(LENGTH, device=contender.device)

    def call() -> None:
        work = dist.all_reduce(tensor, group=contender.group, async_op=async_op)
        if work is not None:
            work.wait()

    return call


def _all_gather(contender: Contender, async_op: bool) -> Call:
    tensor, output = (torch.zeros(LENGTH, device=contender.device) for _ in range(2))

    def call() -> None:
        work = dist.all_gather_into_tensor(output, tensor, group=contender.group, async_op=async_op)
        if work is not None:
            work.wait()

    return call


def _loop(async_op: bool) -> Callable[[Call, Call], Call]:
    def prepare(sync: Call, asynchronous: Call) -> Call:
        one = asynchronous if async_op else sync
        one()  # connects

        def calls() -> None:
            for _ in range(CALLS):
                one()

        return calls

    return prepare


def _captured(sync: Call, asynchronous: Call) -> Call:
    sync()
    torch.cuda.synchronize()
    with Cuda().capture() as graph:
        for _ in range(CALLS):
            sync()
    return graph.replay


def _measure(here: Here, calls: dict[str, Call]) -> dict[str, Quartiles]:
    names = list(calls)
    times: dict[str, list[float]] = {name: [] for name in names}
    gc.disable()  # as timeit does
    for number in range(ROUNDS + 1):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            begin = time.perf_counter()
            calls[name]()
            took = time.perf_counter() - begin
            here.synchronize()
            if number > 0:  # the first one warms up
                times[name].append(took / CALLS * 1e6)
    gc.enable()
    return {name: Quartiles(*quantiles(values, n=4)) for name, values in times.items()}


def _table(rows: dict[str, dict[str, Quartiles]]) -> str:
    names = list(next(iter(rows.values())))
    lines: list[Sequence[str]] = [["median (quartiles)", *names]]
    for what, row in rows.items():
        cells = [
            f"{microseconds(q.median)} ({microseconds(q.low)} to {microseconds(q.high)})"
            for q in row.values()
        ]
        lines.append([what, *cells])
    return align(lines)
