"""The data of a timeline: bars of operations, and of ranks that are in none, in lanes."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torchcomms_pg.trace.analysis import Analysis, Verdict, duration_ms
from torchcomms_pg.trace.dumps import Entry

_STACK = 24  # most lines of Python of a bar


@dataclass
class Idle:
    """A rank that is in no operation, from its last recorded one on. Times as in `Entry`."""

    rank: int
    start: int
    end: int
    where: str  # the line of its main thread, or that this is unknown


class Timeline:
    """Beginnings and ends of all operations, up to the time of the dumps.

    An operation that has not ended lasts until its rank's dump. The dumps of other recorders do
    not say when they were written: it then lasts until the latest recorded event of any rank.
    """

    def __init__(self, analysis: Analysis, verdict: Verdict) -> None:
        self.analysis = analysis
        self.verdict = verdict
        self.entries = list(analysis.entries())
        self.origin = min((entry.created for entry in self.entries), default=0)
        latest = max((entry.completed or entry.created for entry in self.entries), default=0)
        self._latest = {
            rank: max(dump.time or latest, self._seen(rank))
            for rank, dump in analysis.dumps.items()
        }

    def _seen(self, rank: int) -> int:
        entries = self.analysis.dumps[rank].entries
        return max((entry.completed or entry.created for entry in entries), default=self.origin)

    def span(self, entry: Entry) -> tuple[int, int, bool]:
        """Returns begin and end of an operation, and whether it has ended."""
        start = entry.started or entry.created
        took = duration_ms(entry)
        if took is not None:
            return start, start + int(took * 1e6), True
        end = start if entry.finished else max(start, self._latest[entry.rank])
        return start, end, entry.finished

    def idle(self) -> Iterable[Idle]:
        """Returns the ranks without an unfinished operation, unless all is fine."""
        if self.verdict.kind == "fine":
            return
        for rank, dump in sorted(self.analysis.dumps.items()):
            if not self.analysis.unfinished.get(rank):
                unknown = "its dump does not tell its line of Python"
                where = dump.threads[0] if dump.threads else unknown
                yield Idle(rank, self._seen(rank), self._latest[rank], where)

    def data(self) -> dict[str, Any]:
        """Returns what the page draws. Times are milliseconds from the first operation on.

        ``clock`` is the first operation's time of day, as in the verdict. A lane is a rank, and the
        index of a group, or -1 for the rank's Python. A bar is its lane's index, start, end,
        whether it has ended, whether its rank holds up others by it, its texts, and the index of
        its stack. The largest groups have the first lanes of each rank.
        """
        by_size = sorted({e.group for e in self.entries}, key=lambda g: (-len(g.ranks), g.name))
        groups: dict[str, int] = {}
        for each in by_size:
            _number(groups, self.analysis.group_name(each))
        lanes: dict[tuple[int, int], None] = {}
        stacks: dict[str, int] = {}
        found: list[tuple[tuple[int, int], list[Any]]] = []
        for idle in self.idle():
            lane = (idle.rank, -1)
            guilty = idle.rank in self.verdict.culprits
            stack = "\n".join(self.analysis.dumps[idle.rank].threads) or idle.where
            text = [f"in no operation: {idle.where}", f"rank {idle.rank}", ""]
            times = self._ms(idle.start), self._ms(idle.end)
            found.append((lane, [*times, False, guilty, text, _number(stacks, stack)]))
        for entry in self.entries:
            group = _number(groups, self.analysis.group_name(entry.group))
            start, end, ended = self.span(entry)
            times = self._ms(start), self._ms(end)
            stack = "\n".join(map(str, entry.frames[:_STACK]))
            text = [f"{entry.what} #{entry.seq}", f"rank {entry.rank}, {entry.state}"]
            text.append(str(entry.where or ""))
            bar = [*times, ended, self._guilty(entry), text, _number(stacks, stack)]
            found.append(((entry.rank, group), bar))
        lanes = dict.fromkeys(sorted(lane for lane, _ in found))
        number = {lane: index for index, lane in enumerate(lanes)}
        seconds, rest = divmod(self.origin, 1_000_000_000)
        day = time.localtime(seconds)
        return {
            "ranks": sorted(self.analysis.dumps),
            "culprits": self.verdict.culprits,
            "kind": self.verdict.kind,
            "verdict": str(self.verdict),
            "clock": ((day.tm_hour * 60 + day.tm_min) * 60 + day.tm_sec) * 1e3 + rest / 1e6,
            "end": max((bar[1] for _, bar in found), default=0.0),
            "operations": len(self.entries),
            "groups": list(groups),
            "lanes": list(lanes),
            "stacks": list(stacks),
            "bars": [[number[lane], *bar] for lane, bar in found],
        }

    def _ms(self, at: int) -> float:
        return round((at - self.origin) / 1e6, 4)

    def _guilty(self, entry: Entry) -> bool:
        verdict = self.verdict
        inside = entry.rank in verdict.culprits and entry in verdict.entries
        return inside and (verdict.kind == "mismatch" or not entry.finished)


def _number(known: dict[str, int], text: str) -> int:
    return known.setdefault(text, len(known))
