"""The half of the pytest plugin that runs in the ranks.

`template` is a session of pytest as pytest-xdist's workers have one, with the options of the
session that tests. It collects the files of the tests with ranks, once, in a process that has torch
imported. Ranks are forked from it. Each runs the tests that it is told to run through pytest's own
protocol, and sends the reports. So fixtures, marks and captured output are what they are elsewhere.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import re
import socket
import sys
import time
import warnings
from collections.abc import Generator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from _pytest.config import Config
from _pytest.debugging import post_mortem
from _pytest.main import Session
from _pytest.runner import check_interactive_exception

from torchcomms_pg.testing import zygote
from torchcomms_pg.testing.checks import Watch
from torchcomms_pg.testing.rank import Fresh, Setting, make_thread_pool, take_outputs

# A program that has one of these words makes torch import its compiler, in seconds. The template
# does so once, for all ranks.
_IMPORTS_DYNAMO = re.compile(r"\b(compile|optim|fsdp|fully_shard|DistributedDataParallel|FSDP)\b")


@dataclass(frozen=True)
class Plan:
    """What the session that tests tells the template.

    Attributes:
        options: pytest's, by name.
        args: the files with tests of ranks.
        folder: the current folder.
        env: all environment variables.
        path, argv: of the module sys.
        worker: `workerinput` as of pytest-xdist; plugins that see it leave reports to the session.
        coverage: arguments of `coverage.Coverage`, or None if nothing is measured.
    """

    options: dict[str, Any]
    args: list[str]
    folder: str
    env: dict[str, str]
    path: list[str]
    argv: list[str]
    worker: dict[str, Any]
    coverage: dict[str, Any] | None = None


@dataclass(frozen=True)
class Run:
    """One test, as a rank is told to run it.

    Attributes:
        nodeid: of the test.
        following: nodeid of the test that probably follows: its fixtures are kept.
        setting: of the group.
        folder: of the fixture tmp_path, or None if the test has no such fixture.
        dumps: for the record of the test's operations, or None if nothing is recorded.
    """

    nodeid: str
    following: str | None
    setting: Setting
    folder: str | None = None
    dumps: str | None = None


class _Collecting:
    """A plugin that keeps what could not be collected, and whose fixture replaces pytest's."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.problems.append(f"{report.nodeid}: {report.longreprtext}")

    @pytest.fixture
    def tmp_path(self, request: pytest.FixtureRequest) -> Path:
        """The folder that the session which tests has made, the same on all ranks."""
        return Path(request.config.torchcomms_pg_state.folder)  # type: ignore[attr-defined]


_session: Session


def template(control: int, output: int, plan: Plan) -> None:
    """Is the main function of the process that ranks are forked from.

    Args:
        control: descriptor of the socket of `zygote.serve`.
        output: descriptor for stdout and stderr.
        plan: of the session that tests.
    """
    global _session
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(plan.folder)
    os.environ.clear()
    os.environ.update(plan.env)
    zygote.ask_no_name_server(os.environ)
    sys.path[:], sys.argv[:] = plan.path, plan.argv
    importlib.invalidate_caches()
    if plan.coverage is not None:
        import coverage

        if coverage.Coverage.current() is None:
            coverage.Coverage(**plan.coverage).start()
    config = Config.fromdictargs(plan.options, plan.args)
    config.workerinput = plan.worker  # type: ignore[attr-defined]
    config.workeroutput = {}  # type: ignore[attr-defined]
    config.torchcomms_pg_rank = True  # type: ignore[attr-defined]
    config._do_configure()
    # The session that tests has the time limits; its plugin's options and marks stay known.
    config.pluginmanager.unregister(name="timeout")
    collected = _Collecting()
    config.pluginmanager.register(collected)
    _session = Session.from_config(config)
    config.hook.pytest_sessionstart(session=_session)
    with contextlib.suppress(pytest.UsageError):
        _session.perform_collect()
    with contextlib.suppress(OSError):
        if any(_IMPORTS_DYNAMO.search(Path(file).read_text()) for file in plan.args):
            importlib.import_module("torch._dynamo")
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    zygote.serve(
        socket.socket(fileno=control), ("ready", zygote.threads(), "\n".join(collected.problems))
    )


