"""Many tests of two ranks, some of which fail; test_ranks.py looks at what they leave.

The environment's MANY is their number. One in six fails, except in the middle, where the ranks are
kept.
"""

import gc
import json
import os
import signal
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

MANY = int(os.environ["MANY"])
# The first tests fill the caches of torch and pytest, and fail in each way.
FIRST, KEPT = max(24, MANY // 10), MANY // 2
WAYS = ("raises", "is killed", "exits", "hangs")


def call(number):
    """Returns the parameters of a test: its number, and how it fails."""
    if number % 6:
        return number, None
    return pytest.param(number, WAYS[number // 6 % 4], marks=pytest.mark.xfail(strict=True))


def measured(process):
    """Returns the descriptors, threads and bytes of memory that a process has."""
    folder = Path("/proc", str(process))
    pages = int((folder / "statm").read_text().split()[1])
    counts = [len(os.listdir(folder / what)) for what in ("fd", "task")]
    return [*counts, pages * os.sysconf("SC_PAGE_SIZE")]


def descendants(process):
    """Returns the numbers of all processes that a process and its children have started."""
    found = []
    for task in Path("/proc", str(process), "task").iterdir():
        for child in (task / "children").read_text().split():
            found += [int(child), *descendants(child)]
    return found


def write(name, *processes):
    gc.collect()
    files = [os.listdir(folder) for folder in (tempfile.gettempdir(), "/dev/shm", Path.home())]
    text = json.dumps({"processes": [*map(measured, processes)], "files": files})
    Path(os.environ["MEASURED"], name).write_text(text)


def run(rank, how):
    if how and rank == 1:
        if how == "raises":
            raise ValueError
        if how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exits":
            os._exit(3)
        time.sleep(100)
    values = torch.ones(10)
    dist.all_reduce(values)
    assert values[0] == 2


@pytest.mark.ranks(2, timeout=0.5)
@pytest.mark.parametrize("number, how", [*map(call, range(FIRST))])
def test_first(rank, number, how):
    run(rank, how)


def test_session_before():
    write("session before", os.getpid(), *descendants(os.getpid()))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("number", range(KEPT))
def test_on_kept_ranks(rank, number):
    run(rank, None)
    if number in (FIRST, KEPT - 1):
        write(f"rank {rank} {'before' if number == FIRST else 'after'}", os.getpid())


@pytest.mark.ranks(2, timeout=0.5)
@pytest.mark.parametrize("number, how", [*map(call, range(FIRST + KEPT, MANY))])
def test_then(rank, number, how):
    run(rank, how)


def test_session_after():
    write("session after", os.getpid(), *descendants(os.getpid()))
