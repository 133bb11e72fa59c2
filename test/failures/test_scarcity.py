"""Ranks where no thread can be started: nothing crashes, hangs or waits for what never comes."""

import datetime
import os
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

import torchcomms_pg
from harness.comms import make
from harness.limits import grown
from harness.ranks import Ranks, init_default_group
from harness.scarcity import no_more_threads
from torchcomms_pg.testing.rank import report

pytestmark = pytest.mark.beyond_gloo
NO_THREAD = "no thread can be started"


def make_groups(stores):
    rank = int(os.environ["RANK"])
    if rank == 1:
        no_more_threads()
    texts = []
    for store in stores:  # the second finds what the first has left
        with pytest.raises(torchcomms_pg.CommError if rank == 0 else RuntimeError) as raised:
            init_default_group(*store, rank, 2, 1800)
        texts.append(str(raised.value))
        if dist.is_initialized():
            dist.destroy_process_group()
    return texts


def test_a_group_that_has_no_thread_to_spare_is_not_made_and_all_ranks_know_why():
    with Ranks(2, init=False) as ranks:
        stores = [ranks.store_args() for _ in range(2)]
        first, second = ranks.run(make_groups, stores)
        for text in first:
            assert "rank 1 cannot join" in text and NO_THREAD in text, text
        for text in second:
            assert NO_THREAD in text, text


def operate():
    """All that rank 1 issues asynchronously is refused with nothing sent; the rest works."""
    me = dist.get_rank()
    dist.all_reduce(torch.ones(1))
    store = dist.distributed_c10d._get_default_store()
    if me == 1:
        no_more_threads()
        with pytest.raises(RuntimeError, match=NO_THREAD):
            dist.all_reduce(torch.ones(10), async_op=True)
        with pytest.raises(RuntimeError, match="cannot start a thread"):
            dist.isend(torch.full((4,), 13.0), 0)
        store.set("refused", "")
    store.wait(["refused"], datetime.timedelta(seconds=60))
    if me == 1:
        torchcomms_pg.get_comm().send(torch.full((4,), 7.0), 0, async_op=False)
    else:
        dist.recv(got := torch.zeros(4), 1)
        assert got.tolist() == [7] * 4
    dist.all_reduce(tensor := torch.ones(1000))
    assert tensor.tolist() == [2] * 1000
    dist.destroy_process_group()


def test_what_would_need_a_thread_is_refused_and_the_rest_works():
    with Ranks(2) as ranks:
        ranks.run(operate)


def time_out():
    if dist.get_rank() == 0:
        report("stays away")
        dist.distributed_c10d._get_default_store().wait(
            ["rank 1 is done"], datetime.timedelta(seconds=60)
        )
        return None
    no_more_threads()
    comm = torchcomms_pg.get_comm()
    hooks = []
    comm.register_abort_hook(lambda: hooks.append("ran"))
    comm.set_timeout(datetime.timedelta(seconds=1))
    begun = time.monotonic()
    with pytest.raises(torchcomms_pg.CommError, match="timed out after 1 s") as raised:
        dist.all_reduce(torch.ones(1))
    took = time.monotonic() - begun
    dist.distributed_c10d._get_default_store().set("rank 1 is done", "")
    assert hooks == ["ran"]
    return str(raised.value), took


def test_timeouts_are_kept_and_verdicts_reached_without_a_thread_to_spare():
    with Ranks(2) as ranks:
        text, took = ranks.run(time_out)[1]
        assert "rank 0 has not arrived at all_reduce" in text, text
        assert took < grown(30)


def recurse(depth):
    return 0 if depth == 0 else 1 + recurse(depth - 1)


def compute():
    while True:
        recurse(200)
        eval(compile("[i for i in range(20)]", "<computed>", "eval"))


def awaits_the_others(store):
    store.wait(["asked"], datetime.timedelta(seconds=60))


def ask_for_stacks(threads):
    """Rank 0 asks rank 1, which can start no thread, for its stacks many times; the verdicts."""
    comms = [make(f"{number}") for number in range(20)]
    [comm.barrier(False) for comm in comms]
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        for _ in range(threads):
            threading.Thread(target=compute, daemon=True).start()
        no_more_threads()
        sys.setswitchinterval(1e-4)
        store.set("computes", "")
        awaits_the_others(store)
        return None
    store.wait(["computes"])
    [comm.set_timeout(datetime.timedelta(seconds=1)) for comm in comms]
    works = [comm.barrier(True) for comm in comms]
    verdicts = []
    for work in works:
        with pytest.raises(torchcomms_pg.CommError) as raised:
            work.wait()
        verdicts.append(raised.value.verdict)
    store.set("asked", "")
    return verdicts


@pytest.mark.parametrize("threads", [0, 3], ids=["", "threads that run Python"])
def test_no_frame_of_a_running_thread_is_read_without_the_gil(threads):
    """A reader would crash the process; what does not run is told all the same."""
    with Ranks(2) as ranks:
        verdicts, _ = ranks.run(ask_for_stacks, threads)
    # It has one thread for all answers, which may not all come in time.
    answers = [verdict for verdict in verdicts if f"{NO_THREAD} to ask Python" in verdict]
    assert answers, verdicts
    if threads == 0:
        assert any("in awaits_the_others" in answer for answer in answers), answers
