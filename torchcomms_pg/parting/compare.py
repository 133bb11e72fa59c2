"""Which decision has sent two ranks to different places.

Both ranks were in one operation, their last common one, and have been sent from there to different
places: to their next operations, or to where a thread is now. A decision separates the two if one
way on leads one rank to its place, another way the other rank to its own, and one of these ways
does not lead to the other rank's place. A way does not lead past a call that always issues an
operation of the group, since neither rank has issued one on its way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from .flow import EXIT, Flow, Outcome
from .positions import Code, Frame, Operation, Sources, Stack

Calls = tuple[tuple[int, Frame], ...]  # by level
_DEEPEST = 40  # limit of the functions that are followed into each other


class Decision(NamedTuple):
    """A decision that may have sent the ranks apart, and the ways on of both, if they are known."""

    code: Code
    place: int
    level: int  # of the frame, from the outermost
    first: Outcome | None
    second: Outcome | None
    ends: tuple[int, int]  # places of both in this function, or EXIT
    calls: Calls = ()  # if one has left the function: the calls to it, by level


class Rank(NamedTuple):
    """One of the two ranks: its stack in the last common operation, and its next place."""

    last: Stack
    next: Stack
    operation: str  # in which it waits; "" if its thread may go on


class Unknown(Exception):  # noqa: N818
    """The positions do not tell where the ranks parted."""


class Comparison:
    """Compares stacks of two ranks.

    `opaque` tells of a file whether its decisions are of no interest, as in torch; `primitive`
    whether, besides, each call of its functions issues an operation.
    """

    def __init__(
        self,
        sources: Sources,
        history: Iterable[Operation],
        primitive: Callable[[str], bool],
        opaque: Callable[[str], bool],
    ) -> None:
        self._sources = sources
        self._primitive = primitive
        self._opaque = opaque
        # by code and place of a call: what it has called to issue operations; None for torch
        self._sites: dict[Code, dict[int, set[Code | None]]] = {}
        # the names of these operations
        self._names: dict[tuple[Code, int], set[str]] = {}
        self._always: dict[Code, bool] = {}
        for name, stack in {(operation.name, operation.stack) for operation in history}:
            self._note(name, stack)

    def shown(self, stack: Stack) -> Stack:
        """Returns the part of a stack that decides something: of the program's own frames.

        Instructions become places.
        """
        frames: list[Frame] = []
        for code, instruction in stack:
            flow = None if self._opaque(code.file) else self._sources.flow(code)
            frames.append(Frame(code, flow.place(instruction) if flow else instruction))
        while frames and self._opaque(frames[-1].code.file):
            frames.pop()
        return tuple(frames)

    def depends(self, stack: Stack) -> bool:
        """Returns whether a stack's operation depends on data of a library, as in a backward pass.

        That is, whether the program has called functions of which not every call issues one.
        """
        shown = len(self.shown(stack))
        return not all(self._primitive(code.file) for code, _ in stack[shown:])

    def decisions(self, first: Rank, second: Rank) -> list[Decision]:
        """Returns the decisions that may have separated two ranks, with stacks from `shown`.

        Raises Unknown if the positions do not even tell that the ranks have parted.
        """
        level = 0
        for one, other in zip(first.next, second.next, strict=False):
            if one != other:
                break
            level += 1
        if level in (len(first.next), len(second.next)):
            raise Unknown("one stack is a part of the other")
        one, other = first.next[level], second.next[level]
        if one.code != other.code:
            raise Unknown("different functions")
        self._refuse_if_late(level, first, second)
        self._refuse_if_late(level, second, first)
        self._refuse_if_to_match(level, first, second)
        self._refuse_if_to_match(level, second, first)
        found = self._level(level, first, second, False, ())
        merged: dict[tuple[Code, int], Decision] = {}
        for each in found:
            known = merged.get((each.code, each.place))
            if known is None or known == each:
                merged[each.code, each.place] = each
            else:
                merged[each.code, each.place] = each._replace(
                    first=known.first if known.first == each.first else None,
                    second=known.second if known.second == each.second else None,
                )
        return list(merged.values())

    def is_opaque(self, code: Code) -> bool:
        """Returns whether a function's decisions are of no interest."""
        return self._opaque(code.file)

    def flow(self, code: Code) -> Flow:
        """Returns a function's ways; raises Unknown if its source has changed or is missing."""
        flow = self._sources.flow(code)
        if flow is None:
            raise Unknown(f"{code.file} has changed since its import, or is not there")
        return flow

    def skips(self, code: Code, level: int, loop: int) -> list[Decision]:
        """Returns the decisions that may skip all operations of a loop's iteration.

        Their first way leads to an operation, the second to the next iteration. `loop`: the first
        place of the loop, such as its FOR_ITER.
        """
        flow = self.flow(code)
        body = [way.target for way in flow.outcomes(loop) if not way.jumps and not way.raises]
        return self._passing(code, level, body, loop)

    def skips_in_calls(self, code: Code, loop: int) -> list[Decision]:
        """Returns the decisions in functions called in a loop's iteration that may skip them all.

        Their first way leads to an operation, the second to the function's end.
        """
        flow = self.flow(code)
        body = [way.target for way in flow.outcomes(loop) if not way.jumps and not way.raises]
        return self._passing_in_calls(code, body, loop, {code})

    def _passing(self, code: Code, level: int, starts: list[int], end: int) -> list[Decision]:
        """Returns the decisions of a function that may lead from `starts` past all operations."""
        flow = self.flow(code)
        closed = self._closed(code)
        barred = lambda at: at == end or closed(at)  # noqa: E731
        inside = flow.forward(starts, barred)
        issuing = {at for at in inside if at != EXIT and closed(at)}
        to_first = set().union(*(flow.backward(at, barred) for at in issuing))
        to_second = flow.backward(end, barred)
        found = []
        for at in inside - {EXIT, end}:
            if flow.decides(at) and not closed(at):
                ways = self._decide(flow, at, to_first, to_second)
                if ways:
                    found.append(Decision(code, at, level, *ways, ends=(EXIT, EXIT)))
        return found

    def _passing_in_calls(
        self, code: Code, starts: list[int], end: int, known: set[Code]
    ) -> list[Decision]:
        flow = self.flow(code)
        closed = self._closed(code)
        barred = lambda at: at == end or closed(at)  # noqa: E731
        way = flow.forward(starts, barred) & flow.backward(end, barred)
        found = []
        for at in way - {EXIT, end}:
            for callee in self._sites.get(code, {}).get(at, ()):
                if callee is None or callee in known:
                    continue
                known.add(callee)
                start = [self.flow(callee).start()]
                found += self._passing(callee, -1, start, EXIT)
                found += self._passing_in_calls(callee, start, EXIT, known)
        return found

    def iterations(self, rank: Rank, level: int, loop: int) -> set[int]:
        """Returns how many iterations of a loop a rank may have begun since its last operation.

        Does not count iterations without an operation. `loop`: the place of the loop's FOR_ITER.
        """
        code, here = rank.next[level]
        flow = self.flow(code)
        closed = self._closed(code)
        barred = lambda at: at == loop or closed(at)  # noqa: E731
        follows = [way.target for way in flow.outcomes(loop) if not way.jumps]
        ends = [way.target for way in flow.outcomes(loop) if way.jumps]
        found = set()
        reached = flow.forward(flow.after(rank.last[level].instruction), barred)
        again = loop in reached
        if again:
            reached |= flow.forward(ends, barred)
        if here in reached:
            found.add(0)
        if again and here != loop and here in flow.forward(follows, barred):
            found.add(1)
        if rank.last[: level + 1] == rank.next[: level + 1]:
            found.add(0)  # still in the same call, perhaps
        return found

    def _note(self, name: str, stack: Stack) -> None:
        frames = self.shown(stack)
        known = [frame for frame in frames if not self._opaque(frame.code.file)]
        for caller, callee in zip(known, [*known[1:], None], strict=False):
            sites = self._sites.setdefault(caller.code, {})
            sites.setdefault(caller.instruction, set()).add(callee.code if callee else None)
            self._names.setdefault((caller.code, caller.instruction), set()).add(name)

    def _closed(self, code: Code) -> Callable[[int], bool]:
        sites = self._sites.get(code, {})
        closed = {
            place for place, callees in sites.items() if all(map(self.always_issues, callees))
        }
        return closed.__contains__

    def always_issues(self, code: Code | None) -> bool:
        """Returns whether each call of a function issues an operation."""
        if code is None:
            return True
        if code not in self._always:
            self._always[code] = False  # for a function that calls itself
            flow = self._sources.flow(code)
            if flow is not None:
                reached = flow.forward([flow.start()], self._closed(code))
                self._always[code] = EXIT not in reached
        return self._always[code]

    def starts(self, rank: Rank, prefix: Stack, code: Code, fresh: bool = False) -> set[int]:
        """Returns where a rank has been in a function after its last operation, or its start."""
        flow = self.flow(code)
        level = len(prefix)
        last = rank.last
        if fresh or last[:level] != prefix or len(last) <= level or last[level].code != code:
            return {flow.start()}
        starts = set(flow.after(last[level].instruction))
        if EXIT in flow.forward(starts, self._closed(code)) and self._comes_again(prefix):
            starts.add(flow.start())
        return starts

    def _comes_again(self, prefix: Stack) -> bool:
        """Returns whether some frame may repeat its call, so that the next is another one."""
        for code, place in prefix:
            if self._opaque(code.file):
                continue
            flow = self._sources.flow(code)
            if flow is None:
                return True  # unknown
            closed = self._closed(code)
            reached = flow.forward(flow.after(place), lambda at: at != place and closed(at))  # noqa: B023
            if place in reached:
                return True
        return False

    def _refuse_if_late(self, level: int, late: Rank, other: Rank) -> None:
        """Raises Unknown if a rank that is in no operation may only be slow."""
        if late.operation:
            return
        code, here = late.next[level]
        there = other.next[level].instruction
        flow = self.flow(code)
        prefix = late.next[:level]
        closed = self._closed(code)
        barred = lambda place: place == there or closed(place)  # noqa: E731
        starts = self.starts(late, prefix, code)
        stays = late.last[: level + 1] == late.next[: level + 1]  # in the same call, perhaps
        if not stays and here not in flow.forward(starts, barred):
            return  # it has passed the other rank's place
        onward = flow.forward([here, *(flow.after(here) if stays else ())], closed)
        if there in onward or (EXIT in onward and self._comes_again(prefix)):
            raise Unknown("a rank may be late")

    def _refuse_if_to_match(self, level: int, late: Rank, other: Rank) -> None:
        """Raises Unknown if a rank in no operation may still reach the other's on its own way.

        Two branches that call one operation each have sent the ranks to different places, and no
        rank waits because of that.
        """
        if late.operation or not other.operation:
            return
        code, there = other.next[level]
        others = self.flow(code)
        follows = others.forward(others.after(there), self._closed(code))
        own = [
            at for at in range(level, len(late.next)) if not self._opaque(late.next[at].code.file)
        ]
        for at in reversed(own):
            code, here = late.next[at]
            flow = self.flow(code)
            starts = [here] if at == own[-1] else flow.after(here)
            reached = flow.forward(starts, self._closed(code))
            calls = reached - follows if at == level else reached
            if any(other.operation in self._names.get((code, call), ()) for call in calls):
                raise Unknown("a rank may be late for another call of the operation")
            if EXIT not in reached:
                return

    def _own(self, stack: Stack, level: int) -> int | None:
        """Returns the next level whose frame is not opaque, or None."""
        for at in range(level, len(stack)):
            if not self._opaque(stack[at].code.file):
                return at
        return None

    def _fresh(self, stack: Stack, level: int) -> bool:
        """Returns whether a new call can lead to the frames from `level` on."""
        at = self._own(stack, level)
        while at is not None:
            code, place = stack[at]
            flow = self.flow(code)
            if place not in flow.forward([flow.start()], self._closed(code)):
                return False
            at = self._own(stack, at + 1)
        return True

    def _level(
        self, level: int, first: Rank, second: Rank, fresh: bool, calls: Calls
    ) -> list[Decision]:
        """Returns decisions in the function at `level` of `first`, and in those that it has called.

        `calls`: not empty if `second` has left the function. `fresh`: the call began after the last
        common operation.
        """
        if level > _DEEPEST:
            raise Unknown("too deep")
        prefix = first.next[:level]
        code, place = first.next[level]
        left = bool(calls)
        end = EXIT if left else second.next[level].instruction
        flow = self.flow(code)
        closed = self._closed(code)
        found: list[Decision] = []
        moves = True
        here = first.next[: level + 1]
        if not fresh and first.last[: level + 1] == here:
            inner = self._own(first.next, level + 1)
            if inner is not None and second.last[: level + 1] == here:
                found += self._level(inner, first, second, False, (*calls, (level, here[-1])))
                moves = self._fresh(first.next, level + 1)
        there = second.next[: level + 1]
        if not left and not fresh and second.last[: level + 1] == there:
            inner = self._own(second.next, level + 1)
            if inner is not None and first.last[: level + 1] == there:
                found += self._flipped(
                    self._level(inner, second, first, False, ((level, there[-1]),))
                )
                moves = moves and self._fresh(second.next, level + 1)
        if not moves:
            return found
        starts = self.starts(first, prefix, code, fresh)
        others = self.starts(second, prefix, code, fresh)
        of_first, of_second = flow.forward(starts, closed), flow.forward(others, closed)
        to_first = flow.backward(place, closed)
        to_second = flow.backward(end, closed)
        for at in of_first & of_second:
            if flow.decides(at) and not closed(at):
                decision = self._decide(flow, at, to_first, to_second)
                if decision:
                    found.append(
                        Decision(code, at, level, *decision, ends=(place, end), calls=calls)
                    )
        context = (code, level, (place, end), calls)
        found += self._raised(first, place, to_second, context)
        if place in of_second:
            found += self._passed(level, first, second, place, end, calls)
        if not left:
            turned = (code, level, (end, place), ())
            found += self._flipped(self._raised(second, end, to_first, turned))
            if end in of_first:
                found += self._flipped(self._passed(level, second, first, end, place, ()))
        return found

    def _raised(
        self,
        inside: Rank,
        place: int,
        to_other: set[int],
        context: tuple[Code, int, tuple[int, int], Calls],
    ) -> list[Decision]:
        """Returns the decision if an exception may have ended a call that the other rank is in."""
        code, level, ends, calls = context
        handler = self.flow(code).handler(place)
        if handler not in to_other or self._own(inside.next, level + 1) is None:
            return []
        raised = Outcome(handler, jumps=False, raises=True)
        return [Decision(code, place, level, None, raised, ends, calls)]

    def _passed(
        self, level: int, inside: Rank, past: Rank, place: int, end: int, calls: Calls
    ) -> list[Decision]:
        """Returns decisions in a call in which one rank is and which the other may have passed."""
        code = inside.next[level].code
        flow = self.flow(code)
        closed = self._closed(code)
        if closed(place) or end not in flow.forward(flow.after(place), closed):
            return []
        if not inside.operation:
            return []  # it is in some call that issues nothing
        inner = self._own(inside.next, level + 1)
        if inner is None:
            return []
        return self._level(inner, inside, past, True, (*calls, (level, inside.next[level])))

    @staticmethod
    def _decide(
        flow: Flow, at: int, to_first: set[int], to_second: set[int]
    ) -> tuple[Outcome | None, Outcome | None] | None:
        one = [each for each in flow.outcomes(at) if each.target in to_first]
        other = [each for each in flow.outcomes(at) if each.target in to_second]
        pairs = [
            (x, y)
            for x in one
            for y in other
            if x.target != y.target and (x.target not in to_second or y.target not in to_first)
        ]
        if not pairs:
            return None
        ones, others = {x for x, _ in pairs}, {y for _, y in pairs}
        return (
            next(iter(ones)) if len(ones) == 1 else None,
            next(iter(others)) if len(others) == 1 else None,
        )

    @staticmethod
    def _flipped(decisions: Iterable[Decision]) -> list[Decision]:
        return [
            each._replace(first=each.second, second=each.first, ends=each.ends[::-1])
            for each in decisions
        ]
