"""Groups that ranks make differently, and groups that are no slice of the program's mesh."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

from torchcomms_pg.plan.program import Made, Program
from torchcomms_pg.plan.ranges import as_ranges
from torchcomms_pg.trace.hazards.hazard import Hazard

_RULE = "torch.distributed, new_group: all ranks make all groups, in one order"


def disagreeing(programs: dict[int, Program]) -> tuple[list[Hazard], set[str]]:
    """Returns hazards of groups that ranks make differently, and the names of these groups.

    Compares what each of the ranks that were run makes with the first rank's.
    """
    ranks = sorted(programs)
    first, found = programs[ranks[0]], list[Hazard]()
    names: set[str] = set()
    for odd, number in _differing(first, [programs[rank] for rank in ranks[1:]]).items():
        other = programs[odd[0]]
        lines = [f"{as_ranges(odd)} and rank {first.rank} make different groups, as call #{number}"]
        lines += [f"  rank {each.rank}: {_told(each, number)}" for each in (first, other)]
        lines += ["  over any backend: a hang, or groups of other ranks", f"  rule: {_RULE}"]
        found.append(Hazard("groups", [first.rank, *odd], lines))
        for program in (first, other):
            names.update(name for made in _of_all(program)[number:] for name in made.names)
    return found, names


def _differing(first: Program, others: list[Program]) -> dict[tuple[int, ...], int]:
    """Returns the number of the first call that makes other groups than `first` does, by ranks."""
    places: dict[object, list[int]] = defaultdict(list)
    mine = _of_all(first)
    for other in others:
        theirs = _of_all(other)
        for number in range(max(len(mine), len(theirs))):
            a = mine[number] if number < len(mine) else None
            b = theirs[number] if number < len(theirs) else None
            if a is None or b is None or (a.lists, a.names) != (b.lists, b.names):
                key = (number, b and (b.lists, other.stacks[b.where]))
                places[key].append(other.rank)
                break
    return {tuple(ranks): key[0] for key, ranks in places.items() if isinstance(key, tuple)}


def _of_all(program: Program) -> list[Made]:
    return [made for made in program.made if made.everyone]


def _told(program: Program, number: int) -> str:
    made = _of_all(program)
    if number >= len(made):
        return "makes no further group"
    lists = made[number].lists
    more = f" and {len(lists) - 1} more" if len(lists) > 1 else ""
    return f"{as_ranges(lists[0])}{more}{_at(program, made[number])}"


def _at(program: Program, made: Made) -> str:
    stack = program.stacks[made.where]
    return f"  at {stack[0]}" if stack else ""


def off_mesh(program: Program) -> list[Hazard]:
    """Returns hazards of groups whose ranks are no slice of any mesh of the whole job.

    A slice has some coordinates of each dimension of the mesh, and the ranks of all combinations.
    """
    meshes = program.meshes
    if not meshes:
        return []
    odd: dict[int, list[tuple[tuple[int, ...], str]]] = defaultdict(list)
    for made in program.made:
        for some, name in zip(made.lists, made.names, strict=True):
            if not any(_is_slice(some, shape) for shape, _ in meshes):
                odd[made.where].append((some, name))
    return [_off_mesh(program, where, groups) for where, groups in odd.items()]


def _is_slice(ranks: Iterable[int], shape: tuple[int, ...]) -> bool:
    coordinates = []
    for rank in ranks:
        place = []
        for size in reversed(shape):
            rank, at = divmod(rank, size)
            place.append(at)
        coordinates.append(place)
    each = [len(set(along)) for along in zip(*coordinates, strict=True)]
    return math.prod(each) == len(coordinates)


def _off_mesh(program: Program, where: int, groups: list[tuple[tuple[int, ...], str]]) -> Hazard:
    ranks, name = groups[0]
    shape, names = program.meshes[0]
    told = " x ".join(
        f"{names[at]} {size}" if names else str(size) for at, size in enumerate(shape)
    )
    more = f", nor of {len(groups) - 1} more groups" if len(groups) > 1 else ""
    lines = [f"{as_ranges(ranks)} of group {name} are no slice of the mesh {told}{more}"]
    stack = program.stacks[where]
    lines.append(f"  made at {stack[0]}" if stack else "  made by torch")
    if len(ranks) > 1:
        lines.append("  over any backend: these ranks exchange data of different coordinates")
    return Hazard("mesh", sorted(ranks), lines)
