"""Models that are trained over torchcomms and over torch's own backend, from the same seeds."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from values import data

from gpu.here import Here

STEPS = 4
BATCH = 4  # of each rank
Wrap = Callable[[torch.nn.Module, torch.device], torch.nn.Module]


def ddp(here: Here) -> str:
    """DistributedDataParallel, with one bucket, with many, and with compression."""

    def wrap(bucket: float, hook: bool) -> Wrap:
        def wrapped(model: torch.nn.Module, _: torch.device) -> torch.nn.Module:
            from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

            parallel = DistributedDataParallel(model, bucket_cap_mb=bucket)
            if hook:
                parallel.register_comm_hook(None, default_hooks.bf16_compress_hook)
            return parallel

        return wrapped

    return _compare(
        here,
        {
            "one bucket": wrap(25, False),
            "many buckets": wrap(0.01, False),
            "bf16 gradients": wrap(25, True),
        },
    )


def fsdp2(here: Here) -> str:
    """fully_shard, also with mixed precision."""

    def wrap(policy: MixedPrecisionPolicy) -> Wrap:
        def wrapped(model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
            mesh = DeviceMesh.from_group(here.group, device.type)
            for layer in model.children():
                if isinstance(layer, torch.nn.Linear):
                    fully_shard(layer, mesh=mesh, mp_policy=policy)
            fully_shard(model, mesh=mesh, mp_policy=policy)
            return model

        return wrapped

    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return _compare(here, {"fp32": wrap(MixedPrecisionPolicy()), "bf16 parameters": wrap(mixed)})


def _compare(here: Here, ways: dict[str, Wrap]) -> str:
    told = []
    for name, wrap in ways.items():
        # torch 2.15's nccl takes the device by the rank unless it is told.
        here.start(here.kind.reference, eager=here.kind.reference_type == here.kind.type)
        wanted = _train(here, here.reference_device, wrap)
        here.stop()
        here.start()
        got = _train(here, here.device, wrap)
        here.stop()
        # Another order of the additions, and bf16 results that round to a neighbour.
        bound = 2e-2 if "bf16" in name else 1e-4
        largest = 0.0
        for ours, theirs in zip(got, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=bound, atol=bound / 10)
            largest = max(largest, float((ours - theirs).abs().max()))
        told.append(f"{name} {largest:.2g}")
    return f"largest difference from {here.kind.reference}: {', '.join(told)}"


def _train(here: Here, device: torch.device, wrap: Wrap) -> list[torch.Tensor]:
    """Returns the losses and the parameters after some steps."""
    torch.manual_seed(3)
    model: torch.nn.Module = torch.nn.Sequential(
        torch.nn.Linear(12, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Linear(64, 4)
    )
    model = wrap(model.to(device), device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    batch = data(7, (BATCH * here.ranks, 12))[BATCH * here.rank :][:BATCH].to(device)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(batch).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    found = [*losses]
    for parameter in model.parameters():
        full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        found.append(full.detach())
    return [tensor.float().cpu() for tensor in found]
