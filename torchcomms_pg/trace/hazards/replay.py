"""Replays a run as if every operation stopped its rank until the others have called theirs.

NCCL wants the operations of all communicators to be issued in one order on all ranks. There is one
if the following replay of the run ends: each rank calls one operation after the other, and an
operation ends when all that take part have called it; of a batch of messages, when the other side
of each has been called. Where the replay stops, ranks wait for each other in a circle. What the
replay says of a circle holds for itself: each of its ranks has called the one operation before the
other. So it is told, taken for ended, and the replay goes on.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

from torchcomms_pg.trace.analysis import Analysis
from torchcomms_pg.trace.dumps import Entry
from torchcomms_pg.trace.hazards.routes import judged_messages, pair_of

# A run may have one in each of many steps. Finding one takes a time that grows with the ranks.
_MOST_CIRCLES, _MOST_OF_ALL_RANKS = 50, 40_000


@dataclass(eq=False, slots=True)
class Call:
    """What a rank calls at once: a collective, a message, or a batch of messages."""

    rank: int
    entries: list[Entry] = field(default_factory=list)
    meets: list[list[Call]] = field(default_factory=list)  # with the others that take part
    called: bool = False
    # The first call of its communicator: of the group, or of two ranks' messages outside batches.
    first: bool = False

    @property
    def message(self) -> bool:
        """True if it is a message, or a batch of them."""
        return self.entries[0].p2p


@dataclass
class Circle:
    """Ranks that wait for each other: each in a call, for one that the next makes later."""

    now: list[Call]
    later: list[Call]  # by the rank of the same place in ``now``


def programs(analysis: Analysis) -> dict[int, list[Call]]:
    """The calls of each rank in their order, those alone of which the dumps tell who takes part."""
    meetings: dict[Hashable, list[Call]] = defaultdict(list)
    messages = judged_messages(analysis)
    found = {}
    for rank, dump in sorted(analysis.dumps.items()):
        calls: dict[Hashable, Call] = {}
        communicators: set[Hashable] = set()
        for entry in dump.entries:
            if entry.p2p and entry not in messages:
                continue
            meeting: Hashable
            if entry.p2p:
                meeting = (entry.group, entry.sender, entry.receiver, entry.number)
                key: Hashable = (entry.group, entry.batch) if entry.batch else entry
            elif entry.group.ranks:
                meeting = key = (entry.group, "collective", entry.seq)
            else:
                continue
            call = calls.setdefault(key, Call(rank))
            call.entries.append(entry)
            parties = meetings[meeting]
            if not parties or parties[-1] is not call:
                parties.append(call)
                call.meets.append(parties)
            communicator = (entry.group, pair_of(entry) if entry.p2p and not entry.batch else None)
            if communicator not in communicators:
                call.first = dump.whole
                communicators.add(communicator)
        found[rank] = list(calls.values())
    return found


class Replay:
    """Runs the calls of all ranks as if each one blocked its rank."""

    def __init__(self, calls: dict[int, list[Call]]) -> None:
        self.calls = calls
        self.place = dict.fromkeys(calls, 0)
        self.ended = False
        self._waiting: dict[Call, set[int]] = defaultdict(set)
        self._moving = deque(calls)

    def run(self) -> list[Circle]:
        """The circles that it stops at, until it has `ended`, or has seen enough of them."""
        found: list[Circle] = []
        while len(found) < max(_MOST_CIRCLES, _MOST_OF_ALL_RANKS // max(1, len(self.calls))):
            while self._moving:
                self._move(self._moving.popleft())
            circle = self._circle()
            if circle is None:
                self.ended = True
                break
            found.append(circle)
            for call in circle.now:
                self.place[call.rank] += 1
                self._moving.append(call.rank)
        return found

    def _head(self, rank: int) -> Call | None:
        at = self.place[rank]
        return self.calls[rank][at] if at < len(self.calls[rank]) else None

    def _move(self, rank: int) -> None:
        while (call := self._head(rank)) is not None:
            if not call.called:
                call.called = True
                self._moving.extend(self._waiting.pop(call, ()))
            missing = next(awaited(call), None)
            if missing is not None:
                self._waiting[missing].add(rank)
                return
            self.place[rank] += 1

    def _circle(self) -> Circle | None:
        """A shortest circle of ranks that wait; None if all have ended."""
        heads = {rank: call for rank in self.calls if (call := self._head(rank)) is not None}
        waits = {rank: {call.rank: call for call in awaited(head)} for rank, head in heads.items()}
        best: list[int] | None = None
        for rank in sorted(heads):
            if best is None or len(best) > 1:
                found = _way_back(rank, waits, len(best) if best else len(heads) + 1)
                best = found or best
            if best and len(best) <= 2:
                break
        if best is None:
            return None
        later = [waits[before][rank] for before, rank in zip((best[-1], *best), best, strict=False)]
        return Circle([heads[rank] for rank in best], later)


def awaited(call: Call) -> Iterator[Call]:
    """The calls of others that it cannot end without, and that have not been made."""
    return (other for meeting in call.meets for other in meeting if not other.called)


def _way_back(start: int, waits: dict[int, dict[int, Call]], bound: int) -> list[int] | None:
    """The ranks of a shortest circle through ``start`` of less than ``bound``."""
    before: dict[int, int] = {}
    left = deque([(start, 1)])
    while left:
        rank, length = left.popleft()
        if length >= bound:
            return None
        for other in sorted(waits[rank]):
            if other == start:
                way = [rank]
                while way[-1] != start:
                    way.append(before[way[-1]])
                return way[::-1]
            if other not in before:
                before[other] = rank
                left.append((other, length + 1))
    return None
