"""Finds the process group of each entry, from the dumps of all ranks.

For each name, a dump lists the ranks of only one group. But ``split`` gives several groups one
name, and a group that was destroyed and made again keeps its name and counts from the start.
Gloo's recorder lists only the ranks of the group that was made last, without its name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchcomms_pg.trace.dumps import Dump

_MOST_RANKS = 1 << 17


@dataclass(eq=False, slots=True)
class Group:
    """A process group: one name and one list of global ranks.

    ``id`` distinguishes the groups of a process. ``life`` counts the successive groups with one
    name and the same ranks. ``ranks`` is empty if the ranks are unknown.
    """

    name: str
    description: str
    id: int
    ranks: tuple[int, ...] = ()
    life: int = 0
    told: bool = False  # False if ``ranks`` is empty, or has only the ranks that used the group

    def rank_of(self, rank: int) -> int:
        """Returns a global rank's number in the group, or the global rank if that is unknown."""
        return self.ranks.index(rank) if self.told and rank in self.ranks else rank


def settle(dumps: Mapping[int, Dump]) -> None:
    """Gives a group's entries one `Group`, and replaces senders and receivers by global ranks."""
    names: dict[str, dict[int, list[Group]]] = defaultdict(dict)
    for rank, dump in dumps.items():
        for group in dict.fromkeys(entry.group for entry in dump.entries):
            names[group.name].setdefault(rank, []).append(group)
    shared: dict[Group, Group] = {}
    for name, own in names.items():
        if not (_find_ranks(name, own, dumps) and _count_lives(own, dumps)):
            for group in (group for groups in own.values() for group in groups):
                group.ranks, group.told = (), False
        made: dict[tuple[tuple[int, ...], int], Group] = {}
        for group in (group for groups in own.values() for group in groups):
            known = made.setdefault((group.ranks, group.life), group)
            shared[group] = known if group.ranks else group
    for dump in dumps.values():
        for entry in dump.entries:
            group = entry.group = shared[entry.group]
            if entry.local:
                entry.local = False
                entry.sender = _global(entry.sender, group.ranks)
                entry.receiver = _global(entry.receiver, group.ranks)


def _find_ranks(name: str, own: dict[int, list[Group]], dumps: Mapping[int, Dump]) -> bool:
    """Sets the ranks of all groups named `name`. Returns False if they cannot be known."""
    told = {dump.groups[name][1] for dump in dumps.values() if name in dump.groups}
    default = all(group.description == "default_pg" for groups in own.values() for group in groups)
    known = bool(told)
    if not told:
        members = set(own)
        if default:
            members.update(dumps, *(dump.groups.get("", ("", ()))[1] for dump in dumps.values()))
            members.update(range(min(max(members), _MOST_RANKS)))
        told = {tuple(sorted(members))}
    for rank, groups in own.items():
        candidates = {ranks for ranks in told if rank in ranks}
        mine = dumps[rank].groups.get(name, ("", ()))[1]
        if len(candidates) == 1 and (default or not (known and dumps[rank].namesakes)):
            for group in groups:
                group.ranks = next(iter(candidates))
        elif (
            len(candidates) == len(groups) == 2
            and groups[0].id < groups[1].id
            and dumps[rank].whole
        ):
            # Of two groups with one name, a dump lists the ranks of the later group.
            groups[1].ranks = mine
            groups[0].ranks = next(iter(candidates - {mine}))
        else:
            return False
        for group in groups:
            group.told = known or default
    return True


def _count_lives(own: dict[int, list[Group]], dumps: Mapping[int, Dump]) -> bool:
    """Sets the `life` of all groups. Returns False if groups of different ranks do not match."""
    lives: dict[tuple[int, ...], dict[int, list[Group]]] = defaultdict(lambda: defaultdict(list))
    for rank, groups in own.items():
        for group in sorted(groups, key=lambda group: group.id):
            lives[group.ranks][rank].append(group)
    for ranks, of_rank in lives.items():
        most = max(map(len, of_rank.values()))
        for rank in ranks:
            groups = of_rank.get(rank, [])
            if most > 1 and rank in dumps and dumps[rank].whole and len(groups) < most:
                return False  # some of the groups may have other ranks, which no dump lists
            # A ring that has lost entries has lost the entries of the first lives.
            for life, group in enumerate(groups, most - len(groups)):
                group.life = life
    return True


def _global(side: int | None, ranks: tuple[int, ...]) -> int | None:
    return ranks[side] if side is not None and side < len(ranks) else side
