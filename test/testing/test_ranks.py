"""Tests with @pytest.mark.ranks: what becomes of them, and what pytest says about them.

One run of pytest has all cases of programs/cases.py; the tests look at its reports.
"""

import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import types
import xml.etree.ElementTree

import pytest
import torch
import torch.distributed as dist

import emulated
from harness import ROOT, TESTS, limits
from harness.programs import end_tree
from torchcomms_pg.env import DUMP_PREFIXES
from torchcomms_pg.testing import checks, processes, pytest_main, pytest_rank
from torchcomms_pg.testing.rank import Fresh, Setting

# Seconds that a run of pytest may take. That of all cases waits for many processes to start.
PYTEST_LIMIT = 200

# The programs' timeouts of a second are shorter than a stop by harness/stress.py.
pytestmark = [pytest.mark.stops_ranks, pytest.mark.timeout(PYTEST_LIMIT + 20)]

PROGRAMS = TESTS / "testing" / "programs"


def pytest_on(folder, *args, before=(), unset=(), **env):
    """Returns arguments of subprocess.Popen for pytest on programs/ARGS in a folder of its own.

    `before` is a command that runs pytest, and `unset` are variables that pytest does not get.
    """
    for file in PROGRAMS.glob("*.py"):
        shutil.copy(file, folder)
    (folder / "pytest.ini").write_text("[pytest]\npython_files = *.py\n")
    variables = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    for name in unset:
        variables.pop(name, None)
    return {
        "args": [*before, sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *args],
        "cwd": folder,
        "env": variables | env,
        "text": True,
    }


def run_pytest(folder, *args, given="", **options):
    """Runs pytest with the arguments of `pytest_on`, and an input; returns the finished process."""
    timeout = limits.grown(PYTEST_LIMIT)
    command = pytest_on(folder, *args, **options)
    return subprocess.run(**command, input=given, capture_output=True, timeout=timeout)


class Cases:
    """The reports of a file of programs."""

    def __init__(self, folder, *args, **env):
        self.folder = folder
        self.run = run_pytest(folder, *args, "-rA", "--junitxml=report.xml", "--color=no", **env)
        assert (folder / "report.xml").is_file(), self.run.stdout + self.run.stderr
        self.reports = {}
        for case in xml.etree.ElementTree.parse(folder / "report.xml").iter("testcase"):
            self.reports.setdefault(case.get("name"), []).append(case)

    def outcome(self, name):
        """Returns the outcome of a test, its first line, and its whole text."""
        found = [part for case in self.reports[name] for part in case]
        found = [part for part in found if part.tag in ("failure", "error", "skipped")]
        if not found:
            return "passed", "", ""
        worst = found[0]
        return worst.tag, worst.get("message"), worst.text or ""

    def seconds(self, name):
        return sum(float(case.get("time")) for case in self.reports[name])


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cases")
    return Cases(folder, "cases.py", f"--basetemp={folder / 'base'}", unset=DUMP_PREFIXES)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shared")
    (folder / "below").mkdir()
    (folder / "below" / "conftest.py").write_text(
        "import pytest\n@pytest.fixture\ndef below(rank): return rank + 1\n"
    )
    (folder / "below" / "below.py").write_text(
        "import pytest\n@pytest.mark.ranks(2)\n"
        "def test_of_a_folder_with_a_conftest(rank, below): assert below == rank + 1\n"
    )
    given = ("ranks_timeout=1", "ranks_fresh_group=false", "ranks_imports=colorsys")
    defaults = (*(f"-o={each}" for each in given), "--ranks-patience=1.5")
    return Cases(folder, "shared.py", "below/below.py", *defaults, unset=("RES_OPTIONS",))


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checked")
    # The variable checks a whole process, and is left to the option if both are there.
    both = {"TORCHCOMMS_PG_CHECK_ASYNC": str(folder / "found_")}
    return Cases(folder, "checked.py", "--check-async", "--check-nccl", **both)


