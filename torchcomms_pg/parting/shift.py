"""The first operation from which on one rank is ahead of another by some calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

_Stack = TypeVar("_Stack")

_MOST_STARTS = 32  # operations that are tried
_MOST_AHEAD = 16  # calls
_FEWEST_ALIKE = 2  # pairs of operations that have to have equal stacks


def first_difference(one: Mapping[int, _Stack], other: Mapping[int, _Stack]) -> int | None:
    """Returns the number of the first operation that a rank has left out, or None.

    ``one`` and ``other`` are the stacks of two ranks' operations by number. From the number on, the
    stacks of one rank are the other's some operations later, and the operation before had
    equal stacks: so the calls that met were of different lines.
    """
    different = [at for at in sorted(set(one) & set(other)) if one[at] != other[at]]
    for at in different[:_MOST_STARTS]:
        before = at - 1
        if before not in one or before not in other or one[before] != other[before]:
            continue
        for ahead in range(1, _MOST_AHEAD + 1):
            for x, y in ((one, other), (other, one)):
                pairs = [(x[n + ahead], y[n]) for n in y if n >= at and n + ahead in x]
                if len(pairs) >= _FEWEST_ALIKE and all(a == b for a, b in pairs):
                    return at
    return None
