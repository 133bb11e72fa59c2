"""Shows an analysis: as text, as a page with a timeline, as a trace for Perfetto."""

from __future__ import annotations

import importlib.resources
import json
from typing import Any

from torchcomms_pg.trace.analysis import Analysis, Cost, Straggler, Verdict, duration_ms
from torchcomms_pg.trace.dumps import Entry, printable
from torchcomms_pg.trace.groups import Group


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
    """Returns a self-contained page with a timeline: rows are ranks, bars are operations."""
    entries = list(analysis.entries())
    origin = min((entry.created for entry in entries), default=0)
    shown = verdict.entries
    bars = []
    end = 0.0
    for entry in entries:
        took = duration_ms(entry)
        start = ((entry.started or entry.created) - origin) / 1e6
        end = max(end, start + (took or 0.0))
        guilty = entry in shown and (
            entry.rank in verdict.culprits if verdict.kind == "mismatch" else not entry.finished
        )
        stop = None if took is None else start + took
        bars.append([entry.rank, start, stop, entry.finished, guilty, _tip(analysis, entry)])
    data = {
        "ranks": sorted(analysis.dumps),
        "culprits": verdict.culprits,
        "kind": verdict.kind,
        "verdict": str(verdict),
        "end": end,
        "bars": bars,
        "late": _late(analysis.stragglers()),
        "costs": _costs(analysis.costs()),
    }
    page = importlib.resources.files("torchcomms_pg.trace").joinpath("timeline.html").read_text()
    # "</script" in the data would end its element, and "<!--<script" would hide the element's end.
    return page.replace("@DATA@", json.dumps(data, allow_nan=False).replace("<", "\\u003c"))


def perfetto(analysis: Analysis, verdict: Verdict) -> str:
    """Returns a trace in Chrome's trace event format, for chrome://tracing and ui.perfetto.dev.

    Every rank is a process and every group a thread; times are in microseconds. An unfinished
    operation lasts to the end of the trace.
    """
    events: list[dict[str, Any]] = []
    threads: dict[Group, int] = {}
    entries = list(analysis.entries())
    end = max((entry.completed or entry.created for entry in entries), default=0)
    for rank in sorted(analysis.dumps):
        name = f"rank {rank}" + (" (guilty)" if rank in verdict.culprits else "")
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": name}})
    for entry in entries:
        if entry.group not in threads:
            threads[entry.group] = len(threads)
            for rank in analysis.dumps:
                events.append(
                    {
                        "ph": "M",
                        "name": "thread_name",
                        "pid": rank,
                        "tid": threads[entry.group],
                        "args": {"name": analysis.group_name(entry.group)},
                    }
                )
        start = entry.started or entry.created
        took = duration_ms(entry)
        events.append(
            {
                "ph": "X",
                "name": entry.what,
                "cat": entry.state,
                "pid": entry.rank,
                "tid": threads[entry.group],
                "ts": start / 1e3,
                "dur": took * 1e3 if took is not None else max(1, end - start) / 1e3,
                "args": {"seq": entry.seq, "state": entry.state, "at": str(entry.where or "")},
            }
        )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _tip(analysis: Analysis, entry: Entry) -> str:
    lines = [
        f"{entry.what} #{entry.seq}",
        f"{analysis.group_name(entry.group)}, {entry.state}",
    ]
    took = duration_ms(entry)
    if took is not None:
        lines.append(f"{took:.3f} ms")
    lines += [str(frame) for frame in entry.frames[:6]]
    return "\n".join(lines)


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
