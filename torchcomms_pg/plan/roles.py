"""Roles: ranks that are expected to call the same, and the ranks that are run for each role.

At first all ranks in groups of the same sizes are one role. Of a role some ranks are run that lie
apart: at the first and the last place of each dimension, and between them. If two of them call
different things, the role is divided by their places in a family of groups: into first ranks, last
ranks and ranks between or, if that is not enough, into the ranks of each place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

from torchcomms_pg.plan.alike import alike, same_groups
from torchcomms_pg.plan.families import Families, Family

if TYPE_CHECKING:
    from torchcomms_pg.plan.runners import Runners

Role = tuple[Hashable, ...]


@dataclass
class Roles:
    """The roles of a job's ranks.

    ``ranks`` has the ranks of each role, of which the first and the last were run. ``notes`` are
    lines on what ranks differ by, and on what makes no difference.
    """

    families: Families
    ranks: dict[Role, list[int]]
    notes: list[str]


class _By(IntEnum):
    """What of a rank's place in a family's groups its calls depend on, besides their size."""

    NOTHING = 0
    ENDS = 1  # whether it is the first, the last, or one between
    PLACE = 2


def find_roles(runners: Runners, ranks: Iterable[int], *, each: bool = False) -> Roles:
    """Runs ranks until it is known which of ``ranks`` call the same, and returns the roles.

    With ``each``, all of the ranks are run.
    """
    ranks = list(ranks)
    runners.run(ranks[:1])
    families = Families(runners.programs[ranks[0]])
    if each or not families.complete:
        runners.run(ranks)
        notes = ["a group is made by its own ranks alone: all ranks were run"]
        return Roles(
            families, {(rank,): [rank] for rank in ranks}, [] if families.complete else notes
        )
    search = _Search(runners, families, ranks)
    while True:
        roles = search.roles()
        runners.run(rank for some in roles.values() for rank in search.apart(some))
        for role, some in roles.items():
            if (odd := search.odd(some)) is not None:
                search.divide(role, some, odd)
                break
        else:
            return Roles(families, roles, search.notes())


class _Search:
    def __init__(self, runners: Runners, families: Families, ranks: list[int]) -> None:
        self._runners = runners
        self._families = families
        self._ranks = ranks
        self._by = dict.fromkeys(families.all, _By.NOTHING)
        self._single: dict[Role, int] = {}  # the size of each role whose ranks are all run
        self._known: dict[tuple[int, int, int], bool] = {}

    def roles(self) -> dict[Role, list[int]]:
        """Returns the ranks of each role."""
        found: dict[Role, list[int]] = defaultdict(list)
        for rank in self._ranks:
            role = tuple(_part(family, by, rank) for family, by in self._by.items())
            found[(*role, rank) if role in self._single else role].append(rank)
        return found

    def apart(self, some: list[int]) -> list[int]:
        """Returns ranks of a role that lie apart, among them its first and its last.

        Only dimensions in which the role's ranks differ count. The ranks are at each combination of
        first and last places; at the second place of one dimension and the first of the others; at
        the last but one of one dimension and the last of the others; and in the middle of all.
        """
        dimensions = []
        here: list[list[int]] = []
        for family in self._families.dimensions:
            among = {family.places[rank][0] for rank in some if rank in family.places}
            if len(among) > 1:
                dimensions.append(family.places)
                here.append(sorted(among))
        firsts, lasts = (tuple(each[at] for each in here) for at in (0, -1))
        between = {tuple(each[len(each) // 2] for each in here)}
        for at, each in enumerate(here):
            between.add((*firsts[:at], each[1], *firsts[at + 1 :]))
            between.add((*lasts[:at], each[-2], *lasts[at + 1 :]))
        found: dict[tuple[int, ...], int] = {}
        for rank in some:
            key = tuple(places[rank][0] for places in dimensions)
            corner = all(at in ends for at, *ends in zip(key, firsts, lasts, strict=True))
            if corner or key in between:
                found.setdefault(key, rank)
        return list(dict.fromkeys([some[0], *found.values(), some[-1]]))

    def odd(self, some: list[int]) -> int | None:
        """Returns a rank of those run that does not call what its role's first rank calls."""
        programs = self._runners.programs
        if len(some) > 2 and not self._in_families(some[0]):
            return some[-1]
        run = (rank for rank in (some[-1], *some) if rank in programs)
        return next((rank for rank in run if not self._alike(some[0], some[-1], rank)), None)

    def _in_families(self, rank: int) -> bool:
        """Returns whether a rank made the groups that the families are of."""
        programs = self._runners.programs
        return same_groups(programs[rank], programs[self._ranks[0]])

    def _alike(self, first: int, last: int, rank: int) -> bool:
        key = (first, last, rank)
        if key not in self._known:
            programs = (self._runners.programs[each] for each in key)
            self._known[key] = alike(self._families, *programs)
        return self._known[key]

    def divide(self, role: Role, some: list[int], odd: int) -> None:
        """Makes several roles of one, whose first rank does not call what ``odd`` calls."""
        if self._in_families(some[0]) and self._in_families(odd):
            reason = self._reason(some) or self._on_the_way(some[0], odd)
            if reason is not None:
                self._by[reason[0]] = reason[1]
                return
        self._single[role] = len(some)

    def _reason(self, some: list[int]) -> tuple[Family, _By] | None:
        """Returns the least division by a family that tells the ranks that were run apart."""
        run = [rank for rank in some if rank in self._runners.programs]
        found: list[tuple[int, Family, _By]] = []
        for family, now in self._by.items():
            for by in (_By.ENDS, _By.PLACE):
                if by <= now or (by == _By.PLACE and family not in self._families.dimensions):
                    continue
                parts: dict[Hashable, list[int]] = defaultdict(list)
                for rank in run:
                    parts[_part(family, by, rank)].append(rank)
                if len(parts) > 1 and all(self.odd(part) is None for part in parts.values()):
                    count = len({_part(family, by, rank) for rank in some})
                    found.append((count, family, by))
        return min(found, key=lambda each: each[0])[1:] if found else None

    def _on_the_way(self, one: int, other: int) -> tuple[Family, _By] | None:
        """Returns the dimension along which ranks differ first on the way from one to another.

        Each step of the way changes the place in one dimension. Runs the ranks on the way.
        """
        for family in self._families.dimensions:
            if one not in family.at or other not in family.at:
                continue
            ranks, place = family.at[one][0], family.places[other][0]
            if place >= len(ranks) or ranks[place] == one:
                continue
            after = ranks[place]
            self._runners.run([after])
            if not self._alike(one, after, after):
                ends = _part(family, _By.ENDS, one) != _part(family, _By.ENDS, after)
                known = self._by[family] != _By.NOTHING
                return family, _By.PLACE if known or not ends else _By.ENDS
            one = after
        return None

    def notes(self) -> list[str]:
        """Returns lines on what ranks differ by, and what not."""
        same = []
        lines = []
        for family, by in self._by.items():
            if by == _By.PLACE:
                lines.append(f"ranks differ by their place in {family.name}: each place was run")
            elif by == _By.ENDS:
                lines.append(f"ranks differ by being first or last in {family.name}")
            elif family in self._families.dimensions and family.largest > 1:
                same.append(family.name)
        if same:
            lines.append(f"ranks do not differ by their place in {', '.join(same)}")
        for count in self._single.values():
            lines.append(f"{count} ranks of one role differ: all of them were run")
        return lines


def _part(family: Family, by: _By, rank: int) -> Hashable:
    """Returns what ranks of one role have in common in a family."""
    place = family.places.get(rank)
    if place is None or by == _By.PLACE:
        return place
    at, size = place
    if by == _By.NOTHING:
        return size
    return "first" if at == 0 else "last" if at == size - 1 else "between", size
