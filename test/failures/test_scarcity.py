"""Ranks where no thread can be started: nothing crashes, hangs or waits for what never comes."""

import datetime
import os
import time

import pytest
import torch
import torch.distributed as dist

import torchcomms_pg
from harness.rank_process import report
from harness.ranks import Ranks, init_default_group
from harness.scarcity import no_more_threads

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


def test_deadlines_are_kept_and_verdicts_reached_without_a_thread_to_spare():
    with Ranks(2) as ranks:
        text, took = ranks.run(time_out)[1]
        assert "rank 0 has not arrived at all_reduce" in text, text
        assert took < 30