@pytest.mark.parametrize(
    "name",
    (
        "test_fixtures",
        "test_prints_after_another_has_closed_its_output",
        "test_finds_no_thread_of_an_earlier_test",
        "test_nothing_is_left",
        "test_mesh[1]",
        "test_mesh[2]",
        "test_of_unittest",
        "test_unpicklable[lock]",
        "test_after_failures",
        "test_makes_its_own_group",
        "test_leaves_a_thread",
        "test_without_the_mark",
    ),
)
@pytest.mark.torch_version
def test_a_test_that_succeeds_on_all_ranks_passes(cases, name):
    assert cases.outcome(name) == ("passed", "", "")


@pytest.mark.parametrize(
    "name",
    (
        *(f"test_shares_its_group[{number}]" for number in range(3)),
        "test_finds_no_group_of_an_earlier_test",
        "test_has_its_own_group",
        "test_has_a_group_of_its_own_backend",
        "test_after_one_that_fails_has_new_processes",
        "test_ends_its_group",
        "test_of_several_numbers[1ranks]",
        "test_of_several_numbers[3ranks]",
        "test_after_one_that_ends_its_group_has_new_processes[2ranks]",
        "test_asks_no_name_server",
        "test_has_the_imports_of_the_configuration",
        "test_of_a_folder_with_a_conftest",
    ),
)
def test_tests_that_share_a_group_pass(shared, name):
    assert shared.outcome(name) == ("passed", "", "")


def test_who_ends_a_shared_group_is_told(shared):
    assert re.search(
        r"replaced after shared.py::test_ends_its_group: it ended the group that other tests share",
        shared.run.stdout,
    )


def test_the_default_timeout_is_that_of_the_configuration_and_grows_with_the_patience(shared):
    kind, _, text = shared.outcome("test_is_late")
    assert kind == "failure" and "it came 1.5 s later to the test's end" in text, text


def test_a_mark_takes_what_it_does_not_say_from_the_configuration():
    found = {"ranks_timeout": "3", "ranks_limit": "4", "ranks_fresh_group": False}
    config = types.SimpleNamespace(getini=found.get, getoption={"--ranks-patience": 2.0}.get)
    item = types.SimpleNamespace(
        config=config, get_closest_marker=lambda name: pytest.mark.ranks(2).mark
    )
    mark = pytest_main.read_mark(item)
    assert (mark.timeout, mark.limit, mark.fresh_group) == (6, 8, False)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("before", (0, 1, 2))
def test_the_deterministic_mode_is_put_back(before):
    """On the suite's ranks, which have torch's compiler imported, as the mode needs it."""
    from torch._inductor import config

    torch.use_deterministic_algorithms(before > 0, warn_only=before == 1)
    fresh = Fresh(Setting(1, 0, 0, backend=None))
    torch.use_deterministic_algorithms(before < 2)
    fresh.end()
    assert (torch.get_deterministic_debug_mode(), config.deterministic) == (before, before > 0)


def test_stacks_of_no_ranks_take_no_time(monkeypatch):
    """Each test that succeeds asks for them."""
    monkeypatch.setattr(processes.select, "select", lambda *_: pytest.fail("it waited"))
    assert processes.Processes(0).stacks([]) == {}


def test_the_rank_that_failed_first_is_shown_with_values_and_the_others_with_a_line(cases):
    kind, message, text = cases.outcome("test_raises")
    assert kind == "failure" and message.startswith("rank 1: assert 6 == 3")
    assert re.search(r"^>\s+assert found == 3\nE\s+assert 6 == 3$", text, re.MULTILINE), text
    assert re.search(r"- rank 1 failed first -+\nrank 0: still running, at cases.py:\d+ in", text)
    assert "said by rank 1" in cases.run.stdout


