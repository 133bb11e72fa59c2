"""A collective that hangs ends at the group's timeout, with the rank that is missing and its line.

$ torchrun --nproc-per-node 3 examples/verdict.py
verdict on group '0', 3 ranks: rank 1 has not arrived at all_reduce #2 (1024 x Float, SUM), issued 5.1 s ago
  rank 1: last completed all_reduce #1 (1024 x Float, SUM) in this group
      MainThread: examples/verdict.py:21 in save_checkpoint
  ranks 0, 2: in all_reduce #2 (1024 x Float, SUM), called at examples/verdict.py:25 in train_step
rank 0 has caught it: all_reduce 2, waited for ranks [1]
"""

import time
from datetime import timedelta

import torch
import torch.distributed as dist

import torchcomms_pg


def save_checkpoint():
    time.sleep(14)  # longer than the timeout


def train_step():
    dist.all_reduce(torch.ones(1024))


def main():
    dist.init_process_group("torchcomms", timeout=timedelta(seconds=5))
    train_step()
    try:
        if dist.get_rank() == 1:
            save_checkpoint()
        train_step()
    except torchcomms_pg.CommError as error:
        if dist.get_rank() == 0:
            print(f"rank 0 has caught it: {error.op} {error.seq}, waited for ranks {error.ranks}")


if __name__ == "__main__":
    main()