def process(connection: int, stacks: int, output: int, rank: int) -> None:
    """Is the main function of a rank, which a template has forked.

    Args:
        connection: descriptor of the connection to the session that tests.
        stacks: descriptor for stacks.
        output: descriptor for stdout and stderr.
        rank: the rank.
    """
    take_outputs(stacks, output)
    make_thread_pool()
    config = _session.config
    base = getattr(config, "_tmp_path_factory", None)
    if base is not None and base._given_basetemp is not None:
        base._given_basetemp /= f"rank{rank}-{os.getpid()}"
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.start_global_capturing()
    capture.suspend_global_capture()
    captured = capture._global_capturing
    files = [
        part.tmpfile.fileno()
        for part in (captured and captured.out, captured and captured.err)
        if part is not None and hasattr(part, "targetfd_save")
    ]
    # What a rank that dies has written last is in these files.
    with socket.fromfd(connection, socket.AF_UNIX, socket.SOCK_STREAM) as raw:
        socket.send_fds(raw, [b"f"], files)
    served = _Served(Connection(connection), rank)
    config.pluginmanager.register(served, "torchcomms_pg_rank")
    served.serve()
    _save_coverage(stop=True)
    sys.stdout.flush()
    os._exit(0)


def _closed_outputs() -> list[str]:
    """Returns what the test has closed that each later test needs, as sentences about the test."""
    captured = _session.config.pluginmanager.getplugin("capturemanager")._global_capturing
    closed = [f"it closed the descriptor {fd}" for fd in (1, 2) if not _is_open(fd)]
    for name, part in (
        ("stdout", captured and captured.out),
        ("stderr", captured and captured.err),
    ):
        if part is not None and part.tmpfile.closed:
            closed.append(f"it closed sys.{name}")
    return closed


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _save_coverage(stop: bool = False) -> None:
    if "coverage" in sys.modules:
        measured = sys.modules["coverage"].Coverage.current()
        if measured is not None:
            if stop:
                measured.stop()
            measured.save()


class RankState:
    """What the fixtures of the plugin give in a rank."""

    def __init__(self, fresh: Fresh, folder: str | None) -> None:
        self.setting, self.folder = fresh.setting, folder
        self._fresh = fresh

    @property
    def store(self) -> Any:
        """A client of the store that the ranks meet in, with other keys than the groups'."""
        return dist.PrefixStore("of the test", self._fresh.store())

    @property
    def group(self) -> Any:
        """The default group."""
        if not dist.is_initialized():
            pytest.fail(
                "the fixture 'group' needs a default group, and @pytest.mark.ranks(..., "
                "backend=None) makes none",
                pytrace=False,
            )
        return dist.group.WORLD

    @property
    def device_mesh(self) -> Any:
        """A mesh of one dimension with all ranks."""
        from torch.distributed.device_mesh import init_device_mesh

        device = "cuda" if self.setting.devices else "cpu"
        return init_device_mesh(device, (self.setting.world,))


