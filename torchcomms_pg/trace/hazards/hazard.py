"""The hazards of a run, and the texts that name their operations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torchcomms_pg.trace.analysis import Analysis, rank_names
from torchcomms_pg.trace.dumps import Entry

GUIDE = "NCCL's user guide"
# From 2.15 on, torch's nccl makes one communicator for a group, together with the group.
LAZY = "over torch's nccl before 2.15, or nccl-legacy, without device_id"


@dataclass
class Hazard:
    """One thing that would go wrong over NCCL, at one set of lines of Python.

    ``kind`` is ``order``, ``messages``, ``first message``, ``tags``, ``sizes``, ``batch``,
    ``first batch``, ``refused``, ``mismatch``, ``threads``, ``lines`` or ``device``. ``lines`` is
    the text for the user. ``entries`` are the first operations that show the hazard, and ``ranks``
    the global ranks that called them. ``times`` counts the occurrences in the run; some of them
    were on the ranks ``others``.
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
    """The hazards of a run over NCCL.

    ``found`` are violations of a rule that NCCL or torch's ``nccl`` states. ``doubts`` may be
    mistakes or intended. ``not_covered`` has a line for each thing that could not be judged.
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
    """Keeps the first hazard at each set of lines of Python, and counts the others."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, frozenset[str]], Hazard] = {}

    def add(self, hazard: Hazard) -> None:
        """Adds a hazard, or if a hazard of its kind at its lines is known, counts that hazard."""
        places = frozenset(map(_place, hazard.entries))
        known = self._found.setdefault((hazard.kind, places), hazard)
        if known is not hazard:
            known.times += 1
            known.others.update(set(hazard.ranks) - set(known.ranks))

    @property
    def hazards(self) -> list[Hazard]:
        """The kept hazards, in the order in which they were added."""
        return list(self._found.values())


def _place(entry: Entry) -> str:
    return str(entry.where or f"{entry.what} of group {entry.group.name}")


def some_ranks(ranks: Iterable[int]) -> str:
    """Returns the names of the eight lowest ranks, or of all ranks if they are fewer."""
    ordered = sorted(ranks)
    return rank_names(ordered[:8]) + (", ..." if len(ordered) > 8 else "")


def named(analysis: Analysis, entries: Sequence[Entry]) -> str:
    """Returns the name of an operation, or of a batch with these entries, with its Python line."""
    first = entries[0]
    what = f"{analysis.what(first)} #{first.seq} of {analysis.group_name(first.group)}"
    if len(entries) > 1:
        what = f"a batch of {len(entries)}, with {what}"
    return what + at(first)


def at(entry: Entry) -> str:
    """Returns the operation's line of Python, to append to the operation's name."""
    return f"  at {entry.where}" if entry.where else ""
