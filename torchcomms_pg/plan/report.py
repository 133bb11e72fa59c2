"""The answer as text and as JSON."""

from __future__ import annotations

from typing import Any

from torchcomms_pg.plan.answer import Answer
from torchcomms_pg.plan.ranges import as_ranges
from torchcomms_pg.plan.volume import Volume, volumes
from torchcomms_pg.trace.dumps import Entry
from torchcomms_pg.trace.hazards import Hazard

_MOST_ROLES = 16  # most lines on roles, and on memory


def as_text(answer: Answer) -> str:
    """Returns the report, without the line of the exit code."""
    blocks = ["\n".join(head(answer))]
    for error, ranks in answer.failed.items():
        blocks.append(f"{as_ranges(ranks)} failed:\n{error.strip()}")
    blocks.append(_hazards(answer))
    if moved := volumes(answer.dumps, answer.job.per_host):
        blocks.append("\n".join(_volume_table(moved)))
    if memory := _memory(answer):
        blocks.append("\n".join(memory))
    return "\n\n".join(blocks)


def last_line(answer: Answer) -> str:
    """Returns the line of the exit code."""
    if answer.exit_code == 2 and not answer.code:
        return "No operation of a group was called: exit code 2"
    count = len(answer.hazards.found)
    line = f"{count or 'no'} hazard{'' if count == 1 else 's'}: exit code {answer.exit_code}"
    return line + (", the program's own" if answer.code else "")


def head(answer: Answer) -> list[str]:
    """Returns the lines on what was run."""
    job, roles = answer.job, answer.roles
    judged = sum(map(len, roles.ranks.values()))
    calls = sum(len(dump.entries) for dump in answer.dumps.values())
    lines = [
        f"{judged} of {job.size} ranks, {job.per_host} on a host: {len(answer.programs)} were run, "
        f"of {len(roles.ranks)} roles; {calls} operations",
        *roles.notes,
    ]
    for shape, names in answer.programs[min(answer.programs)].meshes:
        sizes = (f"{names[at]} {size}" if names else str(size) for at, size in enumerate(shape))
        lines.append(f"mesh: {' x '.join(sizes)}")
    return lines


def _hazards(answer: Answer) -> str:
    text = str(answer.hazards)
    return text.replace("No hazard for NCCL found.", "No hazard found.", 1)


def size_text(count: float) -> str:
    """Returns a number of bytes as ``481 GB``."""
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            exact = count >= 10 or count == int(count)
            return f"{count:.{0 if exact else 1}f} {unit}"
        count /= 1000
    raise AssertionError


def volume_rows(moved: list[Volume]) -> list[tuple[str, ...]]:
    """Returns the rows of the table of what is moved; the first row names the columns."""
    rows: list[tuple[str, ...]] = [
        ("dimension", "operation", "ranks", "calls", "in hosts", "between", "by trees")
    ]
    for each in moved:
        tree = size_text(each.tree_between) if each.tree_between != each.between else ""
        rows.append(
            (
                each.dimension,
                each.op,
                str(each.size),
                str(each.calls),
                size_text(each.inside),
                size_text(each.between),
                tree,
            )
        )
    return rows


def _volume_table(moved: list[Volume]) -> list[str]:
    rows = volume_rows(moved)
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = ["Moved in all, by rings, and between hosts by trees if that is another sum:"]
    for row in rows:
        cells = [
            cell.ljust(width) if at < 2 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    return lines


def _memory(answer: Answer) -> list[str]:
    lines = []
    for ranks, memory in answer.memory().items():
        if memory.parameters:
            lines.append(
                f"  {size_text(memory.parameters)} of parameters, {size_text(memory.gradients)} of "
                f"gradients, {size_text(memory.states)} of states: {ranks}"
            )
    if not lines:
        return []
    more = [f"  and {len(lines) - _MOST_ROLES} more sums"] if len(lines) > _MOST_ROLES else []
    return ["Memory of a rank at the steps of its optimizers:", *lines[:_MOST_ROLES], *more]


def as_dict(answer: Answer) -> dict[str, Any]:
    """Returns the answer as values of JSON; docs/plan.md lists the keys."""
    hazards = answer.hazards
    return {
        "world_size": answer.job.size,
        "ranks_per_host": answer.job.per_host,
        "run": sorted(answer.programs),
        "roles": [as_ranges(ranks) for ranks in answer.roles.ranks.values()],
        "notes": answer.roles.notes,
        "failed": [
            {"ranks": as_ranges(ranks), "error": error} for error, ranks in answer.failed.items()
        ],
        "found": [_hazard(each) for each in hazards.found],
        "doubts": [_hazard(each) for each in hazards.doubts],
        "not_covered": hazards.not_covered,
        "volume": [
            {
                "dimension": each.dimension,
                "operation": each.op,
                "group_size": each.size,
                "calls": each.calls,
                "bytes_in_hosts": round(each.inside),
                "bytes_between_hosts": round(each.between),
                "bytes_between_hosts_by_trees": round(each.tree_between),
            }
            for each in volumes(answer.dumps, answer.job.per_host)
        ],
        "memory": [
            {
                "ranks": ranks,
                "parameters": each.parameters,
                "gradients": each.gradients,
                "states": each.states,
            }
            for ranks, each in answer.memory().items()
        ],
        "exit_code": answer.exit_code,
    }


def _hazard(hazard: Hazard) -> dict[str, Any]:
    return {
        "kind": hazard.kind,
        "ranks": as_ranges([*hazard.ranks, *hazard.others]),
        "times": hazard.times,
        "text": hazard.lines,
        "lines": sorted({str(entry.where) for entry in hazard.entries if _has_line(entry)}),
    }


def _has_line(entry: Entry) -> bool:
    return entry.where is not None
