"""Collectives that the ranks called as one, but from different lines of Python."""

from __future__ import annotations

from collections import defaultdict

from torchcomms_pg.trace.analysis import Analysis, rank_names
from torchcomms_pg.trace.dumps import Entry
from torchcomms_pg.trace.groups import Group
from torchcomms_pg.trace.hazards.hazard import GUIDE, Hazard, named

# Begins of the names of collectives without a root: a root often has another line of Python.
_ALIKE = ("all_reduce", "all_gather", "_all_gather", "reduce_scatter", "_reduce_scatter", "all_to")

_ONE_THREAD = f'{GUIDE}, "Thread Safety": one thread at a time, in an order that is the same'


def crossed_lines(analysis: Analysis) -> list[Hazard]:
    """Returns pairs of lines of Python that two ranks have called crosswise.

    In one collective the first rank was at line A and the second at line B; in another collective,
    the reverse. The kind is ``threads`` if two threads of a rank called the lines, since the order
    of threads is not fixed. Otherwise it is ``lines``, and a program may intend it.
    """
    # For each group and two of its ranks: collectives that the two called from different lines,
    # by these lines.
    apart: dict[tuple[Group, int, int], dict[tuple[str, str], tuple[Entry, Entry]]]
    apart = defaultdict(dict)
    for place, calls in analysis.collectives.items():
        if not place.group.ranks or len(calls) < 2:
            continue
        first, *others = sorted(calls)
        mine = calls[first][0]
        if not mine.op.startswith(_ALIKE) or mine.where is None:
            continue
        for rank in others:
            theirs = calls[rank][0]
            if theirs.where is not None and theirs.where != mine.where:
                key = (str(mine.where), str(theirs.where))
                apart[place.group, first, rank].setdefault(key, (mine, theirs))
    found: dict[tuple[str, frozenset[str]], Hazard] = {}
    for pairs in apart.values():
        for (here, there), once in pairs.items():
            again = pairs.get((there, here))
            if again is not None and here < there:
                hazard = _hazard(analysis, once, again)
                known = found.setdefault((hazard.kind, frozenset((here, there))), hazard)
                known.times += known is not hazard
    return list(found.values())


def _hazard(analysis: Analysis, once: tuple[Entry, Entry], again: tuple[Entry, Entry]) -> Hazard:
    ranks = [entry.rank for entry in once]
    threads = [a.rank for a, b in zip(once, again, strict=True) if a.thread != b.thread]
    lines = [f"{rank_names(ranks)} met from different lines, and both call both lines"]
    if threads:
        lines.append(f"  {rank_names(threads)} called them from two threads")
    for both in (once, again):
        lines += [f"  rank {entry.rank}: {named(analysis, [entry])}" for entry in both]
    if threads:
        lines.append("  over any backend: the data of these lines are mixed, or they hang")
        lines += ["  instead: issue from one thread, or let each have its own group"]
        lines.append(f"  rule: {_ONE_THREAD}")
    return Hazard("threads" if threads else "lines", ranks, lines, [*once, *again])
