"""Tests that test_ranks.py has pytest run with --check-async and --check-nccl."""

import datetime
import time

import pytest
import torch
import torch.distributed as dist


def sum_and_read_early():
    values = torch.ones(4)
    work = dist.all_reduce(values, async_op=True)
    total = values.sum()
    work.wait()
    return total


def reduce_in_two_orders(rank):
    other = dist.new_group()
    works = [
        dist.all_reduce(torch.ones(4), group=group, async_op=True)
        for group in ((None, other) if rank == 0 else (other, None))
    ]
    for work in works:
        work.wait()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("number", (1, 2))
def test_reads_early(number):
    print("said by the test")
    sum_and_read_early()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("number", (1, 2))
def test_has_two_orders(rank, number):
    reduce_in_two_orders(rank)


@pytest.mark.ranks(2)
def test_has_two_orders_and_reads_early(rank):
    reduce_in_two_orders(rank)
    sum_and_read_early()


@pytest.mark.ranks(2)
def test_waits():
    values = torch.ones(4)
    dist.all_reduce(values, async_op=True).wait()
    assert values.sum() == 8


@pytest.fixture
def ends_slowly():
    yield
    time.sleep(0.6)


@pytest.mark.ranks(2)
def test_fails_by_an_early_use(ends_slowly):
    assert sum_and_read_early() == 8


@pytest.mark.ranks(2, backend=None)
def test_receives_from_any_rank():
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        dist.send(torch.ones(4), 1)
    else:
        dist.recv(torch.ones(4))


@pytest.mark.ranks(2)
@pytest.mark.xfail(strict=True)
def test_reads_early_as_expected():
    sum_and_read_early()


@pytest.mark.ranks(2)
def test_skips(rank):
    if rank == 1:
        pytest.skip("not on rank 1")
    dist.barrier()


@pytest.mark.ranks(2)
def test_skips_though_another_rank_passes(rank, store):
    if rank == 1:
        store.wait(["sent"])
        pytest.skip("not on rank 1")
    dist.isend(torch.ones(4), 1)
    store.set("sent", "")


@pytest.mark.ranks(2)
def test_expects_a_timeout(rank):
    group = dist.new_group(timeout=datetime.timedelta(seconds=0.3))
    if rank == 0:
        with pytest.raises(dist.DistError):
            dist.all_reduce(torch.ones(4), group=group)
