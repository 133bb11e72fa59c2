"""What an operation on a GPU costs its caller, beside torch's nccl.

One rank is measured, whose operations have next to nothing to do. On an emulated CUDA host time and
the number of calls are those of torch's own code and of this package, and what NCCL and the driver
cost is not in them; on a GPU it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import emulated
import torchcomms_pg  # noqa: F401  torch 2.11 and 2.12 do not load it by its name
from harness import streams
from harness.ranks import Ranks

from . import table

ROUNDS = 15
CALLS = 100  # while the device is held: a GPU's queue takes about 1000 of what they queue


def missing(device: str) -> str:
    """Says why there are no GPUs of this kind, "emulated" or "cuda"; empty if there are."""
    if device == "emulated":
        return str(emulated.available())
    return "" if torch.cuda.is_available() else f"torch {torch.__version__} sees no GPU"


def measure(device: str) -> list[dict[str, Any]]:
    """Measures in a process that has the GPUs. One record for each case."""
    started_with = emulated.environment if device == "emulated" else None
    # Ranks sets it for tests; here nccl does what it does for its users.
    unset = ("TORCH_NCCL_ASYNC_ERROR_HANDLING",)
    with Ranks(1, init=False, delete_env=unset, started_with=started_with) as ranks:
        records: list[dict[str, Any]] = ranks.run(compare, device, timeout=300)[0]
    return records


def as_text(records: list[dict[str, Any]]) -> str:
    """Returns the table."""
    lines = [["", "torchcomms", "nccl", "ratio"]]
    for record in records:
        cells = [cell(record[side]) for side in ("torchcomms", "nccl")]
        lines.append([record["case"], *cells, f"{record['ratio']:.2f}"])
    heading = "Host time (and calls of CUDA) of an operation of one rank, medians of"
    return f"{heading} {ROUNDS} rounds\n{table.align(lines)}"


def cell(side: dict[str, float]) -> str:
    """Returns what one side of a case has taken."""
    calls = f" {side['calls']:5.1f} calls" if "calls" in side else ""
    return f"{side['us']:.1f} us{calls}"


def cases(group: Any) -> dict[str, Callable[[], object]]:
    """The calls that are compared."""
    tensor = torch.ones(1000, device="cuda")
    output = torch.empty_like(tensor)

    def reduced(async_op: bool = False) -> Any:
        return dist.all_reduce(tensor, group=group, async_op=async_op)

    def gathered(async_op: bool = False) -> Any:
        return dist.all_gather_into_tensor(output, tensor, group=group, async_op=async_op)

    return {
        "all_reduce": reduced,
        "all_reduce async": lambda: reduced(async_op=True).wait(),
        "all_reduce, future": lambda: reduced(async_op=True).get_future().wait(),
        "all_gather": gathered,
        "all_gather async": lambda: gathered(async_op=True).wait(),
    }


def host_us(call: Callable[[], object]) -> float:
    """Returns the microseconds of the calling thread for each call, which runs ahead of the device.

    The device is held until then: the threads of an emulated one would be woken up by most calls,
    and take the cores.
    """
    with streams.hold():
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        taken = time.perf_counter() - start
    torch.cuda.synchronize()
    return taken / CALLS * 1e6


def cuda_calls(call: Callable[[], object]) -> float:
    """Returns the calls of CUDA's runtime by the calling thread, without cudaGetDevice."""
    with emulated.counted() as counts:
        for _ in range(CALLS):
            call()
    calls = counts["main"]
    return float(sum(calls.values()) - calls["cudaGetDevice"]) / CALLS


def compare(device: str) -> list[dict[str, Any]]:
    """Called in a process that has the GPUs: returns a record for each case."""
    torch.cuda.set_device(0)
    dist.init_process_group("torchcomms", store=dist.HashStore(), rank=0, world_size=1)
    sides = {"torchcomms": cases(None), "nccl": cases(dist.new_group(backend="nccl"))}
    for calls in sides.values():
        for call in calls.values():  # what connects or loads a kernel may wait for the device
            call()
    torch.cuda.synchronize()
    records = []
    for case in sides["torchcomms"]:
        times: dict[str, list[float]] = {side: [] for side in sides}
        for _ in range(ROUNDS + 1):
            for side, calls in sides.items():
                times[side].append(host_us(calls[case]))
        record: dict[str, Any] = {"case": case}
        for side, calls in sides.items():
            times[side] = times[side][1:]  # without the first, of memory and events that are new
            record[side] = {"us": median(times[side])}
            if device == "emulated":
                record[side]["calls"] = cuda_calls(calls[case])
            torch.cuda.synchronize()
        pairs = zip(times["torchcomms"], times["nccl"], strict=True)
        record["ratio"] = median(ours / theirs for ours, theirs in pairs)
        records.append(record)
    dist.destroy_process_group()
    return records
