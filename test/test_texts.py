"""What users read when something is wrong, word for word: a change of a text is seen and meant.

``EXPECTTEST_ACCEPT=1 tools/test test/test_texts.py`` writes the present texts into this file.
"""

import datetime
import os
import re

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from ranks import Ranks, connect_store

import torchcomms_pg

pytestmark = pytest.mark.beyond_gloo


def text_of(function, *args, **kwargs):
    """Type and text of what a call raises, without what differs from run to run."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    else:
        return "nothing was raised"
    text = text.split("\nException raised from")[0]  # C++ frames, where torch shows them
    text = re.sub(r"pid \d+", "pid N", text)
    text = re.sub(r"\d+(\.\d+)? m?s ago", "T ago", text)
    return re.sub(r"\S*/(test_\w+\.py):\d+", r"\1:L", text)


def mistakes():
    def all_to_all():
        dist.all_to_all_single(torch.zeros(4), torch.zeros(4), [1, 3], [2, 1])

    def reduce_scatter():
        dist.reduce_scatter_tensor(torch.zeros(3), torch.zeros(5))

    def reduce_op():
        dist.all_reduce(torch.zeros(2), dist.ReduceOp.BAND)

    def overlapping():
        dist.all_reduce(torch.zeros(1).expand(3))

    dist.barrier()
    return [text_of(body) for body in (all_to_all, reduce_scatter, reduce_op, overlapping)]


def test_of_a_callers_mistakes():
    with Ranks(2) as ranks:
        all_to_all, reduce_scatter, reduce_op, overlapping = ranks.run(mistakes)[0]
    assert_expected_inline(all_to_all, """""")
    assert_expected_inline(reduce_scatter, """""")
    assert_expected_inline(reduce_op, """""")
    assert_expected_inline(overlapping, """""")


def mismatch():
    rank = dist.get_rank()
    dist.all_reduce(torch.zeros(2))
    return text_of(dist.all_reduce, torch.zeros(8 + rank))


def test_of_calls_that_do_not_match():
    with Ranks(2) as ranks:
        text, other = ranks.run(mismatch)
    assert_expected_inline(text, """""")
    assert_expected_inline(other, """""")


def stays_away(args):
    rank, store = int(os.environ["RANK"]), connect_store(*args)
    comm = torchcomms_pg.new_comm(
        *("shm", "cpu", "tested"),
        store=store,
        rank=rank,
        size=2,
        timeout=datetime.timedelta(seconds=30),
        abort_process_on_timeout_or_error=False,
    )
    add = torchcomms_pg.ReduceOp.SUM
    comm.all_reduce(torch.zeros(3), add, async_op=False)
    if rank == 1:
        store.wait(["seen"])
        return None
    comm.set_timeout(datetime.timedelta(seconds=2))
    text = text_of(comm.all_reduce, torch.zeros(5), add, async_op=False)
    store.set("seen", "")
    return text


def test_of_a_verdict():
    with Ranks(2, init=False) as ranks:
        text = ranks.run(stays_away, ranks.store_args())[0]
    # The frames above the test's own are those of its harness.
    text = re.sub(r"( <- [\w.]+:\d+ in \w+)+", " <- ...", text)
    assert_expected_inline(text, """""")
