"""Shared memory joins the ranks of one host; ranks elsewhere are told who is where."""

import ctypes
import os

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks, init_default_group

CLONE_NEWUTS = 0x04000000

pytestmark = pytest.mark.beyond_gloo


def on_another_host(args):
    """Rank 1 gives itself a host name of its own, in a namespace that ends with it."""
    rank = int(os.environ["RANK"])
    libc = ctypes.CDLL(None, use_errno=True)
    if rank == 1:
        if libc.unshare(CLONE_NEWUTS) != 0:
            return "not permitted"
        libc.sethostname(b"elsewhere", len(b"elsewhere"))
    init_default_group(*args, rank, 2, 20)
    with pytest.raises(RuntimeError) as error:
        dist.all_reduce(torch.ones(3))
    dist.destroy_process_group()
    return str(error.value)


def test_ranks_on_different_hosts_are_named_with_their_hosts():
    if os.geteuid() != 0:
        pytest.skip("a host name of its own needs root")
    with Ranks(2, init=False) as ranks:
        messages = ranks.run(on_another_host, ranks.store_args(), timeout=40)
    if "not permitted" in messages:
        pytest.skip("this machine does not let a process have a host name of its own")
    for message in messages:
        assert "all_reduce" in message and "different hosts" in message
        assert "rank 0 on host" in message and "rank 1 on host 'elsewhere'" in message
