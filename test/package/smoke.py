"""Runs all-reduces and one DDP step over torchcomms in two processes. For a torch minor on which
the whole suite is not run; needs neither pytest nor a GPU.

    python test/package/smoke.py
"""

from __future__ import annotations

import os
import tempfile

import torch
import torch._dynamo  # which DDP imports: once, before the ranks are forked
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchcomms_pg  # noqa: F401  (registers the backend; from torch 2.14 on its name is enough)

RANKS = 2


def run_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), RANKS)
    dist.init_process_group("torchcomms", store=store, rank=rank, world_size=RANKS)
    check_all_reduce(rank)
    check_ddp_step(rank)
    dist.destroy_process_group()


def check_all_reduce(rank: int) -> None:
    for count in (1, 1000, 300_001):
        tensor = torch.arange(count, dtype=torch.float64) * (rank + 1)
        dist.all_reduce(tensor)
        expected = torch.arange(count, dtype=torch.float64) * sum(range(1, RANKS + 1))
        torch.testing.assert_close(tensor, expected, rtol=0, atol=0)


def check_ddp_step(rank: int) -> None:
    """After one step, every rank has the model that one process trains on all of the data."""
    torch.manual_seed(0)
    inputs, targets = torch.randn(RANKS, 8, 16), torch.randn(RANKS, 8, 4)
    reference = nn.Linear(16, 4)
    model = nn.Linear(16, 4)
    if rank == 0:  # DDP copies rank 0's parameters to the other rank
        model.load_state_dict(reference.state_dict())
    ddp = DistributedDataParallel(model)
    for net, x, y in ((reference, inputs.flatten(0, 1), targets.flatten(0, 1)),
                      (ddp, inputs[rank], targets[rank])):  # fmt: skip
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
    for trained, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(trained, expected)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="torchcomms_pg-smoke-") as folder:
        mp.start_processes(run_rank, args=(folder,), nprocs=RANKS, start_method="fork")
    print(f"torch {torch.__version__}: all-reduce and a DDP step on {RANKS} ranks are right")


if __name__ == "__main__":
    main()
