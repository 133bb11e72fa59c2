"""Timed calls on one rank, the same for every backend."""

from __future__ import annotations

import gc
import math
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass
class Subject:
    """One operation with its buffers, ready to be called."""

    call: Callable[[], object]
    reset: Callable[[], object]
    """Puts the values in place that `wrong` starts from."""
    wrong: Callable[[int], str]
    """What is wrong with the result after so many calls since reset; empty if nothing is."""
    meets: bool
    """Whether no rank can be a call ahead of another: else they meet before each call."""


def run(subject: Subject, calls: int, meet: Callable[[], object]) -> array[float]:
    """Times each of `calls` calls and checks the result. In microseconds."""
    subject.reset()
    clock = time.perf_counter_ns
    call = subject.call
    times = array("d", bytes(8 * calls))
    between = None if subject.meets else meet
    gc.disable()
    meet()
    try:
        for i in range(calls):
            if between is not None:
                between()
            start = clock()
            call()
            times[i] = (clock() - start) / 1e3
    finally:
        gc.enable()
    if problem := subject.wrong(calls):
        raise AssertionError(f"wrong result after {calls} calls: {problem}")
    return times


def timed(call: Callable[[], object]) -> float:
    """Returns the microseconds of one call."""
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


def slowest(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merges what all ranks returned: the largest of each value."""
    return {name: max(each[name] for each in answers if name in each) for name in answers[0]}


def power(base: int, exponent: int, limit: float) -> float:
    """Returns what a sum over `base` equal ranks, repeated in place, makes of one."""
    return float(base) ** exponent if exponent * math.log(base) < math.log(limit) else math.inf
