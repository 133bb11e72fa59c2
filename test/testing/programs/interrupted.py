"""Tests that test_ranks.py has pytest run: Ctrl-C on one rank ends the session."""

import pytest
import torch.distributed as dist


@pytest.mark.ranks(2, timeout=50)
def test_is_interrupted_on_a_rank(rank):
    if rank == 1:
        raise KeyboardInterrupt
    dist.barrier()


@pytest.mark.ranks(2)
def test_does_not_begin():
    raise AssertionError
