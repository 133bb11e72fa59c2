"""One random operation, the same on all ranks that draw from the same seed, and its check."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from harness import catalogue
from harness.values import reduced

# 0, 1, odd, over a page, larger than the library's staging.
SIZES = (0, 1, 7, 1025, 70_001, 400_003)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64)
# What Gloo has, each of one value or more; a ring of one rank it has not.
GLOO = ("ring", "all_reduce", "broadcast", "all_gather", "gather", "scatter", "all_to_all_single")


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
    splits: list[list[int]]  # what each rank has for each other, where sizes differ


def draw(generator: random.Random, size: int, backend: str) -> Draw:
    """Draws the same number of values whatever comes, so that ranks stay in step."""
    names = GLOO[size == 1 :] if backend == "gloo" else list(OPERATIONS)
    return Draw(
        generator.choice(names),
        generator.randrange(1 << 30),
        generator.choice(SIZES[1:] if backend == "gloo" else SIZES),
        generator.choice(DTYPES),
        generator.randrange(size),
        generator.random() < 0.5,
        [[generator.randrange(2000) for _ in range(size)] for _ in range(size)],
    )


class Case(catalogue.Case):
    """What was drawn, as a case of the catalogue of operations.

    Values are whole numbers, so small that every type adds them without rounding.
    """

    def __init__(self, team: Team, drawn: Draw) -> None:
        self.team, self.drawn = team, drawn
        self.world, self.rank = len(team.ranks), team.ranks.index(dist.get_rank())
        self.rows, self.splits, self.roots = drawn.numel, drawn.splits, [drawn.root]
        self.how, self.layout = "async" if drawn.async_op else "sync", "contiguous"
        self.options = {"group": team.group}

    def to_global(self, root: int) -> int:
        """Returns the number that this rank of the group has for torch.distributed."""
        return self.team.ranks[root]

    def values(self, rank: int, rows: int, salt: int = 0) -> torch.Tensor:
        """Returns so many numbers, the same on every rank that asks for `rank`."""
        generator = torch.Generator().manual_seed(self.drawn.salt + 1000 * salt + rank)
        return torch.randint(-4, 5, (rows,), generator=generator).to(self.drawn.dtype)

    def check(self, got: torch.Tensor, want: torch.Tensor, what: str = "") -> None:
        """Compares them bit by bit."""
        if got.shape != want.shape or not torch.equal(got, want):
            raise WrongValueError(f"{self.drawn}: got {got[:8]}..., expected {want[:8]}... {what}")

    def check_reduced(self, got: torch.Tensor, inputs: list[torch.Tensor]) -> None:
        """Compares with the reduction, in which nothing was rounded."""
        self.check(got, reduced(*self.of_plain_values(inputs)))


def perform(team: Team, drawn: Draw) -> None:
    """Runs it on this rank and compares the result, bit by bit."""
    OPERATIONS[drawn.name](Case(team, drawn))


def ring(case: Case) -> None:
    """A message to the right, and one from the left."""
    team, tag, size = case.team, case.drawn.root, case.world
    left, right = (case.rank - 1) % size, (case.rank + 1) % size
    want = case.values(left, case.rows)
    output = torch.empty_like(want)
    requests = [
        dist.P2POp(dist.isend, case.mine(), team.ranks[right], team.group, tag=tag),
        dist.P2POp(dist.irecv, output, team.ranks[left], team.group, tag=tag),
    ]
    for work in dist.batch_isend_irecv(requests):
        work.wait()
    case.check(output, want)


OPERATIONS: dict[str, Callable[[Case], None]] = {**catalogue.OPERATIONS, "ring": ring}
