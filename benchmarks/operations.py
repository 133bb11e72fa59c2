"""Every operation: its buffers, its call, its check."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .front_ends import FrontEnd, Issue, finish
from .results import MEETS, Contender
from .timing import Subject, power


def subject(contender: Contender, front: FrontEnd, rank: int) -> Subject:
    """Makes the buffers of an operation and binds them to its call."""
    issue, reset, wrong = bind(contender, front, rank)
    call = issue if contender.mode == "sync" else partial(finish, issue)
    if contender.backend == "fake":
        wrong = never_wrong  # it moves nothing
    return Subject(call, reset, wrong, contender.op in MEETS)


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
        return front.bind("barrier"), nothing, never_wrong
    if c.op == "all_reduce":
        # In place, so that values grow: of ones they show how many calls were right.
        def grown(calls: int) -> str:
            # Of ranks that are no power of two every sum is rounded.
            exact = c.ranks & (c.ranks - 1) == 0
            rounding = 0 if exact else calls * c.ranks * torch.finfo(dtype).eps
            return differs(data, power(c.ranks, calls, torch.finfo(dtype).max), rounding)

        data = mine
        issue = front.bind("all_reduce", data, front.sum)
        finish(issue)  # once with values that differ by rank and position
        if c.backend != "fake" and (problem := differs(data, pattern * sum_of_ranks)):
            raise AssertionError(f"wrong result: {problem}")
        return issue, partial(data.fill_, 1), grown
    if c.op == "broadcast":
        data = mine if rank == 0 else torch.empty_like(mine)
        reset = nothing if rank == 0 else partial(data.fill_, -1)
        return front.bind("broadcast", data, 0), reset, lambda _: differs(data, pattern)
    if c.op == "reduce":
        # In place. Gloo also writes where the result is not wanted, so that only its first
        # call has inputs that are known.
        def grown_on_root(calls: int) -> str:
            wanted = 1 + calls * (c.ranks - 1)
            known = c.backend != "gloo" and wanted <= 1 / torch.finfo(dtype).eps
            return differs(data, wanted) if rank == 0 and known else ""

        data = mine
        issue = front.bind("reduce", data, 0, front.sum)
        finish(issue)
        if rank == 0 and (problem := differs(data, pattern * sum_of_ranks)):
            raise AssertionError(f"wrong result: {problem}")
        return issue, partial(data.fill_, 1), grown_on_root
    if c.op == "send_recv":
        return ping_pong(front, c.mode == "async", mine, pattern, rank, c.ranks)
    if c.op == "all_gather":
        data, out = pattern[:block] * (rank + 1), torch.empty_like(mine)
        wanted = blocks(pattern[:block], c.ranks)
        return (
            front.bind("all_gather_single", out, data),
            partial(out.fill_, -1),
            lambda _: differs(out, wanted),
        )
    if c.op == "gather":
        data, out = pattern[:block] * (rank + 1), torch.empty_like(mine)
        if rank:
            return front.bind("gather", [], data, 0), nothing, never_wrong
        wanted = blocks(pattern[:block], c.ranks)
        issue = front.bind("gather", list(out.chunk(c.ranks)), data, 0)
        return issue, partial(out.fill_, -1), lambda _: differs(out, wanted)
    own = slice(block * rank, block * (rank + 1))
    out = torch.empty(count if c.op == "all_to_all" else block, dtype=dtype)
    reset = partial(out.fill_, -1)
    if c.op == "reduce_scatter":
        wanted = pattern[own] * sum_of_ranks
        issue = front.bind("reduce_scatter_single", out, mine, front.sum)
    elif c.op == "all_to_all":
        wanted = blocks(pattern[own], c.ranks)
        issue = front.bind("all_to_all_single", out, mine)
    elif c.op == "scatter":
        wanted = pattern[own]
        issue = front.bind("scatter", out, [] if rank else list(mine.chunk(c.ranks)), 0)
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
    send, recv = front.bind("send", mine, peer), front.bind("recv", out, peer)
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