def test_of_several_failures_the_earliest_is_shown_that_no_other_has_caused():
    def effect_of(error):
        served = pytest_rank._Served(connection=None, rank=0)
        call = types.SimpleNamespace(excinfo=types.SimpleNamespace(value=error))
        step = served.pytest_runtest_makereport(item=None, call=call)
        next(step)
        with pytest.raises(StopIteration) as ended:
            step.send(types.SimpleNamespace())
        return ended.value.value.torchcomms_pg_failed[0]

    lost, own = dist.DistBackendError("the peer is gone"), AssertionError("of this rank")
    event = pytest_main._Event
    events = [event(0, 1.0, effect_of(lost)), event(1, 3.0, effect_of(own)), event(2, 2.0)]
    assert pytest_main._first(events).rank == 2


def test_a_rank_that_leaves_is_named_with_its_code_and_its_last_words(cases):
    kind, message, text = cases.outcome("test_leaves_with_a_code")
    assert kind == "failure"
    assert text.startswith("rank 1 ended with exit code 3; its output ends:\nlast words")


def test_a_dead_rank_is_named_with_its_signal(cases):
    kind, _, text = cases.outcome("test_is_killed")
    assert kind == "failure" and text.startswith("rank 1 was killed by SIGKILL")


def test_a_rank_that_dies_is_named_while_a_child_of_it_holds_its_connection(cases):
    kind, _, text = cases.outcome("test_leaves_a_child_that_holds_the_connection")
    assert kind == "failure" and text.startswith("rank 1 ended with exit code 4"), text


def test_a_report_is_shown_however_much_the_ranks_have_printed(cases):
    kind, message, _ = cases.outcome("test_prints_more_than_a_socket_holds")
    assert kind == "failure" and "assert not True" in message


def test_a_test_that_closes_its_output_is_told_and_the_next_one_can_print(cases):
    for name in ("stdout", "stderr"):
        told = rf"replaced after cases.py::test_closes_its_output\[{name}\]: it closed sys.{name}\n"
        assert re.search(told, cases.run.stdout), cases.run.stdout


def test_the_terminal_gets_no_warning_of_the_store(cases):
    assert "socket.cpp" not in cases.run.stderr, cases.run.stderr


@pytest.mark.slow
def test_an_interrupt_on_one_rank_ends_the_session_at_once(tmp_path):
    run = run_pytest(tmp_path, "interrupted.py", "-rA")
    said = run.stdout + run.stderr
    assert run.returncode == 2 and "!! _pytest.outcomes.Exit: KeyboardInterrupt !!" in said, said
    assert "did not arrive" not in said and "FAILED" not in said, said


def test_an_interrupt_ends_the_ranks_at_once_and_leaves_nothing(tmp_path):
    for name in ("run", "tmp"):
        (tmp_path / name).mkdir()
    os.mkfifo(tmp_path / "pipe")
    pipe = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    given = ("waits.py", "--check-nccl", f"--basetemp={tmp_path / 'base'}")
    variables = {"RANKS_PIPE": str(tmp_path / "pipe"), "TMPDIR": str(tmp_path / "tmp")}
    command = pytest_on(tmp_path / "run", *given, unset=DUMP_PREFIXES, **variables)
    limit = limits.grown(PYTEST_LIMIT / 2)
    said = subprocess.PIPE
    with subprocess.Popen(**command, stdout=said, stderr=said, start_new_session=True) as run:
        try:
            for _ in range(2):  # ranks
                assert select.select([pipe], [], [], limit)[0] and os.read(pipe, 1) == b"r"
            os.killpg(run.pid, signal.SIGINT)  # as a terminal does
            # The end of the pipe is that of the ranks.
            assert select.select([pipe], [], [], limits.grown(4))[0] and os.read(pipe, 1) == b""
            output, errors = run.communicate(timeout=limit)
        except BaseException:
            end_tree(run.pid)
            raise
    assert run.returncode == 2 and "KeyboardInterrupt" in output, output + errors
    assert "Traceback" not in errors and "failed" not in output, output + errors
    os.close(pipe)
    assert not list((tmp_path / "tmp").iterdir())


