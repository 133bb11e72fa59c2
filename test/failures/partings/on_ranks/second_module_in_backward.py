import torch
from torch.nn.parallel import DistributedDataParallel


def loss_of(model, critic, batch, with_critic):
    loss = model(batch).sum()
    if with_critic:  # parted
        loss = loss + critic(batch).sum()
    return loss


def main(at):
    model = DistributedDataParallel(torch.nn.Linear(4, 2).to(at.device))
    critic = DistributedDataParallel(torch.nn.Linear(4, 3).to(at.device))
    for step in range(3):
        batch = torch.ones(2, 4, device=at.device)
        loss = loss_of(model, critic, batch, not (at.rank == 1 and step == 1))
        loss.backward()
    at.barrier()
