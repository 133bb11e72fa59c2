"""Collectives that the ranks called with arguments that disagree."""

from __future__ import annotations

from torchcomms_pg.trace.analysis import Analysis, rank_names, signature
from torchcomms_pg.trace.dumps import Entry
from torchcomms_pg.trace.hazards.hazard import GUIDE, Collector, Hazard, named

_SAME = f'{GUIDE}, "Collective Operations": the same count and the same datatype on each rank'


def disagreements(analysis: Analysis) -> list[Hazard]:
    """Returns the collectives whose calls differ in operation, size, type, root or reduction."""
    found = Collector()
    for place, calls in analysis.collectives.items():
        if not place.group.ranks or len(calls) < 2:
            continue
        kinds = {rank: tuple(map(_kind, entries)) for rank, entries in sorted(calls.items())}
        first, *others = kinds
        other = next((rank for rank in others if kinds[rank] != kinds[first]), None)
        if other is None:
            continue
        lines = [f"{rank_names([first, other])} called different things as one collective"]
        lines += [f"  rank {rank}: {_told(analysis, calls[rank])}" for rank in (first, other)]
        lines += ["  over NCCL: a hang, an error or other data", f"  rule: {_SAME}"]
        entries = [calls[first][0], calls[other][0]]
        found.add(Hazard("mismatch", [first, other], lines, entries))
    return found.hazards


def _kind(entry: Entry) -> tuple[object, ...]:
    return (*signature(entry), entry.root, entry.reduce_op)


def _told(analysis: Analysis, entries: list[Entry]) -> str:
    first = entries[0]
    more = [f"root {first.root}"] if first.root is not None else []
    more += [first.reduce_op] if first.reduce_op else []
    return ", ".join([named(analysis, entries), *more])
