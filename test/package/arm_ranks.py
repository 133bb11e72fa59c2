"""Two ranks make groups, reduce, exchange messages and get a verdict. For a processor on which the
suite is not run (tools/arm); needs no pytest.

    python test/package/arm_ranks.py

Ranks are forked after the imports, which take minutes under an emulator, and start no program,
which an emulator of one process cannot.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

import torchcomms_pg

RANKS = 2
TIMEOUT = timedelta(minutes=5)


def reduce_in_groups(rank: int) -> None:
    both, alone = dist.new_group([0, 1]), [dist.new_group([each]) for each in range(RANKS)][rank]
    for group, total in ((None, 3), (both, 3), (alone, rank + 1)):
        for count in (1, 1000, 300_001):
            tensor = torch.arange(count, dtype=torch.float64) * (rank + 1)
            dist.all_reduce(tensor, group=group)
            expected = torch.arange(count, dtype=torch.float64) * total
            torch.testing.assert_close(tensor, expected, rtol=0, atol=0)


def exchange_messages(rank: int) -> None:
    for count in (1, 300_001):
        received = torch.empty(count)
        sent = torch.full((count,), float(rank))
        works = [dist.isend(sent, 1 - rank), dist.irecv(received, 1 - rank)]
        for work in works:
            work.wait()
        torch.testing.assert_close(received, torch.full((count,), float(1 - rank)))


def be_named_by_a_verdict(rank: int, store: dist.Store) -> None:
    """Rank 1 does not call the all-reduce, and rank 0's error names it and its line."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=5))
    dist.all_reduce(torch.ones(4), group=group)
    if rank == 1:
        wait_for_rank_0(store)
        return
    try:
        dist.all_reduce(torch.ones(4), group=group)
    except torchcomms_pg.CommError as error:
        assert error.ranks == [1], error
        assert "rank 1 has not arrived at all_reduce #2" in error.verdict, error.verdict
        assert "in wait_for_rank_0" in error.verdict, error.verdict
        print(error.verdict, flush=True)
    else:
        raise AssertionError("an all-reduce without rank 1 has ended")
    store.set("verdict", "")


def wait_for_rank_0(store: dist.Store) -> None:
    store.wait(["verdict"], timedelta(minutes=5))


def run_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), RANKS)
    dist.init_process_group("torchcomms", store=store, rank=rank, world_size=RANKS, timeout=TIMEOUT)
    reduce_in_groups(rank)
    exchange_messages(rank)
    be_named_by_a_verdict(rank, dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="torchcomms_pg-ranks-") as folder:
        children = []
        for rank in range(RANKS):
            child = os.fork()
            if child == 0:
                try:
                    run_rank(rank, folder)
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
                os._exit(0)
            children.append(child)
        statuses = [os.waitpid(child, 0)[1] for child in children]
    if any(statuses):
        sys.exit(f"wanted ranks that end with 0, they ended with {statuses}")
    print(
        f"torch {torch.__version__} on {platform.machine()}: groups, all-reduces, messages and a "
        f"verdict on {RANKS} ranks are right"
    )


if __name__ == "__main__":
    main()
