"""The TorchComm object API: a communicator as an object, without process groups."""

from __future__ import annotations

import inspect
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from torchcomms_pg import _C, compile_ops, objcol
from torchcomms_pg._version import __version__
from torchcomms_pg.diagnosis import leaving
from torchcomms_pg.diagnosis.late_ranks import RankLateness, of_communicator
from torchcomms_pg.errors import SplitError
from torchcomms_pg.handle import Handle
from torchcomms_pg.operations import Operations
from torchcomms_pg.options import (
    COMMUNICATOR_HINTS,
    TIMING,
    CommOptions,
    Hints,
    check_hints,
    check_timeout,
    config_of,
)
from torchcomms_pg.window import TorchCommWindow
from torchcomms_pg.work import TorchWork

if TYPE_CHECKING:
    from torchcomms_pg.hooks.flight_recorder import FlightRecorderHook


class TorchComm(Operations, Handle):
    """A group of ranks that communicate, made by `new_comm`, `split` and `get_comm`.

    All ranks call the same collectives in the same order. Each call returns a `TorchWork`. With
    ``async_op=False`` it returns when the operation has finished, on an accelerator when the
    operation is in the current stream; with ``async_op=True`` it returns at once. ``timeout``
    limits one operation, from its issue to its end; None takes the communicator's timeout.
    docs/api.md lists the ``hints``; an unknown hint only causes a warning.

    Tensors are dense, on the communicator's device, of any strides and of every dtype (operations
    that reduce: see `ReduceOp`); the tensors of one call share a dtype. A mistake raises
    ValueError, TypeError or RuntimeError, and nothing is issued. A failure raises `CommError`, in
    every later call, too. Inside ``with comm.group():`` operations are collected.

    Thread-safe, provided that all ranks issue their collectives in one order.

    Example:
        >>> tensor = torch.ones(2)
        >>> work = comm.all_reduce(tensor, ReduceOp.SUM, async_op=True)
        >>> work.wait()
        >>> tensor.tolist()
        [2.0, 2.0]
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
        super().__init__(comm)
        self._backend = backend
        self._options = options
        self._owned = owned
        self._store = store  # of this communicator's ranks
        self._world_size = world_size or comm.size  # of the ancestor that no split made
        self._group = group  # the process group over the communicator, or None
        self._recorded_by: set[FlightRecorderHook] = set()
        self._forgotten = (
            weakref.finalize(self, _warn_forgotten, comm.name, os.getpid()) if owned else None
        )

    def __repr__(self) -> str:
        return (
            f"<TorchComm {self.get_name()!r}: rank {self.get_rank()} of {self.get_size()}, "
            f"{self._backend} on {self.get_device()}>"
        )

    # Identity

    def get_rank(self) -> int:
        """Returns the rank of this process in the communicator, from 0."""
        return self._rank

    def get_size(self) -> int:
        """Returns the number of ranks."""
        return self._size

    def get_ranks(self) -> list[int]:
        """Returns for each rank its number in the ancestor that no split has made.

        For a process group's communicator these numbers are the global ranks.
        """
        return self._comm.ranks

    def get_name(self) -> str:
        """Returns the communicator's name, as used in errors and records."""
        return self._comm.name

    def get_device(self) -> torch.device:
        """Returns the device whose tensors the communicator takes."""
        return self._comm.device

    def get_backend(self) -> str:
        """Returns the name of the backend, such as ``"shm"``."""
        return self._backend

    def get_backend_version(self) -> str:
        """Returns the version of the backend's library: this package's, torch's, or NCCL's."""
        if self._backend in ("shm", "gloo"):
            return torch.__version__ if self._backend == "gloo" else __version__
        return self._comm.library_version

    def get_nccl_comm_ptr(self) -> int:
        """Returns NCCL's communicator as a number, for code that calls NCCL itself.

        Waits until all ranks have joined. NCCL's communicator is valid until `finalize`, and the
        caller must not destroy it.

        Raises:
            RuntimeError: the backend is not ``"nccl"`` or ``"ncclx"``, or the communicator was
                finalized.
        """
        if self._backend not in ("nccl", "ncclx"):
            raise RuntimeError(
                f"get_nccl_comm_ptr: communicator {self.get_name()!r} is of backend "
                f"{self._backend!r}, which has no communicator of NCCL; only 'nccl' has"
            )
        return self._native("get_nccl_comm_ptr").comm_ptr()

    def get_options(self) -> CommOptions:
        """Returns a copy of the options in force, including the environment's defaults."""
        options = self._options.resolved()
        options.timeout = self._comm.timeout
        return options

    # Lifecycle

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets how long each operation issued from now on may take."""
        if timeout is None:
            raise TypeError("set_timeout: timeout is None, wanted a datetime.timedelta")
        check_timeout("set_timeout", timeout)
        self._comm.timeout = timeout

    @contextmanager
    def relaxed_timeout(
        self, timeout: timedelta | float | None = None, *, minutes: float = 0
    ) -> Iterator[None]:
        """Gives time for work of this rank alone, such as saving or validating.

        Inside the block, peers that wait for this rank extend their deadlines, up to the given time
        after the block began. Operations that this rank issues may take that long, too. The peers
        need not call this, and go on as soon as this rank arrives. The end of the block ends the
        extension.

        Args:
            timeout: a datetime.timedelta, or seconds.
            minutes: added to `timeout`.
        """
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout or 0.0
        given = timedelta(seconds=seconds, minutes=minutes)
        check_timeout("relaxed_timeout", given)
        comm = self._native("relaxed_timeout")
        end = comm.relax(given)
        try:
            yield
        finally:
            comm.end_relaxation(end)

    def abort(self) -> None:
        """Fails all operations, present and later ones, on all ranks.

        Returns when the abort hooks have run, or after 30 s; waits for nothing else. Only the first
        call has an effect. Never ends this process. Call `finalize` afterwards nevertheless.
        """
        self._comm.abort("abort()")

    def is_abort_supported(self) -> bool:
        """Returns True: `abort` ends the operations in flight on every backend."""
        return True

    def is_aborted(self) -> bool:
        """Returns whether the communicator has failed, by `abort` or otherwise."""
        return self._comm.failed

    def lateness(self) -> list[RankLateness]:
        """Returns how late each rank arrives at collectives, by the latest collectives.

        Returns:
            An entry for each rank, in their order; an empty list until 16 or more training steps
            have ended.

        Raises:
            RuntimeError: the communicator has one rank or has ended, or its store does not answer
                within 4 s. Or it is an accelerator's, whose queued operations show no waits.
        """
        return of_communicator(self._comm)

    def finalize(self) -> None:
        """Waits for the operations in flight, then frees all resources. Idempotent.

        Hooks are removed. Later operations raise RuntimeError.

        Raises:
            CommError: the ranks' last operations do not match, and no call has reported that. All
                resources are freed nevertheless.
        """
        if not self._owned:
            raise RuntimeError(
                f"finalize: communicator {self.get_name()!r} belongs to a process group; "
                "torch.distributed.destroy_process_group() ends both"
            )
        if self._finalized:
            return
        leaving.leave([self.get_name()])
        try:
            self._comm.close()
        finally:
            compile_ops.forget(self._key)
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
        """Makes a communicator of some of the ranks. Every rank of this communicator calls this.

        Args:
            ranks: the ranks of the new communicator, in their new order. The list contains this
                rank, or is empty if this rank joins no new communicator.
            name: of the new communicator, also in NCCL. By default made from this one's name.
            hints: as for `new_comm`. By default this communicator's.
            timeout: limit of the split's time, and the new communicator's timeout. By default this
                communicator's timeout.

        Returns:
            The new communicator, which inherits the options and the recorders
            (`FlightRecorderHook`). None if the list is empty.

        Raises:
            SplitError: this rank's list is not empty and lacks this rank, or has a rank twice or
                one that does not exist; or another rank of the new communicator passed another
                list. The call counts as this rank's split, so that no other rank waits for it.
        """
        comm = self._native("split", timeout)
        config = None
        if hints is not None:
            check_hints("split", hints, COMMUNICATOR_HINTS)
            config = config_of("split", hints)
        ranks = list(ranks)
        named = bool(name) and (config is None or config.comm_name is None)
        number = comm.splits + 1
        # The first rank tells apart the communicators that one split makes.
        name = name or "/".join(map(str, [self.get_name(), number, *ranks[:1]]))
        try:
            child = comm.split(ranks, name, timeout, config, named)
        except ValueError as error:
            raise SplitError(error) from None
        if child is None:
            return None
        options = self.get_options()
        options.store = None
        options.hints = dict(options.hints if hints is None else hints)
        options.timeout = child.timeout
        store = None
        if self._store is not None:
            store = dist.PrefixStore(f"split/{number}/{ranks[0]}", self._store)
        new = wrap(child, self._backend, options, store, self._world_size)
        for hook in self._recorded_by:
            hook.register_with_comm(new)
        return new

    # Python objects

    all_gather_object = objcol.all_gather_object
    gather_object = objcol.gather_object
    broadcast_object_list = objcol.broadcast_object_list
    scatter_object_list = objcol.scatter_object_list
    send_object_list = objcol.send_object_list
    recv_object_list = objcol.recv_object_list

    # Windows

    def new_window(self, tensor: torch.Tensor | None = None) -> TorchCommWindow:
        """Makes a window, through which ranks write into each other's tensors.

        All ranks call this.

        Args:
            tensor: the tensor to register with the window. None leaves that to a later
                `TorchCommWindow.tensor_register`.
        """
        window = TorchCommWindow(self._native("new_window").new_window(), self.get_name())
        if tensor is not None:
            window.tensor_register(tensor)
        return window

    def allocate_tensor(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns an uninitialized tensor that a window registers without moving its memory.

        Not collective. Allocates the memory at once: shared memory, or NCCL's memory on a GPU.

        Args:
            size: number of elements; the tensor has one dimension.
            dtype: of the elements.

        Raises:
            torch.OutOfMemoryError: not enough memory is free.
        """
        return self._native("allocate_tensor").allocate_tensor(size, dtype)

    # Hooks

    def register_pre_hook(self, callback: Callable[..., object]) -> _C.RemovableHandle:
        """Registers `callback`, called before each operation, the process group's included.

        `callback` gets a `PreHookArgs`. If it takes three arguments, as hooks of the torchcomms
        package do, it gets name, op_id and the `PreHookArgs`. An exception of the callback cancels
        the operation before it is issued, and is raised to the caller.
        """
        return self._comm.register_pre_hook(
            _of_args(callback, 3, lambda args: callback(args.name, args.op_id, args))
        )

    def register_post_hook(self, callback: Callable[..., object]) -> _C.RemovableHandle:
        """Registers `callback`, called when an operation is over for its caller, whatever its end.

        `callback` gets a `PostHookArgs`. If it takes two arguments, as hooks of the torchcomms
        package do, it gets op_id and the `PostHookArgs`.

        A synchronous operation is over when it returns or raises, or a pre hook has cancelled it.
        All post hooks then run, and the first exception of a hook is raised to the caller. An
        asynchronous operation is over when it has completed or failed. Its post hooks run in a
        separate thread, even if they were removed meanwhile; their exceptions are written to
        stderr. `finalize` waits for them.
        """
        return self._comm.register_post_hook(
            _of_args(callback, 2, lambda args: callback(args.op_id, args))
        )

    def register_end_hook(self, callback: Callable[[_C.EndHookArgs], object]) -> _C.RemovableHandle:
        """Registers `callback`, called when an operation has completed or failed.

        For an asynchronous operation the callback runs in a separate thread, for which `finalize`
        waits. Exceptions of the callback are written to stderr. Turns timing on.
        """
        return self._comm.register_end_hook(callback)

    def register_abort_hook(self, callback: Callable[[], object]) -> _C.RemovableHandle:
        """Registers `callback`, called once when the communicator has failed, in its own thread.

        The failure is raised, or the process ends, only after the callback, or after 30 s.
        Exceptions of the callback are written to stderr.
        """
        return self._comm.register_abort_hook(callback)


def _of_args(
    callback: Callable[..., object], count: int, spread: Callable[..., object]
) -> Callable[..., object]:
    """Returns `spread` if `callback` takes `count` arguments but not one, else `callback`."""
    try:
        signature = inspect.signature(callback)
    except (TypeError, ValueError):  # a function without a signature, such as one in C
        return callback
    for arguments, chosen in ((1, callback), (count, spread)):
        with suppress(TypeError):
            signature.bind(*[None] * arguments)
            return chosen
    return callback


def wrap(
    comm: _C.Communicator,
    backend: str,
    options: CommOptions,
    store: dist.Store | None,
    world_size: int | None = None,
) -> TorchComm:
    """Returns a TorchComm that owns the new communicator."""
    if options.hints.get(TIMING) == "true":
        comm.enable_timing()
    return TorchComm(comm, backend, options, store=store, world_size=world_size)


def _warn_forgotten(name: str, pid: int) -> None:
    if os.getpid() != pid:
        return  # this is a forked child, which does not own the communicator
    warnings.warn(
        f"communicator {name!r} was not finalized; call finalize() when all ranks are done with it",
        RuntimeWarning,
        stacklevel=2,
    )


_C.set_work_type(TorchWork)