def test_a_hang_ends_after_its_timeout_with_the_verdict_and_the_line(cases):
    kind, _, text = cases.outcome("test_hangs")
    assert kind == "failure"
    assert "rank 1 has not arrived at barrier #1" in text
    assert re.search(r"MainThread: cases.py:\d+ in test_hangs", text)
    assert re.search(r"^rank 1: still running, at cases.py:\d+ in test_hangs$", text, re.MULTILINE)


def test_the_dumps_of_ranks_that_hang_are_in_pytests_folder(cases):
    dumps = {path.name for path in (cases.folder / "base").rglob("trace_rank_*")}
    assert "trace_rank_0" in dumps, dumps  # rank 1 is in no operation, and is ended


def test_a_rank_late_at_the_end_is_named_with_its_line(cases):
    kind, _, text = cases.outcome("test_is_late")
    assert kind == "failure"
    assert re.match(r"rank 1 still running, at cases.py:\d+ in test_is_late: it came 1 s", text)
    assert text.endswith("rank 0: passed")


def test_a_test_ends_at_its_limit_whatever_its_ranks_do(cases):
    kind, _, text = cases.outcome("test_never_ends")
    assert kind == "failure" and "longer than its limit of 1 s" in text


def test_a_rank_that_exits_has_failed(cases):
    kind, message, _ = cases.outcome("test_exits")
    assert kind == "failure" and message == "rank 1: SystemExit: 2"


def test_a_fixture_that_raises_on_a_rank_is_an_error_of_the_setup(cases):
    kind, message, text = cases.outcome("test_fixture_raises")
    assert kind == "error" and "no fixture of rank 1" in text


def test_a_skip_on_one_rank_skips_the_test(cases):
    kind, message, _ = cases.outcome("test_skips")
    assert (kind, message) == ("skipped", "not on rank 1")


def test_a_failure_comes_before_a_failure_as_expected_and_that_before_a_skip_and_a_success():
    def event(rank, outcome, **attributes):
        report = types.SimpleNamespace(duration=0, longrepr="", **attributes)
        report.failed, report.skipped = outcome == "failed", outcome == "skipped"
        return pytest_main._Event(rank, stamp=float(rank), report=report)

    passed, skipped, failed = event(0, "passed"), event(1, "skipped"), event(3, "failed")
    expected = event(2, "skipped", wasxfail="")
    choose = pytest_main._Test._choose
    assert choose(None, [passed, skipped, expected, failed]) is failed
    assert choose(None, [passed, skipped, expected]) is expected
    assert choose(None, [passed, skipped]) is skipped


@pytest.mark.parametrize(
    "name", ("test_fails_as_expected", "test_fails_late_as_expected", "test_dies_as_expected")
)
def test_a_test_that_fails_as_expected_on_one_rank_has(cases, name):
    assert f"XFAIL cases.py::{name}" in cases.run.stdout, cases.run.stdout


def test_a_subtest_that_fails_on_one_rank_is_shown(cases):
    assert re.search(r"cases.py::test_subtests.* - rank 1: assert \(2 \* 1\) < 2", cases.run.stdout)


def test_a_thread_that_a_test_leaves_is_reported(cases):
    assert re.search(
        r"rank 0 has been replaced after cases.py::test_leaves_a_thread: it left the thread 'left'",
        cases.run.stdout,
    )
    assert cases.run.stdout.count("UserWarning: a warning of all ranks") == 1  # not by rank


def test_errors_of_use_say_what_to_do(cases):
    _, _, text = cases.outcome("test_async")
    assert "async def functions are not natively supported" in text and "pytest-asyncio" in text
    _, _, text = cases.outcome("test_of_no_ranks")
    assert "the fixture 'rank' needs ranks: give the test @pytest.mark.ranks(2)" in text
    [name] = [each for each in cases.reports if each.startswith("test_whose_name_changes")]
    _, _, text = cases.outcome(name)
    assert "has no test of this name" in text and "give the parameters ids" in text, text
    _, _, text = cases.outcome("test_of_a_wrong_mark")
    assert "@pytest.mark.ranks('2'): wanted ranks(n, backend='torchcomms', timeout=5" in text


