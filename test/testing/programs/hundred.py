"""A hundred tests of two ranks, which docs/testing.md measures."""

import pytest
import torch
import torch.distributed as dist


@pytest.mark.ranks(2)
@pytest.mark.parametrize("number", range(100))
def test_sum(rank, number):
    values = torch.full((10,), float(rank + number))
    dist.all_reduce(values)
    assert values[0] == 2 * number + 1
