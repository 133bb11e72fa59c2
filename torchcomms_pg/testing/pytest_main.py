"""The half of the pytest plugin in the session that tests: it has the ranks run the tests.

As pytest-xdist's controller, the session sets no fixture up for a test with ranks, and calls no
function of it. It sends the test's name to ranks that have collected the same files, waits for
their reports with a bound for everything, and makes one report of theirs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import pickle
import shutil
import socket
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
from _pytest.skipping import evaluate_xfail_marks, xfailed_key

from torchcomms_pg.env import DUMP_PREFIXES
from torchcomms_pg.testing import checks, pytest_rank
from torchcomms_pg.testing.calls import GRACE
from torchcomms_pg.testing.processes import (
    Death,
    Processes,
    Store,
    Template,
    Zygote,
    ZygoteError,
    end_of,
    place,
    without_bench,
)
from torchcomms_pg.testing.rank import Setting

_PHASES = ("setup", "call", "teardown")
_LATE = 0.9  # seconds beyond the timeout that a rank may come later to the end than another
_END_LIMIT = 5.0  # seconds that the end of a test's groups may take beyond the group's timeout


class RankEndedError(AssertionError):
    """A rank died, or was ended by the test's limit; its text is all that is shown."""


@dataclasses.dataclass(frozen=True)
class _Mark:
    """The arguments of the mark."""

    n: int
    backend: str | None
    timeout: float
    limit: float
    fresh_group: bool


@dataclasses.dataclass
class _Event:
    """What one rank has told, or what became of it.

    Attributes:
        rank, stamp: whose, and when, on the monotonic clock of the host.
        effect: whether another rank's failure is the cause.
        report: pytest's report, or None if the rank did not end on its own.
        text: else what became of the rank.
        blamed: whether the event makes the test fail, if the rank did not end on its own.
    """

    rank: int
    stamp: float
    effect: bool = False
    report: Any = None
    text: str = ""
    blamed: bool = True

    @property
    def failed(self) -> bool:
        return self.blamed if self.report is None else bool(self.report.failed)


class _Ranks(Processes):
    """The ranks of one number, forked from the template."""

    def __init__(self, world: int, template: Template, print_output: bool) -> None:
        super().__init__(world)
        self._captured: list[list[int]] = []
        self._pipes: list[int] = []
        self._lines: list[bytes] = [b""] * world
        for _ in range(world):
            ends = os.pipe() if print_output else (None, None)
            self.fork(template, "torchcomms_pg.testing.pytest_rank:process", output=ends[1])
            if ends[0] is not None and ends[1] is not None:
                os.close(ends[1])
                os.set_blocking(ends[0], False)
                self._pipes.append(ends[0])
        for rank, connection in enumerate(self.connections):
            with socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as raw:
                raw.settimeout(60)
                message, fds, _, _ = socket.recv_fds(raw, 1, 2)
                raw.settimeout(None)  # the connection shares this with the copy of its descriptor
            self._captured.append(list(fds))
            if not message:
                raise ZygoteError(f"rank {rank} ended at its start: {self.output(rank)}")

    def output(self, rank: int) -> str:
        """Returns what the rank has written and no report has."""
        text = super().output(rank)
        for fd in self._captured[rank] if rank < len(self._captured) else []:
            text += os.pread(fd, 1 << 16, 0).decode(errors="replace")
        return text

    def print_lines(self, end: bool = False) -> None:
        """With -s: prints what the ranks have written, with the rank in front of each line."""
        for rank, pipe in enumerate(self._pipes):
            with contextlib.suppress(BlockingIOError):
                while part := os.read(pipe, 1 << 16):
                    self._lines[rank] += part
            *lines, rest = self._lines[rank].split(b"\n")
            if end and rest:
                lines, rest = [*lines, rest], b""
            self._lines[rank] = rest
            for line in lines:
                sys.stdout.write(f"[rank {rank}] {line.decode(errors='replace')}\n")
        if self._pipes:
            sys.stdout.flush()

    def close(self) -> None:
        """Ends the ranks."""
        super().close()
        self.print_lines(end=True)
        for fd in itertools.chain(self._pipes, *self._captured):
            os.close(fd)


