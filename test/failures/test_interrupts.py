"""Signals: what a handler does while its rank waits in a call, and what its peers get."""

import datetime
import os
import re
import signal
import time

import pytest
import torch
import torch.distributed as dist

import torchcomms_pg
from harness.leaks import mappings
from harness.limits import grown
from harness.ranks import Ranks, check, wait_for
from torchcomms_pg.testing.rank import report

pytestmark = pytest.mark.beyond_gloo
LONG = datetime.timedelta(minutes=30)


class Handler:
    """Calls `act` once, when the main thread has been in one call for two signals.

    So it does not matter when the signals come: what Python does between calls is never
    interrupted, only a call that waits.
    """

    def __init__(self, act):
        self.place, self.act = None, act
        signal.signal(signal.SIGINT, self.handle)

    def handle(self, number, frame):
        place = (id(frame), frame.f_lasti)
        if self.act and place == self.place:
            act, self.act = self.act, None
            act()
        self.place = place


def interrupt():
    raise KeyboardInterrupt


def signal_until_done(ranks):
    """Sends signals to rank 0, from its report until it is done."""
    pid = ranks.wait_report(0)
    begun = time.monotonic()
    while not ranks._done.get(0) and time.monotonic() - begun < 40:
        os.kill(pid, signal.SIGINT)
        ranks._read([0], 0.5)


def run_with_signals(function, *args, world=2, **kwargs):
    """The values of all ranks; rank 0, once it has reported, gets signals until it is done."""
    with Ranks(world, timeout=1800, **kwargs) as ranks:
        ranks.start(function, *args)
        signal_until_done(ranks)
        outcomes = ranks.wait(40)
        check(outcomes)
        return [outcome.value for outcome in outcomes]


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
OVER_GLOO = ("all_reduce", "recv", "wait", "split")


def over_gloo(store):
    """A communicator over Gloo, whose connections are there."""
    comm = torchcomms_pg.new_comm(
        "gloo",
        "cpu",
        "g",
        abort_process_on_timeout_or_error=False,
        store=store,
        rank=dist.get_rank(),
        size=2,
        timeout=LONG,
    )
    comm.barrier(False)
    return comm


def interrupted(what, over):
    """Rank 0 waits in `what`; what rank 1 learns of it."""
    store, me, comm = dist.distributed_c10d._get_default_store(), dist.get_rank(), None
    if over == "gloo":
        comm = over_gloo(store)
    if me == 1:
        store.wait(["interrupted"], datetime.timedelta(seconds=60))
        with pytest.raises(torchcomms_pg.CommError) as raised:
            dist.new_group(timeout=LONG) if what == "new_group" else all_reduce(comm)
        if comm:
            comm.finalize()
        return str(raised.value)
    Handler(interrupt)
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
        *((what, "gloo") for what in OVER_GLOO),
    ],
)
def test_a_waiting_call_raises_keyboard_interrupt_and_the_peers_are_told(what, over):
    _, told = run_with_signals(interrupted, what, over)
    assert re.search(r"(?i)rank 0\b.*interrupt", told), told


# Rank 1's part in what rank 0 waits for.
ANSWERS = {
    "recv": lambda comm: (
        comm.send(torch.ones(1), 0, False) if comm else dist.send(torch.ones(1), 0)
    ),
    "new_group": lambda comm: dist.new_group(timeout=LONG),
    "split": lambda comm: comm.split([0, 1]).finalize(),
}


def uses_groups(what, over):
    """What rank 0's handler gets from the group that the rank waits in; another group serves it."""
    store, me = dist.distributed_c10d._get_default_store(), dist.get_rank()
    comm = over_gloo(store) if over == "gloo" else None
    other = torchcomms_pg.new_comm("shm", "cpu", "other", store=store, rank=me, size=2)
    errors = []

    def use_groups():
        for use in (
            lambda: all_reduce(comm),
            lambda: all_reduce(comm, async_op=True),
            lambda: comm.send(torch.ones(1), 1, False) if comm else dist.send(torch.ones(1), 1),
            *([work.wait] if work else []),
        ):
            with pytest.raises(RuntimeError) as raised:
                use()
            errors.append(str(raised.value))
        use_other()

    def use_other():
        store.set("handler", "")
        other.all_reduce(tensor := torch.ones(1), torchcomms_pg.ReduceOp.SUM, False)
        assert tensor.item() == 2

    if me == 1:
        store.wait(["handler"], datetime.timedelta(seconds=60))
        use_other()
        ANSWERS.get(what, all_reduce)(comm)
    else:
        # A group that is being made is in nobody's hands yet.
        Handler(use_other if what == "new_group" else use_groups)
        work = all_reduce(comm, async_op=True) if what in ISSUED_BEFORE else None
        report(os.getpid())
        made = CALLS[what](comm, work)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        assert store.check(["handler"])
        if what == "split":
            made.finalize()
    other.finalize()
    if comm:
        comm.finalize()
    return errors


@pytest.mark.parametrize(
    "what, over",
    [
        *((what, "shm") for what in CALLS if what != "split"),
        *((what, "gloo") for what in OVER_GLOO),
    ],
)
def test_a_handler_may_use_other_groups_than_that_which_its_rank_waits_in(what, over):
    """That one refuses at once, saying why, and the call that waits goes on."""
    errors, _ = run_with_signals(uses_groups, what, over)
    assert len(errors) == (0 if what == "new_group" else 3 + (what in ISSUED_BEFORE))
    for error in errors:
        assert "called by the handler of a signal in the middle of" in error, error


# How a handler ends the group that its rank waits in.
ENDS = {
    "destroy_process_group": lambda comm: dist.destroy_process_group(),
    "abort a process group": lambda comm: dist.distributed_c10d._abort_process_group(),
    "finalize": lambda comm: comm.finalize(),
    "abort": lambda comm: comm.abort(),
}


def ends_the_group(what, over, how):
    """Rank 0's handler ends the group; how long that takes, and what rank 1 gets."""
    store, me = dist.distributed_c10d._get_default_store(), dist.get_rank()
    comm = over_gloo(store) if over == "gloo" else None
    if me == 1:
        store.wait(["ended"], datetime.timedelta(seconds=60))
        with pytest.raises(torchcomms_pg.CommError) as raised:
            all_reduce(comm)
        comm.finalize() if comm else dist.destroy_process_group()
        return str(raised.value)
    took = []

    def end():
        begun = time.monotonic()
        ENDS[how](comm)
        took.append(time.monotonic() - begun)

    Handler(end)
    work = all_reduce(comm, async_op=True) if what in ISSUED_BEFORE else None
    report(os.getpid())
    if what == "destroy_process_group":
        CALLS[what](comm, work)
    else:
        with pytest.raises(torchcomms_pg.CommError, match="aborted on rank 0 by "):
            CALLS[what](comm, work)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    store.set("ended", "")
    if comm:
        comm.finalize()
        dist.destroy_process_group()
    elif how == "destroy_process_group":
        assert wait_for(lambda: not mappings())  # its resources are freed
    return took[0]


@pytest.mark.parametrize(
    "what, over, how",
    [
        *(
            (what, "shm", how)
            for what in CALLS
            for how in ("destroy_process_group", "abort a process group")
            if what not in ("split", "new_group")
        ),
        *((what, "gloo", how) for what in OVER_GLOO for how in ("finalize", "abort")),
    ],
)
def test_a_handler_that_ends_its_ranks_group_fails_the_call_and_returns(what, over, how):
    took, told = run_with_signals(ends_the_group, what, over, how)
    assert took < grown(20), took  # no deadline has to pass
    assert re.search(r"rank 0\b", told), told
