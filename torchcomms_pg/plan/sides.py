"""Peers and roots of ranks of one role: the same number in each group, or at the same distance.

A rank's place in a group is its number in the group, and the group's size.
"""

from __future__ import annotations

Place = tuple[int, int]


def same_side(a: int | None, b: int | None, mine: Place, theirs: Place) -> bool:
    """Returns whether the peers or roots of two ranks are the same, each in its own group."""
    if a == b:
        return True
    if a is None or b is None or -1 in (a, b):
        return False
    return (a - mine[0]) % mine[1] == (b - theirs[0]) % theirs[1]


def side_of(
    a: int | None, b: int | None, one: Place, other: Place, mine: Place, *, follows: bool
) -> int | None:
    """Returns a rank's peer or root, from the peers or roots of two ranks of its role.

    If both the number and the distance are the same, ``follows`` chooses the distance.
    """
    if a is None or b is None or a == -1:
        return a
    distance = (a - one[0]) % one[1]
    if (other[0] + distance) % other[1] == b and (follows or a != b):
        return (mine[0] + distance) % mine[1]
    return a
