"""From the reports of two ranks to the place of their parting, and its text."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any, NamedTuple

from . import statement as statements
from .compare import Comparison, Decision, Rank, Unknown
from .flow import EXIT, Outcome
from .positions import (
    MOST_FRAMES,
    Code,
    Frame,
    Operation,
    Report,
    Sources,
    Stack,
    code_of,
    stack_of,
)
from .shift import first_difference
from .statement import Statement
from .values import Unreadable, evaluate, show, truth

_MOST_PLACES = 3

# Each thread's code, `f_lasti` and line, by its ident: the innermost frame first.
Stacks = Mapping[int, Sequence[tuple[CodeType, int, int]]]
# Returns the variables of a thread's frame, the outermost of which is 0; see `_C.variables_of`.
Variables = Callable[[int, int, CodeType], Mapping[str, object] | None]


class Side(NamedTuple):
    """One of the two ranks that are compared, with the ranks at the same place."""

    report: Report
    names: str  # "rank 1", "ranks 0, 2"
    name: str  # of the rank itself


class Place(NamedTuple):
    """A statement at which the ranks may have parted."""

    file: str
    line: int
    function: str
    statement: str


class Parting(NamedTuple):
    """What is known of where the ranks parted."""

    places: list[Place]  # one if it is known
    lines: list[str]  # the text, without the places

    def text(self, name: Callable[[str, int], str]) -> str:
        """Returns the lines for people. `name`: tells of a file and a line what to show."""
        told = [
            f"{name(file, line)} in {function}: `{text}`"
            for file, line, function, text in self.places
        ]
        if not told:
            return ""
        head = "the ranks parted at " + ("one of " if len(told) > 1 else "") + "; ".join(told)
        return "\n".join([head, *("  " + line for line in self.lines)])


class Reading(NamedTuple):
    """Expressions to read in a living frame of a rank."""

    thread: int
    level: int  # of the frame, from the outermost
    code: Code
    reads: dict[str, str]  # by what is shown, the expression in that frame
    test: str  # the condition in that frame, or ""


class _Loop(NamedTuple):
    """A loop in which both ranks were in their last common operation."""

    counted: statements.Counted
    level: int
    code: Code
    readings: tuple[Reading | None, Reading | None]
    # By how many iterations the first rank may be ahead; None if that is not known.
    ahead: frozenset[int] | None


class _Candidate(NamedTuple):
    decision: Decision
    statement: Statement
    readings: tuple[Reading | None, Reading | None]
    # Of a decision that skips an iteration: the code and the first place of the loop.
    skips: tuple[Code, int] | None = None


class Inquiry:
    """The question where two ranks have parted."""

    def __init__(
        self,
        first: Side,
        second: Side,
        group: str,
        number: int,
        primitive: Callable[[str], bool],
        opaque: Callable[[str], bool],
    ) -> None:
        self._sides = (first, second)
        self._group = group
        self._sources = Sources()
        history = [*first.report.operations, *second.report.operations]
        history = [operation for operation in history if operation.group == group]
        self._comparison = Comparison(self._sources, history, primitive, opaque)
        self._shown = self._comparison.shown
        self._number = number
        self._places: tuple[Operation | None, Operation | None] = (None, None)
        self._candidates: list[_Candidate] = []
        self._loops: list[_Loop] = []
        self._note: list[str] = []
        self._soft = False
        # Of each rank whether it has gone on, so that its values are of a later time.
        self._moved = (False, False)
        try:
            self._find()
        except Unknown:
            self._candidates = []

    @property
    def found(self) -> bool:
        """Returns whether there is any place at which the ranks may have parted."""
        return bool(self._candidates)

    def questions(self) -> tuple[str, str]:
        """Returns what to ask each of the two ranks, for `answer()`."""
        return (self._question(0), self._question(1))

    def conclude(self, answers: tuple[str, str]) -> Parting | None:
        """Returns where the ranks parted, from their answers; None if that is not known."""
        count = len(self._candidates)
        answered = [_read_answer(text, count + len(self._loops)) for text in answers]
        told = [each[:count] for each in answered]
        aligned = set()
        for at, loop in enumerate(self._loops):
            values = [each[count + at]["reads"].get(loop.counted.variable) for each in answered]
            ahead = _ahead(values)
            if ahead is None or loop.ahead is None:
                continue
            aligned.add((loop.code, loop.counted.place))
            if ahead not in loop.ahead:
                variable, line = loop.counted.variable, loop.counted.line
                return self._skipped(
                    loop.code,
                    loop.level,
                    loop.counted.place,
                    f"the ranks are in different iterations of the loop at line {line}:"
                    f" {variable} is {values[0]} on {self._sides[0].name},"
                    f" {values[1]} on {self._sides[1].name}",
                )
        chosen = self._choose(told, aligned)
        if not chosen:
            return None
        for index in chosen:
            if length := self._one_length(index, told):
                decision, statement, *_ = self._candidates[index]
                return self._skipped(
                    decision.code,
                    decision.level,
                    decision.place,
                    f"the loop at line {statement.line} has ended on one rank alone, and"
                    f" {statement.over} is {length} on both: a rank has skipped an operation",
                )
        places = []
        for index in chosen:
            decision, statement, *_ = self._candidates[index]
            place = Place(
                decision.code.file,
                statement.line,
                statements.function_of(decision.code),
                statement.text,
            )
            if place not in places:
                places.append(place)
        lines = list(self._note)
        if len(places) == 1:
            ways = "" if self._soft else self._ways(chosen[0])
            lines += [ways] if ways else []
            lines += self._differences(chosen, told)
        return Parting(places, lines) if len(places) <= _MOST_PLACES else None

    # ------------------------------------------------------------------ the operations

    def _find(self) -> None:
        by_number = [
            {
                operation.number: operation
                for operation in side.report.operations
                if operation.group == self._group
            }
            for side in self._sides
        ]
        if not by_number[0] or not by_number[1]:
            self._find_first(by_number)
            return
        newest = min(max(by_number[0]), max(by_number[1]))
        number = min(self._number, newest + 1)
        earlier = self._first_difference(by_number, number)
        if earlier is not None:
            number = earlier
        self._compare(by_number, number, back=earlier is not None)

    def _find_first(self, by_number: list[dict[int, Operation]]) -> None:
        if self._number == 1 and (by_number[0] or by_number[1]):
            self._compare(by_number, 1, back=False)

    def _compare(self, by_number: list[dict[int, Operation]], number: int, back: bool) -> None:
        ranks = []
        places = []
        stacks = []
        depends = False
        for known, side in zip(by_number, self._sides, strict=True):
            last = known.get(number - 1)
            if last is None and number > 1:
                raise Unknown("the last common operation is not recorded")
            operation = known.get(number)
            if operation is not None:
                thread, stack = operation.thread, operation.stack
            else:
                thread = last.thread if last else next(iter(side.report.now), 0)
                stack = side.report.now.get(thread, ())
            whole = (
                stack and len(stack) < MOST_FRAMES and (not last or len(last.stack) < MOST_FRAMES)
            )
            if not whole or (last is not None and last.thread != thread):
                raise Unknown("another thread")
            ranks.append(
                Rank(
                    self._shown(last.stack) if last else (),
                    self._shown(stack),
                    operation.name if operation else "",
                )
            )
            places.append(operation)
            stacks.append(stack)
            depends = depends or (operation is not None and self._comparison.depends(stack))
        self._places = (places[0], places[1])
        self._moved = (max(by_number[0], default=0) > number, max(by_number[1], default=0) > number)
        if back:
            self._tell_difference(number, ranks)
        if self._parts_in_a_call(ranks, stacks):
            return
        if ranks[0].next == ranks[1].next and places[0] and places[1]:
            self._soft = True
            self._softly(ranks)
            return
        decisions = self._comparison.decisions(*ranks)
        if not decisions and depends:
            self._soft = True
            self._softly(ranks)
            return
        for decision in decisions:
            self._add(decision, ranks)
        if not decisions:
            return
        if not back:
            self._add_loops(ranks)
        self._add_skips(ranks)

    def _add_skips(self, ranks: list[Rank]) -> None:
        """Adds the decisions by which a rank may have skipped an iteration before.

        The places of both would not show it.
        """
        for level, (one, other) in enumerate(zip(*(rank.next for rank in ranks), strict=False)):
            lasts = [rank.last[level] for rank in ranks if len(rank.last) > level]
            same = {one.code, other.code, *(last.code for last in lasts)}
            if len(lasts) < 2 or len(same) > 1:
                break
            if not self._comparison.is_opaque(one.code):
                flow = self._comparison.flow(one.code)
                places = {last.instruction for last in lasts}
                for loop in set.intersection(*map(flow.loops, places)):
                    for decision in [
                        *self._comparison.skips(one.code, level, loop),
                        *self._comparison.skips_in_calls(one.code, loop),
                    ]:
                        self._add(decision, ranks, skips=(one.code, loop))
            if one != other:
                break

    def _begun(self, at: int, rank: Rank, level: int, loop: int) -> set[int] | None:
        """Returns how many iterations of a loop a rank may have begun since its last common one.

        Up to now, when the loop's counter is read. None if that is not known.
        """
        begun = self._comparison.iterations(rank, level, loop)
        operation = self._places[at]
        report = self._sides[at].report
        later = [
            each
            for each in report.operations
            if operation and each.group == self._group and each.number > operation.number
        ]
        if operation is None or not later:
            return begun
        now = Operation("", 0, "", operation.thread, report.now.get(operation.thread, ()))
        before = rank.next
        for each in [*later, now]:
            shown = self._shown(each.stack)
            here = shown[: level + 1]
            if each is now and here == before[: level + 1]:
                break
            if each.thread != operation.thread or len(here) <= level:
                return None
            if here[:level] != before[:level] or here[level].code != before[level].code:
                return None
            more = self._comparison.iterations(Rank(before, shown, each.name), level, loop)
            begun = {one + other for one in begun for other in more}
            before = shown
        return begun or None

    def _add_loops(self, ranks: list[Rank]) -> None:
        for level, (one, other) in enumerate(zip(*(rank.next for rank in ranks), strict=False)):
            if one.code != other.code:
                break
            flow = self._sources.flow(one.code)
            if flow is None or self._comparison.is_opaque(one.code):
                continue
            lasts = [rank.last[level] for rank in ranks if len(rank.last) > level]
            if len(lasts) < 2 or any(last.code != one.code for last in lasts):
                break
            for counted in statements.counted_loops(
                flow, one.code.file, [last.instruction for last in lasts]
            ):
                reads = {counted.variable: counted.variable}
                readings = [self._living(at, level, one.code, reads, "") for at in (0, 1)]
                begun = [
                    self._begun(at, rank, level, counted.place) for at, rank in enumerate(ranks)
                ]
                ahead = None
                if begun[0] is not None and begun[1] is not None:
                    ahead = frozenset(x - y for x in begun[0] for y in begun[1])
                self._loops.append(
                    _Loop(counted, level, one.code, (readings[0], readings[1]), ahead)
                )
            if one != other:
                break

    def _parts_in_a_call(self, ranks: list[Rank], stacks: list[Stack]) -> bool:
        """Looks for a call by which the ranks entered two functions that both issue operations."""
        comparison = self._comparison
        level, own = 0, -1
        for one, other in zip(*stacks, strict=False):
            if one.code != other.code:
                break
            opaque = comparison.is_opaque(one.code)
            if not opaque:
                flow = self._sources.flow(one.code)
                places = [flow.place(each.instruction) if flow else each for each in (one, other)]
                if places[0] != places[1]:
                    return False
                own = level
            level += 1
        if own < 0 or level >= min(map(len, stacks)) or None in self._places:
            return False
        callees = [stack[level].code for stack in stacks]
        code, place = ranks[0].next[own]
        if not all(
            comparison.is_opaque(each) or comparison.always_issues(each) for each in callees
        ):
            raise Unknown("a rank may have passed one of the functions")
        self._add(Decision(code, place, own, None, None, (place, place)), ranks, called=True)
        if self._candidates:
            told = [
                f"{side.name} has called {statements.function_of(callee)}"
                for side, callee in zip(self._sides, callees, strict=True)
            ]
            self._note.append("; ".join(told))
        return True

    def _first_difference(self, by_number: list[dict[int, Operation]], number: int) -> int | None:
        """Returns the first operation that is not the same call on both ranks, or None.

        The ranks call different operations, or from then on one rank is ahead by some calls.
        """
        one, other = by_number
        named = (at for at in set(one) & set(other) if one[at].name != other[at].name)
        shown = [
            {at: self._shown(known[at].stack) for at in known if at <= number}
            for known in by_number
        ]
        ahead = first_difference(*shown)
        found = [at for at in (*named, ahead) if at is not None and at < number]
        return min(found, default=ahead)

    def _tell_difference(self, number: int, ranks: list[Rank]) -> None:
        names = [_name(operation, number) for operation in self._places]
        same = names[0] == names[1]
        level = next(
            (at for at, (x, y) in enumerate(zip(*(r.next for r in ranks), strict=False)) if x != y),
            -1,
        )
        lines = []
        for rank, side, name in zip(ranks, self._sides, names, strict=True):
            code, place = rank.next[level]
            line = self._comparison.flow(code).line(place)
            what = "" if same else f"{name} at "
            lines.append(f"{side.name}: {what}line {line} in {statements.function_of(code)}")
        self._note.append(
            f"since {names[0] if same else f'#{number}'} the ranks have called"
            f" {'from different lines' if same else 'different operations'} ({', '.join(lines)})"
        )

    # ------------------------------------------------------------------ candidates

    def _add(
        self,
        decision: Decision,
        ranks: list[Rank],
        called: bool = False,
        skips: tuple[Code, int] | None = None,
    ) -> None:
        flow = self._comparison.flow(decision.code)
        statement = statements.statement_of(decision, flow, called)
        if statement is None:
            raise Unknown("the source does not show a decision")
        readings = tuple(self._reading(at, decision, statement, ranks) for at in (0, 1))
        self._candidates.append(_Candidate(decision, statement, (readings[0], readings[1]), skips))

    def _softly(self, ranks: list[Rank]) -> None:
        """Adds all decisions before the operations: only their values can tell."""
        for level, (code, place) in enumerate(ranks[0].next):
            if self._comparison.is_opaque(code):
                continue
            if ranks[1].next[level : level + 1] != ranks[0].next[level : level + 1]:
                break
            flow = self._comparison.flow(code)
            to = flow.backward(place, lambda _: False)
            starts = self._comparison.starts(ranks[0], ranks[0].next[:level], code)
            for at in flow.forward(starts, lambda _: False):
                if flow.decides(at) and at in to:
                    jumps = [each for each in flow.outcomes(at) if not each.raises]
                    if len({each.target for each in jumps}) > 1:
                        ends = (place, place)
                        self._add(Decision(code, at, level, None, None, ends), ranks)

    def _reading(
        self, at: int, decision: Decision, statement: Statement, ranks: list[Rank]
    ) -> Reading | None:
        """Returns what to read of a decision on a rank: in its frame, or in the caller's."""
        reads = {text: text for text in statement.reads}
        test = ast.unparse(statement.test) if statement.test is not None else ""
        level, code = decision.level, decision.code
        if decision.ends[at] == EXIT:
            chain = list(decision.calls)
            names: dict[str, str] = {}
            arguments = self._arguments(chain, decision)
            if arguments is None:
                return None
            level, code, names = arguments
            reads = {
                shown: text for shown in reads if (text := _replaced(shown, names)) is not None
            }
            test = _replaced(test, names) or "" if test else ""
        return self._living(at, level, code, reads, test)

    def _living(
        self, at: int, level: int, code: Code, reads: dict[str, str], test: str
    ) -> Reading | None:
        """Returns what to read in a rank's frame, or None if the frame is gone."""
        operation = self._places[at]
        side = self._sides[at]
        thread = operation.thread if operation else next(iter(side.report.now), 0)
        if not operation:
            last = [each for each in side.report.operations if each.group == self._group]
            thread = last[-1].thread if last else thread
        now = side.report.now.get(thread, ())
        if level >= len(now) or now[level].code != code:
            return None
        return Reading(thread, level, code, reads, test)

    def _arguments(
        self, chain: list[tuple[int, Frame]], decision: Decision
    ) -> tuple[int, Code, dict[str, str]] | None:
        """Returns the frame that has called a function that was left, and the names there.

        The frame, at its level, has for each parameter an expression.
        """
        if len(chain) != 1:
            return None
        level, (code, place) = chain[0]
        flow = self._comparison.flow(code)
        call = statements.call_at(flow, code.file, place)
        if call is None or any(isinstance(each, ast.Starred) for each in call.args):
            return None
        callee = self._comparison.flow(decision.code).code
        parameters = callee.co_varnames[: callee.co_argcount]
        values: list[ast.expr] = list(call.args)
        if len(values) < len(parameters) and isinstance(call.func, ast.Attribute):
            if parameters[:1] == ("self",):
                values.insert(0, call.func.value)
        names = {name: ast.unparse(value) for name, value in zip(parameters, values, strict=False)}
        for keyword in call.keywords:
            if keyword.arg in parameters:
                names[keyword.arg] = ast.unparse(keyword.value)
        return level, code, names

    # ------------------------------------------------------------------ values

    def _question(self, at: int) -> str:
        asked = [each.readings[at] for each in self._candidates]
        return json.dumps(asked + [each.readings[at] for each in self._loops])

    def _choose(
        self, told: list[list[dict[str, Any]]], aligned: set[tuple[Code, int]]
    ) -> list[int]:
        """Returns the candidates that may be right, by their values.

        `aligned`: the loops of which both ranks are in one iteration.
        """
        everyone = [at for at, each in enumerate(self._candidates) if each.skips not in aligned]
        if self._soft:
            states = [self._reads_differ(at, told) for at in everyone]
            differ = [at for at in everyone if states[at]]
            places = {self._place_of(at) for at in differ}
            known = all(
                states[at] is not None or self._candidates[at].statement.kind in ("for", "loop")
                for at in everyone
            )
            return differ if len(places) == 1 and known else []
        if len({self._place_of(at) for at in everyone}) == 1:
            return everyone
        ways = {at: self._ways_now(at, told) for at in everyone}
        left = [at for at in everyone if not any(self._refutes(at, by, ways) for by in everyone)]
        return left or everyone

    def _one_length(self, index: int, told: list[list[dict[str, Any]]]) -> str:
        """Returns what a loop is over that one rank has left, if it is equally long on both.

        The ranks have not parted at such a loop: one has gone through an iteration without an
        operation before. Returns "" for other decisions, and if the lengths differ or are unknown.
        """
        decision, statement, *_ = self._candidates[index]
        ways = (decision.first, decision.second)
        if not statement.over or ways[0] is None or ways[1] is None:
            return ""
        if ways[0].jumps == ways[1].jumps:
            return ""
        lengths = {side[index]["reads"].get(statement.over) for side in told}
        length = lengths.pop()
        return length if not lengths and length and length.startswith("a ") else ""

    def _skipped(self, code: Code, level: int, place: int, why: str) -> Parting | None:
        """Returns the decision that lets a rank skip an iteration's operations, if there is one."""
        flow = self._comparison.flow(code)
        found = {
            statement
            for decision in self._comparison.skips(code, level, place)
            if (statement := statements.statement_of(decision, flow, False)) is not None
        }
        places = {
            Place(code.file, each.line, statements.function_of(code), each.text) for each in found
        }
        return Parting(list(places), [*self._note, why]) if len(places) == 1 else None

    def _place_of(self, at: int) -> tuple[str, int]:
        decision, statement, *_ = self._candidates[at]
        return decision.code.file, statement.line

    def _reads_differ(self, at: int, told: list[list[dict[str, Any]]]) -> bool | None:
        """Returns whether values of a decision differ between the ranks; None if unknown."""
        if any(self._moved):
            return None
        reads = self._candidates[at].statement.reads
        pairs = [tuple(side[at]["reads"].get(text) for side in told) for text in reads]
        if any(None not in pair and pair[0] != pair[1] for pair in pairs):
            return True
        return False if pairs and not any(None in pair for pair in pairs) else None

    def _ways_now(
        self, at: int, told: list[list[dict[str, Any]]]
    ) -> tuple[Outcome | None, Outcome | None]:
        """Returns the way of each rank by a condition's present values; None if unknown."""
        decision, statement, *_ = self._candidates[at]
        flow = self._comparison.flow(decision.code)
        ways = []
        for side, moved in zip(told, self._moved, strict=True):
            holds = None if moved else side[at]["test"]
            jumps = None if holds is None else statements.jumps(flow, decision, statement, holds)
            ways.append(
                next(
                    (
                        way
                        for way in flow.outcomes(decision.place)
                        if jumps is not None and not way.raises and way.jumps == jumps
                    ),
                    None,
                )
            )
        return ways[0], ways[1]

    def _refutes(
        self, at: int, by: int, ways: Mapping[int, tuple[Outcome | None, Outcome | None]]
    ) -> bool:
        """Returns whether values show that a rank has not gone the way of a candidate.

        A condition's last value says which way the rank has gone last. If that way does not lead to
        another decision of the same loop, the rank has not reached that decision since.
        """
        decision = self._candidates[at].decision
        other = self._candidates[by].decision
        for side in (0, 1):
            went, taken = ways[by][side], (decision.first, decision.second)[side]
            if went is None:
                continue
            if at == by:
                if taken is not None and went != taken:
                    return True
            elif decision.code == other.code and decision.level == other.level:
                flow = self._comparison.flow(decision.code)
                none = lambda _: False  # noqa: E731
                ahead = flow.forward([decision.place], none)
                again = flow.forward([each.target for each in flow.outcomes(other.place)], none)
                if (
                    other.place in ahead
                    and decision.place in again
                    and decision.place not in flow.forward([went.target], none)
                ):
                    return True
        return False

    def _differences(self, chosen: list[int], told: list[list[dict[str, Any]]]) -> list[str]:
        lines: list[str] = []
        for index in chosen:
            for text in self._candidates[index].statement.reads:
                values = [side[index]["reads"].get(text) for side in told]
                if None not in values and values[0] != values[1]:
                    line = (
                        f"now {text} is {values[0]} on {self._sides[0].name},"
                        f" {values[1]} on {self._sides[1].name}"
                    )
                    if line not in lines:
                        lines.append(line)
        return lines

    # ------------------------------------------------------------------ text

    def _ways(self, chosen: int) -> str:
        decision, statement, _, skips = self._candidates[chosen]
        if skips is not None:
            code, loop = skips
            line = self._comparison.flow(code).line(loop)
            return f"a rank has gone through the loop at line {line} without an operation"
        told = []
        for at, way in ((0, decision.first), (1, decision.second)):
            side = self._sides[at]
            did = self._did(at, decision, statement, way)
            told.append(f"{side.names} {did}")
        if decision.ends[1] == EXIT:
            told.reverse()
        return "; ".join(told)

    def _did(self, at: int, decision: Decision, statement: Statement, way: Outcome | None) -> str:
        flow = self._comparison.flow(decision.code)
        function = statements.function_of(decision.code)
        end = decision.ends[at]
        did = ""
        if way is not None and way.raises:
            what = "try" if statement.kind == "try" else "with"
            did = f"left the `{what}` by an exception"
        elif (
            statement.kind == "for" and way is not None and flow.name(decision.place) == "FOR_ITER"
        ):
            did = "found the loop's end" if way.jumps else "went on with the loop"
        operation = self._places[at]
        if end == EXIT:
            line = None
            if way is not None:
                line = statements.line_of_return(flow, decision, way.target, ())
            then = f"returned at line {line}" if line else f"left {function}"
        elif operation is not None:
            then = f"went on to {_name(operation, operation.number)} at line {flow.line(end)}"
        else:
            then = f"went on to line {flow.line(end)}"
        return f"{did} and {then}" if did else then


