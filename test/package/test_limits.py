"""A program that a test's limit ends is gone; limits fit the machine; samples have every value."""

import itertools
import subprocess
import sys
import types

import pytest

from harness import limits, sampling
from harness.programs import end_tree, run_program
from harness.ranks import wait_for

# Each writes its line at once: print makes two writes of it where output is not buffered.
FAMILY = """
import os, subprocess, sys
worker = "import os, signal; os.write(1, b'%d\\\\n' % os.getpid()); signal.pause()"
workers = [subprocess.Popen([sys.executable, "-c", worker], start_new_session=True) for _ in "ab"]
os.write(1, b"%d\\n" % os.getpid())
workers[0].wait()
"""


def gone(pid):
    """Returns whether the process does not exist or has ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


def test_a_program_goes_with_the_sessions_that_it_has_started():
    with subprocess.Popen([sys.executable, "-c", FAMILY], stdout=subprocess.PIPE) as program:
        try:
            pids = [int(program.stdout.readline()) for _ in range(3)]
            assert program.pid in pids and not any(map(gone, pids))
        finally:
            end_tree(program.pid)
    assert wait_for(lambda: all(map(gone, pids)), 1), pids


def test_a_program_that_takes_too_long_is_ended_and_said_to_have():
    with pytest.raises(subprocess.TimeoutExpired):
        run_program([sys.executable, "-c", "import signal; signal.pause()"], timeout=0.1)


def test_limits_grow_with_the_pace_of_the_machine_up_to_tenfold(monkeypatch):
    monkeypatch.setattr(limits, "_pace", 1.0)
    assert limits.grown(20) == 20
    limits.set_pace(3)
    limits.set_pace(0.5)  # as of a second process, with the machine to itself
    assert limits.grown(20) == 60
    limits.set_pace(1000)
    assert limits.grown(20) == 200


@pytest.mark.parametrize("sizes", [(4,), (14, 4), (4, 14), (3, 4, 5), (2, 2, 2), (14, 4, 4)])
def test_a_sample_of_a_product_has_each_value_and_is_as_short_as_it_can_be(sizes):
    values = list(
        map(set, itertools.product(*([(n, i) for i in range(s)] for n, s in enumerate(sizes))))
    )
    chosen = [values[number] for number in sampling.covering(values)]
    assert set().union(*chosen) == set().union(*values) and len(chosen) == max(sizes)


def test_a_sample_does_not_tie_one_parameter_to_another():
    values = list(map(set, itertools.product(range(12), "abc", "xyz")))
    pairs = {frozenset(values[number] - set(range(12))) for number in sampling.covering(values)}
    assert len(pairs) == 9


class Call:
    """Stands in for a call of a test, with what the sampling reads of it."""

    def __init__(self, test, value, marker):
        self.path = test.partition("::")[0]
        self.nodeid = f"{test}[{value}]"
        self.callspec = types.SimpleNamespace(params={"kind": value})
        self.marker = marker
        self.slow = False

    def get_closest_marker(self, name):
        return name == self.marker

    def add_marker(self, marker):
        self.slow = marker.name == "slow"


def test_a_rotation_has_one_call_of_each_test_and_every_value_in_a_file():
    tests = [f"{file}::test_{number}" for file in ("a.py", "b.py") for number in range(3)]
    calls = [Call(test, value, "rotation") for test in tests for value in "xyz"]
    others = [Call("a.py::test_other", value, "no marker") for value in "xyz"]
    sampling.mark_slow(calls + others)
    quick = [call for call in calls if not call.slow]
    assert [call.nodeid.partition("[")[0] for call in quick] == tests
    for file in ("a.py", "b.py"):
        assert {call.callspec.params["kind"] for call in quick if call.path == file} == set("xyz")
    assert not any(call.slow for call in others)


def test_runs_that_take_turns_have_some_call_of_each_test_and_together_every_call():
    calls = [Call(f"a.py::test_{n}", value, "") for n in range(1, 9) for value in range(n)]
    runs = [sampling.of_turn(calls, turn, 4) for turn in range(1, 5)]
    for run in runs:
        assert {call.nodeid.partition("[")[0] for call in run} == {
            f"a.py::test_{n}" for n in range(1, 9)
        }
        assert len(run) <= len(calls) / 4 + 4
    assert {call.nodeid for run in runs for call in run} == {call.nodeid for call in calls}
    first = [run for run in runs if calls[0] in run]
    assert len(first) == 4, "a test without parameters is of every run"
    assert sampling.of_turn(calls, 1, 1) == calls


def test_each_process_begins_with_its_share_of_the_long_tests():
    limits_of = dict.fromkeys(range(100), 120) | {40: 300, 41: 900, 42: 600, 99: 301}
    order = sampling.long_ones_first(list(range(100)), limits_of.get, 3)
    assert sorted(order) == list(range(100))
    assert (order[:2], order[33], order[66]) == ([41, 40], 42, 99)
    assert [item for item in order if limits_of[item] == 120] == [
        item for item in range(100) if limits_of[item] == 120
    ]
