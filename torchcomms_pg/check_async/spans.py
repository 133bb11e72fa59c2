"""The bytes of tensors: which of them two tensors share, and what marks bytes as not valid yet."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

_C: Any = torch._C
_FILL = 0xA5  # every byte of an integer whose value is not valid: large, and negative if signed
_NAN = 0x7F  # every byte of a float8 without an infinity; other floats get their own NaN


class Unseen:
    """Context of operators that neither the check nor autograd sees."""

    __slots__ = ("_dispatch", "_grad")

    # torch.no_grad() takes 4 us, which counts beside a small operation.
    def __enter__(self) -> None:
        self._grad = torch.is_grad_enabled()
        _C._set_grad_enabled(False)
        self._dispatch = _C._DisableTorchDispatch()
        self._dispatch.__enter__()

    def __exit__(self, *error: object) -> None:
        self._dispatch.__exit__(*error)
        _C._set_grad_enabled(self._grad)


class Span:
    """The bytes of one tensor, which keep no memory alive.

    Attributes:
        start, end: addresses of the first byte, and behind the last one.
        storage: address of the storage's object.
    """

    __slots__ = ("_dense", "_geometry", "_storage", "end", "start", "storage")

    def __init__(self, tensor: torch.Tensor) -> None:
        size, stride, width = tensor.size(), tensor.stride(), tensor.element_size()
        self.start = address(tensor)
        reach = sum((count - 1) * step for count, step in zip(size, stride, strict=True))
        count = tensor.numel()
        self.end = self.start + (reach + 1) * width if count else self.start
        self._dense = reach + 1 == count
        self._geometry = (tuple(size), stride, tensor.dtype, tensor.storage_offset())
        self.storage = _C._storage_address(tensor)
        self._storage = StorageWeakRef(tensor.untyped_storage())

    def freed(self) -> bool:
        """Returns whether the memory has been freed, by the storage's end or by a resize to 0."""
        if self._storage.expired():
            return True
        storage = self._strong()
        return storage is None or (self.end > self.start and storage.nbytes() == 0)

    def shares_bytes(self, other: Span) -> bool:
        """Returns whether the tensors have a byte in common."""
        if self.start >= other.end or other.start >= self.end:
            return False
        if self._dense and other._dense:
            return True
        return self._marks(other).any().item() is True

    def tensor(self) -> torch.Tensor | None:
        """Returns a tensor of these bytes; None if the storage has ended."""
        storage = self._strong()
        if storage is None:
            return None
        size, stride, dtype, offset = self._geometry
        return torch.empty(0, dtype=dtype).set_(storage, offset, size, stride)

    def _strong(self) -> torch.UntypedStorage | None:
        storage: Any = torch.UntypedStorage
        return storage._new_with_weak_ptr(self._storage.cdata)  # type: ignore[no-any-return]

    def _marks(self, other: Span) -> torch.Tensor:
        """Returns for each byte of `other` whether it is a byte of this tensor, too."""
        low, high = min(self.start, other.start), max(self.end, other.end)
        marks = torch.zeros(high - low, dtype=torch.bool)
        self._bytes_in(marks, low).fill_(True)
        return other._bytes_in(marks, low)

    def _bytes_in(self, memory: torch.Tensor, low: int) -> torch.Tensor:
        size, stride, dtype, _ = self._geometry
        steps = [step * dtype.itemsize for step in stride]
        return memory.as_strided((*size, dtype.itemsize), (*steps, 1), self.start - low)


def address(tensor: torch.Tensor) -> int:
    """Returns the address of the first element, and leaves memory that is shared until a write."""
    start: int = _C._data_address(tensor)
    return start + int(tensor.storage_offset()) * tensor.element_size()


def plain(tensors: Iterable[Any]) -> bool:
    """Returns whether all tensors are on the CPU and have strides."""
    return all(
        tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.is_quantized
        for tensor in tensors
    )


def poison(tensor: torch.Tensor) -> None:
    """Fills the tensor with NaN, or with a value that is unlikely for its type."""
    data = tensor.data
    if data.dtype.is_floating_point and data.element_size() > 1:
        data.fill_(float("nan"))
    elif data.dtype.is_complex:
        data.fill_(complex("nan+nanj"))
    elif data.dtype is torch.bool:
        data.fill_(True)
    else:
        byte = _NAN if data.dtype.is_floating_point else _FILL
        bytes_of(data).fill_(byte)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor's bytes, as a view."""
    size, stride, width = tensor.size(), tensor.stride(), tensor.element_size()
    steps = [step * width for step in stride]
    flat = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    return flat.as_strided((*size, width), (*steps, 1), tensor.storage_offset() * width)


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns whether two tensors of one shape and dtype are equal bit by bit."""
    return torch.equal(bytes_of(one), bytes_of(other))
