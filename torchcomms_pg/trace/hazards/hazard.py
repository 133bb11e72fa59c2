"""What is found, how an operation is named in it, and how it is printed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torchcomms_pg.trace.analysis import Analysis, rank_names
from torchcomms_pg.trace.dumps import Entry

GUIDE = "NCCL's user guide"
# Torch's nccl of 2.15 makes the communicator of a group with the group, and no others.
LAZY = "over torch's nccl before 2.15, or nccl-legacy, without device_id"


@dataclass
class Hazard:
    """One thing that would go wrong over NCCL, at one set of lines of Python.

    ``kind`` is ``order``, ``messages``, ``first message``, ``tags``, ``sizes``, ``batch``,
    ``first batch``, ``refused``, ``mismatch``, ``threads``, ``lines`` or ``device``. ``entries``
    are the operations that show it first, of the global ``ranks``; ``times`` counts how often the
    run had it, also on the ranks ``others``.
    """

    kind: str
    ranks: list[int]
    lines: list[str]
    entries: list[Entry] = field(default_factory=list)
    times: int = 1
    others: set[int] = field(default_factory=set)

    def __str__(self) -> str:
        lines = list(self.lines)
        if self.times > 1:
            lines.append(f"  {self.times - 1} more times at these lines")
            if self.others:
                lines[-1] += f", also on {some_ranks(self.others)}"
        return "\n".join(lines)


@dataclass
class Hazards:
    """What a run would meet over NCCL.

    ``found``: what breaks a rule that NCCL, or torch's ``nccl``, states. ``doubts``: what may be
    meant, and may be a mistake. ``not_covered``: what the dumps do not tell.
    """

    found: list[Hazard]
    doubts: list[Hazard]
    not_covered: list[str]

    def __str__(self) -> str:
        blocks = [f"{number}. {hazard}" for number, hazard in enumerate(self.found, 1)]
        if not blocks:
            blocks = ["No hazard for NCCL found."]
        if self.doubts:
            blocks.append(
                "\n".join(["Look at, since it may be a mistake:", *map(str, self.doubts)])
            )
        if self.not_covered:
            lines = [f"  {line}" for line in self.not_covered]
            blocks.append("\n".join(["Not covered:", *lines]))
        return "\n\n".join(blocks)


class Collector:
    """Keeps one hazard for each set of lines of Python, and counts the others."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, frozenset[str]], Hazard] = {}

    def add(self, hazard: Hazard) -> None:
        """Adds a hazard, or counts it."""
        places = frozenset(map(_place, hazard.entries))
        known = self._found.setdefault((hazard.kind, places), hazard)
        if known is not hazard:
            known.times += 1
            known.others.update(set(hazard.ranks) - set(known.ranks))

    @property
    def hazards(self) -> list[Hazard]:
        """Those that were added, the first first."""
        return list(self._found.values())


def _place(entry: Entry) -> str:
    return str(entry.where or f"{entry.what} of group {entry.group.name}")


def some_ranks(ranks: Iterable[int]) -> str:
    """The first of many ranks, in their order."""
    ordered = sorted(ranks)
    return rank_names(ordered[:8]) + (", ..." if len(ordered) > 8 else "")


def named(analysis: Analysis, entries: Sequence[Entry]) -> str:
    """The name of an operation, or of a batch of them, with its line of Python."""
    first = entries[0]
    what = f"{analysis.what(first)} #{first.seq} of {analysis.group_name(first.group)}"
    if len(entries) > 1:
        what = f"a batch of {len(entries)}, with {what}"
    return what + at(first)


def at(entry: Entry) -> str:
    """The line of Python, to be put behind what it calls."""
    return f"  at {entry.where}" if entry.where else ""
