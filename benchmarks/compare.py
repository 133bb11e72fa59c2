"""This run beside an earlier one that was stored as JSON."""

from __future__ import annotations

import json
from pathlib import Path

from . import table
from .results import Results, Row


def load(file: Path) -> list[Row]:
    """Reads the rows of a stored run. Raises ValueError where the file is something else."""
    try:
        stored = json.loads(file.read_text())
        return [Row.from_json(values) for values in stored["rows"]]
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file} is no result of tools/bench --json: {error!r}") from None


def verdict(new: Row, old: Row) -> str:
    """Says whether the rounds of two runs overlap: where they do, the difference is noise."""
    if min(new.rounds_us) > max(old.rounds_us):
        return "SLOWER"
    if max(new.rounds_us) < min(old.rounds_us):
        return "faster"
    return ""


def as_text(results: Results, old: list[Row], name: str) -> str:
    """Writes what both runs have measured."""
    before = {row.contender: row for row in old}
    lines = [["operation", "before", "now", "ratio", ""]]
    for new in results.rows:
        row = before.get(new.contender)
        if row is None:
            continue
        change = ratio(new, row)
        times = [table.time(row.median_us), table.time(new.median_us)]
        lines.append([new.contender.key, *times, f"{change:.2f}", verdict(new, row)])
    if len(lines) == 1:
        return f"nothing in common with {name}"
    heading = f"now / {name} (microseconds; marked where the rounds of both do not overlap)"
    return f"{heading}\n{table.align(lines)}"


def ratio(new: Row, old: Row) -> float:
    """Returns how many times the old time the new one is."""
    return new.median_us / old.median_us if old.median_us else float("inf")
