"""The answer as a page: roles of ranks, findings, what is moved, one step of each role."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torchcomms_pg.plan.answer import Answer
from torchcomms_pg.plan.ranges import as_ranges, spans
from torchcomms_pg.plan.report import head, last_line, volume_rows
from torchcomms_pg.plan.steps import Step, step_of
from torchcomms_pg.plan.volume import volumes
from torchcomms_pg.trace.dumps import Entry
from torchcomms_pg.trace.page import page

T = TypeVar("T")

# They bound the page to less than 2 MB.
_MOST_ROLES = 64  # most roles whose calls are shown
_MOST_CALLS = 2000  # most calls of a role
_MOST_TEXT = 300_000  # most letters of calls, of families and of stacks
_MOST_FINDINGS = 100
_MOST_LETTERS = 3000  # most letters of a finding, or of an error
_MOST_RANGES = 20_000  # most ranges of ranks of groups
_STACK = 8  # most lines of Python of a call


def html(answer: Answer, step: int | None = None) -> str:
    """Returns a self-contained page. Its timeline has one step, the last if ``step`` is None.

    Raises:
        ValueError: the step is none of the answer's.
    """
    return page("torchcomms_pg.plan", "plan.html", _data(answer, step_of(answer, step)))


def _data(answer: Answer, step: Step) -> dict[str, Any]:
    """Returns what the page shows.

    Ranks are ranges: first, last and step. A role has all ranks that call the same in the step, and
    its calls as indices of ``calls``. An element of ``calls`` has a text, the index of a family,
    and the index of a stack. An index may lie beyond its list, which has a limited length.
    """
    calls = _Calls()
    roles: dict[tuple[int, ...], list[int]] = {}
    for ranks in answer.roles.ranks.values():
        entries = step.entries[ranks[0]]
        roles.setdefault(tuple(map(calls.number, entries)), []).extend(ranks)
    run = answer.programs.keys()
    shape, names = _mesh(answer)
    findings = [
        {"text": str(hazard)[:_MOST_LETTERS], "ranks": spans([*hazard.ranks, *hazard.others])}
        for hazard in answer.hazards.found[:_MOST_FINDINGS]
    ]
    failed = [
        {"text": f"{as_ranges(ranks)} failed:\n{error[-_MOST_LETTERS:]}", "ranks": spans(ranks)}
        for error, ranks in list(answer.failed.items())[:_MOST_FINDINGS]
    ]
    shown = sorted(roles.items(), key=lambda role: min(role[1]))
    return {
        "summary": "\n".join([*head(answer), last_line(answer)]),
        "bad": answer.exit_code != 0,
        "size": answer.job.size,
        "per_host": answer.job.per_host,
        "mesh": [[name, size] for name, size in zip(names, shape, strict=True)],
        "roles": [
            {
                "ranks": spans(ranks),
                "run": spans(rank for rank in ranks if rank in run),
                "calls": key[:_MOST_CALLS] if number < _MOST_ROLES else (),
                "count": len(key),
            }
            for number, (key, ranks) in enumerate(shown)
        ],
        "groups": list(_groups(answer)),
        **calls.data(),
        "findings": [*failed, *findings],
        "more_findings": max(0, len(answer.hazards.found) - _MOST_FINDINGS),
        "not_covered": answer.hazards.not_covered,
        "volume": volume_rows(volumes(answer.dumps, answer.job.per_host)),
        "step": str(step),
    }


def _mesh(answer: Answer) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Returns shape and names of the mesh of most dimensions; hosts and ranks if no mesh exists."""
    job = answer.job
    meshes = answer.programs[min(answer.programs)].meshes
    shape, names = max(meshes, key=lambda mesh: len(mesh[0]), default=((), ()))
    if len(shape) < 2:
        return (-(-job.size // job.per_host), job.per_host), ("host", "rank")
    return shape, names or tuple(f"dimension {at}" for at in range(len(shape)))


def _groups(answer: Answer) -> Iterable[tuple[str, list[tuple[int, int, int]]]]:
    """Yields the family's name and the ranks of groups, except of those with all ranks."""
    left = _MOST_RANGES
    for family in answer.roles.families.all:
        for ranks in {ranks for ranks, _, _ in family.at.values()}:
            if len(ranks) < answer.job.size:
                found = spans(ranks)
                left -= len(found)
                if left < 0:
                    return
                yield family.name, found


def _distance(entry: Entry, other: int | None) -> str:
    """Returns how far a message's other rank is in the group, such as ``+1``, or ``any``."""
    if other is None:
        return "any"
    ranks = entry.group.ranks
    far = (ranks.index(other) - ranks.index(entry.rank)) % len(ranks)
    return f"{far - len(ranks) if 2 * far > len(ranks) else far:+d}"


class _Calls:
    """Numbers different calls, families of groups and stacks."""

    def __init__(self) -> None:
        self._families: dict[str, int] = {}
        self._stacks: dict[str, int] = {}
        self._known: dict[tuple[str, int, int], int] = {}

    def number(self, entry: Entry) -> int:
        """Returns a call's number."""
        group = entry.group
        told = group.description not in ("", "undefined")
        family = group.description.removeprefix("mesh_") if told else f"group {group.name}"
        what = entry.what
        if entry.p2p:
            other = entry.receiver if entry.op == "send" else entry.sender
            what = f"{entry.op} {_distance(entry, other)} ({entry.numel} x {entry.dtype})"
        stack = "\n".join(map(str, entry.frames[:_STACK]))
        place = self._families.setdefault(family, len(self._families))
        key = (what, place, self._stacks.setdefault(stack, len(self._stacks)))
        return self._known.setdefault(key, len(self._known))

    def data(self) -> dict[str, Any]:
        """Returns the calls, families and stacks, of each the first ones."""
        return {
            "calls": _some(self._known, lambda call: len(call[0]) + 16),
            "families": _some(self._families, len),
            "stacks": _some(self._stacks, len),
        }


def _some(values: Iterable[T], letters: Callable[[T], int]) -> list[T]:
    """Returns the first of the values, as many as have not too many letters."""
    count = itertools.accumulate(map(letters, values))
    return [value for value, total in zip(values, count, strict=False) if total <= _MOST_TEXT]