@pytest.mark.slow
def test_a_file_that_starts_threads_when_it_is_imported_is_refused(tmp_path):
    run = run_pytest(tmp_path, "started.py")
    assert run.returncode == 1, run.stdout
    assert "started.py leaves 1 threads running" in run.stdout, run.stdout
    assert "start threads in a fixture" in run.stdout


def test_the_next_test_begins_a_second_after_a_failure(cases):
    """Also a second after the timeout or the limit, if the failure is a hang."""
    for name, most in (
        ("test_raises", 1),
        ("test_leaves_with_a_code", 1),
        ("test_is_killed", 1),
        ("test_leaves_a_child_that_holds_the_connection", 1),
        ("test_exits", 1),
        ("test_hangs", 2),
        ("test_is_late", 2),
        ("test_never_ends", 2),
    ):
        assert cases.seconds(name) <= limits.grown(most), name


@pytest.mark.slow
def test_output_and_the_debugger_are_of_a_rank_and_lines_of_all_ranks_count(tmp_path):
    pytest.importorskip("pytest_cov")
    run = run_pytest(
        tmp_path,
        *("shown.py", "-s", "--pdb", "--cov=measured", "--cov-report=term-missing"),
        "--ranks-backend=gloo",
        given="p secret * 4\nc\n",
    )
    said = run.stdout
    assert "[rank 0] hello of gloo\n" in said and "[rank 1] hello of gloo\n" in said, (
        said + run.stderr
    )
    assert "entering PDB on rank 1" in said and "(Pdb) 84\n" in said
    assert re.search(r"measured.py +6 +1 +83% +9\n", said)  # rank 0 alone has two lines less
    assert re.search(
        r"Timeout \(>5.0s\) from pytest-timeout.\nrank 0: still running, at shown.py", said
    )
    for rank in range(2):
        assert re.search(
            rf"rank {rank} has .*descriptor: it closed the descriptor {1 + rank}\n", said
        )
    assert "2 passed" in said and "2 failed" in said
    assert sorted(path.name for path in tmp_path.glob(".coverage*")) == [".coverage"]


def test_a_breakpoint_stops_the_first_rank_each_time_while_no_limit_counts(tmp_path):
    longer = "import time; time.sleep(2.5)\n"  # than the timeout
    given = f"p value\n{longer}c\np value\nc\n"
    run = run_pytest(tmp_path, "stopped.py", "-rA", given=given)
    said = run.stdout + run.stderr
    assert "(Pdb) 10\n" in said and "(Pdb) 20\n" in said and not run.returncode, said
    # Captured on the rank that has ended first, which was not stopped.
    assert "--- Captured stdout call ---" in said and "went on after 20" in said, said


def line_of(text):
    """Returns the number of the only line of programs/checked.py that ends with a text."""
    lines = (PROGRAMS / "checked.py").read_text().splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if line.endswith(text)]
    return number


@pytest.mark.parametrize("number", (1, 2))
def test_an_early_use_fails_the_test_that_has_it_with_both_lines(checked, number):
    """Also when an earlier test on the same ranks had the same use."""
    kind, _, text = checked.outcome(f"test_reads_early[{number}]")
    issue, use = line_of("values, async_op=True)"), line_of("total = values.sum()")
    assert kind == "failure"
    assert text.startswith(
        f"--check-async: checked.py::test_reads_early[{number}]\n"
        "1. ranks 0, 1 read the output of an all_reduce before its end\n"
        "  rank 0: all_reduce (4 x float32) of group 0 (default_pg)"
    ), text
    assert re.search(rf"  at checked.py:{issue} in sum_and_read_early\n", text)
    assert re.search(rf"then aten.sum.default reads it  at checked.py:{use} in sum_and", text)
    assert "  1 more times at these lines" in text and "2. " not in text


def test_what_a_test_with_a_finding_has_printed_is_shown(checked):
    assert checked.run.stdout.count("said by the test") >= 2