@dataclass(eq=False)  # pytest makes sets of plugins
class _Served:
    """The plugin of a rank: runs tests, and sends what becomes of them."""

    connection: Connection[Any, Any]
    rank: int
    run: Run | None = None
    fresh: Fresh | None = None
    items: dict[str, pytest.Item] = field(default_factory=dict)
    expected: pytest.Item | None = None
    debugged: bool = False

    def send(self, *message: Any) -> None:
        try:
            packed = pickle.dumps(message)
        except Exception as error:
            packed = pickle.dumps(("unsent", f"{message[0]} could not be pickled: {error}"))
        self.connection.send_bytes(packed)

    def serve(self) -> None:
        self.items = {item.nodeid: item for item in _session.items}
        while True:
            try:
                command = pickle.loads(self.connection.recv_bytes())
            except EOFError:
                return
            if command is None:
                with contextlib.suppress(BaseException):
                    _session._setupstate.teardown_exact(None)
                _session.config.hook.pytest_sessionfinish(session=_session, exitstatus=0)
                _session.config._ensure_unconfigure()
                return
            self.run = command
            self.run_test()

    def run_test(self) -> None:
        """Runs a test, and after the others have run it ends its group."""
        run = self.run
        assert run is not None
        item = self.items.get(run.nodeid)
        following = self.items.get(run.following or "")
        quit = ""
        uses: dict[str, Any] | None = None
        if item is None:
            self.send("missing")
        else:
            self.fresh = Fresh(run.setting.of_rank(self.rank))
            state = RankState(self.fresh, run.folder)
            item.config.torchcomms_pg_state = state  # type: ignore[attr-defined]
            self.debugged = False
            watch = Watch(item.config.getoption("--check-async"), run.dumps, self.rank)
            try:
                if self.expected is not item:  # another test than the last one was told of
                    _session._setupstate.teardown_exact(item)
                with watch:
                    item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            except (KeyboardInterrupt, pytest.exit.Exception) as error:
                quit = str(error) or type(error).__name__
            uses = watch.uses
            self.expected = following
        self.send("done", quit, uses)
        self.connection.recv_bytes()  # all ranks are through
        left = self.fresh.end() if self.fresh else []
        left += _closed_outputs()
        self.fresh = None
        _save_coverage()
        self.send("ended", left)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Makes the group before the fixtures."""
        __tracebackhide__ = True
        assert self.fresh is not None
        self.fresh.make_group()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Generator[None, Any, Any]:
        """Notes when the test failed, and whether by what another rank had done."""
        report = yield
        if call.excinfo is not None:
            report.torchcomms_pg_failed = (
                isinstance(call.excinfo.value, dist.DistError),
                time.monotonic(),
            )
        return report

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: Any) -> None:
        effect, stamp = getattr(report, "torchcomms_pg_failed", (False, time.monotonic()))
        report.__dict__.pop("torchcomms_pg_failed", None)
        config = _session.config
        data = config.hook.pytest_report_to_serializable(config=config, report=report)
        self.send("report", data, effect, stamp)

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: Any
    ) -> None:
        """Sends a warning of a test."""
        if when != "runtest":
            return  # of the session, which warns itself
        message = str(warning_message.message)
        category = warning_message.category
        with contextlib.suppress(Exception):
            pickle.dumps((category, warning_message.message))
            message = warning_message.message  # type: ignore[assignment]
        if isinstance(message, str):
            category = UserWarning
        shown = warning_message.filename, warning_message.lineno
        self.send("warning", message, category, shown, when, nodeid, location)

    # The debugger

    def pytest_exception_interact(self, node: pytest.Item, call: Any, report: Any) -> None:
        """Opens the debugger with --pdb on the first rank that fails."""
        if not _session.config.getoption("torchcomms_pg_pdb") or self.debugged:
            return
        if not check_interactive_exception(call, report):
            return
        capture = node.config.pluginmanager.getplugin("capturemanager")
        capture.suspend_global_capture(in_=True)
        if not self._take_terminal():
            return
        from _pytest._io import TerminalWriter

        writer = TerminalWriter(sys.stdout)
        writer.sep(">", f"traceback of rank {self.rank}")
        report.toterminal(writer)
        writer.sep(">", f"entering PDB on rank {self.rank}")
        error = call.excinfo._excinfo
        post_mortem(error[1] if sys.version_info >= (3, 13) else error[2])

    def pytest_enter_pdb(self, config: Config, pdb: Any) -> None:
        """Gives a test that calls breakpoint() the terminal; a rank that gets none goes on."""
        if not self._take_terminal():
            pdb.set_trace = lambda *_: None
            config.pluginmanager.getplugin("capturemanager").resume()

    def _take_terminal(self) -> bool:
        """Asks for the terminal; returns False if another rank has it."""
        if self.debugged:
            return True
        self.send("terminal")
        with socket.fromfd(self.connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as raw:
            _, fds, _, _ = socket.recv_fds(raw, 1, 2)
        captured = _session.config.pluginmanager.getplugin("capturemanager")._global_capturing
        for number, (fd, part) in enumerate(zip(fds, (captured.in_, captured.out), strict=False)):
            os.dup2(fd, number)
            # The debugger captures output while the test goes on, and restores this descriptor.
            if hasattr(part, "targetfd_save"):
                os.dup2(fd, part.targetfd_save)
            os.close(fd)
        self.debugged = bool(fds)
        return self.debugged
