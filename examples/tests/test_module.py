"""A module that has a collective in its forward pass: its output is that of one process."""

import pytest
import torch
import torch.distributed as dist


class MeanOfRanks(torch.nn.Module):
    """Subtracts the mean over the batches of all ranks."""

    def forward(self, batch):
        total = batch.sum(0)
        rows = torch.tensor([float(len(batch))])
        dist.all_reduce(total)
        dist.all_reduce(rows)
        return batch - total / rows


@pytest.mark.ranks(3)
@pytest.mark.parametrize("rows", (1, 4))
def test_the_mean_is_over_all_ranks(rank, world_size, rows):
    everything = torch.randn(world_size * rows, 5)  # the same on all ranks, which have one seed
    mine = everything[rank * rows : (rank + 1) * rows]
    expected = mine - everything.mean(0)
    torch.testing.assert_close(MeanOfRanks()(mine), expected)