def _name(operation: Operation | None, number: int) -> str:
    return f"{operation.name if operation else 'operation'} #{number}"


def _ahead(values: list[Any]) -> int | None:
    """Returns by how many iterations the first rank is ahead, by a loop's counter, or None."""
    try:
        one, other = (int(value) for value in values)
    except (TypeError, ValueError):
        return None
    return one - other


class _Names(ast.NodeTransformer):
    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = names
        self.missing = False

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id == "len":
            return node
        text = self.names.get(node.id)
        if text is None:
            self.missing = True
            return node
        return ast.parse(text, mode="eval").body


def _replaced(text: str, names: Mapping[str, str]) -> str | None:
    """Returns an expression with a function's parameters replaced; None if it reads other names."""
    replacer = _Names(names)
    tree = replacer.visit(ast.parse(text, mode="eval"))
    return None if replacer.missing else ast.unparse(tree)


def answer(question: str, stacks: Stacks, variables: Variables) -> str:
    """Returns the values that a question asks for, of this process's threads."""
    told: list[dict[str, Any] | None] = []
    for asked in json.loads(question):
        told.append(None if asked is None else _answer_one(Reading(*asked), stacks, variables))
    return json.dumps(told)


def _answer_one(reading: Reading, stacks: Stacks, variables: Variables) -> dict[str, Any] | None:
    calls = stacks.get(reading.thread, [])
    if reading.level >= len(calls):
        return None
    code = calls[-1 - reading.level][0]
    if tuple(code_of(code)) != tuple(reading.code):
        return None
    names = variables(reading.thread, reading.level, code)
    if names is None:
        return None
    reads = {}
    for shown, text in reading.reads.items():
        try:
            reads[shown] = show(evaluate(ast.parse(text, mode="eval"), names))
        except (Unreadable, SyntaxError):
            continue
    test = None
    if reading.test:
        try:
            test = truth(evaluate(ast.parse(reading.test, mode="eval"), names))
        except (Unreadable, SyntaxError):
            test = None
    return {"reads": reads, "test": test}


def _read_answer(text: str, count: int) -> list[dict[str, Any]]:
    told = json.loads(text) if text else []
    none: dict[str, Any] = {"reads": {}, "test": None}
    return [each or none for each in told] + [none] * (count - len(told))


def now_of(stacks: Stacks, threads: set[int]) -> dict[int, Stack]:
    """Returns the places of this process's threads."""
    return {
        thread: stack_of([(code, at) for code, at, _ in stacks[thread]])
        for thread in threads & set(stacks)
    }
