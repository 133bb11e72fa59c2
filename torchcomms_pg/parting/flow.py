"""The ways through a function, read from its bytecode.

A place is the offset of an instruction. The bytecode has every decision of the source as a jump:
`if`, `while`, `for`, `match`, short circuits, conditional expressions, comprehensions, `except` and
`with`.
"""

from __future__ import annotations

import bisect
import dis
from collections.abc import Callable, Iterable, Mapping
from types import CodeType
from typing import NamedTuple

EXIT = -1  # the place behind a function's return, or behind a generator's yield


class Outcome(NamedTuple):
    """One of the ways on from a decision."""

    target: int
    jumps: bool  # the instruction has jumped
    raises: bool = False  # the instruction has raised, and `target` is a handler


# Instructions that raise no exception, apart from interrupts.
_SAFE: tuple[str, ...] = (
    "CACHE",
    "COPY",
    "EXTENDED_ARG",
    "JUMP",
    "KW_NAMES",
    "LOAD_CONST",
    "LOAD_FAST",
    "NOP",
    "NOT_TAKEN",
)
_SAFE += ("POP_", "PRECALL", "PUSH_", "RESUME", "RETURN", "STORE_FAST", "SWAP", "END_FOR")
_ENDS = ("RETURN_VALUE", "RETURN_CONST")
_RAISES = ("RAISE_VARARGS", "RERAISE")


class Flow:
    """The control flow of one code object."""

    def __init__(self, code: CodeType) -> None:
        self.code = code
        self._instructions = {each.offset: each for each in dis.get_instructions(code)}
        self._offsets = list(self._instructions)
        self._positions = list(code.co_positions())
        self._handlers = sorted(
            (entry.start, entry.end, entry.target)
            for entry in dis.Bytecode(code).exception_entries  # type: ignore[attr-defined]
        )
        self._outcomes = {offset: self._after(offset) for offset in self._offsets}
        # An await's or a yield's loop decides nothing of the function's own.
        self._decides = {
            offset
            for offset, outcomes in self._outcomes.items()
            if len({outcome.target for outcome in outcomes}) > 1
            and self._instructions[offset].opname != "SEND"
        }

    def place(self, instruction: int) -> int:
        """Returns the place of a frame's `f_lasti`, which may lie in the instruction's caches."""
        return self._offsets[max(bisect.bisect_right(self._offsets, instruction) - 1, 0)]

    def name(self, place: int) -> str:
        """Returns the name of a place's instruction."""
        return self._instructions[place].opname

    def position(self, place: int) -> tuple[int, int, int, int] | None:
        """Returns first line and column, last line and column of a place; None if unknown."""
        line, last, column, end = self._positions[place // 2]
        if line is None or last is None or column is None or end is None:
            return None
        return line, column, last, end

    def line(self, place: int) -> int:
        """Returns the line of a place, or 0."""
        return self._positions[place // 2][0] or 0

    def outcomes(self, place: int) -> tuple[Outcome, ...]:
        """Returns the ways on from a place."""
        return self._outcomes[place]

    def decides(self, place: int) -> bool:
        """Returns whether a place has several ways on."""
        return place in self._decides

    def places(self) -> list[int]:
        """Returns all places of the function."""
        return self._offsets

    def before(self, place: int) -> str:
        """Returns the name of the instruction before a place, or ""."""
        index = bisect.bisect_left(self._offsets, place)
        return self.name(self._offsets[index - 1]) if index > 0 else ""

    def start(self) -> int:
        """Returns the function's first place."""
        return self._offsets[0]

    def forward(self, starts: Iterable[int], closed: Callable[[int], bool]) -> set[int]:
        """Returns the places that can be reached from `starts`, these included.

        No way leads on from a place that is `closed`.
        """
        seen: set[int] = set()
        left = list(starts)
        while left:
            place = left.pop()
            if place in seen:
                continue
            seen.add(place)
            if place != EXIT and not closed(place):
                left += [outcome.target for outcome in self._outcomes[place]]
        return seen

    def backward(self, end: int, closed: Callable[[int], bool]) -> set[int]:
        """Returns the places from which `end` can be reached, and `end` itself."""
        before: dict[int, list[int]] = {}
        for place, outcomes in self._outcomes.items():
            if not closed(place):
                for outcome in outcomes:
                    before.setdefault(outcome.target, []).append(place)
        seen: set[int] = set()
        left = [end]
        while left:
            place = left.pop()
            if place not in seen:
                seen.add(place)
                left += before.get(place, [])
        return seen

    def loops(self, place: int) -> set[int]:
        """Returns the first places of the loops around a place."""
        backwards = [
            (at, way.target)
            for at, ways in self._outcomes.items()
            for way in ways
            if way.jumps and way.target <= at
        ]
        return {first for at, first in backwards if place in self.backward(at, first.__eq__)}

    def after(self, place: int) -> list[int]:
        """Returns the places that follow a call that has returned."""
        return [outcome.target for outcome in self._outcomes[place] if not outcome.raises]

    def handler(self, place: int) -> int | None:
        """Returns the innermost handler of exceptions that are raised at a place."""
        found = [entry for entry in self._handlers if entry[0] <= place < entry[1]]
        return max(found)[2] if found else None

    def _after(self, place: int) -> tuple[Outcome, ...]:
        instruction = self._instructions[place]
        name = instruction.opname
        index = bisect.bisect_right(self._offsets, place)
        following = self._offsets[index] if index < len(self._offsets) else EXIT
        ways: list[Outcome] = []
        if name in _ENDS:
            return (Outcome(EXIT, jumps=False),)
        if name not in _RAISES:
            target = instruction.argval if instruction.opcode in _JUMPS else None
            if name.startswith("JUMP") and "_IF_" not in name and target is not None:
                ways.append(Outcome(target, jumps=True))
            else:
                ways.append(Outcome(following, jumps=False))
                if target is not None and not name.startswith("SETUP"):
                    ways.append(Outcome(target, jumps=True))
            if name == "YIELD_VALUE":
                ways.append(Outcome(EXIT, jumps=False))
        handler = self.handler(place)
        # Only throw() and close() of a coroutine that awaits lead to CLEANUP_THROW.
        if handler is not None and self._instructions[handler].opname == "CLEANUP_THROW":
            handler = None
        if handler is not None and not name.startswith(_SAFE):
            ways.append(Outcome(handler, jumps=False, raises=True))
        return tuple(ways)


_JUMPS = frozenset(dis.hasjrel) | frozenset(dis.hasjabs)


def codes_within(code: CodeType) -> Iterable[CodeType]:
    """Returns a module's code object and all that are nested in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_within(constant)


def flows_of(code: CodeType) -> Mapping[tuple[int, str], list[CodeType]]:
    """Returns the code objects of a compiled file, by first line and qualified name."""
    found: dict[tuple[int, str], list[CodeType]] = {}
    for each in codes_within(code):
        found.setdefault((each.co_firstlineno, each.co_qualname), []).append(each)
    return found
