"""Writes what this process has done into a file in OpenMetrics format: docs/metrics.md.

The sums are kept in C++, where operations end. A thread of Python writes them down, as
``TORCHCOMMS_PG_METRICS_FILE`` says; without that variable nothing here runs, and
``prometheus_client`` is not imported.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from torchcomms_pg import _C, env
from torchcomms_pg._version import __version__

_INTERVAL = timedelta(seconds=15)
_AFTER_FAILURE = timedelta(seconds=1)  # for operations that a failure ends, which it comes before
_PATIENCE = 5.0  # seconds that the end of a process waits for a file that is being written

_PREFIX = "torchcomms_pg_"
_RANK = ("rank",)
_GROUP = ("rank", "group", "backend")
_OPERATION = (*_GROUP, "operation")

# Counters of a group's operations of one name: attribute of `_C.OperationTotals`, name, unit, help.
_COUNTERS = (
    ("ended", "operations", "", "Operations that have ended, in whatever way."),
    ("failures", "operation_failures", "", "Operations that have ended with an error."),
    ("bytes", "operation_bytes", "bytes", "Size of their input or output, the larger of both."),
    ("seconds", "operation_seconds", "seconds", "Time from their issue to their end."),
    ("waited", "wait_seconds", "seconds", "Time that threads of the program were blocked in them."),
)
# Gauges of a group that has not ended: attribute of `_C.GroupTotals`, name, unit, help.
_GAUGES = (
    ("in_flight", "operations_in_flight", "", "Operations that have not ended."),
    ("oldest", "oldest_operation_age_seconds", "seconds", "Time since the issue of the oldest."),
)
# Gauges of a rank of a group, on rank 0 of that: attribute of `_C._RankLateness`, name, unit, help.
_LATENESS = (
    ("later", "lateness_seconds", "seconds", "How much later it comes to a collective."),
    ("share", "lateness_ratio", "ratio", "Part of the time for which all others wait for it."),
)
# Counters of a group, by whether it is a watched one: name, help.
_FAILURES = {
    False: ("group_failures", "Failures of a group, other than by a call of abort here."),
    True: ("verdicts", "Verdicts on a watched group, of whom its ranks wait for."),
}

_started: dict[int, object] = {}  # by process; a fork has those that it comes from


def configure() -> None:
    """Starts the writer of this process, where the environment names its file.

    Has an effect once. What keeps it from that is one line on the stderr of rank 0.
    """
    template = env.metrics_file()
    token = object()
    if not template or _started.setdefault(os.getpid(), token) is not token:
        return
    why = ""
    if "{rank}" not in template and "{pid}" not in template:
        why = f"{template!r} has neither {{rank}} nor {{pid}}, and all ranks would write one file"
    else:
        try:
            _Writer(template).start()
        except ImportError:
            why = "prometheus_client is not installed; pip install 'torchcomms_pg[metrics]'"
        except RuntimeError as error:
            why = str(error)  # no thread can be started
    if why and _C.process_totals().rank == 0:
        _tell(f"TORCHCOMMS_PG_METRICS_FILE is set, and no metrics are written: {why}")


class _Writer:
    def __init__(self, template: str) -> None:
        from prometheus_client import CollectorRegistry, core
        from prometheus_client.openmetrics.exposition import generate_latest

        self._core = core
        self._registry = CollectorRegistry()
        self._registry.register(self)  # calls collect() for each text
        self._text = generate_latest
        path = template.replace("{pid}", str(os.getpid()))
        self._path = Path(path.replace("{rank}", str(max(_C.process_totals().rank, 0))))
        self._told = False
        self._thread = threading.Thread(target=self._run, name="torchcomms_pg", daemon=True)

    def start(self) -> None:
        self._thread.start()
        # Children of multiprocessing run no atexit, but these; forked ones none that is not theirs.
        Finalize(None, self._end, exitpriority=0)

    def _run(self) -> None:
        failures, patience = 0, _INTERVAL
        self._write()
        while (known := _C.await_failure(failures, patience)) is not None:
            patience = _AFTER_FAILURE if known > failures else _INTERVAL
            failures = known
            self._write()

    def _end(self) -> None:
        """Writes a last time, in the thread that ends the process."""
        _C.end_metrics_writer()
        self._thread.join(_PATIENCE)
        if not self._thread.is_alive():
            self._write()

    def _write(self) -> None:
        """Replaces the file, which is never seen half written."""
        # Hidden, and without the ending by which collectors of such files find them.
        partial = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            with contextlib.suppress(FileNotFoundError):
                partial.unlink()  # left by a process of this number that was killed
            try:
                with partial.open("xb") as file:
                    file.write(self._text(self._registry))
                partial.replace(self._path)
            except BaseException:
                with contextlib.suppress(OSError):
                    partial.unlink()
                raise
        except OSError as error:
            if not self._told:
                _tell(f"the metrics of rank {_C.process_totals().rank} are not written: {error}")
            self._told = True

    def collect(self) -> Iterator[Any]:
        """Yields the metrics; called by prometheus_client."""
        totals = _C.process_totals()
        rank = str(totals.rank)
        counter, gauge = self._core.CounterMetricFamily, self._core.GaugeMetricFamily
        build = gauge(
            f"{_PREFIX}build_info",
            "Versions, as labels; always 1.",
            labels=(*_RANK, "version", "torch"),
        )
        build.add_metric([rank, __version__, _C.torch_version], 1)
        yield build
        for attribute, name, unit, text in _COUNTERS:
            family = counter(_PREFIX + name, text, labels=_OPERATION, unit=unit)
            for group in totals.groups:
                for operation in group.operations:
                    family.add_metric(
                        [rank, group.name, group.backend, operation.name],
                        getattr(operation, attribute),
                    )
            yield family
        for watched, (name, text) in _FAILURES.items():
            family = counter(_PREFIX + name, text, labels=_GROUP)
            for group in totals.groups:
                if group.watched == watched:
                    family.add_metric([rank, group.name, group.backend], group.failures)
            yield family
        for attribute, name, unit, text in _GAUGES:
            now = gauge(_PREFIX + name, text, labels=_GROUP, unit=unit)
            for group in totals.groups:
                if group.live:
                    now.add_metric([rank, group.name, group.backend], getattr(group, attribute))
            yield now
        for attribute, name, unit, text in _LATENESS:
            late = gauge(_PREFIX + name, text, labels=(*_GROUP, "of"), unit=unit)
            for group in totals.groups:
                for number, each in enumerate(group.lateness):
                    labels = [rank, group.name, group.backend, str(number)]
                    late.add_metric(labels, getattr(each, attribute))
            yield late


def _tell(what: str) -> None:
    print(f"torchcomms_pg: {what}", file=sys.stderr)
