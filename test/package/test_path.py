"""Counts the extension's functions between c10d's call and the wait for another rank."""

import ctypes
import os
import pathlib
import platform
import signal
import subprocess

import torch
import torch.distributed as dist

from harness import TESTS
from harness.ranks import Ranks, check, wait_for
from torchcomms_pg.testing.rank import receive, report

MOST_FRAMES = 14  # of a synchronous all-reduce of 4 bytes


def _wait_with_frames(library, path):
    if dist.get_rank() == 0:
        receive()
    else:
        place = os.open(path, os.O_WRONLY | os.O_CREAT)
        assert ctypes.CDLL(library).print_frames_on(signal.SIGUSR2, place) == 0
    tensor = torch.ones(1)
    if dist.get_rank() == 1:
        report(os.getpid())
    dist.all_reduce(tensor)
    assert tensor.item() == 2


def _sleeps_in_futex(pid):
    number = "98" if platform.machine() == "aarch64" else "202"
    return pathlib.Path(f"/proc/{pid}/syscall").read_text().startswith(number + " ")


def _frames_of_the_extension(stack):
    """Returns the extension's frames in the first complete stack that has any."""
    *whole, _ = stack.read_text().split("\n\n") if stack.exists() else [""]
    for each in whole:
        if ours := [frame for frame in each.splitlines() if "torchcomms_pg/_C" in frame]:
            return ours
    return []


def test_a_synchronous_all_reduce_waits_in_few_frames(tmp_path):
    library, stack = tmp_path / "frames.so", tmp_path / "stack"
    source = TESTS / "harness/frames.c"
    subprocess.run(["gcc", "-shared", "-fPIC", source, "-o", library], check=True)
    with Ranks(2) as ranks:
        ranks.start(_wait_with_frames, str(library), str(stack))
        pid = ranks.wait_report(1)

        def ask():
            if _sleeps_in_futex(pid):
                os.kill(pid, signal.SIGUSR2)
            return _frames_of_the_extension(stack)

        frames = wait_for(ask, 20)
        ranks.tell(0, "go")
        check(ranks.wait())
    assert frames, stack.read_text()
    assert len(frames) <= MOST_FRAMES, "\n".join(frames)
