"""Ranks as ranges, in texts and on the command line."""

from __future__ import annotations

from collections.abc import Iterable


def spans(ranks: Iterable[int]) -> list[tuple[int, int, int]]:
    """Returns ranges that have all ranks: the first rank of each, the last, and the step."""
    left = sorted(set(ranks))
    found = []
    while left:
        step = left[1] - left[0] if len(left) > 1 else 1
        end = 1
        while end < len(left) and left[end] - left[end - 1] == step:
            end += 1
        if end < 3 and step > 1:
            end = 1
        found.append((left[0], left[end - 1], step if end > 1 else 1))
        left = left[end:]
    return found


def as_ranges(ranks: Iterable[int]) -> str:
    """Returns ``rank 3`` or ``ranks 0-7, 12``, and with a step ``ranks 0-56 by 8``."""
    found = spans(ranks)
    parts = [
        str(first) if first == last else f"{first}-{last}" + (f" by {step}" if step > 1 else "")
        for first, last, step in found
    ]
    one = len(found) == 1 and found[0][0] == found[0][1]
    return f"rank{'' if one else 's'} {', '.join(parts)}"


def from_ranges(text: str) -> list[int]:
    """Returns the ranks of a text such as ``0-7,12``.

    Raises:
        ValueError: the text is no list of ranks.
    """
    ranks: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"{text!r} is no list of ranks, wanted one such as 0-7,12")
        ranks += range(int(first), int(last if dash else first) + 1)
    return ranks
