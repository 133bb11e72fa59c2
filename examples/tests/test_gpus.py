"""A collective of GPU tensors, which is skipped on a machine without two GPUs."""

import pytest
import torch
import torch.distributed as dist


@pytest.mark.ranks(2)
def test_gpus_sum_up(rank):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    values = torch.full((1000,), rank + 1.0, device="cuda")
    dist.all_reduce(values)
    assert values.cpu().unique().tolist() == [3.0]
