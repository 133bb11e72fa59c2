"""What a program does when a rank does not come: it gets an error that names the rank."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist


def synchronize(group):
    """Returns the number of ranks that are there, or what is known of the others."""
    try:
        present = torch.ones(1)
        dist.all_reduce(present, group=group)
    except dist.DistBackendError as error:
        return str(error)
    return present.item()


@pytest.mark.ranks(2)
def test_a_missing_rank_is_named(rank):
    group = dist.new_group([0, 1], timeout=timedelta(seconds=0.5))
    if rank == 0:
        assert "rank 1 did not arrive" in synchronize(group)
