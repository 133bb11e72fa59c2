"""One random operation, the same on all ranks that draw from the same seed, and its check."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

# 0, 1, odd, over a page, larger than the library's staging.
SIZES = (0, 1, 7, 1025, 70_001, 400_003)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64)


class WrongValueError(AssertionError):
    """An operation gave a rank something else than the reference."""


class Team(NamedTuple):
    """A group, if this rank is in it, and its global ranks in the order of the group."""

    group: dist.ProcessGroup | None
    ranks: list[int]


class Draw(NamedTuple):
    """What was drawn for one operation."""

    name: str
    salt: int
    numel: int
    dtype: torch.dtype
    root: int  # rank of the group
    async_op: bool
    splits: list[list[int]]


def draw(generator: random.Random, size: int) -> Draw:
    """Draws the same number of values whatever comes, so that ranks stay in step."""
    return Draw(
        generator.choice(list(OPERATIONS)),
        generator.randrange(1 << 30),
        generator.choice(SIZES),
        generator.choice(DTYPES),
        generator.randrange(size),
        generator.random() < 0.5,
        [[generator.randrange(2000) for _ in range(size)] for _ in range(size)],
    )


def perform(team: Team, drawn: Draw) -> None:
    """Runs it on this rank and compares the result, bit by bit."""
    OPERATIONS[drawn.name](team, drawn)


def values(drawn: Draw, rank: int, numel: int | None = None) -> torch.Tensor:
    """Whole numbers, so small that every type adds them without rounding."""
    generator = torch.Generator().manual_seed(drawn.salt + rank)
    numel = drawn.numel if numel is None else numel
    return torch.randint(-4, 5, (numel,), generator=generator).to(drawn.dtype)


def _all_values(team: Team, drawn: Draw, numel: int | None = None) -> list[torch.Tensor]:
    return [values(drawn, rank, numel) for rank in range(len(team.ranks))]


def _me(team: Team) -> int:
    return team.ranks.index(dist.get_rank())


def _check(drawn: Draw, got: torch.Tensor, want: torch.Tensor) -> None:
    if got.shape != want.shape or not torch.equal(got, want):
        raise WrongValueError(f"{drawn}: got {got[:8]}..., expected {want[:8]}...")


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


def _sum(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(tensors)).sum(0).to(tensors[0].dtype)


def _all_reduce(team: Team, drawn: Draw) -> None:
    inputs = _all_values(team, drawn)
    tensor = inputs[_me(team)].clone()
    _wait(dist.all_reduce(tensor, group=team.group, async_op=drawn.async_op))
    _check(drawn, tensor, _sum(inputs))


def _reduce(team: Team, drawn: Draw) -> None:
    inputs = _all_values(team, drawn)
    tensor = inputs[_me(team)].clone()
    root = team.ranks[drawn.root]
    op = dist.ReduceOp.MAX
    _wait(dist.reduce(tensor, root, op, group=team.group, async_op=drawn.async_op))
    if _me(team) == drawn.root:
        _check(drawn, tensor, torch.stack(inputs).amax(0))


def _broadcast(team: Team, drawn: Draw) -> None:
    tensor = values(drawn, _me(team))
    root = team.ranks[drawn.root]
    _wait(dist.broadcast(tensor, root, group=team.group, async_op=drawn.async_op))
    _check(drawn, tensor, values(drawn, drawn.root))


def _all_gather(team: Team, drawn: Draw) -> None:
    inputs = _all_values(team, drawn)
    outputs = [torch.empty_like(tensor) for tensor in inputs]
    work = dist.all_gather(outputs, inputs[_me(team)], group=team.group, async_op=drawn.async_op)
    _wait(work)
    for got, want in zip(outputs, inputs, strict=True):
        _check(drawn, got, want)


def _all_gather_single(team: Team, drawn: Draw) -> None:
    inputs = _all_values(team, drawn)
    output = torch.empty(drawn.numel * len(inputs), dtype=drawn.dtype)
    _wait(
        dist.all_gather_into_tensor(
            output, inputs[_me(team)], group=team.group, async_op=drawn.async_op
        )
    )
    _check(drawn, output, torch.cat(inputs))


def _reduce_scatter(team: Team, drawn: Draw) -> None:
    size = len(team.ranks)
    inputs = _all_values(team, drawn, drawn.numel * size)
    output = torch.empty(drawn.numel, dtype=drawn.dtype)
    _wait(
        dist.reduce_scatter_tensor(
            output, inputs[_me(team)].clone(), group=team.group, async_op=drawn.async_op
        )
    )
    _check(drawn, output, _sum(inputs).view(size, -1)[_me(team)])


def _all_to_all(team: Team, drawn: Draw) -> None:
    me = _me(team)
    sends = drawn.splits[me]
    receives = [splits[me] for splits in drawn.splits]
    parts = [
        values(drawn, rank, sum(splits)).split(splits)[me]
        for rank, splits in enumerate(drawn.splits)
    ]
    output = torch.empty(sum(receives), dtype=drawn.dtype)
    source = values(drawn, me, sum(sends))
    _wait(
        dist.all_to_all_single(
            output, source, receives, sends, group=team.group, async_op=drawn.async_op
        )
    )
    _check(drawn, output, torch.cat(parts))


def _gather(team: Team, drawn: Draw) -> None:
    inputs = _all_values(team, drawn)
    outputs = None
    if _me(team) == drawn.root:
        outputs = [torch.empty_like(tensor) for tensor in inputs]
    root = team.ranks[drawn.root]
    _wait(dist.gather(inputs[_me(team)], outputs, root, group=team.group, async_op=drawn.async_op))
    for got, want in zip(outputs or [], inputs, strict=False):
        _check(drawn, got, want)


def _scatter(team: Team, drawn: Draw) -> None:
    inputs = _all_values(team, drawn)
    output = torch.empty(drawn.numel, dtype=drawn.dtype)
    root = team.ranks[drawn.root]
    source = inputs if _me(team) == drawn.root else None
    _wait(dist.scatter(output, source, root, group=team.group, async_op=drawn.async_op))
    _check(drawn, output, inputs[_me(team)])


def _ring(team: Team, drawn: Draw) -> None:
    me, size = _me(team), len(team.ranks)
    left, right = (me - 1) % size, (me + 1) % size
    output = torch.empty(drawn.numel, dtype=drawn.dtype)
    requests = [
        dist.P2POp(dist.isend, values(drawn, me), team.ranks[right], team.group, tag=drawn.root),
        dist.P2POp(dist.irecv, output, team.ranks[left], team.group, tag=drawn.root),
    ]
    for work in dist.batch_isend_irecv(requests):
        work.wait()
    _check(drawn, output, values(drawn, left))


def _barrier(team: Team, drawn: Draw) -> None:
    _wait(dist.barrier(group=team.group, async_op=drawn.async_op))


OPERATIONS: dict[str, Callable[[Team, Draw], None]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "all_gather_single": _all_gather_single,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "gather": _gather,
    "scatter": _scatter,
    "ring": _ring,
    "barrier": _barrier,
}
