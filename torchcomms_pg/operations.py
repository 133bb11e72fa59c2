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
    """The operations of `TorchComm`, whose docstring describes their common arguments."""

    _comm: _C.Communicator
    _size: int
    _rank: int
    _finalized: bool
    _key: str  # the communicator's name in graphs of torch.compile
    _token: torch.Tensor  # orders the communicator's operations in graphs

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
        """Sends a tensor to one rank, which receives it with `recv`.

        Args:
            tensor: has the dtype and the number of elements of the receiver's tensor.
            dst: the rank that receives, from 0; may be this rank.

        Hint ``torchcomm::shm::tag`` gives the message a tag, which the receiver must name, too.
        Messages between two ranks with one tag arrive in order.

        Example:
            >>> tensor = torch.arange(3) + rank
            >>> if rank == 0:
            ...     work = comm.send(tensor, 1)
            ... elif rank == 1:
            ...     work = comm.recv(tensor, 0)
            >>> tensor.tolist()
            [0, 1, 2]
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
        """Receives a tensor that one rank sends. For hints and an example see `send`.

        Args:
            tensor: is overwritten; has the dtype and the number of elements of the sent tensor.
            src: the rank that sends, from 0.
        """
        if is_dynamo_compiling():
            args = (tensor, src)
            return compile_ops.trace(self, "recv", args, async_op, hints, timeout)
        tag = self._tag("recv", hints)
        self._check_rank("recv", "src", src)
        work = self._native("recv", timeout).recv(tensor, src, tag, async_op, timeout)
        return TorchWork(work, (tensor,))

    def batch_op_create(self) -> BatchSendRecv:
        """Returns an empty list of sends and receives that are issued together."""
        return BatchSendRecv(self)

    def group(self) -> GroupLaunch:
        """Returns a context, at whose end the operations issued inside it are launched as one.

        Each operation's work stands for all of them; do not wait for it inside the context. The
        operations run in the calling thread if all of them are synchronous. An exception inside
        the context drops all operations. Groups and batches inside the context join it.
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
        """Copies one rank's tensor to all ranks.

        Args:
            tensor: of equal size on all ranks; read on `root`, overwritten on the others.
            root: the rank whose tensor is copied, from 0.

        Example:
            >>> tensor = torch.full((2,), rank)
            >>> work = comm.broadcast(tensor, 1)
            >>> tensor.tolist()
            [1, 1]
        """
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
        """Reduces the ranks' tensors to one tensor, and gives it to all ranks, with equal bits.

        Args:
            tensor: of equal size on all ranks; overwritten, unless `output` is given.
            op: the reduction, such as ``ReduceOp.SUM``; for its dtypes see `ReduceOp`.
            output: gets the result in place of `tensor`, and has its dtype and number of elements.

        Example:
            >>> tensor = torch.tensor([1.0, rank])
            >>> work = comm.all_reduce(tensor, ReduceOp.SUM)
            >>> tensor.tolist()
            [2.0, 1.0]
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
        """Reduces the ranks' tensors to one tensor, and gives it to one rank.

        Args:
            tensor: of equal size on all ranks; overwritten on `root`, unchanged on the others.
            root: the rank that gets the result, from 0.
            op: the reduction; see `all_reduce`.

        Example:
            >>> tensor = torch.ones(2)
            >>> work = comm.reduce(tensor, 0, ReduceOp.SUM)
            >>> tensor.tolist() == ([2.0, 2.0] if rank == 0 else [1.0, 1.0])
            True
        """
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
        """Gives every rank the tensors of all ranks.

        Args:
            tensor_list: one tensor for each rank; entry r gets the `tensor` of rank r.
            tensor: of equal size on all ranks.

        Example:
            >>> tensors = [torch.empty(2, dtype=torch.int64) for _ in range(2)]
            >>> work = comm.all_gather(tensors, torch.full((2,), rank))
            >>> [tensor.tolist() for tensor in tensors]
            [[0, 0], [1, 1]]
        """
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
        """Does the same as `all_gather` for tensors whose sizes differ by rank.

        Args:
            tensor_list: entry r has the size of rank r's `tensor`, which every rank must know.
            tensor: this rank's tensor.

        Example:
            >>> tensors = [torch.empty(size, dtype=torch.int64) for size in (1, 2)]
            >>> work = comm.all_gather_v(tensors, torch.full((rank + 1,), rank))
            >>> [tensor.tolist() for tensor in tensors]
            [[0], [1, 1]]
        """
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
        """Does the same as `all_gather`, with one tensor as output.

        Args:
            output: contiguous, of get_size() * input.numel() elements; gets the inputs in rank
                order.
            input: of equal size on all ranks.

        Example:
            >>> output = torch.empty(2, 2, dtype=torch.int64)
            >>> work = comm.all_gather_single(output, torch.full((2,), rank))
            >>> output.tolist()
            [[0, 0], [1, 1]]
        """
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
        """Reduces the ranks' lists entry by entry; rank r gets entry r.

        Args:
            output: gets the reduction of all ranks' ``input_list[rank]``.
            input_list: one tensor for each rank, all of equal size.
            op: the reduction; see `all_reduce`.

        Example:
            >>> output = torch.empty(1)
            >>> inputs = [torch.tensor([1.0]), torch.tensor([2.0])]
            >>> work = comm.reduce_scatter(output, inputs, ReduceOp.SUM)
            >>> output.tolist() == [2.0 * (rank + 1)]
            True
        """
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
        """Does the same as `reduce_scatter` for entries of different sizes.

        Args:
            output: has the size of entry `rank`, and gets the reduction of that entry.
            input_list: one tensor for each rank; entry r has the same size on all ranks.
            op: the reduction; see `all_reduce`.

        Example:
            >>> output = torch.empty(rank + 1)
            >>> work = comm.reduce_scatter_v(output, [torch.ones(1), torch.ones(2)], ReduceOp.SUM)
            >>> output.tolist() == [2.0] * (rank + 1)
            True
        """
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
        """Does the same as `reduce_scatter`, with one tensor as input.

        Args:
            output: gets the reduction of this rank's part.
            input: contiguous, of get_size() * output.numel() elements: the parts for the ranks, one
                after another.
            op: the reduction; see `all_reduce`.

        Example:
            >>> output = torch.empty(1)
            >>> work = comm.reduce_scatter_single(output, torch.tensor([1.0, 2.0]), ReduceOp.SUM)
            >>> output.tolist() == [2.0 * (rank + 1)]
            True
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
        """Sends part r of a tensor to rank r, and gets part `rank` of each rank's tensor.

        Args:
            output: of as many elements as `input`; gets the parts in the order of their ranks.
            input: its first dimension is divided into as many parts as there are ranks.

        Example:
            >>> output = torch.empty(2, dtype=torch.int64)
            >>> work = comm.all_to_all_single(output, torch.tensor([10, 11]) + 100 * rank)
            >>> output.tolist() == [10 + rank, 110 + rank]
            True
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
        """Does the same as `all_to_all_single` for parts of different sizes.

        Args:
            output: gets the parts in the order of their ranks.
            input: the parts for the ranks, one after another.
            output_split_sizes: for each rank, the number of rows (of the first dimension) of
                `output` in its part; they add up to all rows.
            input_split_sizes: the same for `input`.

        Raises:
            ValueError: a list's length is not the number of ranks.

        Example:
            >>> output, mine = torch.empty(2 * (rank + 1)), torch.ones(3)
            >>> work = comm.all_to_all_v_single(output, mine, [rank + 1, rank + 1], [1, 2])
            >>> output.tolist() == [1.0] * (2 * (rank + 1))
            True
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
        """Sends entry r of a list to rank r, and gets entry `rank` of each rank's list.

        Args:
            output_tensor_list: one tensor for each rank; entry r gets rank r's entry.
            input_tensor_list: one tensor for each rank. Entries may differ in size; sender and
                receiver pass the same size.

        Example:
            >>> outputs = [torch.empty(1, dtype=torch.int64) for _ in range(2)]
            >>> work = comm.all_to_all(outputs, [torch.tensor([rank]) for _ in range(2)])
            >>> [tensor.tolist() for tensor in outputs]
            [[0], [1]]
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
        """Waits until all ranks have arrived at the barrier.

        Example:
            >>> comm.barrier().is_completed()
            True
        """
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
        """Gives each rank one tensor of the root's list.

        Args:
            output_tensor: gets this rank's entry.
            input_tensor_list: on `root` one tensor for each rank, of the size of `output_tensor`.
                Ignored on the other ranks.
            root: the rank whose list is scattered, from 0.

        Example:
            >>> output = torch.empty(1, dtype=torch.int64)
            >>> work = comm.scatter(output, [torch.tensor([5]), torch.tensor([6])], 0)
            >>> output.tolist() == [5 + rank]
            True
        """
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
        """Gives one rank the tensors of all ranks.

        Args:
            output_tensor_list: on `root` one tensor for each rank; entry r gets the input of rank
                r. Ignored on the other ranks.
            input_tensor: of equal size on all ranks.
            root: the rank that gets the tensors, from 0.

        Example:
            >>> outputs = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
            >>> work = comm.gather(outputs, torch.tensor([rank + 1]), 0)
            >>> [tensor.item() for tensor in outputs] == ([1, 2] if rank == 0 else [0, 0])
            True
        """
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
        """Does the same as `gather`, with one tensor as output.

        Args:
            output: on `root` contiguous, of get_size() * input.numel() elements; gets the inputs in
                rank order. Ignored on the other ranks, which may pass None.
            input: of equal size on all ranks.
            root: the rank that gets the inputs, from 0.

        Example:
            >>> output = torch.zeros(2, dtype=torch.int64)
            >>> work = comm.gather_single(output, torch.tensor([rank + 1]), 0)
            >>> output.tolist() == ([1, 2] if rank == 0 else [0, 0])
            True
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
