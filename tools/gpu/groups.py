"""How groups are made, and what goes through them besides tensors of one device."""

from __future__ import annotations

import torch
import torch.distributed as dist

import torchcomms_pg
from gpu.here import Here, finish
from torchcomms_pg import nccl


def library(here: Here) -> str:
    """Which libnccl serves."""
    here.start()
    dist.all_reduce(torch.ones(1, device=here.device))
    found = nccl.load()
    here.stop()
    version = ".".join(map(str, nccl.version()))
    lacks = f"; it lacks {', '.join(found.missing)}" if found.missing else ""
    return f"NCCL {version}, {found.origin}{lacks}"


def check(here: Here) -> str:
    """Default groups, lazy and eager; new ones; split ones; CPU tensors and objects in them."""
    for eager in (False, True):
        here.start(eager=eager)
        _sum(here, here.group, here.ranks)
        _part(here)
        if eager:
            _split(here)
        _mixed(here)
        here.stop()
    return "lazy, eager, new, split, high priority, CPU tensors, objects"


def _sum(here: Here, group: dist.ProcessGroup | int | None, members: int) -> None:
    # On a rank outside a group torch gives a number instead.
    assert isinstance(group, dist.ProcessGroup), group
    tensor = torch.ones(100, device=here.device)
    finish(dist.all_reduce(tensor, group=group, async_op=True))
    assert (tensor.cpu() == members).all(), tensor[:4].cpu()


def _part(here: Here) -> None:
    """A group of some ranks, and one whose stream has a high priority."""
    last = dist.new_group([here.ranks - 1])
    if here.rank == here.ranks - 1:
        _sum(here, last, 1)
    options = torchcomms_pg.Backend.Options()
    options.is_high_priority_stream = True
    group = dist.new_group(pg_options=options)
    _sum(here, group, here.ranks)
    dist.destroy_process_group(group)


def _split(here: Here) -> None:
    first = list(range((here.ranks + 1) // 2))
    rest = list(range(len(first), here.ranks))
    group = dist.split_group(split_ranks=[part for part in (first, rest) if part])
    _sum(here, group, len(first if here.rank in first else rest))


def _mixed(here: Here) -> None:
    """Tensors of both devices, in any order, and objects."""
    on_cpu, on_device = torch.ones(100), torch.ones(100, device=here.device)
    works = [dist.all_reduce(x, async_op=True) for x in (on_device, on_cpu, on_device)]
    for work in works:
        work.wait()
    assert (on_cpu == here.ranks).all(), on_cpu[:4]
    assert (on_device.cpu() == here.ranks**2).all(), on_device[:4].cpu()
    objects: list[object] = [None] * here.ranks
    dist.all_gather_object(objects, {"rank": here.rank})
    assert objects == [{"rank": rank} for rank in range(here.ranks)], objects
    told: list[object] = [here.rank]
    dist.broadcast_object_list(told, here.ranks - 1, device=here.device)
    assert told == [here.ranks - 1], told


def devices(here: Here) -> str:
    """One rank with tensors of two devices: a communicator for each."""
    here.start()
    tensors = [torch.ones(100, device=torch.device(here.device.type, i)) for i in range(2)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work, tensor in zip(works, tensors, strict=True):
        with torch.get_device_module(here.device.type).device(tensor.device):
            work.wait()
            assert (tensor.cpu() == here.ranks).all(), tensor.device
    comms = [torchcomms_pg.get_comm(device=tensor.device) for tensor in tensors]
    assert comms[0].get_device() != comms[1].get_device()
    here.stop()
    return "a communicator for each of 2 devices"
