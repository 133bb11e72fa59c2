"""Tests that test_ranks.py has pytest run with -s, coverage, a time limit and the debugger."""

import os
import time

import measured
import pytest
import torch.distributed as dist


@pytest.mark.ranks(2)
def test_closes_a_descriptor(rank):
    os.close(1 + rank)


@pytest.mark.ranks(2)
def test_prints(rank):
    print("hello of", dist.get_backend())
    assert measured.branch(rank) in ("zero", "one")


@pytest.mark.ranks(2)
def test_is_debugged(rank):
    secret = 20 + rank
    assert rank == 0, secret


@pytest.mark.ranks(2)
@pytest.mark.timeout(5)  # in which new ranks have begun the test, also on busy cores
def test_takes_too_long(rank):
    time.sleep(100)
