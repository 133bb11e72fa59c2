"""Ranks as ranges, in texts and on the command line."""

from __future__ import annotations

from collections.abc import Iterable


def as_ranges(ranks: Iterable[int]) -> str:
    """Returns ``rank 3`` or ``ranks 0-7, 12``, and with a step ``ranks 0-56 by 8``."""
    left = sorted(set(ranks))
    count = len(left)
    parts = []
    while left:
        step = left[1] - left[0] if len(left) > 1 else 1
        end = 1
        while end < len(left) and left[end] - left[end - 1] == step:
            end += 1
        if end < 3 and step > 1:
            end = 1
        first, last = left[0], left[end - 1]
        parts.append(str(first) if end == 1 else f"{first}-{last}")
        if end > 2 and step > 1:
            parts[-1] += f" by {step}"
        left = left[end:]
    return f"rank{'s' if count != 1 else ''} {', '.join(parts)}"


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
