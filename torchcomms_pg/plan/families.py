"""Families of groups.

The groups of a family are made by one place in the program, and a rank is in one of them at most.
The groups of one dimension of a mesh are a family.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from torchcomms_pg.plan.program import Made, Program
from torchcomms_pg.plan.sides import Place


@dataclass(eq=False)
class Family:
    """The groups of one family, by the ranks that are in them.

    ``name`` is the description of the groups, such as ``mesh_tp``, or their name if they have none.
    ``at``: for each rank, the group's ranks, its name, and the index in `Program.made` of the call
    that made it, on the ranks that were run.
    """

    number: int
    description: str
    backend: str
    at: dict[int, tuple[tuple[int, ...], str, int]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What the family is called in reports."""
        if self.description not in ("", "undefined"):
            return self.description.removeprefix("mesh_")
        names = list(dict.fromkeys(name for _, name, _ in self.at.values()))
        return f"group {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")

    @cached_property
    def places(self) -> dict[int, Place]:
        """The place of each rank that is in a group."""
        groups = {ranks for ranks, _, _ in self.at.values()}
        return {rank: (at, len(some)) for some in groups for at, rank in enumerate(some)}

    @property
    def largest(self) -> int:
        """The size of the largest group."""
        return max(size for _, size in self.places.values())

    def made_of(self, other: Family) -> bool:
        """Returns whether each group is made of groups of two or more ranks of the other family."""
        for ranks in {ranks for ranks, _, _ in self.at.values()}:
            whole = set(ranks)
            for rank in ranks:
                if other.places.get(rank, (0, 1))[1] < 2 or not whole.issuperset(other.at[rank][0]):
                    return False
        return True


class Families:
    """The families of a program that all ranks agree on. ``of`` has a family by index of the call.

    A call that not all ranks make, of ``use_local_synchronization``, tells its own groups alone.
    ``dimensions`` are the families whose groups are not made of groups of another one.
    """

    def __init__(self, program: Program) -> None:
        self.all: list[Family] = []
        self.of: list[Family] = []
        last: Made | None = None
        for index, made in enumerate(program.made):
            ranks = {rank for some in made.lists for rank in some}
            family = self.all[-1] if self.all else None
            if (
                family is None
                or last is None
                or (made.where, made.description) != (last.where, last.description)
                or not made.everyone
                or ranks & family.at.keys()
            ):
                family = Family(len(self.all), made.description, made.backend)
                self.all.append(family)
            for some, name in zip(made.lists, made.names, strict=True):
                for rank in some:
                    family.at[rank] = (some, name, index)
            self.of.append(family)
            last = made
        self.complete = all(made.everyone for made in program.made)
        self.dimensions: list[Family] = []
        for family in sorted(self.all, key=lambda family: family.largest):
            if not any(map(family.made_of, self.dimensions)):
                self.dimensions.append(family)
        self.dimensions.sort(key=lambda family: family.number)
