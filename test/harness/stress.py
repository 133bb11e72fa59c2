"""A pytest plugin: ranks are stopped and continued at random on loaded cores while tests run.

``tools/test --stress N`` loads the plugin. A test of several ranks has to pass if any rank stops
for three seconds anywhere. The plugin would continue ranks at the wrong moment if a test stops
ranks itself. Such a test has the marker ``stops_ranks``, and only runs on loaded cores. With
``-n 4 --dist worksteal`` four processes test side by side, and each stops its own ranks.
"""

import contextlib
import multiprocessing
import os
import random
import signal
import threading
import time

import pytest

from harness.programs import children

LONGEST_STOP = 3.0  # seconds
LONGEST_PAUSE = 2.0  # seconds between two stops


def _descendants(pid):
    """Returns the processes that could be ranks: running ones, below this process's children."""
    by_parent, found = children(), []
    waiting = [child for child, _ in by_parent.get(pid, [])]
    while waiting:
        for child, state in by_parent.get(waiting.pop(), []):
            waiting.append(child)
            if state not in "TtZ":
                found.append(child)
    return found


class Stopper(threading.Thread):
    """Stops one rank after another, each for up to LONGEST_STOP, while `running` is set."""

    def __init__(self, seed):
        super().__init__(name="stopper", daemon=True)
        self.random = random.Random(seed)
        self.running = threading.Event()
        self.idle = threading.Event()
        self.idle.set()
        self.stops = 0

    def run(self):
        while True:
            self.running.wait()
            time.sleep(self.random.uniform(0, LONGEST_PAUSE))
            self.idle.clear()
            if self.running.is_set():
                self._stop_one()
            self.idle.set()

    def _stop_one(self):
        ranks = sorted(_descendants(os.getpid()))
        with contextlib.suppress(OSError):  # the rank has ended, or no rank runs
            # Keeps a descriptor, since the pid may be another process's at the end of the stop.
            fd = os.pidfd_open(self.random.choice(ranks or [-1]))
            try:
                signal.pidfd_send_signal(fd, signal.SIGSTOP)
                self.stops += 1
                time.sleep(self.random.uniform(0, LONGEST_STOP))
            finally:
                signal.pidfd_send_signal(fd, signal.SIGCONT)
                os.close(fd)


def _load():
    while os.getppid() != 1:  # until the tests have gone
        sum(range(1_000_000))


def pytest_configure(config):
    if hasattr(config, "torchcomms_pg_rank"):
        config.pluginmanager.unregister(name=__name__)  # the process that tests stops the ranks
        return
    seed = int(os.environ.get("STRESS_SEED", time.time_ns() % 1_000_000))
    config.stops, config.load = 0, []
    config.stopper = Stopper(seed)
    config.stopper.start()
    # Test processes of pytest-xdist load the cores themselves.
    if not hasattr(config, "workerinput") and not config.getoption("numprocesses", None):
        context = multiprocessing.get_context("spawn")
        config.load = [context.Process(target=_load, daemon=True) for _ in os.sched_getaffinity(0)]
    for process in config.load:
        process.start()


def pytest_report_header(config):
    return f"stress: STRESS_SEED={config.stopper.seed}, {len(config.load)} processes of load"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    stopper = item.config.stopper
    if not item.get_closest_marker("stops_ranks"):
        stopper.running.set()
    try:
        return (yield)
    finally:
        stopper.running.clear()
        stopper.idle.wait(LONGEST_STOP + 1)


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["stops"] = session.config.stopper.stops


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    node.config.stops += getattr(node, "workeroutput", {}).get("stops", 0)


def pytest_terminal_summary(terminalreporter, config):
    stops = config.stops + config.stopper.stops
    terminalreporter.write_line(f"stress: ranks were stopped {stops} times")


def pytest_unconfigure(config):
    for process in config.load:
        process.kill()
        process.join()
