"""Memory of NCCL's allocator for a group's tensors, which NCCL can use without copying."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._C._distributed_c10d import _SymmetricMemory

from torchcomms_pg import _C


def allocator(options: _C.Backend.Options) -> Any:
    """Returns NCCL's allocator in the form that torch.cuda.MemPool takes.

    Raises:
        NotImplementedError: torch is not built for GPUs.
        RuntimeError: libnccl is not found or has no allocator, or another library already
            allocates in this process.
    """
    if not hasattr(torch._C, "_cuda_customAllocator"):
        raise NotImplementedError(
            f"mem_allocator: torch {torch.__version__} is built for CPUs only, and pools of memory "
            "are of GPUs; install a torch that is built for them"
        )
    _C.allocate_with(_library(options))
    return _allocator()


def can_allocate(options: _C.Backend.Options, device: torch.device) -> bool:
    """Returns whether NCCL should allocate the group's tensors.

    The rule is the same as in torch's own backend: NCCL has an allocator, and the GPU multicast.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    if "ncclMemAlloc" in _library(options).missing:
        return False
    index = torch.cuda.current_device() if device.index is None else device.index
    return bool(_SymmetricMemory.has_multicast_support(torch._C._autograd.DeviceType.CUDA, index))


def allocate_tensor(
    backend: _C.Backend, size: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Returns an uninitialized tensor in NCCL's memory, registered with the group.

    The first tensor on a device makes the group's communicator for the device, if none exists.
    """
    if device.type != "cuda":
        raise ValueError(
            f"allocate_tensor: device is {device}, wanted a GPU; supports_tensor_alloc(device) "
            "tells, and torch.empty() allocates on others"
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    pool = _pool(index, backend.mem_allocator)
    with torch.cuda.use_mem_pool(pool, index):
        tensor = torch.empty(size, dtype=dtype, device=torch.device("cuda", index))
    backend.register_mem_pool(pool)
    return tensor


def _library(options: _C.Backend.Options) -> _C.NcclLibrary:
    return _C.load_nccl(options.nccl_library, options.nccl_folder)


@functools.cache
def _allocator() -> Any:
    functions = ("torchcomms_pg_allocate", "torchcomms_pg_free")
    return torch.cuda.memory.CUDAPluggableAllocator(_C.__file__, *functions).allocator()


# Returns the one pool of each device: all groups allocate from it.
@functools.cache
def _pool(index: int, of: Any) -> torch.cuda.MemPool:
    with torch.cuda.device(index):
        return torch.cuda.MemPool(of)
