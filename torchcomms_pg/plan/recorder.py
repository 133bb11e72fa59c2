"""Records the calls of the rank that runs in this process."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from torchcomms_pg.plan.program import Called, Made, Program, Sizes
from torchcomms_pg.trace.dumps import Frame, is_library

# c10's names of dtypes, which flight recorders write.
_NAMES = {
    torch.uint8: "Byte",
    torch.int8: "Char",
    torch.int16: "Short",
    torch.int32: "Int",
    torch.int64: "Long",
    torch.float16: "Half",
    torch.float32: "Float",
    torch.float64: "Double",
    torch.complex64: "ComplexFloat",
    torch.complex128: "ComplexDouble",
    torch.bool: "Bool",
    torch.bfloat16: "BFloat16",
    torch.float8_e4m3fn: "Float8_e4m3fn",
    torch.float8_e5m2: "Float8_e5m2",
    torch.uint16: "UInt16",
    torch.uint32: "UInt32",
    torch.uint64: "UInt64",
}


class Recorder:
    """Collects a `Program`. Only the threads of one rank use it."""

    def __init__(self, rank: int) -> None:
        self.program = Program(rank)
        self._stacks: dict[tuple[tuple[str, str, int], ...], int] = {}
        self._threads: dict[int, int] = {}
        self._unseen: dict[str, None] = {}
        self._batches = 0
        self._batch = threading.local()

    def begin_batch(self) -> None:
        """Makes the following messages of this thread members of one new batch."""
        self._batches += 1
        self._batch.number = self._batches

    def end_batch(self) -> None:
        """Ends the batch of this thread."""
        self._batch.number = 0

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Makes the messages of this thread within it one batch."""
        self.begin_batch()
        try:
            yield
        finally:
            self.end_batch()

    def made(self, made: Made) -> int:
        """Records a call that makes groups, and returns its index."""
        self.program.made.append(made)
        return len(self.program.made) - 1

    def call(
        self,
        op: str,
        made: int,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        *,
        peer: int | None = None,
        root: int | None = None,
        reduce_op: str = "",
        tag: int | None = None,
        seen: bool = True,
    ) -> None:
        """Records an operation of this thread; ``seen`` is False if its sizes depend on data."""
        first = next(iter((*inputs, *outputs)), None)
        batch = getattr(self._batch, "number", 0) if op in ("send", "recv") else 0
        called = Called(
            op,
            made,
            _sizes(inputs) if seen else (),
            _sizes(outputs) if seen else (),
            _NAMES.get(first.dtype, str(first.dtype)) if first is not None else "",
            peer,
            root,
            reduce_op,
            tag,
            batch,
            self._threads.setdefault(threading.get_ident(), len(self._threads)),
            first.device.type if first is not None else "",
            self.where(),
        )
        self.program.calls.append(called)

    def where(self) -> int:
        """Returns the index of this thread's stack, of the user's lines or else the innermost."""
        frames = []
        frame: FrameType | None = sys._getframe(1)
        innermost = None
        while frame is not None:
            code = frame.f_code
            one = (code.co_qualname.rpartition(".")[2], code.co_filename, frame.f_lineno)
            innermost = innermost or one
            if not is_library(code.co_filename) or "async_executor" in code.co_filename:
                frames.append(one)
            frame = frame.f_back
        key = tuple(frames) or (innermost,) if innermost else ()
        number = self._stacks.setdefault(key, len(self._stacks))
        if number == len(self.program.stacks):
            self.program.stacks.append(tuple(Frame(*each) for each in key))
        return number

    def unseen(self, what: str) -> None:
        """Notes what depends on data, with the user's line, once for each line."""
        stack = self.program.stacks[self.where()]
        at = f"{what}  at {stack[0]}" if stack else what
        if at not in self._unseen:
            self._unseen[at] = None
            self.program.unseen.append(at)


def _sizes(tensors: Sequence[torch.Tensor]) -> Sizes:
    return tuple(tuple(tensor.shape) for tensor in tensors)


def reduction(op: object) -> str:
    """Returns the name of a reduction as recorders write it, such as ``SUM``."""
    kind = getattr(op, "op", op)
    return str(getattr(kind, "name", kind)).rpartition(".")[2]


def modules() -> list[str]:
    """Returns the names of installed modules that this process has imported since `start`.

    Leaves out modules of the user's own folders, whose import may do what only a rank may do.
    """
    folder = str(Path(torch.__file__).parent.parent)
    return [
        name
        for name, module in list(sys.modules.items())
        if name not in _known and str(getattr(module, "__file__", "")).startswith(folder)
    ]


_known: set[str] = set()
_current: list[Recorder] = []


def current() -> Recorder:
    """Returns the recorder of this process."""
    return _current[-1]


def start(rank: int) -> Recorder:
    """Makes and returns the recorder of this process."""
    _known.update(sys.modules)
    _current[:] = [Recorder(rank)]
    return current()


def wanted(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Returns the group, or the default group instead of None."""
    from torch.distributed.distributed_c10d import _get_default_group

    return group if group is not None else _get_default_group()
