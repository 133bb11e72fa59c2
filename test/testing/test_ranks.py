"""Tests with @pytest.mark.ranks: what becomes of them, and what pytest says about them.

One run of pytest has all cases of programs/cases.py; the tests look at its reports.
"""

import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree

import pytest

from harness import ROOT, TESTS, limits

# Seconds that a run of pytest may take. That of all cases waits for many processes to start.
PYTEST_LIMIT = 200

# The programs' timeouts of a second are shorter than a stop by harness/stress.py.
pytestmark = [pytest.mark.stops_ranks, pytest.mark.timeout(PYTEST_LIMIT + 20)]

PROGRAMS = TESTS / "testing" / "programs"


def run_pytest(folder, *args, given="", **env):
    """Runs pytest on programs/ARGS in a folder of its own; returns the finished process."""
    for file in PROGRAMS.glob("*.py"):
        shutil.copy(file, folder)
    (folder / "pytest.ini").write_text("[pytest]\npython_files = *.py\n")
    variables = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *args],
        cwd=folder,
        env=variables | env,
        input=given,
        capture_output=True,
        text=True,
        timeout=limits.grown(PYTEST_LIMIT),
    )


class Cases:
    """The reports of programs/cases.py."""

    def __init__(self, folder):
        self.run = run_pytest(folder, "cases.py", "-rA", "--junitxml=report.xml", "--color=no")
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
    return Cases(tmp_path_factory.mktemp("cases"))


@pytest.mark.parametrize(
    "name",
    (
        "test_fixtures",
        "test_nothing_is_left",
        "test_mesh[1]",
        "test_mesh[2]",
        "test_after_failures",
        "test_makes_its_own_group",
        "test_leaves_a_thread",
        "test_without_the_mark",
    ),
)
@pytest.mark.torch_version
def test_a_test_that_succeeds_on_all_ranks_passes(cases, name):
    assert cases.outcome(name) == ("passed", "", "")


def test_the_rank_that_failed_first_is_shown_with_values_and_the_others_with_a_line(cases):
    kind, message, text = cases.outcome("test_raises")
    assert kind == "failure" and message.startswith("rank 1: assert 6 == 3")
    assert re.search(r"^>\s+assert found == 3\nE\s+assert 6 == 3$", text, re.MULTILINE), text
    assert re.search(r"- rank 1 failed first -+\nrank 0: still running, at cases.py:\d+ in", text)
    assert "said by rank 1" in cases.run.stdout


def test_a_rank_that_leaves_is_named_with_its_code_and_its_last_words(cases):
    kind, message, text = cases.outcome("test_leaves_with_a_code")
    assert kind == "failure"
    assert text.startswith("rank 1 ended with exit code 3; its output ends:\nlast words")


def test_a_rank_that_is_killed_is_named_with_its_signal(cases):
    kind, _, text = cases.outcome("test_is_killed")
    assert kind == "failure" and text.startswith("rank 1 was killed by SIGKILL")


def test_a_hang_ends_after_its_timeout_with_the_verdict_and_the_line(cases):
    kind, _, text = cases.outcome("test_hangs")
    assert kind == "failure"
    assert "rank 1 has not arrived at barrier #1" in text
    assert re.search(r"MainThread: cases.py:\d+ in test_hangs", text)
    assert re.search(r"^rank 1: still running, at cases.py:\d+ in test_hangs$", text, re.MULTILINE)


def test_a_rank_that_comes_late_to_the_end_is_named_with_its_line(cases):
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


@pytest.mark.parametrize("name", ("test_fails_as_expected", "test_dies_as_expected"))
def test_a_test_that_fails_as_expected_on_one_rank_has(cases, name):
    assert f"XFAIL cases.py::{name}" in cases.run.stdout, cases.run.stdout


def test_a_subtest_that_fails_on_one_rank_is_shown(cases):
    assert re.search(r"cases.py::test_subtests.* - rank 1: assert \(2 \* 1\) < 2", cases.run.stdout)


def test_a_thread_that_a_test_leaves_is_told(cases):
    assert re.search(
        r"rank 0 has been replaced after cases.py::test_leaves_a_thread: it left the thread 'left'",
        cases.run.stdout,
    )
    assert cases.run.stdout.count("UserWarning: a warning of all ranks") == 1  # not by rank


def test_errors_of_use_say_what_to_do(cases):
    _, _, text = cases.outcome("test_of_no_ranks")
    assert "the fixture 'rank' needs ranks: give the test @pytest.mark.ranks(2)" in text
    _, _, text = cases.outcome("test_of_a_wrong_mark")
    assert "@pytest.mark.ranks('2'): wanted ranks(n, backend='torchcomms', timeout=5" in text


def test_the_next_test_begins_a_second_after_a_failure(cases):
    """Also a second after the timeout, if the failure is a hang."""
    for name, most in (
        ("test_raises", 1),
        ("test_leaves_with_a_code", 1),
        ("test_is_killed", 1),
        ("test_exits", 1),
        ("test_hangs", 2),
        ("test_is_late", 2),
    ):
        assert cases.seconds(name) <= limits.grown(most), name


def test_output_and_the_debugger_are_of_a_rank_and_lines_of_all_ranks_count(tmp_path):
    pytest.importorskip("pytest_cov")
    run = run_pytest(
        tmp_path,
        *("shown.py", "-s", "--pdb", "--cov=measured", "--cov-report=term-missing"),
        given="p secret * 4\nc\n",
    )
    said = run.stdout
    assert "[rank 0] hello\n" in said and "[rank 1] hello\n" in said, said + run.stderr
    assert "entering PDB on rank 1" in said and "(Pdb) 84\n" in said
    assert re.search(r"measured.py +6 +1 +83% +9\n", said)  # rank 0 alone has two lines less
    assert re.search(
        r"Timeout \(>1.0s\) from pytest-timeout.\nrank 0: still running, at shown.py", said
    )
    assert "1 passed" in said and "2 failed" in said
    assert sorted(path.name for path in tmp_path.glob(".coverage*")) == [".coverage"]


@pytest.mark.slow
def test_processes_of_xdist_have_their_own_ranks(tmp_path):
    pytest.importorskip("xdist")
    names = "fixtures or nothing or raises or skips or after"
    run = run_pytest(tmp_path, "cases.py", "-n", "2", "-k", names)
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
