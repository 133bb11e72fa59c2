"""Ranks whose calls do not match: an error with both calls tells each of them, and none crashes."""

import os

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks, init_default_group
from test_torchcomm import torchcomms

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
