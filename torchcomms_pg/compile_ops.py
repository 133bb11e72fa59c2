"""TorchComm's operations inside ``torch.compile``.

A traced operation becomes a custom operator, which calls the real operation when the graph runs.
The tensors that an operation writes are results of its operator. They are copied to the caller's
tensors when the operation has ended, so no compiler pass can move or reuse memory that is still
being written. For the same reason an asynchronous operation reads copies. Every operator also
writes the communicator's token. This keeps operators in order, and operators without a result in
the graph.

As in eager mode, gradients do not flow through operations. For gradients use functional collectives
over `get_process_group`.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchcomms_pg.reduce_op import ReduceOp, op_name
from torchcomms_pg.work import TorchWork, WorkStatus

if TYPE_CHECKING:
    from torchcomms_pg.operations import Operations

# The kinds of each operation's arguments, in order, up to async_op.
_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "send": ("read", "peer"),
    "recv": ("write", "peer"),
    "broadcast": ("write", "peer"),
    "all_reduce": ("write", "op"),
    "all_reduce_to": ("write", "read", "op"),
    "reduce": ("write", "peer", "op"),
    "all_gather": ("writes", "read"),
    "all_gather_v": ("writes", "read"),
    "all_gather_single": ("write", "read"),
    "reduce_scatter": ("write", "reads", "op"),
    "reduce_scatter_v": ("write", "reads", "op"),
    "reduce_scatter_single": ("write", "read", "op"),
    "all_to_all_single": ("write", "read"),
    "all_to_all_v_single": ("write", "read", "sizes", "sizes"),
    "all_to_all": ("writes", "reads"),
    "barrier": (),
    "scatter": ("write", "reads", "peer"),
    "gather": ("writes", "read", "peer"),
    "gather_single": ("write", "read", "peer"),
    "batch_op_issue": ("reads", "writes", "peers"),  # the peers of the reads come first
}

_comms: weakref.WeakValueDictionary[str, Operations] = weakref.WeakValueDictionary()
_keys = itertools.count()
_handles = itertools.count()
# Asynchronous operations of graphs that no thread has waited for, by handle: the communicator's
# name, the work and the results.
_pending: dict[int, tuple[str, TorchWork, list[Tensor]]] = {}


def register(comm: Operations) -> str:
    """Registers a communicator; returns its name in graphs."""
    key = f"{comm._comm.name}#{next(_keys)}"
    _comms[key] = comm
    return key


def forget(key: str) -> None:
    """Drops the operations that graphs have issued on a communicator and not waited for."""
    for handle in [handle for handle, (owner, *_) in _pending.items() if owner == key]:
        del _pending[handle]


def _start(
    async_op: bool,
    comm: str,
    operation: str,
    writes: Sequence[Tensor],
    reads: Sequence[Tensor],
    peers: Sequence[int],
    sizes: Sequence[int],
    op: str,
    factor: float,
    hints: str,
    timeout: float,
) -> tuple[TorchWork, list[Tensor]]:
    """Calls the real operation on copies of `writes`; returns its work and these copies."""
    owner = _comms[comm]
    results = [tensor.clone() for tensor in writes]
    sources = [tensor.clone() for tensor in reads] if async_op else list(reads)
    keywords: dict[str, Any] = {
        "async_op": async_op,
        "hints": dict(hint.split("\t") for hint in hints.splitlines()) or None,
        "timeout": timedelta(seconds=timeout) if timeout >= 0 else None,
    }
    if operation == "batch_op_issue":
        batch = owner.batch_op_create()
        for tensor, peer in zip(sources, peers[: len(sources)], strict=True):
            batch.send(tensor, peer)
        for tensor, peer in zip(results, peers[len(sources) :], strict=True):
            batch.recv(tensor, peer)
        return batch.issue(**keywords), results
    reduce_op = ReduceOp.PREMUL_SUM(factor) if op == "PREMUL_SUM" else getattr(ReduceOp, op, None)
    values: dict[str, list[Any]] = {
        "write": list(results) or [None],
        "writes": [results],
        "read": sources,
        "reads": [sources],
        "peer": list(peers),
        "sizes": [list(sizes[: len(sizes) // 2]), list(sizes[len(sizes) // 2 :])],
        "op": [reduce_op],
    }
    arguments = [values[kind].pop(0) for kind in _ARGUMENTS[operation]]
    if operation == "all_reduce_to":
        output, *arguments = arguments
        return owner.all_reduce(*arguments, output=output, **keywords), results
    return getattr(owner, operation)(*arguments, **keywords), results


# The arguments of _start, after async_op.
_CALL = (
    "(Tensor token, str comm, str operation, Tensor[] writes, Tensor[] reads, SymInt[] peers, "
    "SymInt[] sizes, str op, float factor, str hints, float timeout) -> Tensor[]"
)
_WAIT = "(Tensor token, Tensor handle, Tensor[] writes) -> Tensor[]"


def _operator(schema: str, traced: Callable[..., list[Tensor]]) -> Callable[..., Any]:
    """Returns a decorator that makes a function a custom operator.

    `traced` returns tensors like the function's results, without running it.
    """

    def register(function: Callable[..., list[Tensor]]) -> Any:
        name = f"torchcomms_pg::{function.__name__[1:]}"
        operator = torch.library.custom_op(name, function, mutates_args=(), schema=schema)
        operator.register_fake(traced)
        return operator

    return register


def _like(token: Tensor, writes: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor in [token, *writes]]


@_operator(_CALL, traced=lambda token, comm, operation, writes, *_: _like(token, writes))
def _run(token: Tensor, *call: Any) -> list[Tensor]:
    _, results = _start(False, *call)
    return [token.clone(), *results]


@_operator(_CALL, traced=lambda token, *_: [*_like(token, []), torch.empty((), dtype=torch.int64)])
def _issue(token: Tensor, *call: Any) -> list[Tensor]:
    work, results = _start(True, *call)
    handle = next(_handles)
    _pending[handle] = (call[0], work, results)
    return [token.clone(), torch.tensor(handle)]


@_operator(_WAIT, traced=lambda token, handle, writes: _like(token, writes))
def _wait(token: Tensor, handle: Tensor, writes: Sequence[Tensor]) -> list[Tensor]:
    _, work, results = _pending[int(handle)]
    work.wait()
    del _pending[int(handle)]  # kept if wait() raises: the next wait must raise, too
    return [token.clone(), *results]


class TracedWork(TorchWork):
    """The work of an asynchronous operation in a graph. Its results are valid after `wait`."""

    __slots__ = ("_handle", "_token", "_waited")

    def __init__(self, token: Tensor, handle: Tensor, writes: list[Tensor]) -> None:
        super().__init__(None, writes)
        self._token = token
        self._handle = handle
        self._waited = False

    def is_completed(self) -> bool:
        """Returns whether `wait` has been called: a graph cannot query the operation."""
        return self._waited

    def wait(self, timeout: timedelta | None = None) -> None:
        """Waits as `TorchWork.wait` does, but ignores `timeout`: the operation's own holds."""
        if not self._waited:
            results = _wait(self._token, self._handle, _data(self._outputs))
            _write_back([self._token, *self._outputs], results)
            self._waited = True

    def wait_blocking(self, timeout: timedelta | None = None) -> None:
        """Does the same as `wait`: on an accelerator only the stream waits."""
        self.wait(timeout)

    def status(self) -> WorkStatus:
        """Returns COMPLETED after `wait`, and INPROGRESS before."""
        return WorkStatus.COMPLETED if self._waited else WorkStatus.INPROGRESS

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Waits, and returns a future that is complete."""
        self.wait()
        return super().get_future()

    def result(self) -> list[Tensor]:
        """Waits, and returns the output tensors (none for send and barrier)."""
        self.wait()
        return super().result()


def _data(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach() for tensor in tensors]


def _write_back(targets: Sequence[Tensor], results: Sequence[Tensor]) -> None:
    with torch.no_grad():  # autograd does not record the copies
        for target, result in zip(targets, results, strict=True):
            target.copy_(result)


def trace(
    comm: Operations,
    operation: str,
    arguments: tuple[Any, ...],
    async_op: bool,
    hints: Mapping[str, str] | None,
    timeout: timedelta | None,
) -> TorchWork:
    """Traces an operation into the graph and returns its work.

    `arguments`: the operation's arguments before async_op.
    """
    writes: list[Tensor] = []
    reads: list[Tensor] = []
    peers: list[int] = []
    sizes: list[int] = []
    op: str = ""
    factor: float = 1.0
    for kind, value in zip(_ARGUMENTS[operation], arguments, strict=True):
        if kind == "write":
            if value is not None:
                writes.append(value)
        elif kind == "writes":
            writes.extend(value)
        elif kind == "read":
            reads.append(value)
        elif kind == "reads":
            reads.extend(value)
        elif kind == "peer":
            peers.append(value)
        elif kind == "peers":
            peers.extend(value)
        elif kind == "sizes":
            sizes.extend(value)
        else:
            op, factor = op_name(operation.removesuffix("_to"), value)
    flat = "\n".join([f"{name}\t{value}" for name, value in (hints or {}).items()])
    seconds = -1.0
    if timeout is not None:  # its total_seconds() cannot be traced
        seconds = timeout.days * 86400.0 + timeout.seconds + timeout.microseconds / 1e6
    token, key = comm._token, comm._key
    sources = _data(reads)
    call = (token, key, operation, _data(writes), sources, peers, sizes, op, factor, flat, seconds)
    if async_op:
        following, handle = _issue(*call)
        _write_back([token], [following])
        return TracedWork(token, handle, writes)
    _write_back([token, *writes], _run(*call))
    return TorchWork(None, writes)
