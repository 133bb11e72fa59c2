"""Every operation: its buffers, its call, its check."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

import torchcomms_pg
from torchcomms_pg.hooks import FlightRecorderHook

from .results import MEETS, Contender
from .timing import Subject, power

SUM = torchcomms_pg.ReduceOp.SUM
Issue = Callable[[], Any]
"""Starts the operation; returns its Work where it was started as asynchronous."""


class FrontEnd(Protocol):
    """A way to call a backend. Every function binds the arguments of one operation."""

    def all_reduce(self, data: Tensor) -> Issue: ...  # noqa: D102
    def broadcast(self, data: Tensor) -> Issue: ...  # noqa: D102
    def all_gather(self, out: Tensor, data: Tensor) -> Issue: ...  # noqa: D102
    def reduce_scatter(self, out: Tensor, data: Tensor) -> Issue: ...  # noqa: D102
    def all_to_all(self, out: Tensor, data: Tensor) -> Issue: ...  # noqa: D102
    def reduce(self, data: Tensor) -> Issue: ...  # noqa: D102
    def gather(self, out: list[Tensor] | None, data: Tensor) -> Issue: ...  # noqa: D102
    def scatter(self, out: Tensor, data: list[Tensor] | None) -> Issue: ...  # noqa: D102
    def send(self, data: Tensor, peer: int) -> Issue: ...  # noqa: D102
    def recv(self, data: Tensor, peer: int) -> Issue: ...  # noqa: D102
    def barrier(self) -> Issue: ...  # noqa: D102


class Dist:
    """``torch.distributed``'s functions."""

    def __init__(self, group: dist.ProcessGroup, asynchronous: bool) -> None:
        self.options: Any = {"group": group, "async_op": asynchronous}
        self.group = group
        self.asynchronous = asynchronous

    def all_reduce(self, data: Tensor) -> Issue:
        """Binds dist.all_reduce."""
        return partial(dist.all_reduce, data, **self.options)

    def broadcast(self, data: Tensor) -> Issue:
        """Binds dist.broadcast from rank 0."""
        return partial(dist.broadcast, data, 0, **self.options)

    def all_gather(self, out: Tensor, data: Tensor) -> Issue:
        """Binds dist.all_gather_into_tensor."""
        return partial(dist.all_gather_into_tensor, out, data, **self.options)

    def reduce_scatter(self, out: Tensor, data: Tensor) -> Issue:
        """Binds dist.reduce_scatter_tensor."""
        return partial(dist.reduce_scatter_tensor, out, data, **self.options)

    def all_to_all(self, out: Tensor, data: Tensor) -> Issue:
        """Binds dist.all_to_all_single."""
        return partial(dist.all_to_all_single, out, data, **self.options)

    def reduce(self, data: Tensor) -> Issue:
        """Binds dist.reduce to rank 0."""
        return partial(dist.reduce, data, 0, **self.options)

    def gather(self, out: list[Tensor] | None, data: Tensor) -> Issue:
        """Binds dist.gather to rank 0."""
        return partial(dist.gather, data, out, 0, **self.options)

    def scatter(self, out: Tensor, data: list[Tensor] | None) -> Issue:
        """Binds dist.scatter from rank 0."""
        return partial(dist.scatter, out, data, 0, **self.options)

    def send(self, data: Tensor, peer: int) -> Issue:
        """Binds dist.send or dist.isend."""
        return partial(dist.isend if self.asynchronous else dist.send, data, peer, self.group)

    def recv(self, data: Tensor, peer: int) -> Issue:
        """Binds dist.recv or dist.irecv."""
        return partial(dist.irecv if self.asynchronous else dist.recv, data, peer, self.group)

    def barrier(self) -> Issue:
        """Binds dist.barrier."""
        return partial(dist.barrier, **self.options)