@pytest.mark.parametrize("number", (1, 2))
def test_a_hazard_for_nccl_fails_the_test_that_has_it_with_both_lines(checked, number):
    kind, _, text = checked.outcome(f"test_has_two_orders[{number}]")
    assert kind == "failure"
    assert text.startswith(
        f"--check-nccl: checked.py::test_has_two_orders[{number}]\n1. ranks 0, 1"
    )
    assert "in different orders" in text and "2. " not in text, text
    assert text.count(f"  at checked.py:{line_of('group=group, async_op=True)')} in") == 4, text


def test_a_test_with_findings_of_both_checks_shows_both(checked):
    kind, _, text = checked.outcome("test_has_two_orders_and_reads_early")
    assert kind == "failure"
    for option in ("--check-async", "--check-nccl"):
        assert f"{option}: checked.py::test_has_two_orders_and_reads_early\n1. " in text, text


def test_groups_of_gloo_are_checked_for_nccl(checked):
    kind, _, text = checked.outcome("test_receives_from_any_rank")
    assert kind == "failure"
    assert "torch's nccl refuses a receive from any rank: rank 1" in text, text


def test_a_failure_that_an_early_use_makes_shows_both(checked):
    kind, message, text = checked.outcome("test_fails_by_an_early_use")
    assert kind == "failure" and "assert tensor(nan) == 8" in message, text
    assert "--check-async: checked.py::test_fails_by_an_early_use" in text
    # A rank that is ended a moment after the other has failed tells no findings.
    assert re.search(r"ranks? (0, )?[01] reads? the output of an all_reduce before its end", text)


@pytest.mark.parametrize("name", ("test_waits", "test_expects_a_timeout"))
def test_a_test_without_findings_passes_under_the_checks(checked, name):
    assert checked.outcome(name) == ("passed", "", "")


def test_a_test_that_skips_or_fails_as_expected_does_so_under_the_checks(checked):
    for name in ("test_skips", "test_skips_though_another_rank_passes"):
        assert checked.outcome(name)[:2] == ("skipped", "not on rank 1")
    assert "XFAIL checked.py::test_reads_early_as_expected" in checked.run.stdout


def test_the_checks_say_how_much_they_had_to_check(checked):
    said = checked.run.stdout
    # Of 27, two are of ranks that may be ended before they tell.
    assert re.search(r"^--check-async: checked 12 tests with ranks, with 2[567] asyn", said, re.M)
    assert "\n--check-nccl: checked 9 tests with ranks, with 25 operations\n" in said


@pytest.mark.skipif(bool(emulated.available()), reason=emulated.available())
@pytest.mark.parametrize("gpus", ("2", pytest.param("1", marks=pytest.mark.slow)))
def test_ranks_get_emulated_gpus(tmp_path, gpus):
    run = run_pytest(tmp_path, "gpus.py", "--emulated-gpus", gpus)
    assert "1 passed" in run.stdout, run.stdout + run.stderr


def test_emulated_gpus_that_cannot_be_had_are_refused_with_what_to_do(tmp_path, monkeypatch):
    run = run_pytest(tmp_path, "gpus.py", "--emulated-gpus", "3")
    assert "ERROR: --emulated-gpus 3: wanted 1 or 2" in run.stderr, run.stdout + run.stderr
    if reason := emulated.available():
        with pytest.raises(checks.NoGpusError, match=f"no emulated CUDA here: {reason}"):
            checks.environment(False, False, 2)
    monkeypatch.setattr(checks._compat, "FOLDER", str(tmp_path / "torchcomms_pg"))
    with pytest.raises(checks.NoGpusError, match=r"clone the project, and run pip install -e \."):
        checks.environment(False, False, 2)


PRIVATE = ("unshare", "--map-root-user", "--mount")  # memory that other processes do not use


