"""Two ranks take different ways: the verdict names the statement that sent them apart, and why.

$ torchrun --nproc-per-node 3 examples/parting.py
verdict on group '0', 3 ranks: its ranks call different operations
  the ranks parted at examples/parting.py:24 in write_back: `if len(self.ongoing) == 0:`
    rank 1 returned at line 25; ranks 0, 2 went on to all_reduce #2 at line 26
    now len(self.ongoing) is
  ranks 0, 2: in all_reduce #2 (4 x Float, SUM), called at examples/parting.py:26 in write_back
  rank 1: in broadcast #2 (2 x Float, root 0), called at examples/parting.py:34 in main
rank 0 has caught it: if len(self.ongoing) == 0:
"""

import torch
import torch.distributed as dist

import torchcomms_pg


class Cache:
    def __init__(self, ongoing):
        self.ongoing = ongoing

    def write_back(self):
        if len(self.ongoing) == 0:
            return
        dist.all_reduce(torch.ones(4))


def main():
    dist.init_process_group("torchcomms")
    dist.all_reduce(torch.ones(1))
    cache = Cache([] if dist.get_rank() == 1 else ["a write"])
    cache.write_back()
    dist.broadcast(torch.ones(2), 0)


if __name__ == "__main__":
    try:
        main()
    except torchcomms_pg.CommError as error:
        print(f"rank {dist.get_rank()} has caught it: {error.parted_at[0].statement}")
