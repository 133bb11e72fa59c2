"""Ranks whose calls do not match: an error with both calls tells each of them, and none crashes."""

import os
import re

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks, init_default_group, on_ranks
from test_torchcomm import each_backend, make, torchcomms

pytestmark = pytest.mark.beyond_gloo
TIMEOUT = 20.0


def messages_that_do_not_fit(port, prefix, sent, received):
    """Issued while the group fails, so that each meets its failure somewhere else."""
    rank = int(os.environ["RANK"])
    for turn in range(5):
        init_default_group(port, f"{prefix}/{turn}", rank, 2, TIMEOUT)
        works = []
        with pytest.raises(torchcomms().CommError) as caught:
            for _ in range(5):
                tensor = torch.ones(received if rank else sent)
                works.append(dist.irecv(tensor, 0) if rank else dist.isend(tensor, 1))
            while True:  # the receives may meet their messages later
                dist.all_reduce(torch.ones(1))
        wanted = f"rank 1 receives {received} float32 from rank 0, which sends {sent} float32"
        assert wanted in str(caught.value)
        for work in works:
            try:
                work.wait()
            except torchcomms().CommError:
                pass
            assert work.is_completed()
        dist.destroy_process_group()


@pytest.mark.parametrize("sent, received", [(4, 5), (5, 4), (0, 4), (4, 0)])
def test_messages_that_do_not_fit_fail_the_group_and_end_once(sent, received):
    with Ranks(2, init=False) as ranks:
        ranks.run(messages_that_do_not_fit, *ranks.store_args(), sent, received)


@each_backend
@on_ranks(2)
def test_a_barrier_is_called_one(world, backend):
    comm = make("names", backend)
    comm.barrier(False)
    with pytest.raises(torchcomms().CommError) as caught:
        if dist.get_rank() == 0:
            comm.barrier(False)
        else:
            one = torch.ones(1, dtype=torch.uint8)
            comm.all_reduce(one, torchcomms().ReduceOp.MAX, False)
        comm.barrier(False)
    assert re.search(r"rank 0 call(s|ed) barrier\b", str(caught.value))
    assert re.search(r"rank 1 call(s|ed) all_reduce\(count=1, uint8, max\)", str(caught.value))
    comm.finalize()