@pytest.mark.slow
def test_many_tests_leave_no_descriptor_thread_process_file_or_memory(tmp_path):
    """Some of them fail, die, exit and hang."""
    folders = {name: tmp_path / name for name in ("run", "measured", "tmp", "home")}
    for folder in folders.values():
        folder.mkdir()
    variables = {"MANY": "100", "MEASURED": folders["measured"], "HOME": folders["home"]}
    unset = ("TORCH_FR_DUMP_TEMP_FILE", "TORCHCOMMS_PG_STATUS")  # which conftest.py has set
    private = subprocess.run([*PRIVATE, "true"], capture_output=True, check=False).returncode == 0
    run = run_pytest(
        folders["run"], "many.py", f"--basetemp={tmp_path / 'base'}", unset=unset,
        before=[*PRIVATE, "sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "-"]
        if private
        else [],
        **{name: str(value) for name, value in variables.items()}, TMPDIR=str(folders["tmp"]),
    )  # fmt: skip
    assert "94 passed, 8 xfailed" in run.stdout, run.stdout + run.stderr
    of = {path.name: json.loads(path.read_text()) for path in folders["measured"].iterdir()}
    for who, most in (("session", 4_000_000), ("rank 0", 1_000_000), ("rank 1", 1_000_000)):
        before, after = of[f"{who} before"], of[f"{who} after"]
        assert after["processes"][0][0] == before["processes"][0][0], (who, before, after)
        for was, found in zip(before["processes"], after["processes"], strict=True):
            # A rank begins some threads when it needs them, once.
            assert all(map(int.__le__, found, (was[0] + 3, was[1] + 3, was[2] + most))), (
                was,
                found,
            )
        assert after["files"] == ([[], [], []] if private else before["files"]), (who, after)
    assert not list(folders["tmp"].iterdir()) and not list(folders["home"].iterdir())


LATE_RANK = """
import os, time
import pytest

@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup():
    if os.environ.get("RANK") == "1":
        time.sleep(1.5)
    return (yield)
"""
LATE_RANKS_GROUP = """
from datetime import timedelta
import pytest, torch
import torch.distributed as dist

@pytest.mark.ranks(2, timeout=1)
def test_group():
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert backend.options._timeout == timedelta(seconds=1)
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torchcomms", "gloo"])
def test_a_group_is_made_though_a_rank_comes_later_than_its_timeout(tmp_path, backend):
    (tmp_path / "conftest.py").write_text(LATE_RANK)
    (tmp_path / "group.py").write_text(LATE_RANKS_GROUP)
    run = run_pytest(tmp_path, "group.py", f"--ranks-backend={backend}")
    assert "1 passed" in run.stdout, run.stdout + run.stderr


@pytest.mark.slow
def test_processes_of_xdist_have_their_own_ranks(tmp_path):
    pytest.importorskip("xdist")
    names = "test_fixtures or test_nothing or test_raises or test_skips or test_after"
    run = run_pytest(tmp_path, "cases.py", "-n", "2", "--dist", "loadgroup", "-k", names)
    assert "1 failed, 3 passed, 1 skipped" in run.stdout, run.stdout + run.stderr
    assert "rank 1 failed first" in run.stdout


@pytest.mark.slow
def test_the_folder_to_copy_passes(tmp_path):
    folder = shutil.copytree(ROOT / "examples" / "tests", tmp_path / "tests")
    run = run_pytest(tmp_path, str(folder), "-rs")
    assert "5 passed, 1 skipped" in run.stdout, run.stdout + run.stderr
    assert "needs two GPUs" in run.stdout


def test_a_session_without_the_mark_imports_no_torch(tmp_path):
    (tmp_path / "plain.py").write_text(
        "import sys\n"
        "def test_plain():\n"
        "    assert 'torchcomms_pg_autoload.pytest_plugin' in sys.modules\n"
        "    assert 'torch' not in sys.modules and 'torchcomms_pg' not in sys.modules\n"
    )
    run = run_pytest(tmp_path, "plain.py")
    assert "1 passed" in run.stdout, run.stdout + run.stderr
