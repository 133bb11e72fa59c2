"""A program that trains over Gloo, and would hang on GPUs: the last stage reduces its loss first.

$ torchrun --nproc-per-node 2 -m torchcomms_pg.run --check-nccl examples/check_nccl.py
1. ranks 0, 1 call operations of group 0 (default_pg) and group 1 in different orders
  rank 0: all_reduce (1000 x Float) #1 of group 0 (default_pg)  at examples/check_nccl.py:20 in step
          then all_reduce (1 x Float) #1 of group 1  at examples/check_nccl.py:21 in step
  rank 1: all_reduce (1 x Float) #1 of group 1  at examples/check_nccl.py:26 in step_of_the_last_stage
          then all_reduce (1000 x Float) #1 of group 0 (default_pg)  at examples/check_nccl.py:27 in step_of_the_last_stage
  instead: call them in one order on all ranks
  2 more times at these lines
"""

import torch
import torch.distributed as dist

gradient, loss = torch.ones(1000), torch.ones(1)


def step(metrics):
    yield dist.all_reduce(gradient, async_op=True)
    yield dist.all_reduce(loss, group=metrics, async_op=True)


def step_of_the_last_stage(metrics):
    """The same two operations in another order."""
    yield dist.all_reduce(loss, group=metrics, async_op=True)
    yield dist.all_reduce(gradient, async_op=True)


def main():
    dist.init_process_group("gloo")
    metrics = dist.new_group()
    last = dist.get_rank() == dist.get_world_size() - 1
    for _ in range(3):
        for work in list((step_of_the_last_stage if last else step)(metrics)):
            work.wait()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
