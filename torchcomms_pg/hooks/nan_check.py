"""Finds the rank that sends NaN before the NaN reaches other ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchcomms_pg import _C

if TYPE_CHECKING:
    from torchcomms_pg.comm import TorchComm


class NanCheckHook:
    """Refuses operations that would send NaN.

    Checks only the data that this rank sends: of a broadcast or scatter on the root only, and of a
    receive nothing. Checks floating point and complex tensors, since others cannot hold a NaN.
    Operations captured into a graph are not checked.

    A rank whose operation is refused takes no part in it: the peers wait for that rank until their
    timeout, or until this rank's process ends.

    Example:
        >>> from torchcomms_pg.hooks import NanCheckHook
        >>> check = NanCheckHook()
        >>> check.register_with_comm(comm)
        >>> comm.all_reduce(torch.tensor([float("nan")]), ReduceOp.SUM)
        Traceback (most recent call last):
        RuntimeError: ...
        >>> check.unregister()
    """

    def __init__(self) -> None:
        self._handles: list[_C.RemovableHandle] = []

    def register_with_comm(self, comm: TorchComm) -> None:
        """Checks every operation of `comm` from the next one on, until `unregister`.

        An operation that would send NaN raises RuntimeError, with the names of operation, rank and
        tensor, and sends nothing.
        """
        rank = comm.get_rank()
        self._handles.append(comm.register_pre_hook(lambda args: _C.refuse_nan(args, rank)))

    def is_enabled(self) -> bool:
        """Returns whether the check is registered with a communicator."""
        return bool(self._handles)

    def unregister(self) -> None:
        """Stops checking, on all communicators. Idempotent."""
        while self._handles:
            self._handles.pop().remove()
