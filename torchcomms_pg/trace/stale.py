"""Finds dumps of an earlier run, for example of a rank that left no dump in the latest run.

A dump does not name its run. But a collective in which every rank needs all others ends on one
rank only after all ranks have called it. Two dumps that contradict this rule are of different runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torchcomms_pg.trace.groups import Group

if TYPE_CHECKING:
    from torchcomms_pg.trace.dumps import Dump, Entry

# Largest accepted difference of two hosts' clocks.
_APART_NS = 2_000_000_000

_SYNCHRONOUS = (
    *("all_reduce", "allreduce", "all_gather", "allgather", "_all_gather", "barrier"),
    *("reduce_scatter", "_reduce_scatter"),
)


def find_stale(dumps: Mapping[int, Dump]) -> dict[int, str]:
    """Returns the ranks whose dumps are older than another rank's, with the reasons."""
    done: dict[Group, dict[int, list[Entry]]] = defaultdict(lambda: defaultdict(list))
    called: dict[tuple[Group, int], Entry] = {}  # the latest call of each collective
    last: dict[Group, dict[int, Entry]] = defaultdict(dict)
    seen: dict[int, int] = {}  # the latest time in a rank's dump
    for rank, dump in dumps.items():
        for entry in dump.entries:
            seen[rank] = max(seen.get(rank, 0), entry.created, entry.completed or 0)
            if entry.p2p or not entry.group.ranks:
                continue
            last[entry.group][rank] = entry
            other = called.setdefault((entry.group, entry.seq), entry)
            if other.created < entry.created:
                called[entry.group, entry.seq] = entry
            if entry.completed and entry.op.startswith(_SYNCHRONOUS):
                done[entry.group][entry.seq].append(entry)
    found: dict[int, str] = {}
    for group, places in done.items():
        for seq, entries in places.items():
            for entry in entries:
                other = called[group, seq]
                assert entry.completed
                if entry.completed + _APART_NS < other.created:
                    seconds = (other.created - entry.completed) / 1e9
                    why = f"{_what(entry)} had ended on it {seconds:.1f} s before rank {other.rank}"
                    found.setdefault(entry.rank, _older(dumps[entry.rank], f"{why} called it"))
        furthest = places[max(places)][0]
        for rank, entry in last[group].items():
            if entry.seq < furthest.seq:
                # The dump that ends earlier is the older one.
                old, new = sorted((rank, furthest.rank), key=lambda each: seen[each])
                has = "has ended on it" if old == furthest.rank else "is not on it"
                why = f"{_what(furthest)} {has}, and rank {new} tells otherwise"
                found.setdefault(old, _older(dumps[old], why))
    return found


def _older(dump: Dump, why: str) -> str:
    return f"{dump.path.name} is left out, since it is older than the others: {why}"


def _what(entry: Entry) -> str:
    return f"{entry.op} #{entry.seq} of group {entry.group.name}"
