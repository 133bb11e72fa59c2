"""DeepSpeed's all-reduce for CPUs, which inference servers carry copies of, beside torchcomms.

Built from the sources in DeepSpeed's package, which need a processor with AVX512.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import torchcomms_pg

from .plan import KB, MB
from .timing import timed

SIZES = (4 * KB, 16 * KB, 64 * KB, 256 * KB, MB, 4 * MB, 16 * MB, 64 * MB)
DTYPES = (torch.float32, torch.bfloat16)
ROUNDS = 7
BYTES_IN_A_ROUND = 64 * MB


def sources() -> Path | None:
    """Returns DeepSpeed's folder of sources for CPUs, without importing it; None: not installed."""
    found = importlib.util.find_spec("deepspeed")
    places = found.submodule_search_locations if found else None
    return Path(next(iter(places))) / "ops/csrc/cpu" if places else None


def build(folder: Path) -> Any:
    """Builds and loads the extension; nothing is built again."""
    from torch.utils.cpp_extension import load

    cpu = sources()
    assert cpu
    folder.mkdir(parents=True, exist_ok=True)
    return load(
        "deepspeed_shm",
        [str(cpu / "comm/shm_interface.cpp"), str(cpu / "comm/shm.cpp")],
        extra_include_paths=[str(cpu / "includes"), str(cpu / "comm")],
        extra_cflags=["-O2", "-fopenmp", "-march=native"],
        build_directory=str(folder),
    )


def measure(
    group: dist.ProcessGroup, meet: Callable[[], None], folder: Path
) -> list[dict[str, Any]]:
    """Returns the microseconds of each all-reduce, sum in place: medians. All ranks call this."""
    os.environ["LOCAL_SIZE"] = str(group.size())  # it works within a host, and asks how many
    extension = build(folder)
    meet()
    extension.initialize(group.size(), group.rank())
    comm = torchcomms_pg.get_comm(group)
    calls: dict[str, Callable[[torch.Tensor], object]] = {
        "deepspeed": torch.ops.deepspeed.inference_all_reduce_,
        "torchcomm": lambda tensor: comm.all_reduce(tensor, torchcomms_pg.ReduceOp.SUM, False),
        "dist": lambda tensor: dist.all_reduce(tensor, group=group),
    }
    records = []
    for dtype, size in itertools.product(DTYPES, SIZES):
        tensor = torch.empty(size // dtype.itemsize, dtype=dtype)
        count = min(300, max(4, BYTES_IN_A_ROUND // size))
        times: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(ROUNDS + 1):
            for name, call in calls.items():
                one = functools.partial(call, tensor)
                tensor.fill_(1)
                meet()
                one()
                if not (tensor == group.size()).all():
                    raise AssertionError(f"wrong result: {name}, {size} bytes of {dtype}")
                tensor.zero_()  # so that no sum grows
                meet()
                took = [timed(one) for _ in range(count)]
                if turn > 0:  # the first round warms up
                    times[name] += took
        medians = {name: median(all) for name, all in times.items()}
        records.append({"dtype": str(dtype).removeprefix("torch."), "bytes": size, **medians})
    return records
