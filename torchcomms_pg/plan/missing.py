"""Collectives that some members of a group never call, and messages without a partner."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterable
from dataclasses import dataclass

from torchcomms_pg.parting.shift import first_difference
from torchcomms_pg.plan.ranges import as_ranges
from torchcomms_pg.trace.dumps import Dump, Entry
from torchcomms_pg.trace.groups import Group
from torchcomms_pg.trace.hazards.hazard import Collector, Hazard, at

_HANG = "  over any backend: the others wait for ever"


@dataclass
class Missing:
    """Hazards, and for each group the number of the first collective that not all call."""

    hazards: list[Hazard]
    first: dict[Group, int]

    def judged(self, entry: Entry) -> bool:
        """Returns whether an operation comes before what is missing in its group."""
        return entry.p2p or entry.seq < self.first.get(entry.group, entry.seq + 1)


def find_missing(dumps: dict[int, Dump], disputed: Container[str] = ()) -> Missing:
    """Returns the collectives and messages of which a side is missing, in the ranks of `dumps`.

    Leaves out groups of the names ``disputed``, whose ranks are not known.
    """
    counts: dict[Group, Counter[int]] = defaultdict(Counter)
    routes: dict[tuple[Group, int, int], Counter[str]] = defaultdict(Counter)
    for dump in dumps.values():
        for entry in dump.entries:
            if entry.group.name in disputed:
                continue
            if not entry.p2p:
                counts[entry.group][dump.rank] += 1
            elif entry.sender is not None and entry.receiver is not None:
                routes[entry.group, entry.sender, entry.receiver][entry.op] += 1
    uneven = {
        group
        for group, of in counts.items()
        if len({of[rank] for rank in group.ranks if rank in dumps}) > 1
    }
    alone = {
        route
        for route, of in routes.items()
        if of["send"] != of["recv"] and route[1] in dumps and route[2] in dumps
    }
    calls: dict[tuple[Group, int], list[Entry]] = defaultdict(list)
    sides: dict[tuple[object, ...], list[Entry]] = defaultdict(list)
    if uneven or alone:
        for dump in dumps.values():
            for entry in dump.entries:
                if not entry.p2p and entry.group in uneven:
                    calls[entry.group, dump.rank].append(entry)
                elif (entry.group, entry.sender, entry.receiver) in alone:
                    sides[entry.group, entry.sender, entry.receiver, entry.op].append(entry)
    found, first = Collector(), {}
    for group in sorted(uneven, key=lambda group: group.ranks):
        ranks = [rank for rank in group.ranks if rank in dumps]
        hazard, first[group] = _uncalled(group, {rank: calls[group, rank] for rank in ranks})
        found.add(hazard)
    for group, sender, receiver in sorted(alone, key=lambda route: route[1:]):
        sent, received = (sides[group, sender, receiver, op] for op in ("send", "recv"))
        found.add(_unmatched(group, sender, receiver, sent, received))
    return Missing(found.hazards, first)


def _uncalled(group: Group, calls: dict[int, list[Entry]]) -> tuple[Hazard, int]:
    """Returns the hazard of a group whose ranks call different numbers of collectives."""
    most = max(map(len, calls.values()))
    usual = Counter(len(entries) for entries in calls.values()).most_common(1)[0][0]
    odd = [rank for rank, entries in calls.items() if len(entries) != usual]
    others = [rank for rank in calls if rank not in odd]
    one, other = odd[0], others[0]
    number = _parted(calls[one], calls[other]) or min(len(calls[one]), len(calls[other])) + 1
    title = f"{as_ranges(odd)} of {_name(group)} {_call(odd)} {len(calls[one])} collectives"
    if len({len(calls[rank]) for rank in odd}) > 1:
        title = f"{as_ranges(odd)} of {_name(group)} call up to {most} collectives"
    lines = [f"{title}, {as_ranges(others)} {usual}"]
    lines += [f"  rank {rank}: {_told(calls[rank], number)}" for rank in (one, other)]
    lines.append(_HANG)
    entries = [calls[rank][number - 1] for rank in (one, other) if len(calls[rank]) >= number]
    return Hazard("missing", sorted(odd), lines, entries), number


def _parted(one: list[Entry], other: list[Entry]) -> int | None:
    """Returns the number of the first collective that one of two ranks does not call, or None.

    Before it the ranks call the same. From it on, one rank calls what the other one calls some
    collectives later.
    """
    short, long = sorted(([entry.frames for entry in entries] for entries in (one, other)), key=len)
    same = 0
    while same < len(short) and short[same] == long[same]:
        same += 1
    if short[same:] == long[same + len(long) - len(short) :]:
        return same + 1
    return first_difference(dict(enumerate(short, 1)), dict(enumerate(long, 1)))


def _told(entries: list[Entry], number: int) -> str:
    if len(entries) >= number:
        entry = entries[number - 1]
        return f"as #{number} calls {entry.what}{at(entry)}"
    if not entries:
        return "calls none"
    return f"calls none after #{len(entries)}, {entries[-1].what}{at(entries[-1])}"


def _unmatched(
    group: Group, sender: int, receiver: int, sent: list[Entry], received: list[Entry]
) -> Hazard:
    def of(count: int) -> str:
        return f"{count} message{'' if count == 1 else 's'}"

    lines = [
        f"rank {sender} sends {of(len(sent))} to rank {receiver} in {_name(group)}, "
        f"which receives {len(received) or 'none'}"
    ]
    lines += [f"  rank {sender}: {line}" for line in _lines(sent)]
    lines += [f"  rank {receiver}: {line}" for line in _lines(received)]
    lines.append("  over NCCL: the side without a partner waits for ever")
    firsts = {str(entry.where): entry for entry in (*sent, *received)}
    return Hazard("alone", sorted({sender, receiver}), lines, list(firsts.values()))


def _lines(entries: list[Entry]) -> Iterable[str]:
    counts = Counter(f"{entry.what}{at(entry)}" for entry in entries)
    for line, count in counts.items():
        yield f"{count} times {line}" if count > 1 else line


def _name(group: Group) -> str:
    known = group.description not in ("", "undefined")
    return f"group {group.name}" + (f" ({group.description})" if known else "")


def _call(ranks: list[int]) -> str:
    return "calls" if len(ranks) == 1 else "call"
