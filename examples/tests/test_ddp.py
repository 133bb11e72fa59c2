"""A step of DistributedDataParallel: the parameters are those of one process with all the data."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel


def step(model, inputs, targets):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()


@pytest.fixture
def data():
    return torch.randn(8, 4), torch.randn(8, 1)  # the same on all ranks


@pytest.mark.ranks(2)
def test_a_step_is_that_of_one_process(rank, world_size, data):
    inputs, targets = data
    alone = torch.nn.Linear(4, 1)
    together = torch.nn.Linear(4, 1)
    together.load_state_dict(alone.state_dict())

    step(DistributedDataParallel(together), inputs[rank::world_size], targets[rank::world_size])
    step(alone, inputs, targets)
    torch.testing.assert_close(together.weight, alone.weight)
    torch.testing.assert_close(together.bias, alone.bias)