class Direct:
    """The methods of the backend's own object, beneath ``torch.distributed``."""

    def __init__(self, group: dist.ProcessGroup, asynchronous: bool) -> None:
        self.backend: Any = group._get_backend(torch.device("cpu"))
        self.asynchronous = asynchronous

    def _bind(self, method: Callable[..., Any], *args: Any) -> Issue:
        # What dist.* does too: a synchronous call may still return a Work, to be waited for.
        if self.asynchronous:
            return partial(method, *args)

        def call() -> None:
            work = method(*args)
            if work is not None:
                work.wait()

        return call

    def _options(self, options: Any, **values: Any) -> Any:
        for name, value in {"asyncOp": self.asynchronous, **values}.items():
            setattr(options, name, value)
        return options

    def all_reduce(self, data: Tensor) -> Issue:
        """Binds Backend.allreduce."""
        return self._bind(self.backend.allreduce, [data], self._options(dist.AllreduceOptions()))

    def broadcast(self, data: Tensor) -> Issue:
        """Binds Backend.broadcast from rank 0."""
        options = self._options(dist.BroadcastOptions(), rootRank=0)
        return self._bind(self.backend.broadcast, [data], options)

    def all_gather(self, out: Tensor, data: Tensor) -> Issue:
        """Binds Backend._allgather_base."""
        options = self._options(torch._C._distributed_c10d.AllgatherOptions())
        return self._bind(self.backend._allgather_base, out, data, options)

    def reduce_scatter(self, out: Tensor, data: Tensor) -> Issue:
        """Binds Backend._reduce_scatter_base."""
        options = self._options(dist.ReduceScatterOptions())
        return self._bind(self.backend._reduce_scatter_base, out, data, options)

    def all_to_all(self, out: Tensor, data: Tensor) -> Issue:
        """Binds Backend.alltoall_base."""
        options = self._options(dist.AllToAllOptions())
        return self._bind(self.backend.alltoall_base, out, data, [], [], options)

    def reduce(self, data: Tensor) -> Issue:
        """Binds Backend.reduce to rank 0."""
        options = self._options(dist.ReduceOptions(), rootRank=0)
        return self._bind(self.backend.reduce, [data], options)

    def gather(self, out: list[Tensor] | None, data: Tensor) -> Issue:
        """Binds Backend.gather to rank 0."""
        options = self._options(dist.GatherOptions(), rootRank=0)
        return self._bind(self.backend.gather, [out] if out else [], [data], options)

    def scatter(self, out: Tensor, data: list[Tensor] | None) -> Issue:
        """Binds Backend.scatter from rank 0."""
        options = self._options(dist.ScatterOptions(), rootRank=0)
        return self._bind(self.backend.scatter, [out], [data] if data else [], options)

    def send(self, data: Tensor, peer: int) -> Issue:
        """Binds Backend.send."""
        return self._bind(self.backend.send, [data], peer, 0)

    def recv(self, data: Tensor, peer: int) -> Issue:
        """Binds Backend.recv."""
        return self._bind(self.backend.recv, [data], peer, 0)

    def barrier(self) -> Issue:
        """Binds Backend.barrier."""
        return self._bind(self.backend.barrier, self._options(dist.BarrierOptions()))


