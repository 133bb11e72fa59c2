"""A rank that never comes: the others are released in bounded time, and can go on."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from gpu.here import Here, raises, within
from torchcomms_pg import CommError

TIMEOUT = 5.0
BOUND = 20.0  # seconds for what must not hang


def timeout(here: Here) -> str:
    """Rank 0 waits in vain, until its deadline."""
    return _alone(here, TIMEOUT, _wait_in_vain)


def abort(here: Here) -> str:
    """Rank 0 gives up by itself."""
    return _alone(here, 600.0, _abort)


def _wait_in_vain(here: Here, work: dist.Work) -> None:
    begin = time.monotonic()
    with raises(CommError, "wait(60 s)", "timed out"):
        work.wait(timedelta(seconds=60))
    took = time.monotonic() - begin
    assert took >= TIMEOUT / 2, f"it gave up after {took:.1f} s, its timeout is {TIMEOUT:.0f} s"


def _abort(here: Here, work: dist.Work) -> None:
    assert not work.is_completed(), "the operation did not wait for the other ranks"
    here.group._get_backend(here.device).abort()
    with raises(CommError, "wait() after abort()", "abort", "revoke"):
        work.wait()


def _alone(here: Here, timeout: float, give_up: Callable[[Here, dist.Work], None]) -> str:
    """Rank 0 begins an operation without the others. Returns how long its end took."""
    here.start(timeout=timeout)
    tensor = torch.ones(1000, device=here.device)
    dist.all_reduce(tensor)
    here.synchronize()
    here.meet("connected")
    took = 0.0
    if here.rank == 0:
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        begin = time.monotonic()
        with within(TIMEOUT + BOUND, "giving up"):
            give_up(here, work)
        with within(BOUND, "releasing the stream"):
            here.synchronize()
        with raises(CommError, "the next operation"):
            dist.all_reduce(tensor)
        took = time.monotonic() - begin
    here.meet("over", seconds=4 * BOUND)
    with within(BOUND, "destroying the group"):
        here.stop()
    # The process and its device are as good as before.
    here.start()
    tensor = torch.ones(1000, device=here.device)
    dist.all_reduce(tensor)
    assert (tensor.cpu() == here.ranks).all(), "a new group after the failure"
    here.meet("done")
    here.stop()
    return f"released after {took:.1f} s; a new group works"
