"""Finds from all ranks' dumps which ranks hold up others or come late, and what takes the time.

A collective is stuck when a rank is in it and has not left it. Blame goes along the waiting: a
rank that is awaited and itself waits for another is a victim too, so the culprit is at the end
of the chain. Where the chain closes to a ring, the ranks called their operations in different
orders.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from torchcomms_pg.trace.dumps import Dump, Entry

# Their sizes differ from rank to rank by design.
_UNEVEN = {"all_to_all", "all_to_all_single", "all_to_all_v_single", "all_gather_v"}
_UNEVEN |= {"reduce_scatter_v", "split", "coalesced", "barrier", "all_reduce_barrier"}


# The operation that ends one which waits for one other rank.
_OTHER_SIDE = {"send": "recv", "recv": "send", "wait_signal": "signal"}


class Route(NamedTuple):
    """The way of one kind of messages that a rank sends to, or receives from, another."""

    group: str
    op: str
    sender: int | None
    receiver: int | None


class Place(NamedTuple):
    """A collective of a group, the same on all of its ranks."""

    group: str
    seq: int


@dataclass
class Verdict:
    """The outcome: ``kind`` is one of ``fine``, ``missing``, ``mismatch``, ``order``, ``message``,
    ``unfinished`` and ``unknown``; ``culprits`` are global ranks; ``lines`` is the report."""

    kind: str
    culprits: list[int]
    lines: list[str]
    place: Place | None = None

    def __str__(self) -> str:
        return "\n".join(self.lines)


@dataclass
class Straggler:
    """Lateness of a rank at the collectives of its groups. Times are in milliseconds."""

    rank: int
    collectives: int = 0
    last: int = 0  # number of times it came last, by more than _NOTICEABLE_NS
    late_ms: float = 0.0  # sum of the times after the first rank of each collective
    worst_ms: float = 0.0
    worst: Entry | None = None


@dataclass
class Cost:
    """The time of one kind of operation over all ranks. Times are in milliseconds."""

    group: str
    what: str
    times: list[float] = field(default_factory=list)

    @property
    def total(self) -> float:
        """The sum of all times."""
        return sum(self.times)

    @property
    def median(self) -> float:
        """The median of all times."""
        return statistics.median(self.times)


_NOTICEABLE_NS = 100_000


class Analysis:
    """Matches the operations of all ranks with each other."""

    def __init__(self, dumps: dict[int, Dump]) -> None:
        self.dumps = dumps
        self.groups: dict[str, tuple[str, list[int]]] = {}
        for dump in dumps.values():
            self.groups.update(dump.groups)
        self.collectives: dict[Place, dict[int, list[Entry]]] = defaultdict(dict)
        self.last: dict[tuple[str, int], Entry] = {}  # by group and rank
        # Messages: the first that waits, the last of all, and the finished ones by number.
        self.waiting: dict[Route, Entry] = {}
        self.latest: dict[Route, Entry] = {}
        self.passed: dict[tuple[Route, int], Entry] = {}
        for entry in self.entries():
            if entry.p2p:
                route = _route(entry)
                self.latest[route] = entry
                if not entry.finished:
                    self.waiting.setdefault(route, entry)
                elif entry.number is not None:
                    self.passed[route, entry.number] = entry
            else:
                place = Place(entry.group, entry.seq)
                self.collectives[place].setdefault(entry.rank, []).append(entry)
                self.last[entry.group, entry.rank] = entry
        self.unfinished = {
            rank: [entry for entry in dump.entries if not entry.finished]
            for rank, dump in dumps.items()
        }

    def entries(self) -> Iterable[Entry]:
        """Every operation, rank after rank, in the order of the calls."""
        for _, dump in sorted(self.dumps.items()):
            yield from dump.entries

    def members(self, group: str) -> list[int]:
        """The group's global ranks."""
        return self.groups.get(group, ("", []))[1]

    def group_name(self, group: str) -> str:
        """The group's name, with its description if it has one."""
        description = self.groups.get(group, ("", []))[0]
        known = description and description != "undefined"
        return f"group {group} ({description})" if known else f"group {group}"

    def waits_for(self, entry: Entry) -> set[int]:
        """The ranks that an unfinished operation cannot end without, and that are not in it."""
        if entry.p2p:
            return self._awaited_senders(entry)
        arrived = self.collectives[Place(entry.group, entry.seq)]
        return {
            rank
            for rank in self.members(entry.group)
            if rank not in arrived and self._has_not_passed(rank, entry)
        }

    def _awaited_senders(self, entry: Entry) -> set[int]:
        """The ranks that may be a message's other side, if that has not come."""
        if entry.op not in _OTHER_SIDE or self.met(entry):
            return set()
        other = entry.receiver if entry.op == "send" else entry.sender
        return set(self.members(entry.base)) - {entry.rank} if other is None else {other}

    def met(self, entry: Entry) -> Entry | None:
        """The other side of an unfinished message, if it is there.

        A finished message is there if it has the number of ``entry``: then it met another
        message, and ``entry`` is meant for another one, for example by its tag.
        """
        route = _route(entry)._replace(op=_OTHER_SIDE[entry.op])
        routes = [route]
        if entry.op == "send":
            routes.append(route._replace(sender=None))
        elif entry.sender is None:
            routes = [route._replace(sender=rank) for rank in self.members(entry.base)]
        for route in routes:
            if route in self.waiting:
                return self.waiting[route]
        return None if entry.number is None else self.passed.get((routes[0], entry.number))

    def _has_not_passed(self, rank: int, entry: Entry) -> bool:
        # A recorder keeps the newest operations only.
        last = self.last.get((entry.group, rank))
        return last is None or last.seq < entry.seq

    def disagreement(self, place: Place) -> dict[int, str] | None:
        """The calls of the ranks at ``place``, if these cannot be one collective."""
        calls = self.collectives[place]
        if len(calls) < 2 or all(e.finished for entries in calls.values() for e in entries):
            return None
        keys: dict[int, object] = {}
        for rank, entries in calls.items():
            keys[rank] = tuple(
                (entry.op, entry.dtype, None if entry.op in _UNEVEN else _common(entry))
                for entry in entries
            )
        if len(set(keys.values())) == 1:
            return None
        return {rank: ", ".join(entry.what for entry in calls[rank]) for rank in sorted(calls)}

    def verdict(self) -> Verdict:
        """The first mismatch, or else the rank at the end of the waiting."""
        stuck = [entry for entries in self.unfinished.values() for entry in entries]
        if not stuck:
            return Verdict("fine", [], ["Every recorded operation has finished."])
        stuck.sort(key=lambda entry: entry.created)
        for place in dict.fromkeys(Place(e.group, e.seq) for e in stuck if not e.p2p):
            if calls := self.disagreement(place):
                return self._mismatch(place, calls)
        waits = {rank: set() for rank in self.dumps}  # type: dict[int, set[int]]
        for entry in stuck:
            waits[entry.rank] |= self.waits_for(entry)
        awaited = set().union(*waits.values())
        if not awaited:
            return self._unfinished(stuck)
        silent = sorted(awaited - self.dumps.keys())
        ends = sorted(rank for rank in awaited if rank in waits and not waits[rank])
        culprits = ends or silent
        if not culprits:
            return self._order(stuck, waits)
        for entry in stuck:
            if self.waits_for(entry) & set(culprits):
                return self._missing(entry, culprits, silent)
        raise AssertionError("an awaited rank is awaited by some operation")

    def _missing(self, entry: Entry, culprits: list[int], silent: list[int]) -> Verdict:
        absent = sorted(self.waits_for(entry) & set(culprits))
        unknown = [rank for rank in absent if rank in silent]
        place = None if entry.p2p else Place(entry.group, entry.seq)
        title = f"{entry.what} #{entry.seq} of {self.group_name(entry.group)}"
        lines = []
        if entry.p2p and entry.sender is None:
            lines.append(f"no message is under way to rank {entry.rank}, which waits in {title}")
        elif len(unknown) == len(absent):
            lines.append(
                f"{_ranks(absent)} left no dump, and {_has(absent)} probably not arrived at {title}"
            )
            lines.append("  (killed, or unable to write: look at its output)")
        else:
            lines.append(f"{_ranks(absent)} {_has(absent)} not arrived at {title}")
        inside = [entry] if place is None else self._inside(place)
        lines += [f"  {line}" for line in self._waiting(inside)]
        for rank in absent:
            if rank in self.dumps:
                lines += [f"  {line}" for line in self._doing(rank, entry)]
        kind = "unknown" if len(unknown) == len(absent) else "message" if entry.p2p else "missing"
        return Verdict(kind, absent, lines, place)

    def _mismatch(self, place: Place, calls: dict[int, str]) -> Verdict:
        counts = Counter(calls.values()).most_common()
        majority = counts[0][0] if counts[0][1] > len(calls) / 2 else None
        culprits = [rank for rank, call in calls.items() if call != majority]
        who = _ranks(culprits) if majority else "the ranks"
        verb = "called something else" if majority else "called different things"
        lines = [f"{who} {verb} as operation #{place.seq} of {self.group_name(place.group)}"]
        for rank, call in calls.items():
            where = self.collectives[place][rank][0].where
            lines.append(f"  rank {rank}: {call}" + (f"  at {where}" if where else ""))
        return Verdict("mismatch", culprits, lines, place)

    def _order(self, stuck: list[Entry], waits: dict[int, set[int]]) -> Verdict:
        ring = _ring(waits)
        lines = [f"{_ranks(sorted(ring))} wait for each other: the operations were called in"]
        lines[0] += " different orders"
        for rank in ring:
            entry = next(e for e in stuck if e.rank == rank and self.waits_for(e))
            lines.append(
                f"  rank {rank} is in {entry.what} #{entry.seq} of "
                f"{self.group_name(entry.group)} and waits for "
                f"{_ranks(sorted(self.waits_for(entry)))}"
                + (f"  at {entry.where}" if entry.where else "")
            )
        return Verdict("order", sorted(ring), lines)

    def _unfinished(self, stuck: list[Entry]) -> Verdict:
        entry = stuck[0]
        if entry.op in _OTHER_SIDE and (side := self.met(entry)):
            return self._unmet(entry, side)
        lines = [
            f"all ranks have arrived at {entry.what} #{entry.seq} of "
            f"{self.group_name(entry.group)}, and it has not finished",
            "  (it was running when the dumps were taken, or the transport is stuck)",
        ]
        place = None if entry.p2p else Place(entry.group, entry.seq)
        inside = [entry] if place is None else self._inside(place)
        return Verdict("unfinished", [], lines + [f"  {x}" for x in self._waiting(inside)], place)

    def _unmet(self, entry: Entry, side: Entry) -> Verdict:
        """The verdict on a message with both sides there, at least one of them unfinished."""
        numel = {each.numel_in if each.op == "send" else each.numel_out for each in (entry, side)}
        alike = len(numel) == 1 and entry.dtype == side.dtype
        title = [
            f"{each.what} #{each.seq} of rank {each.rank}"
            for each in sorted((entry, side), key=lambda each: each.op, reverse=True)
        ]
        lines = [
            f"{' and '.join(title)}, of {self.group_name(entry.base)}, "
            + ("have not met:" if alike else "do not fit together:")
        ]
        if alike:
            lines[0] += " are their tags the same, and their order?"
        else:
            lines[0] += " sizes or dtypes differ"
        lines += [f"  {line}" for line in self._waiting([entry, side])]
        if side.finished:
            lines.append(f"  {self._did(side, f'with rank {entry.rank}')}")
        if alike:
            lines.append("  (or it was under way when the dumps were taken)")
        culprits = [] if alike else sorted({entry.rank, side.rank})
        return Verdict("unfinished" if alike else "mismatch", culprits, lines)

    def _inside(self, place: Place) -> list[Entry]:
        return [e for _, entries in sorted(self.collectives[place].items()) for e in entries]

    @staticmethod
    def _waiting(entries: list[Entry]) -> list[str]:
        return [
            f"rank {entry.rank} waits in it since {_clock(entry.created)}"
            + (f"  at {entry.where}" if entry.where else "")
            for entry in entries
            if not entry.finished
        ]

    @staticmethod
    def _did(entry: Entry, where: str) -> str:
        when = f"finished {_clock(entry.completed)}" if entry.completed else entry.state
        return f"rank {entry.rank} did last {where}: {entry.what} #{entry.seq}, {when}" + (
            f"  at {entry.where}" if entry.where else ""
        )

    def _doing(self, rank: int, missed: Entry) -> list[str]:
        """Lines about the last and current operations of a rank that ``missed`` waits for."""
        if missed.p2p:
            route = _route(missed)._replace(op=_OTHER_SIDE[missed.op])
            route = route if missed.op == "send" else route._replace(sender=rank)
            last, where = self.latest.get(route), f"with rank {missed.rank}"
            nothing = f"has no {route.op} {where} in its record"
        else:
            last, where = self.last.get((missed.group, rank)), "in this group"
            nothing = f"has done nothing {where}"
        lines = [f"rank {rank} {nothing}" if last is None else self._did(last, where)]
        others = [
            entry for entry in self.unfinished[rank] if missed.p2p or entry.group != missed.group
        ]
        for entry in others:
            lines.append(
                f"rank {rank} is in {entry.what} #{entry.seq} of {self.group_name(entry.group)}"
            )
        if not others:
            lines.append(f"rank {rank} is in no operation: it is busy elsewhere, or has ended")
        return lines

    def stragglers(self) -> list[Straggler]:
        """The ranks, the latest first. Over several hosts as exact as their clocks agree."""
        found = {rank: Straggler(rank) for rank in self.dumps}
        for place, calls in self.collectives.items():
            if len(calls) < 2 or set(calls) != set(self.members(place.group)):
                continue
            arrivals = sorted((entries[0] for entries in calls.values()), key=lambda e: e.created)
            first, latest = arrivals[0], arrivals[-1]
            for entry in arrivals:
                straggler = found[entry.rank]
                late = (entry.created - first.created) / 1e6
                straggler.collectives += 1
                straggler.late_ms += late
                if late > straggler.worst_ms:
                    straggler.worst_ms, straggler.worst = late, entry
            if latest.created - arrivals[-2].created > _NOTICEABLE_NS:
                found[latest.rank].last += 1
        return sorted(found.values(), key=lambda straggler: -straggler.late_ms)

    def costs(self) -> list[Cost]:
        """The kinds of operations, the most expensive first."""
        found: dict[tuple[str, str], Cost] = {}
        for entry in self.entries():
            took = duration_ms(entry)
            if took is not None:
                key = (entry.group, entry.what)
                found.setdefault(key, Cost(*key)).times.append(took)
        return sorted(found.values(), key=lambda cost: -cost.total)


