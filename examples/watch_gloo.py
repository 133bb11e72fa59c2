"""A job that stays with another backend, here Gloo, gets the same verdict.

Nothing in the program names torchcomms_pg. The watch needs torch 2.14 or later.

$ TORCHCOMMS_PG_WATCH=1 TORCHCOMMS_PG_WATCH_TIMEOUT=5 torchrun --nproc-per-node 3 examples/watch_gloo.py
verdict on group '0', 3 ranks: rank 1 has not arrived at all_reduce #2 (1024 x Float), issued 5.1 s ago
  rank 1: last completed all_reduce #1 (1024 x Float) in this group
      MainThread: examples/watch_gloo.py:20 in load_batch
  ranks 0, 2: in all_reduce #2 (1024 x Float), called at examples/watch_gloo.py:25 in train_step
trained 2 steps
"""

import time

import torch
import torch.distributed as dist


def load_batch():
    time.sleep(14)  # a file server that does not answer
    return torch.ones(1024)


def train_step(gradient):
    dist.all_reduce(gradient)


def main():
    dist.init_process_group("gloo")
    train_step(torch.ones(1024))
    train_step(load_batch() if dist.get_rank() == 1 else torch.ones(1024))
    if dist.get_rank() == 0:
        print("trained 2 steps")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
