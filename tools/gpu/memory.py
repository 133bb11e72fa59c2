"""Memory: pools that are registered with NCCL, and what NCCL gives back."""

from __future__ import annotations

import torch
import torch.distributed as dist

import torchcomms_pg
from gpu.check import Skip
from gpu.here import Here, raises
from torchcomms_pg import nccl

MEBI = 1 << 20


def pool(here: Here) -> str:
    """Memory from NCCL's allocator, registered in both ways, and freed while registered."""
    here.start(eager=True)
    _need("ncclMemAlloc", "2.19.3")
    backend = _backend(here)
    memory = torch.cuda.MemPool(backend.mem_allocator)
    tensor = _ones(here, memory)
    backend.register_mem_pool(memory)
    _sum(here, tensor)
    later = _ones(here, memory)
    backend.register_mem_pool(memory)
    _sum(here, later)
    backend.deregister_mem_pool(memory)
    _sum(here, tensor)
    symmetric = "ncclCommWindowRegister" not in nccl.load().missing
    if symmetric:
        backend.register_mem_pool(memory, symm=True)
        _sum(here, tensor)
        backend.deregister_mem_pool(memory)
    backend.register_mem_pool(memory)
    here.synchronize()
    del tensor, later, memory  # frees its memory, which was not deregistered
    _sum(here, torch.ones(MEBI, device=here.device))
    here.stop()
    return f"allocated, registered, used, freed; {'as' if symmetric else 'no'} windows"


def of_the_group(here: Here) -> str:
    """Tensors that the group allocates, as FSDP2 has it do."""
    here.start()
    _need("ncclMemAlloc", "2.19.3")
    backend = _backend(here)
    for _ in range(3):
        tensor = backend.allocate_tensor(MEBI, dtype=torch.float32, device=here.device)
        assert tensor.shape == (MEBI,) and tensor.device == here.device, tensor.shape
        _sum(here, tensor.fill_(1))
    wanted = "wants" if backend.supports_tensor_alloc(here.device) else "does not want"
    here.stop()
    return f"allocated and used; FSDP2 {wanted} it here (multicast)"


def suspend(here: Here) -> str:
    """Memory that NCCL gives back, and takes again."""
    here.start(eager=True)
    _need("ncclCommSuspend", "2.29.7")
    backend = _backend(here)
    tensor = torch.ones(MEBI, device=here.device)
    _sum(here, tensor)
    before = backend.memory_stats()
    assert before["suspended"] == 0 and before["total"] > 0, before
    for _ in range(2):
        backend.suspend()
        during = backend.memory_stats()
        assert during["suspended"] == 1, during
        with raises(RuntimeError, "an operation of a suspended group", "is suspended"):
            dist.all_reduce(tensor)
        backend.resume()
        _sum(here, tensor)
    here.stop()
    return f"{before['suspend'] >> 20} of {before['total'] >> 20} MiB given back, and taken again"


def _backend(here: Here) -> torchcomms_pg.Backend:
    backend = here.group._get_backend(here.device)
    assert isinstance(backend, torchcomms_pg.Backend), type(backend)
    return backend


def _need(function: str, since: str) -> None:
    if function in nccl.load().missing:
        found = ".".join(map(str, nccl.version()))
        raise Skip(f"NCCL {found} has no {function}, which came with {since}")


def _ones(here: Here, memory: torch.cuda.MemPool) -> torch.Tensor:
    with torch.cuda.use_mem_pool(memory):
        return torch.ones(4 * MEBI, device=here.device)


def _sum(here: Here, tensor: torch.Tensor) -> None:
    dist.all_reduce(tensor.fill_(1))
    assert (tensor.cpu() == here.ranks).all(), tensor[:4].cpu()
