"""Sends and receives that are issued together."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch.compiler import is_dynamo_compiling

from torchcomms_pg import compile_ops
from torchcomms_pg.options import Hints
from torchcomms_pg.work import TorchWork

if TYPE_CHECKING:
    from torchcomms_pg.operations import Operations


class BatchSendRecv:
    """A list of sends and receives. Make it by `TorchComm.batch_op_create`.

    Nothing is checked or sent before `issue`. Messages of one batch do not wait for each other, so
    the ranks may list them in any order.

    Example:
        >>> theirs = torch.empty(1, dtype=torch.int64)
        >>> batch = comm.batch_op_create()
        >>> batch.send(torch.tensor([rank]), 1 - rank)
        >>> batch.recv(theirs, 1 - rank)
        >>> work = batch.issue()
        >>> theirs.item() == 1 - rank
        True
    """

    def __init__(self, comm: Operations) -> None:
        self._comm = comm
        self._ops: list[tuple[bool, torch.Tensor, int]] = []  # is a send, tensor, peer

    def __len__(self) -> int:
        return len(self._ops)

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        """Adds a send of `tensor` to rank `dst`."""
        self._ops.append((True, tensor, dst))

    def recv(self, tensor: torch.Tensor, src: int) -> None:
        """Adds a receive into `tensor` from rank `src`."""
        self._ops.append((False, tensor, src))

    def issue(
        self, async_op: bool = False, hints: Hints | None = None, timeout: timedelta | None = None
    ) -> TorchWork:
        """Launches the batch and empties it.

        Args:
            async_op: whether to return at once, not when all messages have been sent and received.
            hints: as for `TorchComm.send`, for every message.
            timeout: for all messages together.

        Raises:
            ValueError, TypeError: a message is wrong. No message was sent, and the batch is
                unchanged.
            CommError: the communicator has failed.
        """
        if is_dynamo_compiling():
            sends = [(tensor, peer) for sending, tensor, peer in self._ops if sending]
            recvs = [(tensor, peer) for sending, tensor, peer in self._ops if not sending]
            args = (
                [tensor for tensor, _ in sends],
                [tensor for tensor, _ in recvs],
                [peer for _, peer in sends + recvs],
            )
            work = compile_ops.trace(self._comm, "batch_op_issue", args, async_op, hints, timeout)
            self._ops.clear()
            return work
        with self._comm.group() as group:
            for sending, tensor, peer in self._ops:
                op = self._comm.send if sending else self._comm.recv
                op(tensor, peer, async_op, hints, timeout)
        self._ops.clear()
        return group.work


class GroupLaunch:
    """The operations inside ``with comm.group():``, launched together at the end of the block.

    The operations of a block inside another block of the communicator join the outer block.

    Attributes:
        work: the work of all the operations, set at the end of the block.
    """

    def __init__(self, comm: Operations) -> None:
        self._comm = comm._native("group")
        self.work = TorchWork(None)
        self._joined: list[int | None] = []  # what enter_batch() returned, for each open block

    def __enter__(self) -> GroupLaunch:
        self._joined.append(self._comm.enter_batch())
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._comm.cancel_batch(self._joined.pop())
        else:
            self.work = TorchWork(self._comm.leave_batch(self._joined.pop()))
