"""Values that a program reads from tensors: zeros if the tensor has none, and noted."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from torchcomms_pg.plan.recorder import current
from torchcomms_pg.trace.dumps import is_library

_ZEROS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda tensor: _zeros(tensor).item(),
    "tolist": lambda tensor: _zeros(tensor).tolist(),
    "numpy": lambda tensor: _zeros(tensor).numpy(),
    "__bool__": lambda tensor: False,
    "__int__": lambda tensor: 0,
    "__float__": lambda tensor: 0.0,
    "__index__": lambda tensor: 0,
}


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")


def install() -> None:
    """Lets values of tensors on `meta` be read as zeros, and notes the user's lines that read."""
    for name, zeros in _ZEROS.items():
        setattr(torch.Tensor, name, _reader(name, getattr(torch.Tensor, name), zeros))


def _reader(name: str, old: Callable[..., Any], zeros: Callable[[torch.Tensor], Any]) -> Any:
    @functools.wraps(old)
    def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not is_library(sys._getframe(1).f_code.co_filename):
            current().unseen(f"a value that the program reads, by {name.strip('_')}")
        if self.is_meta and isinstance(self, torch.Tensor):
            return zeros(self)
        return old(self, *args, **kwargs)

    return read
