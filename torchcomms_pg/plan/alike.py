"""Whether ranks of one role call the same, each in its own groups."""

from __future__ import annotations

from torchcomms_pg.plan.families import Families, Family
from torchcomms_pg.plan.program import Called, Program
from torchcomms_pg.plan.sides import same_side, side_of


def alike(families: Families, first: Program, last: Program, mine: Program) -> bool:
    """Returns whether a rank calls what the first rank of its role calls.

    If the last rank of the role calls that, too, the peers and roots of the rank have to be those
    that follow from the first's and the last's.
    """
    if mine is first:
        return True
    if not _same_program(families, first, mine):
        return False
    if last in (first, mine) or not _same_program(families, first, last):
        return True
    return all(
        _follows(families.of[a.made], (first, last, mine), (a, b, c))
        for a, b, c in zip(first.calls, last.calls, mine.calls, strict=True)
        if a.peer is not None or a.root is not None
    )


def _same_program(families: Families, one: Program, other: Program) -> bool:
    if (one.error, one.code, one.unseen) != (other.error, other.code, other.unseen):
        return False
    if len(one.calls) != len(other.calls) or not same_groups(one, other):
        return False
    return all(
        _same_call(families, one, a, other, b) for a, b in zip(one.calls, other.calls, strict=True)
    )


def same_groups(one: Program, other: Program) -> bool:
    """Returns whether two ranks made the same groups in the same order."""
    if one.made is other.made:
        return True
    return [(made.lists, made.names, made.description) for made in one.made] == [
        (made.lists, made.names, made.description) for made in other.made
    ]


def _same_call(families: Families, one: Program, a: Called, other: Program, b: Called) -> bool:
    family = families.of[a.made]
    if family is not families.of[b.made]:
        return False
    if one.stacks[a.where] != other.stacks[b.where]:
        return False
    if (a.op, a.inputs, a.outputs, a.dtype, a.reduce_op) != (
        (b.op, b.inputs, b.outputs, b.dtype, b.reduce_op)
    ):
        return False
    if (a.tag, a.batch, a.thread, a.device) != (b.tag, b.batch, b.thread, b.device):
        return False
    mine, theirs = family.places[one.rank], family.places[other.rank]
    return same_side(a.peer, b.peer, mine, theirs) and same_side(a.root, b.root, mine, theirs)


def _follows(
    family: Family,
    programs: tuple[Program, Program, Program],
    calls: tuple[Called, Called, Called],
) -> bool:
    """Returns whether the third call has the peer and the root that follow from the two others."""
    one, other, mine = (family.places[program.rank] for program in programs)
    a, b, c = calls
    peer = side_of(a.peer, b.peer, one, other, mine, follows=True)
    root = side_of(a.root, b.root, one, other, mine, follows=False)
    return (peer, root) == (c.peer, c.root)
