"""Replays a run as if every operation blocked its rank until the other ranks have called it.

NCCL requires all ranks to issue the operations of all communicators in one order. Such an order
exists if the following replay of the run ends. Each rank calls one operation after another. An
operation ends when all ranks that take part have called it, and a batch when the other side of
each of its messages has been called. If the replay stops, ranks wait for each other in a circle.
Each rank of a circle has really called one operation before the other, whatever comes later in the
run. So the circle is reported, its operations count as ended, and the replay goes on.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

from torchcomms_pg.trace.analysis import Analysis
from torchcomms_pg.trace.dumps import Entry
from torchcomms_pg.trace.hazards.routes import judged_messages, pair_of

# Most circles that are looked for: 50, or 40,000 divided by the number of ranks if that is more.
# A run may have a circle in each step, and finding a circle takes longer with more ranks.
_MOST_CIRCLES, _MOST_OF_ALL_RANKS = 50, 40_000


@dataclass(eq=False, slots=True)
class Call:
    """One call of a rank: a collective, a message, or a batch of messages."""

    rank: int
    entries: list[Entry] = field(default_factory=list)
    # For each operation of the call: the calls of all ranks that take part, this one included.
    meets: list[list[Call]] = field(default_factory=list)
    called: bool = False  # True once the replay has reached the call
    # True if the rank's call is the first on a communicator: the group's, or the one for unbatched
    # messages between two ranks.
    first: bool = False
    # True if each message of the call is the first between its two ranks in its direction.
    connects: bool = False

    @property
    def message(self) -> bool:
        """Whether the call is a message or a batch of messages."""
        return self.entries[0].p2p


@dataclass
class Circle:
    """Ranks that wait for each other: each waits for a call that another of them makes later."""

    now: list[Call]  # the call in which each rank waits
    later: list[Call]  # at the same index, the later call of that rank for which another waits


def programs(analysis: Analysis) -> dict[int, list[Call]]:
    """Returns each rank's calls in order, without calls whose participants are unknown."""
    meetings: dict[Hashable, list[Call]] = defaultdict(list)
    messages = judged_messages(analysis)
    found = {}
    for rank, dump in sorted(analysis.dumps.items()):
        calls: dict[Hashable, Call] = {}
        communicators: set[Hashable] = set()
        connected: set[Hashable] = set()
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
            if entry.p2p:
                way = (entry.group, entry.sender, entry.receiver)
                connects = dump.whole and way not in connected
                call.connects = connects and (call.connects or len(call.entries) == 1)
                connected.add(way)
        found[rank] = list(calls.values())
    return found


class Replay:
    """Replays the calls of all ranks as if each call blocked its rank."""

    def __init__(self, calls: dict[int, list[Call]]) -> None:
        self.calls = calls
        self.place = dict.fromkeys(calls, 0)
        self.ended = False
        self._waiting: dict[Call, set[int]] = defaultdict(set)
        self._moving = deque(calls)

    def run(self) -> list[Circle]:
        """Replays until all calls have ended, or too many circles are found; returns the circles.

        Sets `ended` in the former case.
        """
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
        """Returns a shortest circle of waiting ranks; None if all ranks have ended."""
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
    """Returns the calls of other ranks that ``call`` needs and that have not been made."""
    return (other for meeting in call.meets for other in meeting if not other.called)


def _way_back(start: int, waits: dict[int, dict[int, Call]], bound: int) -> list[int] | None:
    """Returns the ranks of a shortest circle through ``start``.

    Returns None if it has ``bound`` ranks or more, or if no circle exists.
    """
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
