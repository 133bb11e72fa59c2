"""Ranks on hosts of their own: namespaces of this machine with links between them."""

import datetime
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from network import Network, missing
from ranks import Ranks, receive, report
from values import all_data, assert_reduced

import torchcomms_pg

pytestmark = pytest.mark.beyond_gloo
DEADLINE = 8  # in seconds: longer than a rank may be held up
LATEST = DEADLINE + 5


@pytest.fixture(scope="module")
def possible():
    if why := missing():
        pytest.skip(why)


def meet(network, hosts):
    """Moves this rank to its host and makes the default group there."""
    rank, world = int(os.environ["RANK"]), len(hosts)
    network.enter(hosts[rank])
    timeout = datetime.timedelta(seconds=60)
    if rank == 0:
        address = network.address(hosts[0])
        store = dist.TCPStore(address, 0, is_master=True, timeout=timeout, wait_for_workers=False)
        report((address, store.port))
    else:
        address, port = receive()
        store = dist.TCPStore(address, port, is_master=False, timeout=timeout)
    dist.init_process_group(
        "torchcomms", store=store, rank=rank, world_size=world,
        timeout=datetime.timedelta(seconds=DEADLINE),
    )  # fmt: skip
    return rank, world


def start(ranks, function, network, hosts, *args):
    ranks.start(function, network, hosts, *args)
    where = ranks.wait_report(0)
    for rank in range(1, len(hosts)):
        ranks.tell(rank, where)


def wait_for_the_lost(network, hosts, number):
    """What a rank is told, and after how many seconds, where another one does not come."""
    rank, _ = meet(network, hosts)
    tensor = torch.ones(number)
    dist.all_reduce(tensor)
    report("ready")
    if receive() != "go on":
        time.sleep(60)
    began = time.monotonic()
    try:
        for _ in range(1000):
            dist.all_reduce(tensor)
            time.sleep(0.001)
    except RuntimeError as error:
        return str(error), time.monotonic() - began, getattr(error, "ranks", None)
    return None
