"""Decisions of long ago: which way each branch of the program went, between the operations.

`TORCHCOMMS_PG_BRANCHES=1` has `sys.monitoring` of Python 3.12 and later report the branches of the
program's own code. Each thread keeps its latest ones. Nothing is compared before a verdict.
"""

from __future__ import annotations

import bisect
import collections
import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import CodeType
from typing import Any, NamedTuple

from .positions import Code, code_of

_MOST = 100_000  # branches that a thread keeps
_TOOL = "torchcomms_pg"
_HEALTHY = 64  # intervals in a row that are alike, after which a difference was of no consequence
_FEWEST = 2  # intervals in which a branch has to go equally on both ranks to have a habit


class Branch(NamedTuple):
    """A branch of a function: the place that decides."""

    code: Code
    place: int


# By number of the operation that ends the interval: of each branch the places to which it went.
Intervals = Mapping[int, Mapping[Branch, Sequence[int]]]


class Recorder:
    """Records branches of threads, in code whose file `chosen` accepts."""

    def __init__(self, chosen: Callable[[str], bool]) -> None:
        self._chosen = chosen
        self._rings: dict[int, collections.deque[tuple[int, CodeType, int, int]]] = {}
        self._tool: int | None = None

    @property
    def started(self) -> bool:
        """Returns whether branches are being recorded."""
        return self._tool is not None

    def start(self) -> bool:
        """Starts to record. Returns False before Python 3.12, or if it has no tool id free."""
        monitoring: Any = getattr(sys, "monitoring", None)
        if monitoring is None:
            return False
        events = monitoring.events
        tool = next((each for each in (4, 3, 1) if monitoring.get_tool(each) is None), None)
        if tool is None:
            return False
        monitoring.use_tool_id(tool, _TOOL)
        kinds = [
            getattr(events, name)
            for name in ("BRANCH", "BRANCH_LEFT", "BRANCH_RIGHT")
            if hasattr(events, name)
        ]
        if len(kinds) == 3:  # 3.14 has BRANCH for old tools only
            kinds = kinds[1:]
        note = self._noter(monitoring.DISABLE)
        for kind in kinds:
            monitoring.register_callback(tool, kind, note)
        monitoring.set_events(tool, sum(kinds))
        self._tool = tool
        return True

    def stop(self) -> None:
        """Stops to record."""
        if self._tool is not None:
            monitoring: Any = sys.monitoring  # type: ignore[attr-defined, unused-ignore]
            monitoring.set_events(self._tool, 0)
            monitoring.free_tool_id(self._tool)
            self._tool = None

    def _noter(self, disable: object) -> Callable[[CodeType, int, int], Any]:
        rings = self._rings
        # Keyed by id, since the hash of a code reads all its instructions. Keeps the code, so that
        # no other code gets this id.
        chosen: dict[int, tuple[CodeType, bool]] = {}
        ident, now = threading.get_ident, time.time_ns

        def note(code: CodeType, place: int, target: int) -> Any:
            known = chosen.get(id(code))
            if known is None:
                known = chosen[id(code)] = (code, self._chosen(code.co_filename))
            if not known[1]:
                return disable
            ring = rings.get(ident())
            if ring is None:
                ring = rings[ident()] = collections.deque(maxlen=_MOST)
            ring.append((now(), code, place, target))
            return None

        return note

    def intervals(self, thread: int, operations: Sequence[tuple[int, int]]) -> Intervals:
        """Returns a thread's branches between operations, given as (time, number) in order.

        Branches before the oldest operation are left out, since their interval may be cut off.
        """
        times = [at for at, _ in operations]
        found: dict[int, dict[Branch, list[int]]] = {}
        for at, code, place, target in list(self._rings.get(thread, ())):
            index = bisect.bisect_left(times, at)
            if 0 < index <= len(operations):
                last = operations[index - 1][1]
                branch = Branch(code_of(code), place)
                found.setdefault(last + 1, {}).setdefault(branch, []).append(target)
        return found


class Difference(NamedTuple):
    """A branch that went differently on two ranks, against its habit."""

    number: int  # of the operation that ends the interval
    branch: Branch


def first_difference(one: Intervals, other: Intervals) -> Difference | None:
    """Returns the first branch that went differently on two ranks though it never had before.

    A branch that has not gone alike before, such as `if rank == 0:`, has no habit. A difference
    after which many intervals are alike was one of a healthy program.
    """
    alike: collections.Counter[Branch] = collections.Counter()
    habit: set[Branch] = set()
    found: Difference | None = None
    healthy = 0
    for number in sorted(set(one) & set(other)):
        ours, theirs = one[number], other[number]
        differ = [
            branch
            for branch in _in_order(ours, theirs)
            if list(ours.get(branch, ())) != list(theirs.get(branch, ())) and branch not in habit
        ]
        healthy = 0 if differ else healthy + 1
        if healthy > _HEALTHY and found is not None:
            habit.add(found.branch)
            found = None
        for branch in differ:
            if found is None and alike[branch] >= _FEWEST:
                found = Difference(number, branch)
            if found is None:
                habit.add(branch)
        alike.update(branch for branch in ours if branch not in differ)
    return found


def _in_order(ours: Iterable[Branch], theirs: Iterable[Branch]) -> list[Branch]:
    """Returns the branches of both ranks, those that both came to first."""
    known = set(theirs)
    both = [branch for branch in ours if branch in known]
    return list(dict.fromkeys([*both, *ours, *theirs]))


def write(intervals: Intervals) -> str:
    """Returns intervals as text."""
    branches: dict[Branch, int] = {}
    told = [
        [number, [[branches.setdefault(branch, len(branches)), *to] for branch, to in ways.items()]]
        for number, ways in intervals.items()
    ]
    return json.dumps(
        {"branches": [[*branch.code, branch.place] for branch in branches], "intervals": told},
        separators=(",", ":"),
    )


def read(text: str) -> Intervals:
    """Returns the intervals of a text."""
    told = json.loads(text)
    branches = [Branch(Code(*code), place) for *code, place in told["branches"]]
    return {
        number: {branches[index]: to for index, *to in ways} for number, ways in told["intervals"]
    }