class Bench:
    """What a session needs for its tests with ranks, made for the first of them.

    Args:
        config: of the session.
        items: all tests with ranks.

    Attributes:
        zygote: the process that forks the template.
    """

    def __init__(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        self._config = config
        self._files = list(dict.fromkeys(str(item.path) for item in items))
        self._following: dict[str, str | None] = {}
        next_of: dict[int, str] = {}
        for item in reversed(items):
            if mark := read_mark(item):
                self._following[item.nodeid] = next_of.get(mark.n)
                next_of[mark.n] = item.nodeid
        self._pools: dict[int, _Ranks] = {}
        self._store: Store | None = None
        self._template: Template | None = None
        self._tests = 0
        self._checked = {"--check-async": [0, 0], "--check-nccl": [0, 0]}
        self._gpus = config.getoption("--emulated-gpus")
        try:
            self._variables = checks.environment(
                config.getoption("--check-async"), config.getoption("--check-nccl"), self._gpus
            )
        except checks.NoGpusError as error:
            raise pytest.UsageError(str(error)) from None
        imports = ["pytest", "torchcomms_pg.testing.pytest_rank", *config.getini("ranks_imports")]
        path = os.pathsep.join(map(str, config.getini("pythonpath")))
        self.zygote = Zygote(imports, self._variables, path)

    def close(self) -> None:
        """Ends all processes."""
        while self._pools:
            self._pools.popitem()[1].close()
        for part in (self._template, self._store, self.zygote):
            if part is not None:
                part.close()

    def prepare(self, item: pytest.Item) -> None:
        """Makes the ranks of a test; an error is raised again when the test runs."""
        if mark := read_mark(item):
            with contextlib.suppress(ZygoteError, OSError):
                self.ranks(mark.n)

    def run(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        """Does for a test with ranks what pytest's own protocol does for other tests."""
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        begin = time.time()
        test = _Test(self, item)
        try:
            reports = test.run()
        finally:
            # pytest expects that the collectors which only this test needed have been left.
            item.session._setupstate.teardown_exact(nextitem)
        for report in reports:
            report.start, report.stop = begin, time.time()
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        if test.quit:
            pytest.exit(test.quit)

    def following(self, item: pytest.Item) -> str | None:
        """Returns the name of the next test that the same ranks will probably run."""
        return self._following[item.nodeid]

    def ranks(self, world: int) -> _Ranks:
        """Returns warm ranks, or new ones."""
        if world not in self._pools:
            prints = self._config.getoption("capture") == "no"
            if self._store is None:
                self._store = Store(self.zygote)
            self._pools[world] = _Ranks(world, self._prepared(), prints)
        return self._pools[world]

    def renew(self, world: int) -> None:
        """Ends the ranks of this number at once; the next test gets new ones."""
        ranks = self._pools.pop(world)
        ranks.busy = True
        ranks.close()

    def setting(self, mark: _Mark) -> Setting:
        """Returns what to tell the ranks about a test's group."""
        self._tests += 1
        backend = mark.backend
        if backend is not None:
            backend = self._config.getoption("--ranks-backend") or backend
        assert self._store is not None
        devices = self._gpus or 0
        # A check judges one test's operations, with the groups they are of.
        fresh = mark.fresh_group or any(map(self._config.getoption, self._checked))
        return Setting(mark.n, self._store.port, self._tests, backend, mark.timeout, devices, fresh)

    def note(self, option: str, operations: int) -> None:
        """Counts a test that an option has checked, with its operations on all ranks."""
        counts = self._checked[option]
        counts[0] += 1
        counts[1] += operations

    def checked(self) -> list[str]:
        """Returns a line for each option that checks tests: how much it has had to check."""
        return [
            f"{option}: checked {tests} tests with ranks, with {operations} "
            f"{'asynchronous ' if option == '--check-async' else ''}operations"
            for option, (tests, operations) in self._checked.items()
            if self._config.getoption(option)
        ]

    def why_missing(self) -> str:
        """Returns why the ranks may lack a test that this session has."""
        problems = self._prepared().prepared[2]
        return problems or (
            "The ranks collect the files of the tests anew. Parameters that differ from run to run "
            "and a plugin that is an object given to pytest.main() do not reach them: give the "
            "parameters ids, and put the plugin's hooks into a conftest.py."
        )

    def _prepared(self) -> Template:
        if self._template is None:
            self._template = Template(
                self.zygote, "torchcomms_pg.testing.pytest_rank:template", self._plan()
            )
            number = self._template.prepared[1]
            if number > 1:
                self._template.close()
                self._template = None
                raise ZygoteError(
                    f"importing {', '.join(self._files)} leaves {number - 1} threads running, and "
                    "ranks cannot be forked from a process with threads: start threads in a fixture"
                )
        return self._template

    def _plan(self) -> pytest_rank.Plan:
        config = self._config
        options = {name: value for name, value in vars(config.option).items() if _pickles(value)}
        base = config._tmp_path_factory.mktemp("ranks")  # type: ignore[attr-defined]
        options.update(
            plugins=[*config.option.plugins, "no:terminal"],
            rootdir=str(config.rootpath),
            inifilename=str(config.inipath) if config.inipath else None,
            basetemp=str(base),
            # What the session does itself.
            usepdb=False, torchcomms_pg_pdb=config.getoption("usepdb"),
            lf=False, failedfirst=False, newfirst=False, stepwise=False,
            numprocesses=None, maxprocesses=None, dist="no", tx=[], looponfail=False,
            cov_source=None, maxfail=0, setupshow=False, keyword="", markexpr="", deselect=None,
            file_or_dir=[],
        )  # fmt: skip
        if config.getoption("log_file", None) or config.getini("log_file"):
            options["log_file"] = os.devnull
        worker = getattr(config, "workerinput", None)
        # What a group that fails writes belongs to this run.
        dumps = {}
        if not any(map(os.environ.get, DUMP_PREFIXES)):
            dumps[DUMP_PREFIXES[0]] = str(base / "trace_rank_")
        return pytest_rank.Plan(
            options,
            self._files,
            os.getcwd(),
            os.environ | self._variables | dumps,
            list(sys.path),
            list(sys.argv),
            worker if worker and _pickles(worker) else {"workerid": "master", "testrunuid": ""},
            _coverage_of(config),
        )


def _pickles(value: object) -> bool:
    try:
        pickle.dumps(value)
    except Exception:
        return False
    return True


def _coverage_of(config: pytest.Config) -> dict[str, Any] | None:
    """Returns the arguments of coverage.Coverage by which pytest-cov measures, or None."""
    plugin = config.pluginmanager.getplugin("_cov")
    controller = getattr(plugin, "cov_controller", None)
    measured = getattr(controller, "cov", None)
    if measured is None:
        return None
    settings = measured.config
    return {
        "data_file": os.path.abspath(settings.data_file),
        "data_suffix": True,
        "branch": settings.branch,
        "source": settings.source,
        "config_file": settings.config_file or False,
    }


def read_mark(item: pytest.Item) -> _Mark | None:
    """Returns the arguments of a test's mark, or None if they are wrong."""
    mark = item.get_closest_marker("ranks")
    assert mark is not None
    config = item.config
    names = [field.name for field in dataclasses.fields(_Mark)]
    given: dict[str, Any] = dict(zip(names, mark.args, strict=False))
    if len(mark.args) > len(names) or given.keys() & mark.kwargs.keys():
        return None
    given.update(mark.kwargs)
    given.setdefault("backend", "torchcomms")
    given.setdefault("timeout", _seconds(config, "ranks_timeout"))
    given.setdefault("limit", _seconds(config, "ranks_limit"))
    given.setdefault("fresh_group", config.getini("ranks_fresh_group"))
    if isinstance(given.get("n"), (list, tuple)):
        parameters = getattr(item, "callspec", None)
        given["n"] = parameters.params.get("world_size") if parameters is not None else None
    try:
        found = _Mark(**given)
    except TypeError:
        return None
    numbers = isinstance(found.n, int) and not isinstance(found.n, bool) and found.n >= 1
    times = all(
        isinstance(value, (int, float)) and value > 0 for value in (found.timeout, found.limit)
    )
    others = isinstance(found.backend, (str, type(None))) and isinstance(found.fresh_group, bool)
    if not (numbers and times and others):
        return None
    patience = config.getoption("--ranks-patience")
    return dataclasses.replace(
        found, timeout=found.timeout * patience, limit=found.limit * patience
    )


def _seconds(config: pytest.Config, name: str) -> float:
    """Returns the value of an option of pytest's configuration file."""
    given = config.getini(name)
    with contextlib.suppress(ValueError):
        if float(given) > 0:
            return float(given)
    raise pytest.UsageError(f"{name} = {given}: wanted seconds, more than 0")


class _Test:
    """One run of one test on its ranks.

    Attributes:
        quit: why the session has to end, empty if it goes on.
    """

    def __init__(self, bench: Bench, item: pytest.Item) -> None:
        self._bench, self._item, self._config = bench, item, item.config
        self._events: list[_Event] = []
        self._warned: set[str] = set()
        self._done: set[int] = set()
        self._ended: set[int] = set()  # dead, or killed
        self._terminal: int | None = None
        self._uses: list[dict[str, Any]] = []
        self.quit = ""

    def run(self) -> list[Any]:
        """Returns the reports of the test."""
        mark = read_mark(self._item)
        if mark is None:
            given = self._item.get_closest_marker("ranks")
            assert given is not None
            words = [*map(repr, given.args), *(f"{k}={v!r}" for k, v in given.kwargs.items())]
            return self._refused(
                f"@pytest.mark.ranks({', '.join(words)}): wanted ranks(n, backend='torchcomms', "
                "timeout=5, limit=60, fresh_group=True), with n a number of ranks, 1 or more, or a "
                "list of such numbers if the test is a function, backend the name of a backend or "
                "None, and seconds"
            )
        self._mark = mark
        try:
            self._ranks = self._bench.ranks(mark.n)
            setting = self._bench.setting(mark)
        except (ZygoteError, OSError) as error:
            return self._refused(f"the ranks of the test could not be started: {error}")
        folder = self._tmp_path()
        with contextlib.ExitStack() as stack:
            dumps = None
            if self._config.getoption("--check-nccl"):
                dumps = stack.enter_context(tempfile.TemporaryDirectory(prefix="torchcomms_pg-"))
            run = pytest_rank.Run(
                self._item.nodeid, self._bench.following(self._item), setting,
                None if folder is None else str(folder), dumps,
            )  # fmt: skip
            try:
                for rank in range(mark.n):
                    self._ranks.send(rank, run)
                self._wait()
                self._finish()
            except BaseException as error:  # of pytest-timeout, or Ctrl-C
                self._end(self._running(), "")
                self._bench.renew(mark.n)
                if not isinstance(error, (Exception, pytest.fail.Exception)):
                    raise
                text = f"{error}\n{self._places()}"
                self._events.append(_Event(-1, time.monotonic(), text=text))
            reports = self._merge()
            self._add_findings(reports, dumps)
        if folder is not None and not any(report.failed for report in reports):
            if self._config.getini("tmp_path_retention_policy") != "all":
                shutil.rmtree(folder, ignore_errors=True)
        return reports

    def _tmp_path(self) -> Path | None:
        if "tmp_path" not in getattr(self._item, "fixturenames", ()):
            return None
        name = "".join(c if c.isalnum() else "_" for c in self._item.name)[:30]
        factory = self._config._tmp_path_factory  # type: ignore[attr-defined]
        folder: Path = factory.mktemp(name)
        return folder

    # The run

    def _wait(self) -> None:
        """Waits until every rank is through, has died or has been ended."""
        ranks, mark = self._ranks, self._mark
        limit = time.monotonic() + mark.limit
        through = over = None  # since when one rank is through, and since when it is over
        while running := self._running():
            now = time.monotonic()
            deadline, why = limit, f"the test took longer than its limit of {mark.limit:g} s"
            if through is not None and through + mark.timeout + _LATE < deadline:
                deadline = through + mark.timeout + _LATE
                why = f"it came {mark.timeout:g} s later to the test's end than another rank"
            # A rank that has failed itself has its fixtures to end, and tells its findings then.
            failed = {event.rank for event in self._events if _ends_test(event)}
            if over is not None:
                grace = GRACE if running - failed else mark.timeout
                if over + grace < deadline:
                    deadline, why = over + grace, ""
            if self._terminal in running:
                deadline = now + 60
            if now >= deadline:
                self._end(running if why else running - failed or running, why)
                continue
            for rank, message in ranks.receive(running, min(0.5, deadline - now)):
                self._take(rank, message)
            ranks.print_lines()
            if self._done and through is None:
                through = time.monotonic()
            if over is None and (self._ended or self.quit or any(map(_ends_test, self._events))):
                over = time.monotonic()

    def _take(self, rank: int, message: Any) -> None:
        if isinstance(message, Death):
            self._ended.add(rank)
            output = end_of(self._ranks.output(rank).strip())
            end = f"; its output ends:\n{output}" if output else ""
            self._events.append(_Event(rank, time.monotonic(), text=f"{message}{end}"))
        elif message[0] == "report":
            _, data, effect, stamp = message
            report = self._config.hook.pytest_report_from_serializable(
                config=self._config, data=data
            )
            self._events.append(_Event(rank, stamp, effect, report))
        elif message[0] == "warning":
            self._warn(*message[1:])
        elif message[0] == "terminal":
            self._give_terminal(rank)
        elif message[0] == "missing":
            text = f"has no test of this name. {self._bench.why_missing()}"
            self._events.append(_Event(rank, time.monotonic(), text=text))
        elif message[0] == "done":
            self._done.add(rank)
            self.quit = self.quit or message[1]
            self._uses += [message[2]] if message[2] is not None else []

    def _running(self) -> set[int]:
        return set(range(self._mark.n)) - self._done - self._ended

    def _end(self, running: set[int], why: str) -> None:
        """Kills ranks that still run the test, and notes their lines, and why they are blamed."""
        now = time.monotonic()
        for rank, stacks in self._ranks.stacks(sorted(running)).items():
            where = place(stacks)
            text = f"still running{f', at {where}' if where else ''}"
            if why:
                text += f": {why}\n{without_bench(stacks)}"
            self._events.append(_Event(rank, now, text=text, blamed=bool(why)))
            self._ranks.kill(rank)
            self._ended.add(rank)

    def _finish(self) -> None:
        """Has the ranks end their groups, and undo what the test has left; or ends the ranks."""
        mark = self._mark
        if self._ended or self.quit:
            self._bench.renew(mark.n)
            return
        for rank in range(mark.n):
            self._ranks.send(rank, "end")
        waiting, deadline = set(range(mark.n)), time.monotonic() + mark.timeout + _END_LIMIT
        renew = self._terminal is not None  # a rank that has the terminal keeps it
        while waiting and (left := deadline - time.monotonic()) > 0:
            for rank, message in self._ranks.receive(waiting, left):
                waiting.discard(rank)
                for what in [f"it {message}"] if isinstance(message, Death) else message[1]:
                    renew = True
                    text = f"rank {rank} has been replaced after {self._item.nodeid}: {what}"
                    self._warn(text, pytest.PytestWarning, None, "runtest", self._item.nodeid, None)
        for rank, stacks in self._ranks.stacks(sorted(waiting)).items():
            renew = True
            text = f"did not end the test's groups in time, at {place(stacks)}"
            self._events.append(_Event(rank, time.monotonic(), text=text))
        self._ranks.print_lines(end=True)
        if renew or (not mark.fresh_group and any(map(_may_break_group, self._events))):
            self._bench.renew(mark.n)

    def _warn(
        self, message: Any, category: Any, shown: Any, when: str, nodeid: str, location: Any
    ) -> None:
        if (key := f"{message} {shown}") in self._warned:
            return
        self._warned.add(key)
        file, line = shown or (str(self._item.path), (self._item.location[1] or 0) + 1)
        self._config.hook.pytest_warning_recorded.call_historic(
            kwargs=dict(
                warning_message=warnings.WarningMessage(message, category, file, line),
                when=when,
                nodeid=nodeid,
                location=location,
            )
        )

    def _give_terminal(self, rank: int) -> None:
        """Lends the terminal to the first rank that asks; no time limit counts meanwhile."""
        with socket.fromfd(
            self._ranks.connections[rank].fileno(), socket.AF_UNIX, socket.SOCK_STREAM
        ) as raw:
            if self._terminal is not None:
                raw.sendall(b"n")
                return
            self._terminal = rank
            capture = self._config.pluginmanager.getplugin("capturemanager")
            if capture is not None:
                capture.suspend_global_capture(in_=True)
            if self._config.pluginmanager.hasplugin("timeout"):
                self._config.hook.pytest_timeout_cancel_timer(item=self._item)
            sys.stdout.flush()
            socket.send_fds(raw, [b"t"], [0, 1])

    # The report

    def _refused(self, text: str) -> list[Any]:
        return [self._own_report(text, "setup")]

    def _own_report(self, text: str, when: Any) -> Any:
        """Returns pytest's report of an error that this session raises itself."""
        self._item.stash[xfailed_key] = evaluate_xfail_marks(self._item)

        def fail() -> None:
            raise RankEndedError(text)

        call = pytest.CallInfo.from_call(fail, when=when)
        report = self._item.ihook.pytest_runtest_makereport(item=self._item, call=call)
        if report.failed:
            report.longrepr = text
        return report

    def _places(self) -> str:
        lines = [
            f"rank {event.rank}: {event.text}" for event in self._events if event.report is None
        ]
        return "\n".join(lines)

    def _merge(self) -> list[Any]:
        """Makes the reports of the test of the reports of all ranks."""
        by_key: dict[tuple[Any, ...], list[_Event]] = {}
        for event in self._events:
            if event.report is not None:
                context = getattr(event.report, "context", None)
                own = repr(context) if context is not None else ""
                by_key.setdefault((event.report.when, own), []).append(event)
        own_failures = [event for event in self._events if event.report is None and event.blamed]
        main = {when: self._choose(by_key.pop((when, ""), [])) for when in _PHASES}
        reports = [main["setup"]] if main["setup"] is not None else []
        if main["setup"] is None or main["setup"].report.passed:
            reports += [self._choose(events) for key, events in by_key.items() if key[0] == "call"]
            reports += [main["call"]] if main["call"] is not None else []
        worst = _first(own_failures)
        failed = [event for event in reports if event is not None and event.report.failed]
        first = _first([*failed, *([worst] if worst else [])])
        if worst is not None and (first is worst or not failed):
            when = "call" if main["setup"] is not None else "setup"
            # A rank that has no report of its setup has not got to the test's call.
            reports = [
                e for e in reports if e is not None and (e.report.when, e.failed) != (when, False)
            ]
            reports = [e for e in reports if e.report.when != when or hasattr(e.report, "context")]
            who = f"rank {worst.rank} " if worst.rank >= 0 else ""
            text = f"{who}{worst.text}\n{self._others(worst.rank)}".rstrip()
            made = _Event(worst.rank, worst.stamp, report=self._own_report(text, when))
            reports.append(made)
        elif first is not None:
            self._add_others(first)
        result = [event.report for event in reports if event is not None]
        if main["teardown"] is not None:
            if main["teardown"].report.failed:
                self._add_others(main["teardown"])
            result.append(main["teardown"].report)
        elif not any(report.when == "teardown" for report in result):
            result.append(self._passed_teardown())
        return result

    def _add_findings(self, reports: list[Any], dumps: str | None) -> None:
        """Makes the test fail by what its checks have found, or adds that to its failure."""
        found = {}
        if self._uses:
            found["--check-async"] = checks.async_report(self._uses)
        # A rank that has failed or skipped has not issued what the others wait for.
        through = (each.report and (each.report.passed or _is_xpass(each)) for each in self._events)
        if dumps is not None and all(through):
            found["--check-nccl"] = checks.nccl_report(Path(dumps))
        for option, (_, operations) in found.items():
            self._bench.note(option, operations)
        blocks = [
            f"{option}: {self._item.nodeid}\n{text}" for option, (text, _) in found.items() if text
        ]
        if not blocks:
            return
        told = "\n\n".join(blocks)
        if any(event.failed and not _is_xpass(event) for event in self._events):
            for report in [report for report in reports if report.failed][:1]:
                _add_section(report, "findings of the checks", told)
            return
        for number, report in enumerate(reports):
            as_expected = report.skipped and hasattr(report, "wasxfail")
            if report.when == "call" and not hasattr(report, "context") and not as_expected:
                reports[number] = self._own_report(told, "call")
                reports[number].sections, reports[number].duration = (
                    report.sections,
                    report.duration,
                )

    def _passed_teardown(self) -> Any:
        call = pytest.CallInfo.from_call(lambda: None, when="teardown")
        return self._item.ihook.pytest_runtest_makereport(item=self._item, call=call)

    def _choose(self, events: list[_Event]) -> Any:
        """Returns the event whose report stands for all ranks, None if there are no events."""
        expected = [event for event in events if hasattr(event.report, "wasxfail")]
        failures = [
            event
            for event in events
            if event.failed
            # A test that fails as expected on one rank has not passed.
            and not (expected and _is_xpass(event))
        ]
        xfailed = [event for event in expected if event.report.skipped]
        skipped = [event for event in events if event.report.skipped]
        for found in (failures, xfailed, skipped, events):
            if found:
                chosen = _first(found)
                assert chosen is not None
                chosen.report.duration = max(event.report.duration for event in events)
                return chosen
        return None

    def _add_others(self, event: _Event) -> None:
        """Says in a report which rank failed first, and what became of the others."""
        report = event.report
        others = self._others(event.rank)
        longrepr = report.longrepr
        if hasattr(longrepr, "addsection"):
            if longrepr.reprcrash is not None:
                longrepr.reprcrash.message = f"rank {event.rank}: {longrepr.reprcrash.message}"
            title = f"rank {event.rank} failed first" if others else f"rank {event.rank} failed"
            longrepr.addsection(title, others)
        else:
            report.longrepr = f"rank {event.rank}: {longrepr}\n{others}"

    def _others(self, but: int) -> str:
        """Returns a line for each other rank."""
        lines = []
        for rank in range(self._mark.n):
            own = [event for event in self._events if event.rank == rank]
            if rank == but or but < 0 or not own:
                continue
            bad = _first([event for event in own if event.failed or event.report is None])
            lines.append(f"rank {rank}: {_in_a_line(bad or own[-1])}")
        return "\n".join(lines)


def _is_xpass(event: _Event) -> bool:
    """Returns whether the test has passed on a rank, and its strict mark expects a failure."""
    text = str(event.report.longrepr) if event.report is not None else ""
    return "[XPASS(strict)]" in text.partition("\n")[0]


def _add_section(report: Any, title: str, text: str) -> None:
    """Adds a text to the report of a failure."""
    if hasattr(report.longrepr, "addsection"):
        report.longrepr.addsection(title, text)
    else:
        report.longrepr = f"{report.longrepr}\n{text}"


def _first(events: list[_Event]) -> _Event | None:
    return min(events, key=lambda event: (event.effect, event.stamp), default=None)


def _ends_test(event: _Event) -> bool:
    """Returns whether the other ranks may wait for this one in vain from now on."""
    report = event.report
    if report is None:
        return True
    ended = report.when != "teardown" and not report.passed and not _is_xpass(event)
    return ended and not hasattr(report, "context")


def _may_break_group(event: _Event) -> bool:
    """Returns whether operations may have failed, of a group that the next test would share."""
    report = event.report
    return report is None or report.failed or hasattr(report, "wasxfail")


def _in_a_line(event: _Event) -> str:
    report = event.report
    if report is None:
        return event.text.splitlines()[0].partition("; its output ends:")[0]
    if report.passed:
        return "passed"
    if report.skipped:
        return f"skipped: {report.longrepr[2]}" if isinstance(report.longrepr, tuple) else "skipped"
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is None:
        return str(report.longrepr).splitlines()[-1]
    message = (crash.message.splitlines() or [""])[0]
    return f"{os.path.relpath(crash.path)}:{crash.lineno}: {message}"
