"""What an operation on a GPU costs its caller, beside torch's nccl, on an emulated CUDA.

The CPU does the work of the GPU, so one rank is measured, whose operations have next to nothing to
do. Host time and the number of calls are those of torch's own code and of this package;
what NCCL and the driver cost is not in them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

ROUNDS = 15
CALLS = 200


def missing() -> str:
    """Says why there is no emulated CUDA; empty if there is."""
    import emulated

    return str(emulated.available())


def measure() -> list[dict[str, Any]]:
    """Measures in a process that has the emulated GPUs. One record for each case."""
    import emulated

    environment = os.environ | emulated.environment()
    command = [sys.executable, "-m", "benchmark.emulated"]
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, timeout=300, check=True
    )
    records: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return records


def as_text(records: list[dict[str, Any]]) -> str:
    """Returns the table."""
    lines = [
        f"Host time and CUDA calls of an operation on an emulated GPU, of one rank, medians of "
        f"{ROUNDS} rounds",
        f"{'':22}{'torchcomms':>22}{'nccl':>22}{'ratio':>8}",
    ]
    for record in records:
        ours, theirs = record["torchcomms"], record["nccl"]
        cells = [f"{side['us']:.1f} us {side['calls']:5.1f} calls" for side in (ours, theirs)]
        lines.append(f"{record['case']:22}{cells[0]:>22}{cells[1]:>22}{record['ratio']:>8.2f}")
    return "\n".join(lines)


def cases(group: Any) -> dict[str, Callable[[], object]]:
    """The calls that are compared."""
    import torch
    import torch.distributed as dist

    tensor = torch.ones(1000, device="cuda")
    output = torch.empty_like(tensor)

    def reduced(**how: bool) -> Any:
        return dist.all_reduce(tensor, group=group, **how)

    def gathered(**how: bool) -> Any:
        return dist.all_gather_into_tensor(output, tensor, group=group, **how)

    return {
        "all_reduce": reduced,
        "all_reduce async": lambda: reduced(async_op=True).wait(),
        "all_reduce, future": lambda: reduced(async_op=True).get_future().wait(),
        "all_gather": gathered,
        "all_gather async": lambda: gathered(async_op=True).wait(),
    }


def host_us(call: Callable[[], object]) -> float:
    """Returns the microseconds of the calling thread for each call, which runs ahead of the device.

    The device is held until then: the threads that emulate it would be woken up by most calls, and
    take the cores.
    """
    import emulated
    import torch

    with emulated.hold():
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        taken = time.perf_counter() - start
    torch.cuda.synchronize()
    return taken / CALLS * 1e6


def cuda_calls(call: Callable[[], object]) -> float:
    """Returns the calls of CUDA's runtime by the calling thread, without cudaGetDevice."""
    import emulated

    with emulated.counted() as counts:
        for _ in range(CALLS):
            call()
    calls = counts["main"]
    return float(sum(calls.values()) - calls["cudaGetDevice"]) / CALLS


def main() -> None:
    """Measures and prints the records as JSON, in a process with the emulated GPUs."""
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(0)
    dist.init_process_group("torchcomms", store=dist.HashStore(), rank=0, world_size=1)
    sides = {"torchcomms": cases(None), "nccl": cases(dist.new_group(backend="nccl"))}
    records = []
    for case in sides["torchcomms"]:
        times: dict[str, list[float]] = {side: [] for side in sides}
        for _ in range(ROUNDS + 1):
            for side, calls in sides.items():
                times[side].append(host_us(calls[case]))
        record: dict[str, Any] = {"case": case}
        for side, calls in sides.items():
            times[side] = times[side][1:]  # without the first, of memory and events that are new
            record[side] = {"us": median(times[side]), "calls": cuda_calls(calls[case])}
            torch.cuda.synchronize()
        pairs = zip(times["torchcomms"], times["nccl"], strict=True)
        record["ratio"] = median(ours / theirs for ours, theirs in pairs)
        records.append(record)
    dist.destroy_process_group()
    print(json.dumps(records))


if __name__ == "__main__":
    main()
