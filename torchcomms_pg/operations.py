"""The operations of a communicator: messages and collectives."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.compiler import is_dynamo_compiling

from torchcomms_pg import _C, compile_ops
from torchcomms_pg.batch import BatchSendRecv, GroupLaunch
from torchcomms_pg.options import (
    MESSAGE_HINTS,
    OPERATION_HINTS,
    TAG,
    Hints,
    check_hints,
    check_timeout,
)
from torchcomms_pg.reduce_op import ReduceOp, native_op
from torchcomms_pg.work import TorchWork

Op = ReduceOp | dist.ReduceOp | dist.ReduceOp.RedOpType


class Operations:
    """The operations that `TorchComm` inherits; see there for what they have in common."""

    _comm: _C.Communicator
    _size: int
    _rank: int
    _finalized: bool
    _key: str  # its name in graphs of torch.compile, and the order of its operations there
    _token: torch.Tensor

    def __init__(self, comm: _C.Communicator) -> None:
        self._comm = comm
        self._rank, self._size = comm.rank, comm.size
        self._finalized = False
        self._key = compile_ops.register(self)
        self._token = torch.zeros(())

    # Messages

    def send(
        self,
        tensor: torch.Tensor,
        dst: int,
        async_op: bool = False,
        hints: Hints | None = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Sends `tensor` to rank `dst`, whose receive has as many elements of the same dtype.

        Hint ``torchcomm::shm::tag`` gives the message a tag, which the receive has to name too;
        messages of one pair and tag arrive in order.
        """
        if is_dynamo_compiling():
            args = (tensor, dst)
            return compile_ops.trace(self, "send", args, async_op, hints, timeout)
        tag = self._tag("send", hints)
        return TorchWork(self._native("send", timeout).send(tensor, dst, tag, async_op, timeout))

    def recv(
        self,
        tensor: torch.Tensor,
        src: int,
        async_op: bool = False,
        hints: Hints | None = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Receives into `tensor` what rank `src` sends. Hints: see `send`."""
        if is_dynamo_compiling():
            args = (tensor, src)
            return compile_ops.trace(self, "recv", args, async_op, hints, timeout)
        tag = self._tag("recv", hints)
        self._check_rank("recv", "src", src)
        work = self._native("recv", timeout).recv(tensor, src, tag, async_op, timeout)
        return TorchWork(work, (tensor,))

    def batch_op_create(self) -> BatchSendRecv:
        """Returns an empty list of sends and receives, to be issued together."""
        return BatchSendRecv(self)

    def group(self) -> GroupLaunch:
        """Returns a context; the operations inside it are launched as one when it is left.

        Their works stand for all of them and are not to be waited for inside. They run in the
        calling thread if all of them are synchronous. An exception inside drops them all. Groups
        and batches of messages inside it join it.
        """
        return GroupLaunch(self)

    # Collectives

    def broadcast(
        self,
        tensor: torch.Tensor,
        root: int,
        async_op: bool = False,
        hints: Hints | None = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Sets `tensor`, of equal size on all ranks, to that of rank `root`."""
        if is_dynamo_compiling():
            args = (tensor, root)
            return compile_ops.trace(self, "broadcast", args, async_op, hints, timeout)
        comm = self._native("broadcast", timeout, hints)
        return TorchWork(comm.broadcast(tensor, root, async_op, timeout), (tensor,))

    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: Op,
        async_op: bool = False,
        hints: Hints | None = None,
        timeout: timedelta | None = None,
        *,
        output: torch.Tensor | None = None,
    ) -> TorchWork:
        """Reduces `tensor`, of equal size on all ranks, to all ranks.

        The result has the same bits on every rank. It replaces `tensor`, or goes to `output`, of
        the same dtype and number of elements, and leaves `tensor` as it is.
        """
        if is_dynamo_compiling():
            if output is not None:
                into = (output, tensor, op)
                return compile_ops.trace(self, "all_reduce_to", into, async_op, hints, timeout)
            args = (tensor, op)
            return compile_ops.trace(self, "all_reduce", args, async_op, hints, timeout)
        comm = self._native("all_reduce", timeout, hints)
        target = tensor if output is None else output
        work = comm.all_reduce(target, tensor, native_op("all_reduce", op), async_op, timeout)
        return TorchWork(work, (target,))

    def reduce(
        self,
        tensor: torch.Tensor,
        root: int,
        op: Op,
        async_op: bool = False,
        hints: Hints | None = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Same as `all_reduce`, on `root` only; elsewhere `tensor` is unchanged."""
        if is_dynamo_compiling():
            args = (tensor, root, op)
            return compile_ops.trace(self, "reduce", args, async_op, hints, timeout)
        comm = self._native("reduce", timeout, hints)
        work = comm.reduce(tensor, root, native_op("reduce", op), async_op, timeout)
        return TorchWork(work, (tensor,))

    def all_gather(
        self,
        tensor_list: Sequence[torch.Tensor],
        tensor: torch.Tensor,
        async_op: bool = False,
        hints: Hints | None = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Sets ``tensor_list[r]`` to the `tensor` of rank r; all have equal size."""
        if is_dynamo_compiling():
            args = (tensor_list, tensor)
            return compile_ops.trace(self, "all_gather", args, async_op, hints, timeout)
        self._check_equal("all_gather", "tensor_list", tensor_list, "all_gather_v")
        comm = self._native("all_gather", timeout, hints)
        return TorchWork(comm.all_gather(tensor_list, tensor, async_op, timeout), tensor_list)

    def all_gather_v(
        self,
        tensor_list: Sequence[torch.Tensor],
        tensor: torch.Tensor,
        async_op: bool = False,
        hints: Hints | None = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Same as `all_gather`; sizes may differ by rank, and every rank knows them all."""
        if is_dynamo_compiling():
            args = (tensor_list, tensor)
            return compile_ops.trace(self, "all_gather_v", args, async_op, hints, timeout)
        comm = self._native("all_gather_v", timeout, hints)
        return TorchWork(comm.all_gather(tensor_list, tensor, async_op, timeout), tensor_list)

    def all_gather_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        async_op: bool = False,
        hints: Hints | None = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Sets `output`, of size x input.numel() elements, to the ranks' inputs in rank order."""
        if is_dynamo_compiling():
            args = (output, input)
            return compile_ops.trace(self, "all_gather_single", args, async_op, hints, timeout)
        comm = self._native("all_gather_single", timeout, hints)
        return TorchWork(comm.all_gather_single(output, input, async_op, timeout), (output,))

    def reduce_scatter(
        self,
        output: torch.Tensor,
        input_list: Sequence[torch.Tensor],
        op: Op,
        async_op: bool = False,
        hints: Hints | None = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Sets `output` to the reduction of all ranks' ``input_list[rank]``; of equal sizes."""
        if is_dynamo_compiling():
            args = (output, input_list, op)
            return compile_ops.trace(self, "reduce_scatter", args, async_op, hints, timeout)
        self._check_equal("reduce_scatter", "input_list", input_list, "reduce_scatter_v")
        comm = self._native("reduce_scatter", timeout, hints)
        native = native_op("reduce_scatter", op)
        work = comm.reduce_scatter(output, input_list, native, async_op, timeout)
        return TorchWork(work, (output,))

    def reduce_scatter_v(
        self,
        output: torch.Tensor,
        input_list: Sequence[torch.Tensor],
        op: Op,
        async_op: bool = False,
        hints: Hints | None = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Same as `reduce_scatter`; the entries of `input_list` may differ in size."""
        if is_dynamo_compiling():
            args = (output, input_list, op)
            return compile_ops.trace(self, "reduce_scatter_v", args, async_op, hints, timeout)
        comm = self._native("reduce_scatter_v", timeout, hints)
        native = native_op("reduce_scatter_v", op)
        work = comm.reduce_scatter(output, input_list, native, async_op, timeout)
        return TorchWork(work, (output,))

    def reduce_scatter_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        op: Op,
        async_op: bool = False,
        hints: Hints | None = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Sets `output` to the reduction of this rank's part of all ranks' inputs.

        `input` has size x output.numel() elements, the ranks' parts one after another.
        """
        if is_dynamo_compiling():
            args = (output, input, op)
            return compile_ops.trace(self, "reduce_scatter_single", args, async_op, hints, timeout)
        what = "reduce_scatter_single"
        comm = self._native(what, timeout, hints)
        work = comm.reduce_scatter_single(output, input, native_op(what, op), async_op, timeout)
        return TorchWork(work, (output,))

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        async_op: bool = False,
        hints: Hints | None = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Sends part r of `input` to rank r; `output` takes the parts for this one in rank order.

        The first dimension is divisible by the number of ranks.
        """
        if is_dynamo_compiling():
            args = (output, input)
            return compile_ops.trace(self, "all_to_all_single", args, async_op, hints, timeout)
        comm = self._native("all_to_all_single", timeout, hints)
        work = comm.all_to_all_single(output, input, [], [], async_op, timeout)
        return TorchWork(work, (output,))

    def all_to_all_v_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        async_op: bool = False,
        hints: Hints | None = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Same as `all_to_all_single`, with parts of different sizes.

        Split sizes count rows of the first dimension, one for each rank; they add up to all rows.
        """
        for argument, splits in (("output", output_split_sizes), ("input", input_split_sizes)):
            if len(splits) != self._size:
                raise ValueError(
                    f"all_to_all_v_single: {argument}_split_sizes has {len(splits)} entries, "
                    f"wanted {self._size} (one for each rank)"
                )
        if is_dynamo_compiling():
            args = (output, input, output_split_sizes, input_split_sizes)
            return compile_ops.trace(self, "all_to_all_v_single", args, async_op, hints, timeout)
        comm = self._native("all_to_all_v_single", timeout, hints)
        work = comm.all_to_all_single(
            output, input, output_split_sizes, input_split_sizes, async_op, timeout
        )
        return TorchWork(work, (output,))

    def all_to_all(
        self,
        output_tensor_list: Sequence[torch.Tensor],
        input_tensor_list: Sequence[torch.Tensor],
        async_op: bool = False,
        hints: Hints | None = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Sends entry r of the input list to rank r; entry r of the outputs takes that of rank r.

        Entries may differ in size; sender and receiver agree.
        """
        if is_dynamo_compiling():
            args = (output_tensor_list, input_tensor_list)
            return compile_ops.trace(self, "all_to_all", args, async_op, hints, timeout)
        comm = self._native("all_to_all", timeout, hints)
        work = comm.all_to_all(output_tensor_list, input_tensor_list, async_op, timeout)
        return TorchWork(work, output_tensor_list)

    def barrier(
        self,
        async_op: bool = False,
        hints: Hints | None = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Ends when all ranks have come to it."""
        if is_dynamo_compiling():
            args = ()
            return compile_ops.trace(self, "barrier", args, async_op, hints, timeout)
        return TorchWork(self._native("barrier", timeout, hints).barrier(async_op, timeout))

    def scatter(
        self,
        output_tensor: torch.Tensor,
        input_tensor_list: Sequence[torch.Tensor],
        root: int,
        async_op: bool = False,
        hints: Hints | None = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Sets `output_tensor` to this rank's entry of the root's list; others' are ignored."""
        if root != self._rank:
            input_tensor_list = ()
        if is_dynamo_compiling():
            args = (output_tensor, input_tensor_list, root)
            return compile_ops.trace(self, "scatter", args, async_op, hints, timeout)
        comm = self._native("scatter", timeout, hints)
        work = comm.scatter(output_tensor, input_tensor_list, root, async_op, timeout)
        return TorchWork(work, (output_tensor,))

    def gather(
        self,
        output_tensor_list: Sequence[torch.Tensor],
        input_tensor: torch.Tensor,
        root: int,
        async_op: bool = False,
        hints: Hints | None = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Sets the entries of the root's list to the ranks' inputs; others' are ignored."""
        if root != self._rank:
            output_tensor_list = ()
        if is_dynamo_compiling():
            args = (output_tensor_list, input_tensor, root)
            return compile_ops.trace(self, "gather", args, async_op, hints, timeout)
        comm = self._native("gather", timeout, hints)
        work = comm.gather(output_tensor_list, input_tensor, root, async_op, timeout)
        return TorchWork(work, output_tensor_list)

    def gather_single(
        self,
        output: torch.Tensor | None,
        input: torch.Tensor,
        root: int,
        async_op: bool = False,
        hints: Hints | None = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Same as `gather`, into one contiguous tensor of size x input.numel() elements.

        `output` is used on the root only; others may pass None.
        """
        if is_dynamo_compiling():
            args = (output, input, root)
            return compile_ops.trace(self, "gather_single", args, async_op, hints, timeout)
        comm = self._native("gather_single", timeout, hints)
        work = comm.gather_single(output, input, root, async_op, timeout)
        return TorchWork(work, () if output is None or root != self._rank else (output,))

    # Checks

    def _native(
        self, what: str, timeout: timedelta | None = None, hints: Hints | None = None
    ) -> _C.Communicator:
        if timeout is not None:
            check_timeout(what, timeout)
        if hints is not None:
            check_hints(what, hints, OPERATION_HINTS)
        if self._finalized:
            raise RuntimeError(
                f"{what}: communicator {self._comm.name!r} was finalized; create a new one"
            )
        return self._comm

    def _tag(self, what: str, hints: Hints | None) -> int:
        if hints is None:
            return 0
        check_hints(what, hints, MESSAGE_HINTS)
        return int(hints.get(TAG, 0))

    def _check_rank(self, what: str, argument: str, rank: int) -> None:
        if not 0 <= rank < self._size:
            raise ValueError(
                f"{what}: {argument} {rank} is not a rank of this communicator, "
                f"wanted 0 to {self._size - 1}"
            )

    def _check_equal(
        self, what: str, argument: str, tensors: Sequence[torch.Tensor], other: str
    ) -> None:
        if len({tensor.numel() for tensor in tensors}) > 1:
            raise ValueError(
                f"{what}: the tensors of {argument} have {[t.numel() for t in tensors]} elements, "
                f"wanted equally many; use {other} for different sizes"
            )
