"""Training steps of a plain model, with DDP and with FSDP2."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

WIDTHS = {10: (1024, 10), 100: (4096, 6)}
"""Width and number of square layers, by millions of parameters."""

ALONE = "alone"
"""The same steps on every rank by itself: what a step takes where communication costs nothing."""


@dataclass(frozen=True)
class Job:
    """A model and how it is trained."""

    kind: str
    """``ddp`` or ``fsdp2``."""
    millions: int
    backends: tuple[str, ...]
    steps: int
    batch: int = 16
    """Rows per rank."""


def train(
    job: Job, groups: dict[str, dist.ProcessGroup], meet: Callable[[], None]
) -> dict[str, Any]:
    """Trains the same model over each group, a step here and a step there.

    And once without a group. Returns the seconds of each step and the last loss, by backend.
    """
    width, layers = WIDTHS[job.millions]
    data = torch.randn(job.batch, width, generator=torch.Generator().manual_seed(dist.get_rank()))
    models: dict[str, Any] = {}
    for name in (ALONE, *groups):
        torch.manual_seed(0)
        parts = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)]
        model: nn.Module = nn.Sequential(*parts)
        group = groups.get(name)
        if group is None:
            pass
        elif job.kind == "ddp":
            model = DistributedDataParallel(
                model, process_group=group, gradient_as_bucket_view=True
            )
        else:
            # Loading takes seconds; ranks that train nothing, such as Open MPI's, skip it.
            from torch.distributed.fsdp import fully_shard

            mesh = DeviceMesh.from_group(group, "cpu")
            for part in parts:
                fully_shard(part, mesh=mesh)
            fully_shard(model, mesh=mesh)
        models[name] = model, torch.optim.SGD(model.parameters(), lr=1e-3)
    seconds: dict[str, list[float]] = {name: [] for name in models}
    losses: dict[str, float] = {}
    # DDP makes its buckets in the first step; the optimizer and FSDP their state.
    warmups = 2
    for step in range(warmups + job.steps):
        for name, (model, optimizer) in models.items():
            meet()
            start = time.perf_counter()
            loss = model(data).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step >= warmups:
                seconds[name].append(time.perf_counter() - start)
            losses[name] = loss.item()
    first, *others = (losses[name] for name in groups)
    if any(abs(other - first) > 1e-4 * abs(first) for other in others):
        raise AssertionError(f"{job.kind}: the losses are {losses}")
    return {"seconds": seconds, "losses": losses}


def summarise(job: Job, answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Makes one record of what all ranks returned: a step is over when its last rank is."""
    medians = {}
    for backend in (ALONE, *job.backends):
        by_step = zip(*(answer["seconds"][backend] for answer in answers), strict=True)
        medians[backend] = median(max(times) for times in by_step) * 1e3
    return {
        "kind": job.kind,
        "millions": job.millions,
        "ranks": len(answers),
        "batch": job.batch,
        "steps": job.steps,
        "milliseconds": medians,
    }
