"""Writes counts of this process's operations into a file in OpenMetrics format: docs/metrics.md.

C++ keeps the sums. A Python thread writes them to the file that ``TORCHCOMMS_PG_METRICS_FILE``
names; without that variable no thread runs, and ``prometheus_client`` is not imported.
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
_AFTER_FAILURE = timedelta(seconds=1)  # time for the operations in flight to end with the failure
_PATIENCE = 5.0  # seconds for which the process's exit waits for a write in progress

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
# Gauges of a rank of a group, on the group's rank 0: attribute of `_C._RankLateness`, name, unit,
# help.
_LATENESS = (
    ("later", "lateness_seconds", "seconds", "How much later it comes to a collective."),
    ("share", "lateness_ratio", "ratio", "Part of the time for which all others wait for it."),
)
# Counters of a group, by whether the group is watched: name, help.
_FAILURES = {
    False: ("group_failures", "Failures of a group, other than by a call of abort here."),
    True: ("verdicts", "Verdicts on a watched group, of whom its ranks wait for."),
}

_started: dict[int, object] = {}  # an entry for each process id, since a fork inherits this dict


def configure() -> None:
    """Starts this process's writer if the environment names a file.

    Has an effect once. If the writer cannot start, rank 0 prints one line on stderr.
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
        self._registry.register(self)  # makes generate_latest() call collect()
        self._text = generate_latest
        path = template.replace("{pid}", str(os.getpid()))
        self._path = Path(path.replace("{rank}", str(max(_C.process_totals().rank, 0))))
        self._told = False
        self._thread = threading.Thread(target=self._run, name="torchcomms_pg", daemon=True)

    def start(self) -> None:
        self._thread.start()
        # multiprocessing's children run such finalizers, but no atexit functions. A forked child
        # does not run its parent's finalizers.
        Finalize(None, self._end, exitpriority=0)

    def _run(self) -> None:
        failures, patience = 0, _INTERVAL
        self._write()
        while (known := _C.await_failure(failures, patience)) is not None:
            patience = _AFTER_FAILURE if known > failures else _INTERVAL
            failures = known
            self._write()

    def _end(self) -> None:
        """Writes the file a last time. Called by the thread that ends the process."""
        _C.end_metrics_writer()
        self._thread.join(_PATIENCE)
        if not self._thread.is_alive():
            self._write()

    def _write(self) -> None:
        """Replaces the file atomically."""
        # A hidden name, without the ending by which collectors find metrics files.
        partial = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            with contextlib.suppress(FileNotFoundError):
                partial.unlink()  # left by a killed process with the same pid
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
