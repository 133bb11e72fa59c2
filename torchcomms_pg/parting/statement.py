"""Statements of the source that decide, and what they read."""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Iterable
from typing import NamedTuple

from .compare import Decision
from .flow import EXIT, Flow
from .positions import Code

_SHOWN = 3  # limit of the values that are shown


class Statement(NamedTuple):
    """A statement that decides."""

    line: int
    text: str  # the first line of its source
    kind: str  # "if", "while", "for", "match", "try", "with" or "" for another
    # what decides, if it is an expression without a loop; of a loop over range(): whether the
    # iteration is the last one
    test: ast.expr | None
    reads: tuple[str, ...]  # expressions whose values explain the decision
    over: str = ""  # of a loop over a container that can be read: the container


def function_of(code: Code) -> str:
    """Returns the name of a function, for a comprehension the name of the function around it."""
    parts = [part for part in code.name.split(".") if part != "<locals>"]
    while len(parts) > 1 and parts[-1] in ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"):
        parts.pop()
    return parts[-1]


@functools.lru_cache(maxsize=16)
def _tree(file: str, text: str) -> ast.Module:
    return ast.parse(text)


def tree_of(file: str) -> ast.Module:
    """Returns the syntax tree of a file whose code has been compared with the running one."""
    return _tree(file, "".join(linecache.getlines(file)))


def statement_of(decision: Decision, flow: Flow, called: bool) -> Statement | None:
    """Returns the statement of a decision, or None if the source does not show it.

    `called`: the decision is which function a call has called.
    """
    place = flow.position(decision.place)
    if place is None:
        return None
    raises = any(each is not None and each.raises for each in (decision.first, decision.second))
    around = [
        node
        for node in ast.walk(tree_of(decision.code.file))
        if isinstance(node, ast.stmt) and _contains(node, place)
    ]
    around.sort(key=lambda node: (node.lineno, node.col_offset))
    if raises:
        return _catcher(decision.code.file, around, place)
    if called and around:
        call = call_at(flow, decision.code.file, decision.place)
        within = ast.walk(call.func) if call else ()
        indices = [each.slice for each in within if isinstance(each, ast.Subscript)]
        reads = [text for index in indices for text in reads_of(index)]
        return _make(decision.code.file, around[-1], "call", None, reads)
    loops = flow.name(decision.place) == "FOR_ITER"
    return _decider(decision.code.file, around[-1], place, loops) if around else None


def jumps(flow: Flow, decision: Decision, statement: Statement, holds: bool) -> bool | None:
    """Returns whether a decision jumps if its condition holds; None if unknown."""
    name = flow.name(decision.place)
    if name == "FOR_ITER":
        return None if holds else False
    negates = isinstance(statement.test, ast.UnaryOp) and isinstance(statement.test.op, ast.Not)
    if negates and flow.before(decision.place) != "UNARY_NOT":
        holds = not holds  # the instruction tests the operand
    if name.endswith("IF_FALSE"):
        return not holds
    if name.endswith("IF_TRUE"):
        return holds
    test = statement.test
    if name.endswith("NONE") and isinstance(test, ast.Compare) and len(test.ops) == 1:
        none = holds == isinstance(test.ops[0], ast.Is)
        return none != name.endswith("NOT_NONE")
    return None


class Counted(NamedTuple):
    """A loop over `range()` or `enumerate()`, whose variable counts its iterations."""

    place: int  # of its FOR_ITER
    variable: str
    line: int


def counted_loops(flow: Flow, file: str, places: Iterable[int]) -> list[Counted]:
    """Returns the loops around all places, if their variables count the iterations."""
    found = []
    positions = [flow.position(place) for place in places]
    for node in ast.walk(tree_of(file)):
        if not isinstance(node, ast.For) or not isinstance(node.iter, ast.Call):
            continue
        called = node.iter.func
        target = node.target
        if isinstance(target, ast.Tuple) and target.elts:
            target = target.elts[0]
        if not isinstance(called, ast.Name) or called.id not in ("range", "enumerate"):
            continue
        inside = all(
            at is not None and any(_contains(part, at) for part in node.body) for at in positions
        )
        if not inside or not isinstance(target, ast.Name):
            continue
        iterations = [
            place
            for place in flow.places()
            if flow.name(place) == "FOR_ITER"
            and (at := flow.position(place)) is not None
            and (_contains(node.iter, at) or at == _range(node))
        ]
        if len(iterations) == 1:
            found.append(Counted(iterations[0], target.id, node.lineno))
    return found


def line_of_return(
    flow: Flow, decision: Decision, target: int, closed: Iterable[int]
) -> int | None:
    """Returns the line of the `return` through which a rank has left, if there is only one."""
    barred = set(closed)
    reached = flow.forward([target], barred.__contains__)
    lines = {
        flow.line(place)
        for place in reached
        if place != EXIT and flow.name(place).startswith(("RETURN_VALUE", "RETURN_CONST"))
    }
    returns = {
        node.lineno
        for node in ast.walk(tree_of(decision.code.file))
        if isinstance(node, ast.Return)
    }
    return next(iter(lines)) if len(lines) == 1 and lines <= returns else None