def duration_ms(entry: Entry) -> float | None:
    """The time from its start, or else from its call, to its end; None while it runs."""
    if entry.duration_ms is not None:
        return entry.duration_ms
    if entry.completed is None:
        return None
    return (entry.completed - (entry.started or entry.created)) / 1e6


def _route(entry: Entry) -> Route:
    return Route(entry.base, entry.op, entry.sender, entry.receiver)


# Number of elements that all ranks of a collective have in common, by operation.
def _common(entry: Entry) -> int:
    return entry.numel_out if entry.op in ("scatter", "reduce_scatter") else entry.numel_in


def _ring(waits: dict[int, set[int]]) -> list[int]:
    """Some ranks that wait for each other in a circle; every rank waits for a known one."""
    path: list[int] = []
    rank = next(rank for rank, others in waits.items() if others)
    while rank not in path:
        path.append(rank)
        rank = min(waits[rank] & waits.keys())
    return path[path.index(rank) :]


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _has(ranks: list[int]) -> str:
    return "have" if len(ranks) > 1 else "has"


def _clock(nanoseconds: int) -> str:
    seconds, rest = divmod(nanoseconds, 1_000_000_000)
    return time.strftime("%H:%M:%S", time.localtime(seconds)) + f".{rest // 1_000_000:03d}"
