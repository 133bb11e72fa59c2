"""How many connections a process has to the job's store, and how many requests the store gets."""

import contextlib
import datetime
import gc
import os
import socket
import threading
import time

import pytest
import torch
import torch.distributed as dist

import torchcomms_pg
from harness.leaks import descriptors
from harness.ranks import Ranks, check, connect_store, meet, wait_for
from hosts.test_hosts import move
from torchcomms_pg.testing.rank import receive, report

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


def uses_all(args, places):
    """Has every part of the diagnosis speak to the store.

    Returns the number of connections, and whether they end with the groups.
    """
    rank, world = int(os.environ["RANK"]), len(places)
    if places != "a" * world:
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


@pytest.mark.parametrize("places", ["aaa", "aab"])
def test_a_process_has_one_connection_to_the_store_beyond_its_own(places):
    with Ranks(len(places), init=False) as ranks:
        for found, ended in ranks.run(uses_all, ranks.store_args(), places):
            assert found == 2
            assert ended


class CountingProxy:
    """Passes connections on to a server of this host, and counts the requests of each client.

    A client waits for an answer before its next request. So what arrives at once is one request.
    """

    def __init__(self, port):
        self._server = ("127.0.0.1", port)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self._lock = threading.Lock()
        self._requests = 0
        self._start(self._accept)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._listening.close()

    def requests(self):
        with self._lock:
            return self._requests

    @staticmethod
    def _start(function, *args):
        threading.Thread(target=function, args=args, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                server = socket.create_connection(self._server)
                self._start(self._pass, client, server, True)
                self._start(self._pass, server, client, False)

    def _pass(self, source, target, counts):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                with self._lock:
                    self._requests += counts
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)


def rests(args, places, folder):
    """Has groups of every kind, and does nothing in them until the test goes on."""
    rank, world = int(os.environ["RANK"]), len(places)
    if places != "a" * world:
        move(places)
    os.environ["TORCHCOMMS_PG_STATUS"] = f"{folder}-{places[rank]}" if folder else "0"
    torchcomms_pg.watch(timeout=datetime.timedelta(seconds=60))
    dist.init_process_group("torchcomms", store=connect_store(*args), rank=rank, world_size=world)
    groups = [dist.group.WORLD, dist.new_group(), *(dist.new_group(backend="gloo") for _ in "ab")]
    for group in groups:
        dist.all_reduce(torch.ones(1), group=group)
    report("rests")
    receive()
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("places", "status", "looking"), [("aaaa", True, 1), ("aaaa", False, 4), ("aabb", True, 2)]
)
def test_a_store_at_rest_is_asked_by_one_process_of_a_host_or_by_each_without_a_status(
    places, status, looking, tmp_path
):
    world, seconds = len(places), 2.0
    looks = looking * 4 * seconds
    port, prefix = Ranks.store_args()
    folder = str(tmp_path / "status") if status else ""
    with CountingProxy(port) as proxy, Ranks(world, init=False) as ranks:
        ranks.start(rests, (proxy.port, prefix), places, folder)
        for rank in range(world):
            ranks.wait_report(rank)

        def few():
            begun, before = time.monotonic(), proxy.requests()
            time.sleep(seconds)
            grown = (time.monotonic() - begun) / seconds
            return 0 < proxy.requests() - before <= looks * grown + world

        # While the process that looks is stopped, the others look, too.
        assert wait_for(few, 30)
        for rank in range(world):
            ranks.tell(rank, "go on")
        check(ranks.wait())
