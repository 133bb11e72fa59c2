"""A test that test_ranks.py has pytest run with --emulated-gpus."""

import os

import pytest
import torch
import torch.distributed as dist


@pytest.mark.ranks(3)
def test_gpus_sum_up(rank, device_mesh):
    count = torch.cuda.device_count()
    assert count == int(os.environ["EMULATED_DEVICES"])
    assert torch.cuda.current_device() == rank % count
    assert device_mesh.device_type == "cuda"
    values = torch.full((1000,), rank + 1.0, device="cuda")
    dist.all_reduce(values)
    assert values.cpu().unique().tolist() == [6.0]
