"""The results as one table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from gpu.check import Check
from gpu.run import Outcome


def place(check: Check) -> str:
    """Writes how many ranks run on how many devices."""
    ranks = "1 rank" if check.ranks == 1 else f"{check.ranks} ranks"
    if check.shares_a_gpu:
        return f"{ranks} on one device"
    return ranks if check.gpus == 1 else f"{ranks} on {check.gpus} devices"


def row(outcome: Outcome, width: int) -> str:
    """Writes a line of the table."""
    name = f"{outcome.check.name}, {place(outcome.check)}"
    seconds = f"{outcome.seconds:.1f}" if outcome.seconds else "-"
    return f"{name:{width}}  {outcome.result:7}  {seconds:>7}  {outcome.detail}"


def width(checks: Sequence[Check]) -> int:
    """Returns the width of the first column."""
    return max(len(f"{check.name}, {place(check)}") for check in checks)


def header(width: int) -> str:
    """Writes the first lines of the table."""
    lines = f"{'check':{width}}  {'result':7}  {'seconds':>7}  detail"
    return f"{lines}\n{'-' * width}  {'-' * 7}  {'-' * 7}  {'-' * 6}"


def summary(outcomes: Sequence[Outcome]) -> str:
    """Counts the results."""
    counts = Counter(outcome.result for outcome in outcomes)
    return ", ".join(f"{counts[result]} {result}" for result in ("ok", "FAILED", "skipped"))
