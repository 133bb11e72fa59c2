"""Waits of the program for operations that it called before."""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch.distributed as dist

from torchcomms_pg.plan.recorder import current


class _Called(threading.local):
    """Indices of this thread's calls: those whose work is not made yet, and of an open batch."""

    def __init__(self) -> None:
        self.now: list[int] = []
        self.batch: list[int] | None = None


_called = _Called()
_of: dict[int, list[int]] = {}  # calls of the works that were not waited for, by the work's id


def called() -> None:
    """Notes that the last call of this process belongs to the next work of this thread."""
    index = len(current().program.calls) - 1
    _called.now.append(index)
    if _called.batch is not None:
        _called.batch.append(index)


def begin_batch() -> None:
    """Makes the following calls of this thread belong to the work of `end_batch`, too."""
    _called.batch = []


def end_batch() -> None:
    """Makes the next work of this thread the work of all calls since `begin_batch`."""
    _called.now, _called.batch = _called.batch or [], None


def made(work: dist.Work) -> None:
    """Notes which calls a work is of."""
    _of[id(work)], _called.now = _called.now, []


def install() -> None:
    """Notes in `Program.waits` when the program waits for a work, unless it does so at once.

    Sees waits of Python. torch's C++, such as DDP's reducer, is taken to wait at once.
    """
    old = dist.Work.wait

    @functools.wraps(old)
    def wait(self: dist.Work, *args: Any, **kwargs: Any) -> Any:
        program = current().program
        for index in _of.pop(id(self), ()):
            if len(program.calls) > index + 1:
                program.waits[index] = len(program.calls)
        return old(self, *args, **kwargs)

    dist.Work.wait = wait  # type: ignore[method-assign]
