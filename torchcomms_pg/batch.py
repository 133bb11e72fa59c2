"""Sends and receives that are issued together."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch.compiler import is_dynamo_compiling

from torchcomms_pg.compile_ops import trace_batch
from torchcomms_pg.options import Hints
from torchcomms_pg.work import TorchWork

if TYPE_CHECKING:
    from torchcomms_pg.operations import Operations


class BatchSendRecv:
    """A list of sends and receives; `TorchComm.batch_op_create` makes it.

    Nothing is checked or sent before `issue`. Issued together, messages of one batch do not wait
    for each other, so that all ranks may list them in any order.
    """

    def __init__(self, comm: Operations) -> None:
        self._comm = comm
        self._ops: list[tuple[bool, torch.Tensor, int]] = []  # sent or not, tensor, peer

    def __len__(self) -> int:
        return len(self._ops)

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        """Adds a send of `tensor` to rank `dst`."""
        self._ops.append((True, tensor, dst))

    def recv(self, tensor: torch.Tensor, src: int) -> None:
        """Adds a receive into `tensor` from rank `src`."""
        self._ops.append((False, tensor, src))

    def issue(
        self, async_op: bool, hints: Hints | None = None, timeout: timedelta | None = None
    ) -> TorchWork:
        """Launches the batch and empties it.

        Args:
            async_op: False returns when all messages have been sent and received.
            hints: as for `TorchComm.send`, for every message.
            timeout: for all of them together.

        Raises:
            ValueError, TypeError: a message is wrong; then none was sent, and the batch is kept.
            CommError: the communicator has failed.
        """
        if is_dynamo_compiling():
            work = trace_batch(self._comm, list(self._ops), async_op, hints, timeout)
            self._ops.clear()
            return work
        with self._comm.group() as group:
            for sending, tensor, peer in self._ops:
                op = self._comm.send if sending else self._comm.recv
                op(tensor, peer, async_op, hints, timeout)
        self._ops.clear()
        return group.work


class GroupLaunch:
    """The operations inside ``with comm.group():``, launched together at its end.

    A block inside another one belongs to it: its operations are launched at the end of the outer
    block, as in NCCL, and the exception that ends it drops those of both.

    Attributes:
        work: of all of them; there when the block has been left.
    """

    def __init__(self, comm: Operations) -> None:
        self._comm = comm._native("group")
        self._outer = False
        self.work = TorchWork(None)

    def __enter__(self) -> GroupLaunch:
        around = self._comm.enter_batch()
        self._outer = around is None
        self.work = TorchWork(around)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._comm.drop_batch()
        elif self._outer:
            self.work = TorchWork(self._comm.end_batch())
