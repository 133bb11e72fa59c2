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


def interrupted_over_gloo(what):
    """Rank 0 waits in `what` of a communicator over Gloo; what rank 1 learns of it."""
    store, me = dist.distributed_c10d._get_default_store(), dist.get_rank()
    options = dict(store=store, rank=me, size=2, timeout=LONG)
    comm = torchcomms_pg.new_comm(
        "gloo", "cpu", "g", abort_process_on_timeout_or_error=False, **options
    )
    comm.barrier(False)
    one, op = torch.ones(1), torchcomms_pg.ReduceOp.SUM
    if me == 1:
        store.wait(["interrupted"], datetime.timedelta(seconds=60))
        with pytest.raises(torchcomms_pg.CommError) as raised:
            comm.all_reduce(one, op, False)
        comm.finalize()
        return str(raised.value)
    Interrupts()
    work = comm.all_reduce(one, op, True) if what == "wait" else None
    report(os.getpid())
    with pytest.raises(KeyboardInterrupt):
        if what == "all_reduce":
            comm.all_reduce(one, op, False)
        elif what == "recv":
            comm.recv(one, 1, False)
        elif what == "wait":
            work.wait()
        else:
            comm.split([0, 1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with pytest.raises(torchcomms_pg.CommError, match="interrupt"):
        comm.all_reduce(one, op, False)
    comm.finalize()
    store.set("interrupted", "")
    return None


def interrupted(what):
    """Rank 0 waits in `what`; what rank 1 learns of it."""
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["interrupted"], datetime.timedelta(seconds=60))
        with pytest.raises(torchcomms_pg.CommError) as raised:
            dist.all_reduce(torch.ones(1)) if what != "new_group" else dist.new_group(timeout=LONG)
        return str(raised.value)
    Interrupts()
    work = None
    if what in ("wait", "wait with a timeout", "destroy_process_group"):
        work = dist.all_reduce(torch.ones(1), async_op=True)
    report(os.getpid())
    with pytest.raises(KeyboardInterrupt):
        if what == "all_reduce":
            dist.all_reduce(torch.ones(1))
        elif what == "recv":
            dist.recv(torch.ones(1), 1)
        elif what == "wait":
            work.wait()
        elif what == "wait with a timeout":
            work.wait(LONG)
        elif what == "new_group":
            dist.new_group(timeout=LONG)
        else:
            dist.destroy_process_group()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    store.set("interrupted", "")
    return None


CALLS = ["all_reduce", "recv", "wait", "wait with a timeout", "new_group", "destroy_process_group"]


@pytest.mark.parametrize(
    "body, what",
    [
        *((interrupted, what) for what in CALLS),
        *((interrupted_over_gloo, what) for what in ("all_reduce", "recv", "wait", "split")),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_waiting_call_raises_keyboard_interrupt_and_the_peers_are_told(body, what):
    with Ranks(2, timeout=1800) as ranks:
        ranks.start(body, what)
        pid = ranks.wait_report(0)
        begun = time.monotonic()
        while not ranks._done.get(0) and time.monotonic() - begun < 40:
            os.kill(pid, signal.SIGINT)
            ranks._read([0], 0.5)
        first, second = ranks.wait(40)
        check([first, second])
        assert re.search(r"(?i)rank 0\b.*interrupt", second.value), second.value