class ThroughComm:
    """The object API: TorchComm's methods, on a communicator that nobody watches."""

    def __init__(self, group: dist.ProcessGroup, asynchronous: bool) -> None:
        behind = torchcomms_pg.get_comm(group)  # which is recorded
        comm = behind.split(list(range(behind.get_size())), type(self).__name__)
        assert comm is not None
        self.comm = comm
        self.asynchronous = asynchronous

    def all_reduce(self, data: Tensor) -> Issue:
        """Binds TorchComm.all_reduce."""
        return partial(self.comm.all_reduce, data, SUM, self.asynchronous)

    def broadcast(self, data: Tensor) -> Issue:
        """Binds TorchComm.broadcast from rank 0."""
        return partial(self.comm.broadcast, data, 0, self.asynchronous)

    def all_gather(self, out: Tensor, data: Tensor) -> Issue:
        """Binds TorchComm.all_gather_single."""
        return partial(self.comm.all_gather_single, out, data, self.asynchronous)

    def reduce_scatter(self, out: Tensor, data: Tensor) -> Issue:
        """Binds TorchComm.reduce_scatter_single."""
        return partial(self.comm.reduce_scatter_single, out, data, SUM, self.asynchronous)

    def all_to_all(self, out: Tensor, data: Tensor) -> Issue:
        """Binds TorchComm.all_to_all_single."""
        return partial(self.comm.all_to_all_single, out, data, self.asynchronous)

    def reduce(self, data: Tensor) -> Issue:
        """Binds TorchComm.reduce to rank 0."""
        return partial(self.comm.reduce, data, 0, SUM, self.asynchronous)

    def gather(self, out: list[Tensor] | None, data: Tensor) -> Issue:
        """Binds TorchComm.gather to rank 0."""
        return partial(self.comm.gather, out or [], data, 0, self.asynchronous)

    def scatter(self, out: Tensor, data: list[Tensor] | None) -> Issue:
        """Binds TorchComm.scatter from rank 0."""
        return partial(self.comm.scatter, out, data or [], 0, self.asynchronous)

    def send(self, data: Tensor, peer: int) -> Issue:
        """Binds TorchComm.send."""
        return partial(self.comm.send, data, peer, self.asynchronous)

    def recv(self, data: Tensor, peer: int) -> Issue:
        """Binds TorchComm.recv."""
        return partial(self.comm.recv, data, peer, self.asynchronous)

    def barrier(self) -> Issue:
        """Binds TorchComm.barrier."""
        return partial(self.comm.barrier, self.asynchronous)


class Watched(ThroughComm):
    """The same under a flight recorder, an empty pre and an empty post hook."""

    def __init__(self, group: dist.ProcessGroup, asynchronous: bool) -> None:
        super().__init__(group, asynchronous)
        self.recorder = FlightRecorderHook()
        self.recorder.register_with_comm(self.comm)
        self.handles = [
            self.comm.register_pre_hook(nothing_with),
            self.comm.register_post_hook(nothing_with),
        ]


def nothing_with(args: object) -> None:
    """Is a hook."""


FRONT_ENDS: dict[str, Callable[[dist.ProcessGroup, bool], FrontEnd]] = {
    "dist": Dist,
    "backend": Direct,
    "torchcomm": ThroughComm,
    "watched": Watched,
}


def subject(contender: Contender, front: FrontEnd, rank: int) -> Subject:
    """Makes the buffers of an operation and binds them to its call."""
    issue, reset, wrong = bind(contender, front, rank)
    call = issue if contender.mode == "sync" else partial(wait_for, issue)
    if contender.backend == "fake":
        wrong = never_wrong  # it moves nothing
    return Subject(call, reset, wrong, contender.op in MEETS)


def wait_for(issue: Issue) -> None:
    """Calls an asynchronous operation and waits for it."""
    issue().wait()


