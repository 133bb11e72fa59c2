"""Finds from all ranks' dumps which ranks hold up others or arrive late, and what takes time.

`torchcomms_pg.trace.blame` finds at which ranks an operation's waits end. These are

- awaited ranks without an unfinished operation: culprits,
- awaited ranks without a dump, or with an incomplete one: unknown, since they may wait, too,
- ranks that wait for each other: a circle.

Found here are operations whose ranks called different things, a mismatch, and operations at which
all ranks have arrived: they are under way, and no rank is a culprit.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from torchcomms_pg.parting.shift import first_difference
from torchcomms_pg.status.report import runs
from torchcomms_pg.trace.blame import Blame, blame
from torchcomms_pg.trace.dumps import Dumps, Entry
from torchcomms_pg.trace.groups import Group

# Operations whose sizes differ between ranks by design, as the sizes of all-to-alls do.
_UNEVEN = {
    "all_gather_v",
    "reduce_scatter_v",
    "split",
    "coalesced",
    "barrier",
    "all_reduce_barrier",
}
_UNEVEN_PREFIXES = ("all_to_all", "alltoall")

# For each operation between two ranks: the operation that the other rank has to call.
_OTHER_SIDE = {"send": "recv", "recv": "send", "wait_signal": "signal"}


class Route(NamedTuple):
    """Identifies a sequence of messages: the group, the operation, the sender and the receiver."""

    group: Group
    op: str
    sender: int | None
    receiver: int | None


class Place(NamedTuple):
    """Identifies a collective of a group, with equal values on all of its ranks."""

    group: Group
    seq: int


@dataclass
class Finding:
    """One cause of waiting. ``culprits`` are the ranks at fault; `Verdict.kind` lists the kinds.

    ``lines`` is the text for the user. ``entries`` are the operations that show the cause, and
    ``held_up`` the ranks that wait because of it.
    """

    kind: str
    culprits: list[int]
    lines: list[str]
    entries: list[Entry] = field(default_factory=list)
    held_up: set[int] = field(default_factory=set)

    @property
    def place(self) -> Place | None:
        """The collective that shows the finding; None if a message or no operation does."""
        entry = self.entries[0] if self.entries else None
        return None if entry is None or entry.p2p else Place(entry.group, entry.seq)


@dataclass
class Verdict:
    """The findings, ordered by how many ranks each one holds up."""

    findings: list[Finding]

    @property
    def kind(self) -> str:
        """The kind of the first finding.

        One of ``fine``, ``missing``, ``message``, ``mismatch``, ``order``, ``unknown`` and
        ``unfinished``.
        """
        return self.findings[0].kind

    @property
    def culprits(self) -> list[int]:
        """The global ranks that are certainly at fault, or if no rank is, those that may be."""
        proven = [finding for finding in self.findings if finding.kind != "unknown"]
        ranks = [rank for finding in proven for rank in finding.culprits]
        ranks = ranks or [rank for finding in self.findings for rank in finding.culprits]
        return list(dict.fromkeys(ranks))

    @property
    def place(self) -> Place | None:
        """The collective that shows the first finding, or None."""
        return self.findings[0].place

    @property
    def entries(self) -> set[Entry]:
        """The operations that show the findings."""
        return {entry for finding in self.findings for entry in finding.entries}

    def __str__(self) -> str:
        return "\n".join(line for finding in self.findings for line in finding.lines)


@dataclass
class Straggler:
    """Lateness of a rank at the collectives of its groups. Times are in milliseconds."""

    rank: int
    collectives: int = 0
    last: int = 0  # number of collectives at which it arrived last, by more than _NOTICEABLE_NS
    late_ms: float = 0.0  # sum over the collectives of its delay after the first rank
    worst_ms: float = 0.0  # its longest delay
    worst: Entry | None = None  # the operation with that delay


@dataclass
class Cost:
    """The times of the operations of one name, size and group on all ranks, in milliseconds."""

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

    def __init__(self, dumps: Dumps) -> None:
        self.dumps = dumps
        self.collectives: dict[Place, dict[int, list[Entry]]] = defaultdict(dict)
        self.last: dict[tuple[Group, int], Entry] = {}  # a rank's last collective in a group
        # On each route: the messages by number, the latest message, the unfinished ones in order.
        self.messages: dict[tuple[Route, int], Entry] = {}
        self.latest: dict[Route, Entry] = {}
        self.waiting: dict[Route, list[Entry]] = defaultdict(list)
        for entry in self.entries():
            if not entry.p2p:
                place = Place(entry.group, entry.seq)
                self.collectives[place].setdefault(entry.rank, []).append(entry)
                self.last[entry.group, entry.rank] = entry
                continue
            route = _route(entry)
            self.latest[route] = entry
            if entry.number is not None:
                self.messages[route, entry.number] = entry
            if not entry.finished:
                self.waiting[route].append(entry)
        self.unfinished = {
            rank: [entry for entry in dump.entries if self.holds(entry)]
            for rank, dump in dumps.items()
        }
        self._gloo = any(dump.library == "gloo" for dump in dumps.values())

    def entries(self) -> Iterable[Entry]:
        """Yields every operation, rank after rank, in the order of the calls."""
        for _, dump in sorted(self.dumps.items()):
            yield from dump.entries

    def holds(self, entry: Entry) -> bool:
        """Returns whether the operation has not ended. A batch does not count: its members do.

        A send also counts as ended if its receive has finished, since torch's hook does not report
        the end of a message in a batch.
        """
        if entry.finished or (entry.p2p and entry.op == "coalesced"):
            return False
        other = self.met(entry) if entry.op == "send" else None
        return other is None or not other.finished

    @cached_property
    def _names(self) -> Counter[str]:
        return Counter(group.name for group in {entry.group for entry in self.entries()})

    def group_name(self, group: Group) -> str:
        """Returns a group's name and description, with the ranks if another group has this name."""
        known = group.description and group.description != "undefined"
        name = f"group {group.name} ({group.description})" if known else f"group {group.name}"
        alone = self._names[group.name] == 1 or not group.ranks
        return name if alone else f"{name} of {rank_names(group.ranks)}"

    def met(self, entry: Entry) -> Entry | None:
        """Returns the other side of a message, or None if it is not recorded.

        If the other side has finished and ``entry`` has not, they may not have been matched with
        each other: ``entry`` has, for example, another tag. Or it waits for its batch.
        """
        route = _route(entry)._replace(op=_OTHER_SIDE[entry.op])
        if entry.number is not None and (side := self.messages.get((route, entry.number))):
            return side
        routes = [route]
        if entry.op == "send":
            routes.append(route._replace(sender=None))
        elif entry.sender is None:
            routes = [route._replace(sender=rank) for rank in entry.group.ranks]
            for each in routes:  # looks for a message that has been sent and not received
                sent, received = self.latest.get(each), self.latest.get(each._replace(op="recv"))
                if sent and (sent.number or 0) > ((received and received.number) or 0):
                    return sent
        for each in routes:
            for side in self.waiting.get(each, []):
                if entry.number is None or side.number is None:
                    return side
        latest = self.latest.get(route)
        if latest is None or entry.number is None or latest.number is None:
            return latest if entry.batched else None  # it is not known which messages were matched
        return latest if latest.number > entry.number else None  # the ring buffer has dropped it

    def _misfit(self, entry: Entry) -> Entry | None:
        """Returns the other side of a message if its size or dtype differs, else None."""
        side = self.met(entry) if entry.op in ("send", "recv") else None
        if side is None or (entry.numel, entry.dtype) == (side.numel, side.dtype):
            return None
        in_order = not (entry.finished or side.finished or entry.batched or side.batched)
        return side if entry.number == side.number and (entry.number or in_order) else None

    def disagrees(self, place: Place) -> bool:
        """Returns whether the ranks' calls at ``place`` cannot be one collective."""
        calls = self.collectives[place].values()
        if len(calls) < 2 or all(entry.finished for entries in calls for entry in entries):
            return False
        return len({tuple(map(signature, entries)) for entries in calls}) > 1

    def verdict(self) -> Verdict:
        """Returns all causes of waiting, ordered by how many ranks each one holds up."""
        stuck = [entry for entries in self.unfinished.values() for entry in entries]
        if not stuck:
            return Verdict([Finding("fine", [], ["Every recorded operation has finished."])])
        stuck.sort(key=lambda entry: entry.created)
        blames = blame(self.entries(), self.unfinished, self.met)
        findings = self._mismatches(stuck)
        clear = {entry for finding in findings for entry in finding.entries}
        for finding in findings:
            ranks = finding.held_up
            while more := {e.rank for e, who in blames if who.missing & ranks} - ranks:
                ranks |= more
        findings += self._missing(blames) + self._circles(blames)
        moving = []
        for entry, who in blames:
            if who.guilty or who.missing or who.circle or entry in clear:
                continue
            if entry.op != "recv" or entry.sender is not None or self.met(entry):
                moving.append(entry)
            elif idle := [r for r in entry.group.ranks if not self.unfinished.get(r)]:
                # Each of them may send, so none is a culprit for certain.
                findings.append(self._miss(entry, idle, proven=False))
                findings[-1].held_up = {entry.rank}
        held_up = {entry.rank for entry in moving}
        if not findings or not held_up <= set().union(*(each.held_up for each in findings)):
            findings.append(self._unfinished((moving or stuck)[0]))
            findings[-1].held_up = held_up
        last = ("unknown", "unfinished")  # kinds that follow others that hold up as many ranks
        findings.sort(key=lambda each: (-len(each.held_up), each.kind in last))
        findings.sort(key=lambda each: each.kind == "unfinished")
        return Verdict(findings)

    def _mismatches(self, stuck: list[Entry]) -> list[Finding]:
        """Returns each group's first mismatched collective, and all mismatched messages."""
        findings: dict[object, Finding] = {}
        for entry in sorted((e for e in stuck if not e.p2p), key=lambda e: e.seq):
            place = Place(entry.group, entry.seq)
            if entry.group not in findings and self.disagrees(place):
                findings[entry.group] = self._mismatch(place)
        for entry in stuck:
            if (side := self._misfit(entry)) and frozenset((entry, side)) not in findings:
                findings[frozenset((entry, side))] = self._unmet(entry, side, alike=False)
        return list(findings.values())

    def _missing(self, blames: list[tuple[Entry, Blame]]) -> list[Finding]:
        """Returns findings on the ranks at which waits end.

        Each such rank is in the finding on the oldest operation that needs it.
        """
        guilty = {rank for _, who in blames for rank in who.guilty}
        findings = []
        for entry, who in blames:
            absent = who.missing & guilty
            if entry.p2p:  # one of a batch, which waits for the others' ranks, too
                sides = {entry.sender, entry.receiver}
                absent &= sides if None not in sides else absent
            guilty -= absent
            for proven in (True, False):
                ranks = sorted(r for r in absent if self._is_proven(r, entry) == proven)
                if ranks:
                    findings.append(self._miss(entry, ranks, proven))
                    findings[-1].held_up = {
                        each.rank for each, other in blames if other.guilty & set(ranks)
                    }
        return findings

    def _circles(self, blames: list[tuple[Entry, Blame]]) -> list[Finding]:
        missing = {entry: who.missing for entry, who in blames}
        held_up: dict[tuple[Entry, ...], set[int]] = defaultdict(set)
        for entry, who in blames:
            held_up[who.circle].add(entry.rank)
        held_up.pop((), None)
        findings = []
        for ring, ranks in held_up.items():
            findings.append(self._circle(ring, missing))
            findings[-1].held_up = ranks
        return findings

    def _is_proven(self, rank: int, missed: Entry) -> bool:
        """Returns whether a rank without an unfinished operation certainly holds up ``missed``."""
        dump = self.dumps.get(rank)
        if dump is None or self._gloo or not dump.gapless:
            return False
        last = self._last_there(rank, missed)
        counted = not missed.p2p or (missed.number and last and last.number)
        return dump.whole or (last is not None and bool(counted))

    def _miss(self, entry: Entry, absent: list[int], proven: bool) -> Finding:
        title = f"{self.what(entry)} #{entry.seq} of {self.group_name(entry.group)}"
        who = self.members(absent, entry.group)
        dumped = [rank for rank in absent if rank in self.dumps]
        lines = []
        if entry.p2p and entry.sender is None and dumped:
            me = self.members([entry.rank], entry.group)
            lines.append(f"no message is under way to {me}, which waits in {title}")
        elif dumped:
            lines.append(f"{who} {_has(absent)} not arrived at {title}")
        else:
            lines.append(f"{who} left no dump, and {_has(absent)} probably not arrived at {title}")
            if set(absent) <= self.dumps.left_out.keys():
                lines[0] = lines[0].replace("left no dump", "left no dump that is of use")
            else:
                lines.append("  (killed, or unable to write: look at its output)")
        inside = [entry] if entry.p2p else self._inside(Place(entry.group, entry.seq))
        for rank in dumped:
            lines += [f"  {line}" for line in self._doing(rank, entry)]
        lines += [f"  {line}" for line in self._waiting(inside)]
        if not entry.p2p:
            lines += self._since(entry.group, dumped)
        kind = ("message" if entry.p2p else "missing") if proven else "unknown"
        return Finding(kind, absent, lines, inside)

    def _mismatch(self, place: Place) -> Finding:
        calls = dict(sorted(self.collectives[place].items()))
        kinds = {rank: tuple(map(signature, entries)) for rank, entries in calls.items()}
        kind, count = Counter(kinds.values()).most_common(1)[0]
        majority = count > len(calls) / 2
        culprits = [rank for rank in calls if kinds[rank] != kind or not majority]
        who = self.members(culprits, place.group) if majority else "the ranks"
        verb = "called something else" if majority else "called different things"
        lines = [f"{who} {verb} as operation #{place.seq} of {self.group_name(place.group)}"]
        for rank, entries in calls.items():
            what = ", ".join(entry.what for entry in entries)
            where = f"  at {entries[0].where}" if entries[0].where else ""
            lines.append(f"  {self.members([rank], place.group)}: {what}{where}")
        lines += self._since(place.group, culprits)
        inside = self._inside(place)
        held_up = {entry.rank for entry in inside if not entry.finished}
        return Finding("mismatch", culprits, lines, inside, held_up)

    def _since(self, group: Group, ranks: list[int]) -> list[str]:
        """Returns a line on the call that one of `ranks` has left out before, if there is one.

        The calls that met since then were of different lines, though they had the same sizes.
        """
        for rank in ranks:
            other = next((each for each in group.ranks if each not in ranks), None)
            if other is None:
                other = next((each for each in group.ranks if each != rank), rank)
            calls: tuple[dict[int, Entry], dict[int, Entry]] = ({}, {})
            for of, found in zip((rank, other), calls, strict=True):
                for place, entries in self.collectives.items():
                    if place.group == group and of in entries and entries[of][0].frames:
                        found[place.seq] = entries[of][0]
            stacks = [{at: entry.frames for at, entry in each.items()} for each in calls]
            at = first_difference(*stacks)
            if at is not None:
                told = [
                    f"{self.members([of], group)}: {found[at].where}"
                    for of, found in zip((rank, other), calls, strict=True)
                ]
                return [
                    f"since {calls[0][at].op} #{at} the ranks have called from different lines"
                    f" ({', '.join(told)})"
                ]
        return []

    def _circle(self, ring: tuple[Entry, ...], missing: dict[Entry, frozenset[int]]) -> Finding:
        """Returns the finding on operations of ranks that wait for each other."""
        ranks = sorted(entry.rank for entry in ring)
        whom = "each other" if len(ring) > 1 else "itself"
        common = ring[0].group if len({entry.group for entry in ring}) == 1 else None
        verb = "wait" if len(ring) > 1 else "waits"
        lines = [f"{self.members(ranks, common)} {verb} for {whom}"]
        lines[0] += ": the operations were called in different orders"
        for entry in ring:
            others = sorted(missing[entry])
            lines.append(
                f"  {self.members([entry.rank], entry.group)} is in {self.what(entry)} "
                f"#{entry.seq} of {self.group_name(entry.group)} and waits for "
                f"{self.members(others, entry.group)}"
                + (f"  at {entry.where}" if entry.where else "")
            )
        lines.append("  (a rank that called one of these with async_op, and does not wait for it,")
        lines.append("  is busy elsewhere: then it holds up the others)")
        return Finding("order", ranks, lines, list(ring))

    def _unfinished(self, entry: Entry) -> Finding:
        if entry.op in _OTHER_SIDE and (side := self.met(entry)):
            return self._unmet(entry, side, alike=True)
        title = f"{self.what(entry)} #{entry.seq} of {self.group_name(entry.group)}"
        if entry.group.told:
            lines = [f"all ranks have arrived at {title}, and it has not finished"]
        else:
            lines = [f"{title} has not finished, and no dump tells the ranks of its group"]
        lines.append("  (it was running when the dumps were taken, or the transport is stuck)")
        inside = [entry] if entry.p2p else self._inside(Place(entry.group, entry.seq))
        lines += [f"  {line}" for line in self._waiting(inside)]
        return Finding("unfinished", [], lines, inside)

    def _unmet(self, entry: Entry, side: Entry, *, alike: bool) -> Finding:
        """Returns the finding on a message of which both sides are recorded and one is unfinished.

        ``alike``: whether the two sides agree in size and dtype.
        """
        title = [
            f"{self.what(each)} #{each.seq} of {self.members([each.rank], each.group)}"
            for each in sorted((entry, side), key=lambda each: each.op, reverse=True)
        ]
        lines = [
            f"{' and '.join(title)}, of {self.group_name(entry.group)}, "
            + ("have not met:" if alike else "do not fit together:")
        ]
        if alike:
            lines[0] += " are their tags the same, and their order?"
        else:
            lines[0] += " sizes or dtypes differ"
        lines += [f"  {line}" for line in self._waiting([entry, side])]
        if side.finished:
            me = self.members([entry.rank], entry.group)
            lines.append(f"  {self._did(side, f'with {me}')}")
        if alike:
            lines.append("  (or it was under way when the dumps were taken)")
        held_up = {each.rank for each in (entry, side) if not each.finished}
        culprits = [] if alike else sorted({entry.rank, side.rank})
        kind = "unfinished" if alike else "mismatch"
        return Finding(kind, culprits, lines, [entry, side], held_up)

    def _inside(self, place: Place) -> list[Entry]:
        return [e for _, entries in sorted(self.collectives[place].items()) for e in entries]

    def _waiting(self, entries: list[Entry]) -> list[str]:
        """Returns a line for each place from which ranks have called unfinished operations."""
        places: dict[str, list[Entry]] = defaultdict(list)
        for entry in entries:
            if not entry.finished:
                places[f"  at {entry.where}" if entry.where else ""].append(entry)
        lines = []
        for place, waiting in places.items():
            who = self.members([entry.rank for entry in waiting], waiting[0].group)
            verb = "waits in it since" if len(waiting) == 1 else "wait in it, the first since"
            lines.append(f"{who} {verb} {_clock(min(e.created for e in waiting))}{place}")
        return lines

    def _did(self, entry: Entry, where: str) -> str:
        when = entry.state
        if entry.completed or entry.finished:
            when = f"finished {_clock(entry.completed)}" if entry.completed else "finished"
        me = self.members([entry.rank], entry.group)
        return f"{me} did last {where}: {self.what(entry)} #{entry.seq}, {when}" + (
            f"  at {entry.where}" if entry.where else ""
        )

    def _last_there(self, rank: int, missed: Entry) -> Entry | None:
        """Returns a rank's last operation of the kind that ``missed`` waits for, or None."""
        if not missed.p2p:
            return self.last.get((missed.group, rank))
        route = _route(missed)._replace(op=_OTHER_SIDE[missed.op])
        return self.latest.get(route if missed.op == "send" else route._replace(sender=rank))

    def _doing(self, rank: int, missed: Entry) -> list[str]:
        """Returns lines about the last operation of a rank that ``missed`` waits for."""
        me = self.members([rank], missed.group)
        last, where = self._last_there(rank, missed), "in this group"
        nothing = f"has done nothing {where}"
        if missed.p2p:
            where = f"with {self.members([missed.rank], missed.group)}"
            nothing = f"has no {_OTHER_SIDE[missed.op]} {where} in its record"
        state = f"{me} is in no operation: it is busy elsewhere, or has ended"
        if threads := self.dumps[rank].threads:
            state = f"{me} is in no operation, but at {threads[0].removeprefix('MainThread: ')}"
        if self._gloo:
            state += ", or waits in a message (Gloo's recorder has none)"
        elif not self._is_proven(rank, missed):
            state = f"{me} is in no recorded operation, but not all of its operations are recorded"
        return [self._did(last, where) if last else f"{me} {nothing}", state]

    def members(self, ranks: Iterable[int], group: Group | None) -> str:
        """Returns ``rank 1``, or ``rank 1 (global 5)`` if its number in the group differs.

        More than eight ranks are written as ``ranks 0-36, 38-63``.
        """
        numbers = {rank: group.rank_of(rank) if group else rank for rank in ranks}
        if len(numbers) > 8 and all(number == rank for rank, number in numbers.items()):
            return f"ranks {runs(numbers)}"
        return rank_names(
            str(number) if number == rank else f"{number} (global {rank})"
            for rank, number in numbers.items()
        )

    @staticmethod
    def what(entry: Entry) -> str:
        """Returns an operation's name and size, with ranks by their numbers in the group."""
        sides = [
            side if side is None else entry.group.rank_of(side)
            for side in (entry.sender, entry.receiver)
        ]
        return entry.describe(*sides)

    def stragglers(self) -> list[Straggler]:
        """Returns the ranks' lateness, the latest rank first.

        It is only as exact as the hosts' clocks agree.
        """
        found = {rank: Straggler(rank) for rank in self.dumps}
        for place, calls in self.collectives.items():
            if len(calls) < 2 or set(calls) != set(place.group.ranks):
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
        """Returns the costs of all kinds of operations, the most expensive first."""
        found: dict[tuple[Group, str], Cost] = {}
        for entry in self.entries():
            took = duration_ms(entry)
            if took is not None:
                key = (entry.group, entry.what)
                found.setdefault(key, Cost(entry.group.name, entry.what)).times.append(took)
        return sorted(found.values(), key=lambda cost: -cost.total)


