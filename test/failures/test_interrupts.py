"""Ctrl-C: a rank that waits in a call leaves it, and its peers are told."""

import datetime
import os
import re
import signal
import time

import pytest
import torch
import torch.distributed as dist

import torchcomms_pg
from harness.rank_process import report
from harness.ranks import Ranks, check

pytestmark = pytest.mark.beyond_gloo
LONG = datetime.timedelta(minutes=30)


class Interrupts:
    """Raises KeyboardInterrupt once the main thread has been in one call for two signals.

    So it does not matter when the signals come: what Python does between calls is never
    interrupted, only a call that waits.
    """

    def __init__(self):
        self.place = None
        signal.signal(signal.SIGINT, self.handle)

    def handle(self, number, frame):
        place = (id(frame), frame.f_lasti)
        if place == self.place:
            raise KeyboardInterrupt
        self.place = place


def all_reduce(comm, async_op=False):
    if comm:
        return comm.all_reduce(torch.ones(1), torchcomms_pg.ReduceOp.SUM, async_op)
    return dist.all_reduce(torch.ones(1), async_op=async_op)


# On the default group, which is over shared memory, or on a communicator over Gloo.
CALLS = {
    "all_reduce": lambda comm, work: all_reduce(comm),
    "recv": lambda comm, work: (
        comm.recv(torch.ones(1), 1, False) if comm else dist.recv(torch.ones(1), 1)
    ),
    "wait": lambda comm, work: work.wait(),
    "wait with a timeout": lambda comm, work: work.wait(LONG),
    "new_group": lambda comm, work: dist.new_group(timeout=LONG),
    "destroy_process_group": lambda comm, work: dist.destroy_process_group(),
    "split": lambda comm, work: comm.split([0, 1]),
}
ISSUED_BEFORE = ("wait", "wait with a timeout", "destroy_process_group")


def interrupted(what, over):
    """Rank 0 waits in `what`; what rank 1 learns of it."""
    store, me, comm = dist.distributed_c10d._get_default_store(), dist.get_rank(), None
    if over == "gloo":
        options = dict(store=store, rank=me, size=2, timeout=LONG)
        comm = torchcomms_pg.new_comm(
            "gloo", "cpu", "g", abort_process_on_timeout_or_error=False, **options
        )
        comm.barrier(False)
    if me == 1:
        store.wait(["interrupted"], datetime.timedelta(seconds=60))
        with pytest.raises(torchcomms_pg.CommError) as raised:
            dist.new_group(timeout=LONG) if what == "new_group" else all_reduce(comm)
        if comm:
            comm.finalize()
        return str(raised.value)
    Interrupts()
    work = all_reduce(comm, async_op=True) if what in ISSUED_BEFORE else None
    report(os.getpid())
    with pytest.raises(KeyboardInterrupt):
        CALLS[what](comm, work)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if comm:
        with pytest.raises(torchcomms_pg.CommError, match="interrupt"):
            all_reduce(comm)
        comm.finalize()
    store.set("interrupted", "")
    return None


@pytest.mark.parametrize(
    "what, over",
    [
        *((what, "shm") for what in CALLS if what != "split"),
        *((what, "gloo") for what in ("all_reduce", "recv", "wait", "split")),
    ],
)
def test_a_waiting_call_raises_keyboard_interrupt_and_the_peers_are_told(what, over):
    with Ranks(2, timeout=1800) as ranks:
        ranks.start(interrupted, what, over)
        pid = ranks.wait_report(0)
        begun = time.monotonic()
        while not ranks._done.get(0) and time.monotonic() - begun < 40:
            os.kill(pid, signal.SIGINT)
            ranks._read([0], 0.5)
        first, second = ranks.wait(40)
        check([first, second])
        assert re.search(r"(?i)rank 0\b.*interrupt", second.value), second.value
