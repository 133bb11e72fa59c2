"""A pipeline of two stages: activations go forward, their gradients back."""

import pytest
import torch
import torch.distributed as dist


def run_stage(stage, rank, micro_batches):
    """Runs all micro-batches through this rank's stage; returns the losses of the last stage."""
    losses = []
    for batch in micro_batches:
        if rank == 0:
            output = stage(batch)
            dist.send(output.detach(), dst=1)
            gradient = torch.empty_like(output)
            dist.recv(gradient, src=1)
            output.backward(gradient)
        else:
            received = torch.empty(len(batch), 8)
            dist.recv(received, src=0)
            received.requires_grad_()
            loss = stage(received).square().mean()
            loss.backward()
            dist.send(received.grad, dst=0)
            losses.append(loss.item())
    return losses


@pytest.mark.ranks(2)
def test_gradients_are_those_of_the_whole_model(rank):
    stages = [torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)]  # the same on both ranks
    micro_batches = torch.randn(3, 5, 4)
    losses = run_stage(stages[rank], rank, micro_batches)
    mine = stages[rank].weight.grad.clone()

    for stage in stages:
        stage.zero_grad()
    whole = torch.nn.Sequential(*stages)
    expected = [whole(batch).square().mean() for batch in micro_batches]
    sum(expected).backward()
    torch.testing.assert_close(mine, stages[rank].weight.grad)
    if rank == 1:
        assert losses == pytest.approx([loss.item() for loss in expected])