def duration_ms(entry: Entry) -> float | None:
    """Returns the operation's duration, from its call if the start is unknown; None if it runs."""
    if entry.duration_ms is not None:
        return entry.duration_ms
    if entry.completed is None:
        return None
    return (entry.completed - (entry.started or entry.created)) / 1e6


def _route(entry: Entry) -> Route:
    return Route(entry.group, entry.op, entry.sender, entry.receiver)


def signature(entry: Entry) -> tuple[object, ...]:
    """Returns the properties of a call that have to be equal on all ranks of a collective."""
    if entry.op in _UNEVEN or entry.op.startswith(_UNEVEN_PREFIXES):
        return (entry.op, entry.dtype)
    by_output = entry.op in ("scatter", "reduce_scatter")
    return (entry.op, entry.dtype, entry.numel_out if by_output else entry.numel_in)


def rank_names(ranks: Iterable[object]) -> str:
    """Returns ``rank 1`` or ``ranks 1, 2``."""
    names = list(map(str, ranks))
    return f"rank{'s' if len(names) > 1 else ''} {', '.join(names)}"


def _has(ranks: list[int]) -> str:
    return "have" if len(ranks) > 1 else "has"


def _clock(nanoseconds: int) -> str:
    seconds, rest = divmod(nanoseconds, 1_000_000_000)
    return time.strftime("%H:%M:%S", time.localtime(seconds)) + f".{rest // 1_000_000:03d}"
