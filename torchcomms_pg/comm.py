"""The TorchComm object API: a communicator as an object, without process groups."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torchcomms_pg import _C, objcol
from torchcomms_pg._version import __version__
from torchcomms_pg.batch import BatchSendRecv, GroupLaunch
from torchcomms_pg.options import (
    COMMUNICATOR_HINTS,
    MESSAGE_HINTS,
    OPERATION_HINTS,
    TAG,
    TIMING,
    CommOptions,
    Hints,
    check_hints,
    check_timeout,
)
from torchcomms_pg.reduce_op import ReduceOp, native_op
from torchcomms_pg.window import TorchCommWindow
from torchcomms_pg.work import TorchWork

Op = ReduceOp | dist.ReduceOp | dist.ReduceOp.RedOpType


class TorchComm:
    """A group of ranks that communicate; `new_comm`, `split` and `get_comm` make it.

    All ranks call the same collectives in the same order. ``async_op=False`` returns when the
    operation has finished, ``async_op=True`` at once; both return a `TorchWork`. ``timeout`` of an
    operation is its own, from its issue to its end, and None the communicator's. ``hints`` are
    listed in docs/api.md; an unknown one raises ValueError.

    Tensors are dense, on the communicator's device, of any strides and of every dtype (operations
    that reduce: see `ReduceOp`); the tensors of one call share a dtype. A mistake raises
    ValueError, TypeError or RuntimeError with nothing enqueued, a failure on the wire `CommError`,
    and every later call raises it again. Inside ``with comm.group():`` operations are collected.

    Thread-safe, as long as all ranks issue their collectives in one order.
    """

    def __init__(
        self,
        comm: _C.Communicator,
        backend: str,
        options: CommOptions,
        *,
        store: dist.Store | None = None,
        world_size: int | None = None,
        group: dist.ProcessGroup | None = None,
        owned: bool = True,
    ) -> None:
        self._comm = comm
        self._backend = backend
        self._options = options
        self._owned = owned
        self._store = store  # of its own ranks
        self._world_size = world_size or comm.size  # of the communicator that all splits began with
        self._group = group  # over it, if there is one
        self._splits = 0
        self._finalized = False
        self._forgotten = weakref.finalize(self, _warn_forgotten, comm.name) if owned else None

    def __copy__(self) -> TorchComm:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> TorchComm:
        return self

    def __repr__(self) -> str:
        return (
            f"<TorchComm {self.get_name()!r}: rank {self.get_rank()} of {self.get_size()}, "
            f"{self._backend} on {self.get_device()}>"
        )

    # Who, where

    def get_rank(self) -> int:
        """Returns the rank of this process in the communicator, from 0."""
        return self._comm.rank

    def get_size(self) -> int:
        """Returns the number of ranks."""
        return self._comm.size

    def get_ranks(self) -> list[int]:
        """Returns what the ranks are called in the communicator that all splits began with.

        For a process group's communicator these are its global ranks.
        """
        return self._comm.ranks

    def get_name(self) -> str:
        """Returns the communicator's name, which errors and records tell it by."""
        return self._comm.name

    def get_device(self) -> torch.device:
        """Returns the device whose tensors it communicates."""
        return self._comm.device

    def get_backend(self) -> str:
        """Returns the name of the backend, such as ``"shm"``."""
        return self._backend

    def get_backend_version(self) -> str:
        """Returns the version of the backend's library."""
        # shm is part of this package, and Gloo of torch.
        return torch.__version__ if self._backend == "gloo" else __version__

    def get_options(self) -> CommOptions:
        """Returns a copy of the options in force, the environment's defaults filled in."""
        options = self._options.resolved()
        options.timeout = self._comm.timeout
        return options

    # Life

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets how long operations issued from now on may take."""
        if timeout is None:
            raise TypeError("set_timeout: timeout is None, wanted a datetime.timedelta")
        check_timeout("set_timeout", timeout)
        self._comm.timeout = timeout

    def abort(self) -> None:
        """Fails all operations, here and on the other ranks, now and later.

        Never blocks, has an effect once, and never ends this process. Abort hooks run. Still call
        `finalize` afterwards.
        """
        self._comm.abort("abort()")

    def is_aborted(self) -> bool:
        """Returns whether the communicator has failed, by `abort` or otherwise."""
        return self._comm.failed

    def finalize(self) -> None:
        """Waits for what is in flight, then frees all resources. Idempotent.

        Hooks are removed. Later operations raise RuntimeError.
        """
        if not self._owned:
            raise RuntimeError(
                f"finalize: communicator {self.get_name()!r} belongs to a process group; "
                "torch.distributed.destroy_process_group() ends both"
            )
        if self._finalized:
            return
        self._comm.close()
        self._finalized = True
        if self._forgotten is not None:
            self._forgotten.detach()

    def split(
        self,
        ranks: Sequence[int],
        name: str | None = None,
        hints: Hints | None = None,
        timeout: timedelta | None = None,
    ) -> TorchComm | None:
        """Returns a communicator of some of the ranks. Every rank of this one calls it.

        Args:
            ranks: those that this rank will be together with, in their new order; empty: this
                rank takes no part.
            name: of the new communicator. None: made from this one's.
            hints: as for `new_comm`. None: this communicator's.
            timeout: for splitting, and of the new communicator. None: this communicator's.

        Returns:
            None on ranks that passed an empty list. Options are inherited.

        Raises:
            ValueError: this rank is not in its own, non-empty list, or a rank does not exist.
        """
        comm = self._native("split", timeout)
        if hints is not None:
            check_hints("split", hints, COMMUNICATOR_HINTS)
        ranks = list(ranks)
        if ranks and self.get_rank() not in ranks:
            raise ValueError(
                f"split: ranks {ranks} do not include this rank, {self.get_rank()}; "
                "pass the group that this rank is to be in, or an empty list"
            )
        self._splits += 1
        child = comm.split(ranks, name or f"{self.get_name()}/{self._splits}", timeout)
        if child is None:
            return None
        options = self.get_options()
        options.store = None
        options.hints = dict(options.hints if hints is None else hints)
        options.timeout = child.timeout
        store = None
        if self._store is not None:
            store = dist.PrefixStore(f"split/{self._splits}/{ranks[0]}", self._store)
        return wrap(child, self._backend, options, store, self._world_size)

    # Messages

    def send(
        self,
        tensor: torch.Tensor,
        dst: int,
        async_op: bool,
        hints: Hints | None = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Sends `tensor` to rank `dst`, whose receive has as many elements of the same dtype.

        Hint ``torchcomm::shm::tag`` gives the message a tag, which the receive has to name too;
        messages of one pair and tag arrive in order.
        """
        tag = self._tag("send", hints)
        return TorchWork(self._native("send", timeout).send(tensor, dst, tag, async_op, timeout))

    def recv(
        self,
        tensor: torch.Tensor,
        src: int,
        async_op: bool,
        hints: Hints | None = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Receives into `tensor` what rank `src` sends. Hints: see `send`."""
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
        calling thread if all of them are synchronous. An exception inside drops them all.
        """
        return GroupLaunch(self)

    # Collectives

    def broadcast(
        self,
        tensor: torch.Tensor,
        root: int,
        async_op: bool,
        hints: Hints | None = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Sets `tensor`, of equal size on all ranks, to that of rank `root`."""
        comm = self._native("broadcast", timeout, hints)
        return TorchWork(comm.broadcast(tensor, root, async_op, timeout), (tensor,))

    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: Op,
        async_op: bool,
        hints: Hints | None = None,
        timeout: timedelta | None = None,
        *,
        output: torch.Tensor | None = None,
    ) -> TorchWork:
        """Reduces `tensor`, of equal size on all ranks, to all ranks.

        The result has the same bits on every rank. It replaces `tensor`, or goes to `output`, of
        the same dtype and number of elements, and leaves `tensor` as it is.
        """
        comm = self._native("all_reduce", timeout, hints)
        target = tensor if output is None else output
        work = comm.all_reduce(target, tensor, native_op("all_reduce", op), async_op, timeout)
        return TorchWork(work, (target,))

    def reduce(
        self,
        tensor: torch.Tensor,
        root: int,
        op: Op,
        async_op: bool,
        hints: Hints | None = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """As `all_reduce`, on `root` only; elsewhere `tensor` is unchanged."""
        comm = self._native("reduce", timeout, hints)
        work = comm.reduce(tensor, root, native_op("reduce", op), async_op, timeout)
        return TorchWork(work, (tensor,))

    def all_gather(
        self,
        tensor_list: Sequence[torch.Tensor],
        tensor: torch.Tensor,
        async_op: bool,
        hints: Hints | None = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Sets ``tensor_list[r]`` to the `tensor` of rank r; all have equal size."""
        self._check_equal("all_gather", "tensor_list", tensor_list, "all_gather_v")
        comm = self._native("all_gather", timeout, hints)
        return TorchWork(comm.all_gather(tensor_list, tensor, async_op, timeout), tensor_list)

    def all_gather_v(
        self,
        tensor_list: Sequence[torch.Tensor],
        tensor: torch.Tensor,
        async_op: bool,
        hints: Hints | None = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """As `all_gather`; sizes may differ from rank to rank, and every rank knows them all."""
        comm = self._native("all_gather_v", timeout, hints)
        return TorchWork(comm.all_gather(tensor_list, tensor, async_op, timeout), tensor_list)

    def all_gather_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        async_op: bool,
        hints: Hints | None = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Sets `output`, of size x input.numel() elements, to the ranks' inputs in rank order."""
        comm = self._native("all_gather_single", timeout, hints)
        return TorchWork(comm.all_gather_single(output, input, async_op, timeout), (output,))

    def reduce_scatter(
        self,
        output: torch.Tensor,
        input_list: Sequence[torch.Tensor],
        op: Op,
        async_op: bool,
        hints: Hints | None = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Sets `output` to the reduction of all ranks' ``input_list[rank]``; of equal sizes."""
        self._check_equal("reduce_scatter", "input_list", input_list, "reduce_scatter_v")
        return self._reduce_scatter(
            "reduce_scatter", output, input_list, op, async_op, hints, timeout
        )

    def reduce_scatter_v(
        self,
        output: torch.Tensor,
        input_list: Sequence[torch.Tensor],
        op: Op,
        async_op: bool,
        hints: Hints | None = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """As `reduce_scatter`; the entries of `input_list` may differ in size."""
        return self._reduce_scatter(
            "reduce_scatter_v", output, input_list, op, async_op, hints, timeout
        )

    def _reduce_scatter(
        self,
        what: str,
        output: torch.Tensor,
        input_list: Sequence[torch.Tensor],
        op: Op,
        async_op: bool,
        hints: Hints | None,
        timeout: timedelta | None,
    ) -> TorchWork:
        comm = self._native(what, timeout, hints)
        work = comm.reduce_scatter(output, input_list, native_op(what, op), async_op, timeout)
        return TorchWork(work, (output,))

    def reduce_scatter_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        op: Op,
        async_op: bool,
        hints: Hints | None = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Sets `output` to the reduction of this rank's part of all ranks' inputs.

        `input` has size x output.numel() elements, the ranks' parts one after another.
        """
        what = "reduce_scatter_single"
        comm = self._native(what, timeout, hints)
        work = comm.reduce_scatter_single(output, input, native_op(what, op), async_op, timeout)
        return TorchWork(work, (output,))

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        async_op: bool,
        hints: Hints | None = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Sends part r of `input` to rank r; `output` takes the parts for this one in rank order.

        The first dimension is divisible by the number of ranks.
        """
        comm = self._native("all_to_all_single", timeout, hints)
        work = comm.all_to_all_single(output, input, [], [], async_op, timeout)
        return TorchWork(work, (output,))

    def all_to_all_v_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        async_op: bool,
        hints: Hints | None = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """As `all_to_all_single`, with parts of different sizes.

        Split sizes count rows of the first dimension, one for each rank; they add up to all rows.
        """
        comm = self._native("all_to_all_v_single", timeout, hints)
        for argument, splits in (("output", output_split_sizes), ("input", input_split_sizes)):
            if len(splits) != self._comm.size:
                raise ValueError(
                    f"all_to_all_v_single: {argument}_split_sizes has {len(splits)} entries, "
                    f"wanted {self._comm.size} (one for each rank)"
                )
        work = comm.all_to_all_single(
            output, input, output_split_sizes, input_split_sizes, async_op, timeout
        )
        return TorchWork(work, (output,))

    def all_to_all(
        self,
        output_tensor_list: Sequence[torch.Tensor],
        input_tensor_list: Sequence[torch.Tensor],
        async_op: bool,
        hints: Hints | None = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Sends entry r of the input list to rank r; entry r of the outputs takes that of rank r.

        Entries may differ in size; sender and receiver agree.
        """
        comm = self._native("all_to_all", timeout, hints)
        work = comm.all_to_all(output_tensor_list, input_tensor_list, async_op, timeout)
        return TorchWork(work, output_tensor_list)

    def barrier(
        self,
        async_op: bool,
        hints: Hints | None = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Ends when all ranks have come to it."""
        return TorchWork(self._native("barrier", timeout, hints).barrier(async_op, timeout))

    def scatter(
        self,
        output_tensor: torch.Tensor,
        input_tensor_list: Sequence[torch.Tensor],
        root: int,
        async_op: bool,
        hints: Hints | None = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Sets `output_tensor` to this rank's entry of the root's list; others pass ``[]``."""
        comm = self._native("scatter", timeout, hints)
        work = comm.scatter(output_tensor, input_tensor_list, root, async_op, timeout)
        return TorchWork(work, (output_tensor,))

    def gather(
        self,
        output_tensor_list: Sequence[torch.Tensor],
        input_tensor: torch.Tensor,
        root: int,
        async_op: bool,
        hints: Hints | None = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Sets the entries of the root's list to the ranks' inputs; others pass ``[]``."""
        comm = self._native("gather", timeout, hints)
        work = comm.gather(output_tensor_list, input_tensor, root, async_op, timeout)
        return TorchWork(work, output_tensor_list)

    def gather_single(
        self,
        output: torch.Tensor | None,
        input: torch.Tensor,
        root: int,
        async_op: bool,
        hints: Hints | None = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """As `gather`, into one contiguous tensor of size x input.numel() elements.

        `output` is used on the root only; others may pass None.
        """
        comm = self._native("gather_single", timeout, hints)
        work = comm.gather_single(output, input, root, async_op, timeout)
        return TorchWork(work, () if output is None or root != comm.rank else (output,))

    # Python objects (objcol.py)

    def all_gather_object(
        self, object_list: list[Any], obj: object, timeout: timedelta | None = None
    ) -> None:
        """Fills `object_list`, one entry per rank, with the ranks' `obj`."""
        objcol.all_gather_object(self, object_list, obj, timeout)

    def gather_object(
        self,
        obj: object,
        root: int,
        object_gather_list: list[Any] | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        """Fills `object_gather_list` on `root`, one entry per rank, with the ranks' `obj`."""
        objcol.gather_object(self, obj, root, object_gather_list, timeout)

    def broadcast_object_list(
        self, object_list: list[Any], root: int, timeout: timedelta | None = None
    ) -> None:
        """Replaces the entries of `object_list` by those of `root`."""
        objcol.broadcast_object_list(self, object_list, root, timeout)

    def scatter_object_list(
        self,
        root: int,
        scatter_object_output_list: list[Any],
        scatter_object_input_list: list[Any] | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        """Sets the first entry of the output list to this rank's of the root's input list."""
        objcol.scatter_object_list(
            self, root, scatter_object_output_list, scatter_object_input_list, timeout
        )

    def send_object_list(
        self, object_list: Sequence[object], dst: int, timeout: timedelta | None = None
    ) -> None:
        """Sends the entries of `object_list` to rank `dst`."""
        objcol.send_object_list(self, object_list, dst, timeout)

    def recv_object_list(
        self, object_list: list[Any], src: int, timeout: timedelta | None = None
    ) -> None:
        """Replaces the entries of `object_list` by those that rank `src` sends."""
        objcol.recv_object_list(self, object_list, src, timeout)

    # Windows

    def new_window(self, tensor: torch.Tensor | None = None) -> TorchCommWindow:
        """Returns a window, through which ranks write into each other's tensors.

        All ranks call it.

        Args:
            tensor: registered with it at once. None: `TorchCommWindow.tensor_register` follows.
        """
        window = TorchCommWindow(self._native("new_window").new_window(), self.get_name())
        if tensor is not None:
            window.tensor_register(tensor)
        return window

    def allocate_tensor(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns a tensor, not initialized, that a window takes without moving its memory.

        Local. The system's memory for it is taken at once.

        Args:
            size: number of elements; the tensor has one dimension.
            dtype: of the elements.

        Raises:
            torch.OutOfMemoryError: the system has not that much shared memory.
        """
        return self._native("allocate_tensor").allocate_tensor(size, dtype)

    # Hooks

    def register_pre_hook(self, hook: Callable[[_C.PreHookArgs], object]) -> _C.RemovableHandle:
        """Has `hook` called before every operation, also of the process group behind it.

        What it raises cancels the operation with nothing enqueued, and goes to the caller.
        """
        return self._comm.register_pre_hook(hook)

    def register_post_hook(self, hook: Callable[[_C.PostHookArgs], object]) -> _C.RemovableHandle:
        """Has `hook` called after every operation was launched, cancelled or has failed to be.

        What it raises goes to the caller when all post hooks have run; the operation goes on.
        """
        return self._comm.register_post_hook(hook)

    def register_end_hook(self, hook: Callable[[_C.EndHookArgs], object]) -> _C.RemovableHandle:
        """Has `hook` called when an operation has completed, failed, or was torn down.

        That of an asynchronous operation runs in a thread of its own; `finalize` waits for it.
        What it raises is written to stderr. Turns timing on.
        """
        return self._comm.register_end_hook(hook)

    def register_abort_hook(self, hook: Callable[[], object]) -> _C.RemovableHandle:
        """Has `hook` called once, in a thread of its own, when the communicator has failed.

        It runs before the error is raised or the process ends, which wait for it up to 30 s. What
        it raises is written to stderr.
        """
        return self._comm.register_abort_hook(hook)

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
                f"{what}: communicator {self.get_name()!r} was finalized; create a new one"
            )
        return self._comm

    def _tag(self, what: str, hints: Hints | None) -> int:
        if hints is None:
            return 0
        check_hints(what, hints, MESSAGE_HINTS)
        return int(hints.get(TAG, 0))

    def _check_rank(self, what: str, argument: str, rank: int) -> None:
        if not 0 <= rank < self._comm.size:
            raise ValueError(
                f"{what}: {argument} {rank} is not a rank of this communicator, "
                f"wanted 0 to {self._comm.size - 1}"
            )

    def _check_equal(
        self, what: str, argument: str, tensors: Sequence[torch.Tensor], other: str
    ) -> None:
        if len({tensor.numel() for tensor in tensors}) > 1:
            raise ValueError(
                f"{what}: the tensors of {argument} have {[t.numel() for t in tensors]} elements, "
                f"wanted equally many; use {other} for different sizes"
            )


def wrap(
    comm: _C.Communicator,
    backend: str,
    options: CommOptions,
    store: dist.Store | None,
    world_size: int | None = None,
) -> TorchComm:
    """Returns a new communicator as the object that its creator owns."""
    if options.hints.get(TIMING) == "true":
        comm.enable_timing()
    return TorchComm(comm, backend, options, store=store, world_size=world_size)


def _warn_forgotten(name: str) -> None:
    warnings.warn(
        f"communicator {name!r} was not finalized; call finalize() when all ranks are done with it",
        RuntimeWarning,
        stacklevel=2,
    )


_C.set_work_type(TorchWork)