def call_at(flow: Flow, file: str, place: int) -> ast.Call | None:
    """Returns the call at a place."""
    position = flow.position(place)
    found = [
        node
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.Call) and position is not None and _range(node) == position
    ]
    return found[0] if len(found) == 1 else None


def reads_of(test: ast.AST) -> tuple[str, ...]:
    """Returns the names, attributes, subscripts and lengths of an expression, the largest ones."""
    found: list[str] = []

    def visit(node: ast.AST) -> None:
        if is_readable(node):
            found.append(ast.unparse(node))
        elif isinstance(node, ast.Call):
            for each in (*node.args, *(keyword.value for keyword in node.keywords)):
                visit(each)
            if isinstance(node.func, ast.Attribute):
                visit(node.func.value)
        else:
            for part in ast.iter_child_nodes(node):
                if not isinstance(part, ast.Lambda):
                    visit(part)

    visit(test)
    return tuple(dict.fromkeys(found))[:_SHOWN]


def is_readable(node: ast.AST) -> bool:
    """Returns whether an expression reads only names, attributes, subscripts or a length."""
    if isinstance(node, ast.Name):
        return True
    if isinstance(node, ast.Attribute):
        return is_readable(node.value)
    if isinstance(node, ast.Subscript):
        index = node.slice
        return is_readable(node.value) and (isinstance(index, ast.Constant) or is_readable(index))
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "len"
        and len(node.args) == 1
        and not node.keywords
        and is_readable(node.args[0])
    )


_Range = tuple[int, int, int, int]


def _range(node: ast.expr | ast.stmt) -> _Range:
    return node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0


def _contains(node: ast.expr | ast.stmt, place: _Range) -> bool:
    line, column, last, end = _range(node)
    return (line, column) <= place[:2] and place[2:] <= (last, end)


def _first_line(file: str, line: int) -> str:
    return linecache.getline(file, line).strip()


def _make(
    file: str, node: ast.stmt, kind: str, test: ast.expr | None, reads: Iterable[str]
) -> Statement:
    return Statement(node.lineno, _first_line(file, node.lineno), kind, test, tuple(reads))


def _catcher(file: str, around: list[ast.stmt], place: _Range) -> Statement | None:
    """Returns the innermost `try` or `with` of whose body the place is a part."""
    for node in reversed(around):
        if isinstance(node, ast.Try | ast.TryStar | ast.With | ast.AsyncWith) and any(
            _contains(part, place) for part in node.body
        ):
            kind = "try" if isinstance(node, ast.Try | ast.TryStar) else "with"
            return _make(file, node, kind, None, ())
        if isinstance(node, ast.Try | ast.TryStar) and node.finalbody:
            return _make(file, node, "try", None, ())
    return None


def _reads_of_loop(loop: ast.For | ast.AsyncFor | ast.comprehension) -> tuple[str, ...]:
    targets = [part.id for part in ast.walk(loop.target) if isinstance(part, ast.Name)]
    named = [name for name in targets if not name.startswith("_")]
    return (*reads_of(loop.iter), *named)[:_SHOWN]


def _last_iteration(loop: ast.For | ast.AsyncFor) -> ast.expr | None:
    call, target = loop.iter, loop.target
    if (
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id == "range"
        and len(call.args) in (1, 2)
        and not call.keywords
        and isinstance(target, ast.Name)
    ):
        text = f"{target.id} + 1 >= {ast.unparse(call.args[-1])}"
        return ast.parse(text, mode="eval").body
    return None


def _decider(file: str, node: ast.stmt, place: _Range, loops: bool) -> Statement:
    exact = [
        part
        for part in ast.walk(node)
        if isinstance(part, ast.expr) and _range(part) == place and not isinstance(part, ast.Call)
    ]
    calls = [
        part for part in ast.walk(node) if isinstance(part, ast.Call) and _range(part) == place
    ]
    test = exact[0] if exact else calls[0] if calls else None
    if isinstance(test, ast.BoolOp | ast.IfExp):
        test = None  # the instruction tests a part of it
    if isinstance(node, ast.If | ast.While):
        kind = "if" if isinstance(node, ast.If) else "while"
        whole = None if isinstance(node.test, ast.BoolOp | ast.IfExp) else node.test
        return _make(file, node, kind, test or whole, reads_of(node.test))
    if isinstance(node, ast.For | ast.AsyncFor):
        made = _make(file, node, "for", _last_iteration(node), _reads_of_loop(node))
        return made._replace(over=ast.unparse(node.iter) if is_readable(node.iter) else "")
    if isinstance(node, ast.Match):
        return _make(file, node, "match", None, reads_of(node.subject))
    if isinstance(node, ast.Try | ast.TryStar):
        return _make(file, node, "try", None, ())
    if isinstance(node, ast.With | ast.AsyncWith):
        return _make(file, node, "with", None, ())
    if loops:
        found = [part for part in ast.walk(node) if isinstance(part, ast.comprehension)]
        return _make(file, node, "for", None, _reads_of_loop(found[0]) if len(found) == 1 else ())
    return _make(file, node, "", test, reads_of(test) if test else ())
