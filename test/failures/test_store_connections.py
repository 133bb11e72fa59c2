"""How many connections a process has to the job's store."""

import contextlib
import datetime
import gc
import os
import time

import pytest
import torch
import torch.distributed as dist

import torchcomms_pg
from harness.leaks import descriptors
from harness.ranks import Ranks, connect_store, meet, wait_for
from hosts.test_hosts import move

pytestmark = [
    pytest.mark.beyond_gloo,
    pytest.mark.skipif(torch.__version__ < "2.14", reason="c10d has hooks from 2.14 on"),
]
ESTABLISHED = "01"


def connections(port):
    """Returns the number of this process's connections to a server's port."""
    own = set(descriptors().values())
    count = 0
    for family in ("tcp", "tcp6"):
        with open(f"/proc/net/{family}") as file:
            for line in list(file)[1:]:
                words = line.split()
                remote, state, inode = int(words[2].split(":")[1], 16), words[3], words[9]
                count += remote == port and state == ESTABLISHED and f"socket:[{inode}]" in own
    return count


def uses_all(args, world, places):
    """Has every part of the diagnosis speak to the store. Returns the number of connections."""
    rank = int(os.environ["RANK"])
    if places:
        move(places)
    store = connect_store(*args)
    torchcomms_pg.watch(timeout=datetime.timedelta(seconds=0.5))
    dist.init_process_group("torchcomms", store=store, rank=rank, world_size=world)
    groups = [dist.group.WORLD, dist.new_group(), *(dist.new_group(backend="gloo") for _ in "ab")]
    for group in groups:
        for _ in range(25):  # more than lateness needs to publish
            dist.all_reduce(torch.ones(1), group=group)
        torchcomms_pg.agree(1, group=group)
        torchcomms_pg.lateness(group)
    if rank == world - 1:
        time.sleep(1.5)  # the others print a verdict on the watched groups
    for group in groups[2:]:
        dist.all_reduce(torch.ones(1), group=group)
    meet(store, "verdicts", world)
    torchcomms_pg.lateness(groups[2])  # the latest connection, if each part had its own
    found = connections(args[0])
    meet(store, "counted", world)
    dist.destroy_process_group()
    del group, groups
    gc.collect()
    ended = wait_for(lambda: connections(args[0]) == 1, 20)
    with contextlib.suppress(RuntimeError):
        meet(store, "ended", world)
    return found, ended


def test_a_process_has_one_connection_to_the_store_beyond_its_own():
    with Ranks(3, init=False) as ranks:
        for found, ended in ranks.run(uses_all, ranks.store_args(), 3, ""):
            assert found == 2  # the program's TCPStore, and one for all groups
            assert ended
