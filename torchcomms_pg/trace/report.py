"""Shows an analysis: as text, as a page with a timeline, as a trace for Perfetto."""

from __future__ import annotations

import json
from typing import Any

from torchcomms_pg.trace.analysis import Analysis, Cost, Straggler, Verdict
from torchcomms_pg.trace.dumps import printable
from torchcomms_pg.trace.groups import Group
from torchcomms_pg.trace.page import page
from torchcomms_pg.trace.timeline import Timeline


def text(analysis: Analysis, verdict: Verdict, top: int = 10) -> str:
    """Returns the verdict, the ranks that arrive late and the ``top`` most expensive operations."""
    lines = [str(verdict), *map(printable, analysis.dumps.left_out.values())]
    late = _late(analysis.stragglers())
    if any(row[1] != "0" for row in late):
        lines += ["", "Who comes late to collectives:"]
        head = ["rank", "collectives", "came last", "late, ms", "worst, ms", "in"]
        lines += _table([head, *late])
    costs = _costs(analysis.costs()[:top])
    if costs:
        lines += ["", "What takes the time:"]
        head = ["operation", "group", "times", "in all, ms", "median, ms", "longest, ms"]
        lines += _table([head, *costs])
    return "\n".join(lines)


def html(analysis: Analysis, verdict: Verdict) -> str:
    """Returns a self-contained page with a timeline: lanes are groups of ranks, bars operations."""
    data = Timeline(analysis, verdict).data()
    data |= {"late": _late(analysis.stragglers()), "costs": _costs(analysis.costs())}
    return page(__package__, "timeline.html", data)


def perfetto(analysis: Analysis, verdict: Verdict) -> str:
    """Returns a trace in Chrome's trace event format, for chrome://tracing and ui.perfetto.dev.

    Every rank is a process and every group a thread; times are in microseconds. An unfinished
    operation lasts until the dump, and so does the slice of a rank that is in no operation.
    """
    timeline = Timeline(analysis, verdict)
    events: list[dict[str, Any]] = []
    threads: dict[Group | None, int] = {None: 0}
    idle = list(timeline.idle())
    for rank in sorted(analysis.dumps):
        name = f"rank {rank}" + (" (guilty)" if rank in verdict.culprits else "")
        events.append(_names("process_name", rank, 0, name))
    for each in idle:
        events.append(_names("thread_name", each.rank, 0, "in no operation"))
        span = {"ts": each.start / 1e3, "dur": max(1, each.end - each.start) / 1e3}
        events.append({"ph": "X", "name": each.where, "pid": each.rank, "tid": 0, **span})
    for entry in timeline.entries:
        if entry.group not in threads:
            threads[entry.group] = len(threads)
            for rank in analysis.dumps:
                name = analysis.group_name(entry.group)
                events.append(_names("thread_name", rank, threads[entry.group], name))
        start, end, ended = timeline.span(entry)
        events.append(
            {
                "ph": "X",
                "name": entry.what if ended else f"{entry.what}, not ended",
                "cat": entry.state,
                "pid": entry.rank,
                "tid": threads[entry.group],
                "ts": start / 1e3,
                "dur": (end - start if ended else max(1, end - start)) / 1e3,
                "args": {"seq": entry.seq, "state": entry.state, "at": str(entry.where or "")},
            }
        )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _names(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    """Returns an event that names a process, or one of its threads."""
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _late(stragglers: list[Straggler]) -> list[list[str]]:
    return [
        [
            str(late.rank),
            str(late.collectives),
            str(late.last),
            f"{late.late_ms:.1f}",
            f"{late.worst_ms:.1f}",
            "" if late.worst is None else f"{late.worst.what} #{late.worst.seq}",
        ]
        for late in stragglers
    ]


def _costs(costs: list[Cost]) -> list[list[str]]:
    return [
        [
            cost.what,
            cost.group,
            str(len(cost.times)),
            f"{cost.total:.1f}",
            f"{cost.median:.3f}",
            f"{max(cost.times):.3f}",
        ]
        for cost in costs
    ]


def _table(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  "
        + "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