def bind(
    c: Contender, front: FrontEnd, rank: int
) -> tuple[Issue, Callable[[], object], Callable[[int], str]]:
    """Returns how to issue the operation, to reset its buffers and to check them."""
    dtype = getattr(torch, c.dtype)
    count, block = c.elements, c.elements // c.ranks
    # Small numbers whose sums over eight ranks bfloat16 holds.
    pattern = (torch.arange(count, dtype=torch.int32) % 7).to(dtype)
    mine = pattern * (rank + 1)
    sum_of_ranks = c.ranks * (c.ranks + 1) // 2
    if c.op == "barrier":
        return front.barrier(), nothing, never_wrong
    if c.op == "all_reduce":
        # In place, so that values grow: of ones they show how many calls were right.
        def grown(calls: int) -> str:
            # Of ranks that are no power of two every sum is rounded.
            exact = c.ranks & (c.ranks - 1) == 0
            rounding = 0 if exact else calls * c.ranks * torch.finfo(dtype).eps
            return differs(data, power(c.ranks, calls, torch.finfo(dtype).max), rounding)

        data = mine
        issue = front.all_reduce(data)
        first = issue()  # once with values that differ by rank and position
        if first is not None:
            first.wait()
        if c.backend != "fake" and (problem := differs(data, pattern * sum_of_ranks)):
            raise AssertionError(f"wrong result: {problem}")
        return issue, partial(data.fill_, 1), grown
    if c.op == "broadcast":
        data = mine if rank == 0 else torch.empty_like(mine)
        reset = nothing if rank == 0 else partial(data.fill_, -1)
        return front.broadcast(data), reset, lambda _: differs(data, pattern)
    if c.op == "reduce":
        # In place. Gloo also writes where the result is not wanted, so that only its first
        # call has inputs that are known.
        def grown_on_root(calls: int) -> str:
            wanted = 1 + calls * (c.ranks - 1)
            known = c.backend != "gloo" and wanted <= 1 / torch.finfo(dtype).eps
            return differs(data, wanted) if rank == 0 and known else ""

        data = mine
        issue = front.reduce(data)
        first = issue()
        if first is not None:
            first.wait()
        if rank == 0 and (problem := differs(data, pattern * sum_of_ranks)):
            raise AssertionError(f"wrong result: {problem}")
        return issue, partial(data.fill_, 1), grown_on_root
    if c.op == "send_recv":
        return ping_pong(front, c.mode == "async", mine, pattern, rank, c.ranks)
    if c.op == "all_gather":
        data, out = pattern[:block] * (rank + 1), torch.empty_like(mine)
        wanted = blocks(pattern[:block], c.ranks)
        return front.all_gather(out, data), partial(out.fill_, -1), lambda _: differs(out, wanted)
    if c.op == "gather":
        data, out = pattern[:block] * (rank + 1), torch.empty_like(mine)
        if rank:
            return front.gather(None, data), nothing, never_wrong
        wanted = blocks(pattern[:block], c.ranks)
        issue = front.gather(list(out.chunk(c.ranks)), data)
        return issue, partial(out.fill_, -1), lambda _: differs(out, wanted)
    own = slice(block * rank, block * (rank + 1))
    out = torch.empty(count if c.op == "all_to_all" else block, dtype=dtype)
    reset = partial(out.fill_, -1)
    if c.op == "reduce_scatter":
        wanted = pattern[own] * sum_of_ranks
        issue = front.reduce_scatter(out, mine)
    elif c.op == "all_to_all":
        wanted = blocks(pattern[own], c.ranks)
        issue = front.all_to_all(out, mine)
    elif c.op == "scatter":
        wanted = pattern[own]
        issue = front.scatter(out, None if rank else list(mine.chunk(c.ranks)))
    else:
        raise ValueError(f"no such operation: {c.op}")
    return issue, reset, lambda _: differs(out, wanted)


def ping_pong(
    front: FrontEnd, asynchronous: bool, mine: Tensor, pattern: Tensor, rank: int, ranks: int
) -> tuple[Issue, Callable[[], object], Callable[[int], str]]:
    """Binds a message to the neighbour and one back; all pairs of ranks at once."""
    peer = rank ^ 1
    if peer >= ranks:
        return nothing, nothing, never_wrong
    out = torch.empty_like(mine)
    send, recv = front.send(mine, peer), front.recv(out, peer)
    first, second = (send, recv) if rank < peer else (recv, send)

    def both() -> Any:
        if not asynchronous:
            first()
            second()
            return None
        first().wait()
        return second()

    return both, partial(out.fill_, -1), lambda _: differs(out, pattern * (peer + 1))


def blocks(block: Tensor, ranks: int) -> Tensor:
    """Returns what ranks make of it together: each its own multiple."""
    return torch.cat([block * (rank + 1) for rank in range(ranks)])


def differs(got: Tensor, wanted: Tensor | float, rounding: float = 0) -> str:
    """Says where `got` is not `wanted` but for so much of that; empty if nowhere."""
    right = torch.as_tensor(wanted, dtype=got.dtype)
    difference = ~torch.isclose(got, right, rtol=rounding, atol=0)
    if not difference.any():
        return ""
    at = int(difference.flatten().to(torch.uint8).argmax())
    value = wanted.flatten()[at].item() if isinstance(wanted, Tensor) else wanted
    return f"element {at} of {got.numel()} is {got.flatten()[at].item()}, not {value}"


def nothing() -> None:
    """Does nothing."""


def never_wrong(calls: int) -> str:
    """Checks nothing: there is no result."""
    return ""
