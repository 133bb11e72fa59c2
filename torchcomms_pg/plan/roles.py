"""Roles: ranks that are expected to call the same, and the ranks that are run for each role.

A role is a rank's place in each family of groups: the first rank of its group, the last, or one
between them, and the group's size. Of each role, two ranks are run: the first and the last, which
differ in each dimension in which the role's ranks differ. If their calls differ, the family is
looked for whose ranks differ, and its ranks then are a role each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchcomms_pg.plan.families import Families, Family
from torchcomms_pg.plan.program import Called, Program

if TYPE_CHECKING:
    from torchcomms_pg.plan.runners import Runners

Role = tuple[Hashable, ...]


@dataclass
class Roles:
    """The roles of a job's ranks.

    ``ranks`` has the ranks of each role; its first rank was run. ``notes`` are lines on roles of
    which more than two ranks were run, and why.
    """

    families: Families
    ranks: dict[Role, list[int]]
    notes: list[str]


class _Search:
    def __init__(self, runners: Runners, families: Families, ranks: list[int]) -> None:
        self.runners = runners
        self.families = families
        self.ranks = ranks
        self.fine: set[Family] = set()  # families whose ranks are a role each
        self.single: set[Role] = set()  # roles whose ranks differ for no family's sake
        self._places: dict[Family, dict[int, tuple[int, int]]] = {}
        for family in families.all:
            places = self._places[family] = {}
            for some in {ranks for ranks, _, _ in family.at.values()}:
                places.update({rank: (at, len(some)) for at, rank in enumerate(some)})

    def role(self, rank: int) -> Role:
        return tuple(
            self._part(self._places[family].get(rank), family in self.fine)
            for family in self.families.all
        )

    @staticmethod
    def _part(place: tuple[int, int] | None, fine: bool) -> Hashable:
        if place is None or fine:
            return place
        at, size = place
        return ("first" if at == 0 else "last" if at == size - 1 else "inner", size)

    def roles(self) -> dict[Role, list[int]]:
        found: dict[Role, list[int]] = defaultdict(list)
        for rank in self.ranks:
            role = self.role(rank)
            found[(*role, rank) if role in self.single else role].append(rank)
        return found

    def responsible(self, ranks: list[int]) -> Family | None:
        """Returns a family in which a rank calls something else than the first of `ranks`.

        Tries ranks of the same role that are in one group of the family, small groups first.
        """
        first, members = ranks[0], set(ranks)
        inner = [
            family for family in self.families.all if family not in self.fine and first in family.at
        ]
        for family in sorted(inner, key=lambda family: len(family.at[first][0])):
            others = [r for r in family.at[first][0] if r in members and r != first]
            if not others:
                continue
            self.runners.run([others[-1]])
            if not alike(self.runners.programs[first], self.runners.programs[others[-1]], self):
                return family
        return None

    def agrees(self, program: Program) -> bool:
        """Returns whether a rank made the groups that the families are of."""
        first = self.runners.programs[self.ranks[0]]
        return [made.lists for made in program.made] == [made.lists for made in first.made]

    def place(self, family: Family, rank: int) -> tuple[int, int]:
        return self._places[family][rank]


def find_roles(runners: Runners, ranks: Iterable[int], *, each: bool = False) -> Roles:
    """Runs ranks until it is known which of ``ranks`` call the same, and returns the roles.

    With ``each``, all of the ranks are run.
    """
    ranks = list(ranks)
    runners.run(ranks[:1])
    families = Families(runners.programs[ranks[0]])
    search = _Search(runners, families, ranks)
    notes: list[str] = []
    if not families.complete:
        notes.append("a group is made by its own ranks alone: all ranks were run")
    if each or not families.complete:
        runners.run(ranks)
        return Roles(families, {(rank,): [rank] for rank in ranks}, notes)
    while True:
        roles = search.roles()
        runners.run(rank for some in roles.values() for rank in (some[0], some[-1]))
        programs = runners.programs
        for role, some in roles.items():
            one, other = programs[some[0]], programs[some[-1]]
            if alike(one, other, search) and (len(some) < 3 or search.agrees(one)):
                continue
            family = search.responsible(some) if search.agrees(one) else None
            if family is not None:
                search.fine.add(family)
                notes.append(f"ranks differ by their place in {family.name}: each place was run")
            else:
                search.single.add(role)
                notes.append(f"{len(some)} ranks of one role differ: all of them were run")
            break
        else:
            return Roles(families, roles, notes)


def alike(one: Program, other: Program, search: _Search) -> bool:
    """Returns whether two ranks of a role call the same, each in its own groups."""
    if one is other:
        return True
    if (one.error, one.code, one.unseen) != (other.error, other.code, other.unseen):
        return False
    if len(one.calls) != len(other.calls) or len(one.made) != len(other.made):
        return False
    for a, b in zip(one.made, other.made, strict=True):
        if (a.lists, a.names, a.description) != (b.lists, b.names, b.description):
            return False
    return all(_same(one, a, other, b, search) for a, b in zip(one.calls, other.calls, strict=True))


def _same(one: Program, a: Called, other: Program, b: Called, search: _Search) -> bool:
    families = search.families.of
    if families[a.made] is not families[b.made]:
        return False
    if one.stacks[a.where] != other.stacks[b.where]:
        return False
    if (a.op, a.inputs, a.outputs, a.dtype, a.reduce_op) != (
        (b.op, b.inputs, b.outputs, b.dtype, b.reduce_op)
    ):
        return False
    if (a.tag, a.batch, a.thread, a.device) != (b.tag, b.batch, b.thread, b.device):
        return False
    family = families[a.made]
    mine, theirs = search.place(family, one.rank), search.place(family, other.rank)
    return _same_side(a.peer, b.peer, mine, theirs) and _same_side(a.root, b.root, mine, theirs)


def _same_side(
    a: int | None, b: int | None, mine: tuple[int, int], theirs: tuple[int, int]
) -> bool:
    if a == b:
        return True
    if a is None or b is None or -1 in (a, b):
        return False
    return (a - mine[0]) % mine[1] == (b - theirs[0]) % theirs[1]
