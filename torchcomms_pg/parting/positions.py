"""Where ranks have been and are: the texts that two ranks exchange after a verdict."""

from __future__ import annotations

import functools
import hashlib
import json
import linecache
import sys
from collections.abc import Mapping, Sequence
from types import CodeType
from typing import Any, NamedTuple

from .flow import Flow, flows_of

# Limit of a source's size. Larger files are mostly generated.
_MOST_SOURCE = 2_000_000

MOST_FRAMES = 64  # of a recorded stack; a stack with as many may lack its outer frames


class Code(NamedTuple):
    """A code object, as other processes know it."""

    file: str
    line: int
    name: str
    digest: str


class Frame(NamedTuple):
    """A call that a thread is in: its code and the instruction, `f_lasti`."""

    code: Code
    instruction: int


Stack = tuple[Frame, ...]  # the outermost frame first


class Operation(NamedTuple):
    """An operation of a group as a rank has issued it."""

    group: str
    number: int  # among the group's collectives
    name: str
    thread: int
    stack: Stack


class Report(NamedTuple):
    """What a rank tells of itself: its last collectives and its threads."""

    rank: int
    operations: list[Operation]  # the oldest first
    now: dict[int, Stack]  # by thread


@functools.lru_cache(maxsize=4096)
def code_of(code: CodeType) -> Code:
    """Returns the description of a code object."""
    content = (code.co_code, code.co_exceptiontable, code.co_names, code.co_varnames)
    digest = hashlib.sha256(repr(content).encode()).hexdigest()[:16]
    return Code(code.co_filename, code.co_firstlineno, code.co_qualname, digest)


def write(report: Report) -> str:
    """Returns a report as text. Codes and stacks that occur often are written once."""
    codes: dict[Code, int] = {}
    stacks: dict[Stack, int] = {}
    for stack in [*(each.stack for each in report.operations), *report.now.values()]:
        stacks.setdefault(stack, len(stacks))
        for frame in stack:
            codes.setdefault(frame.code, len(codes))
    groups = list(dict.fromkeys(each.group for each in report.operations))
    names = list(dict.fromkeys(each.name for each in report.operations))
    return json.dumps(
        {
            "python": sys.version,
            "rank": report.rank,
            "codes": list(codes),
            "stacks": [[[codes[code], at] for code, at in stack] for stack in stacks],
            "groups": groups,
            "names": names,
            "operations": [
                [groups.index(group), number, names.index(name), thread, stacks[stack]]
                for group, number, name, thread, stack in report.operations
            ],
            "now": [[thread, stacks[stack]] for thread, stack in report.now.items()],
        },
        separators=(",", ":"),
    )


def read(text: str) -> Report | None:
    """Returns the report of a text; None if another version of Python has written it."""
    told = json.loads(text)
    if told.get("python") != sys.version:
        return None  # instructions differ between versions
    codes = [Code(*code) for code in told["codes"]]
    stacks = [tuple(Frame(codes[code], at) for code, at in stack) for stack in told["stacks"]]
    return Report(
        told["rank"],
        [
            Operation(told["groups"][group], number, told["names"][name], thread, stacks[stack])
            for group, number, name, thread, stack in told["operations"]
        ],
        {thread: stacks[stack] for thread, stack in told["now"]},
    )


def stack_of(calls: Sequence[tuple[CodeType, int]]) -> Stack:
    """Returns a stack, from its frames' codes and instructions, the innermost first."""
    return tuple(Frame(code_of(code), instruction) for code, instruction in reversed(calls))


class Sources:
    """The functions of source files, as they are in these files now."""

    def __init__(self) -> None:
        self._files: dict[str, Mapping[tuple[int, str], list[CodeType]]] = {}
        self._flows: dict[Code, Flow | None] = {}

    def flow(self, code: Code) -> Flow | None:
        """Returns the ways through a function.

        None if its source is missing, or has changed since the process has read it.
        """
        if code not in self._flows:
            known = self._compiled(code.file).get((code.line, code.name), [])
            same = [each for each in known if code_of(each).digest == code.digest]
            self._flows[code] = Flow(same[0]) if len(same) == 1 else None
        return self._flows[code]

    def lines(self, file: str) -> list[str]:
        """Returns a file's lines."""
        return linecache.getlines(file)

    def _compiled(self, file: str) -> Mapping[tuple[int, str], list[CodeType]]:
        if file not in self._files:
            self._files[file] = {}
            linecache.checkcache(file)
            text = "".join(self.lines(file))
            if 0 < len(text) < _MOST_SOURCE:
                try:
                    compiled: Any = compile(text, file, "exec", dont_inherit=True)
                except (SyntaxError, ValueError):
                    return {}
                self._files[file] = flows_of(compiled)
        return self._files[file]
