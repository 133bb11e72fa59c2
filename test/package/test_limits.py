"""What a limit of a test has ended is gone, limits are those of the machine, samples are whole."""

import collections
import itertools
import subprocess
import sys

import pytest

from harness import limits, sampling
from harness.programs import end_tree, run_program
from harness.ranks import wait_for

FAMILY = """
import os, subprocess, sys
worker = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
workers = [subprocess.Popen([sys.executable, "-c", worker], start_new_session=True) for _ in "ab"]
print(os.getpid(), flush=True)
workers[0].wait()
"""


def gone(pid):
    """Whether there is no such process, or one that has ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


def test_a_program_goes_with_the_sessions_that_it_has_started():
    with subprocess.Popen([sys.executable, "-c", FAMILY], stdout=subprocess.PIPE) as program:
        pids = [int(program.stdout.readline()) for _ in range(3)]
        assert program.pid in pids and not any(map(gone, pids))
        end_tree(program.pid)
    assert wait_for(lambda: all(map(gone, pids)), 1), pids


def test_a_program_that_takes_too_long_is_ended_and_said_to_have():
    with pytest.raises(subprocess.TimeoutExpired):
        run_program([sys.executable, "-c", "import signal; signal.pause()"], timeout=0.1)


def test_limits_grow_with_the_pace_of_the_machine_up_to_tenfold(monkeypatch):
    monkeypatch.setattr(limits, "_pace", 1.0)
    assert limits.grown(20) == 20
    limits.set_pace(3)
    limits.set_pace(0.5)  # of a second process, which had the machine for itself
    assert limits.grown(20) == 60
    limits.set_pace(1000)
    assert limits.grown(20) == 200


@pytest.mark.parametrize("sizes", [(4,), (14, 4), (4, 14), (3, 4, 5), (2, 2, 2)])
def test_a_diagonal_has_each_value_of_each_parameter_and_is_as_short_as_it_can_be(sizes):
    names = [f"parameter {number}" for number in range(len(sizes))]
    counts = collections.Counter(dict(zip(names, sizes)))
    product = [dict(zip(names, indices)) for indices in itertools.product(*map(range, sizes))]
    chosen = [indices for indices in product if sampling.on_diagonal(indices, counts)]
    assert len(chosen) == max(sizes)
    for name, size in zip(names, sizes):
        assert {indices[name] for indices in chosen} == set(range(size))
