"""What a group of many ranks on many hosts costs, counted: no time is taken.

The ranks are threads of one process. Each has the host name of its host, joins the others through
the package's own code, and shares memory with those of its host. The store counts what is asked of
it, and in place of Gloo's sockets stand connections that count and hand over what is sent.

tools/bench --scale prints the tables of docs/hosts.md, tools/bench --scale 8x4 that of 8 hosts of 4
ranks each.
"""

from __future__ import annotations

import collections
import ctypes
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, Work

from torchcomms_pg import registration
from torchcomms_pg.errors import CommError

from . import table

MB = 1 << 20
PLACEMENTS = ("2x2", "4x2", "16x1", "4x8", "16x8", "32x8", "64x8")
MANY_HOSTS = 16
"""On more of them large operations are left out, which are a message for each pair."""
MANY_RANKS = 32
"""Of more of them no verdict is made, in which every rank tells where all threads are."""
VERDICT_AFTER = timedelta(seconds=2)
VOID = b"void"
"""Stands in a verdict's place if a round of the diagnosis has none."""
CLONE_NEWUTS = 0x04000000
PROBE = "/which link this is"
REASON = 1 << 29
"""The tag under which a rank that fails tells why; here none does before a verdict."""
_libc = ctypes.CDLL(None, use_errno=True)
_asked = threading.local()


@dataclass
class Counts:
    """What one rank has done."""

    store: collections.Counter[str] = field(default_factory=collections.Counter)
    store_bytes: int = 0
    sockets: int = 0
    messages: int = 0
    sent: int = 0

    @property
    def asked(self) -> int:
        """Operations on the store, but for looks at what is not there yet."""
        return sum(number for what, number in self.store.items() if what not in ("wait", "look"))


class World:
    """The ranks: where each is, and what it has done."""

    def __init__(self, hosts: int, each: int) -> None:
        self.hosts, self.each = hosts, each
        self.size = hosts * each
        self.counts = [Counts() for _ in range(self.size)]
        self.memory: dict[str, bytes] = {}
        self.there: dict[str, threading.Event] = collections.defaultdict(threading.Event)
        self.lock = threading.Lock()
        self.mail: dict[tuple[str, int, int, int], Post] = collections.defaultdict(Post)
        self.clocks = [0] * self.size  # the longest chain of messages that awaited each other
        self.judged = threading.Event()
        self.told = threading.Barrier(self.size)
        self.kept: list[Any] = []  # what C++ refers to, without keeping the part in Python

    def host(self, rank: int) -> int:
        """Where a rank is."""
        return rank // self.each


class CountingStore(dist.Store):
    """A rank's connection to the store that all ranks share."""

    def __init__(self, world: World, rank: int) -> None:
        super().__init__()
        self.world, self.rank = world, rank
        world.kept.append(self)

    def _count(self, what: str, *texts: str | bytes) -> None:
        counts = self.world.counts[self.rank]
        counts.store[what] += 1
        counts.store_bytes += sum(map(len, texts))

    def set(self, key: str, value: Any) -> None:
        """Counts and sets."""
        if key.endswith(PROBE):
            _asked.whose, _asked.link = self, key.removesuffix(PROBE)
            return
        value = value.encode() if isinstance(value, str) else bytes(value)
        self._count("set", key, value)
        with self.world.lock:
            self.world.memory[key] = value
            self.world.there[key].set()

    def get(self, key: str) -> bytes:
        """Counts and returns what is there: whoever asks has checked."""
        value = self.world.memory[key]
        self._count("get", key, value)
        return value

    def add(self, key: str, value: int) -> int:
        """Counts and adds."""
        self._count("add" if value else "look", key)
        with self.world.lock:
            number = int(self.world.memory.get(key, b"0")) + value
            self.world.memory[key] = str(number).encode()
        return number

    def compare_set(self, key: str, expected: Any, wanted: Any) -> bytes:
        """Counts, and sets where the key has the expected value, or none and none is expected."""
        expected, wanted = (
            value.encode() if isinstance(value, str) else bytes(value)
            for value in (expected, wanted)
        )
        with self.world.lock:
            value = self.world.memory.get(key, b"")
            if sets := value == expected:
                self.world.memory[key] = wanted
        if sets and key.endswith("/verdict") and wanted != VOID:
            self.world.judged.set()
        # A comparison that cannot hold reads; where there is no key it returns what it expected.
        self._count("set" if sets else "get" if value else "look", key)
        return wanted if sets else value or expected

    def check(self, keys: Sequence[str]) -> bool:
        """Counts what is found: how often a rank looks in vain depends on who is late."""
        if keys[0].rpartition("/")[2] == "answer":  # which all wait for: too many to ask again
            with self.world.lock:
                there = self.world.there[keys[0]]
            there.wait(5)
        found = all(key in self.world.memory for key in keys)
        self._count("check" if found else "wait")
        return found

    def clone(self) -> CountingStore:
        """Returns another connection of this rank's."""
        return CountingStore(self.world, self.rank)


class Post:
    """Messages of one pair and tag, and who waits for them."""

    def __init__(self) -> None:
        self.sent: collections.deque[tuple[bytes, int]] = collections.deque()
        self.awaited: collections.deque[Delivery] = collections.deque()


class Delivery(Work):
    """A message that is under way."""

    def __init__(self, world: World, rank: int, tensor: torch.Tensor | None = None) -> None:
        super().__init__()
        self.world, self.rank, self.tensor = world, rank, tensor
        self.clock = 0
        self.arrived = threading.Event()

    def take(self, data: bytes, clock: int) -> None:
        """Takes what was sent."""
        assert self.tensor is not None
        if data:
            ctypes.memmove(self.tensor.data_ptr(), data, len(data))
        self.clock = clock
        self.arrived.set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits for the message; after a verdict C++ aborts it, of which no call comes here."""
        while not self.arrived.wait(1):
            if self.world.judged.is_set():
                raise RuntimeError("aborted")
        with self.world.lock:
            self.world.clocks[self.rank] = max(self.world.clocks[self.rank], self.clock)
        return True


class Wires(Backend):
    """Connections of a rank, in place of Gloo's."""

    def __init__(self, world: World, rank: int, link: str, number: int, size: int) -> None:
        super().__init__(number, size)
        self.world, self.of, self.link, self.number = world, rank, link, number
        self.never = Delivery(world, rank)

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        """Hands over what is sent."""
        data = ctypes.string_at(tensors[0].data_ptr(), tensors[0].nbytes)
        counts, world = self.world.counts[self.of], self.world
        work = Delivery(world, self.of)
        with world.lock:
            counts.messages += 1
            counts.sent += len(data)
            clock = world.clocks[self.of] + 1
            post = world.mail[self.link, self.number, peer, tag]
            if post.awaited:
                post.awaited.popleft().take(data, clock)
            else:
                post.sent.append((data, clock))
        work.arrived.set()
        return work

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        """Begins to wait for a message."""
        if tag == REASON:
            return self.never
        work = Delivery(self.world, self.of, tensors[0])
        with self.world.lock:
            post = self.world.mail[self.link, peer, self.number, tag]
            if post.sent:
                work.take(*post.sent.popleft())
            else:
                post.awaited.append(work)
        return work


def connect(store: dist.Store, number: int, size: int, options: object) -> Backend:
    """What the package takes for ProcessGroupGloo."""
    store.set(PROBE[1:], "")  # in the rank's own store, which notes for whom, and for which link
    world, rank = _asked.whose.world, _asked.whose.rank
    world.counts[rank].sockets += size - 1
    wires = Wires(world, rank, _asked.link, number, size)
    world.kept.append(wires)
    return wires


def create(world: World, rank: int) -> Any:
    """Joins the group of all ranks."""
    options: Any = SimpleNamespace(
        store=CountingStore(world, rank),
        group_rank=rank,
        group_size=world.size,
        timeout=timedelta(seconds=900),
        group_id="scale",
        global_ranks_in_group=list(range(world.size)),
    )
    return registration.create_backend(options, None)


Operation = Callable[[Any, "World", int], Any]


def all_reduce(bytes_: int) -> Operation:
    """An all-reduce of so much."""

    def run(backend: Any, world: World, rank: int) -> Any:
        tensor = torch.ones(bytes_ // 4)
        backend.allreduce([tensor], dist.AllreduceOptions()).wait()
        assert tensor[-1] == world.size, tensor[-1]

    return run


def broadcast(bytes_: int) -> Operation:
    """A broadcast of so much."""

    def run(backend: Any, world: World, rank: int) -> Any:
        tensor = torch.full((bytes_ // 4,), float(rank))
        backend.broadcast([tensor], dist.BroadcastOptions()).wait()
        assert tensor[-1] == 0, tensor[-1]

    return run


def barrier(backend: Any, world: World, rank: int) -> Any:
    """A barrier."""
    backend.barrier(dist.BarrierOptions()).wait()


def verdict(backend: Any, world: World, rank: int) -> Any:
    """An all-reduce at which the last rank does not arrive, until all have been told."""
    options = dist.AllreduceOptions()
    options.timeout = VERDICT_AFTER
    try:
        if rank < world.size - 1:
            backend.allreduce([torch.ones(1)], options).wait()
            raise AssertionError("nobody has noticed")
    except CommError as error:
        assert error.ranks == [world.size - 1], error
    finally:
        world.told.wait()


SMALL: dict[str, Operation] = {
    "barrier": barrier,
    "all_reduce 4 B": all_reduce(4),
    "broadcast 4 B": broadcast(4),
}
LARGE: dict[str, Operation] = {
    "all_reduce 1 MB": all_reduce(MB),
    "broadcast 1 MB": broadcast(MB),
}


@dataclass
class Row:
    """What one thing costs."""

    what: str
    world: World
    most: Counts = field(default_factory=Counts)  # of the rank that does most, figure by figure
    first: Counts = field(default_factory=Counts)  # of rank 0
    host_sent: int = 0  # of the host that sends most
    steps: int = 0

    def as_json(self) -> dict[str, Any]:
        """Returns the figures as plain values."""
        return {
            "hosts": self.world.hosts,
            "ranks": self.world.size,
            "what": self.what,
            "most": vars(self.most),
            "first": vars(self.first),
            "host_sent": self.host_sent,
            "steps": self.steps,
        }


class Simulation:
    """Runs the ranks; every rank does the same things in the same order."""

    def __init__(self, hosts: int, each: int) -> None:
        self.world = World(hosts, each)
        self.meet = threading.Barrier(self.world.size + 1)
        self.orders: list[Operation | None] = []
        self.failures: list[str] = []
        self.threads = [
            threading.Thread(target=self._rank, args=(rank,), daemon=True)
            for rank in range(self.world.size)
        ]

    def _rank(self, rank: int) -> None:
        try:
            name = f"host{self.world.host(rank)}".encode()
            if _libc.unshare(CLONE_NEWUTS) or _libc.sethostname(name, len(name)):
                raise OSError(ctypes.get_errno(), "a host name of its own takes root")
            self.meet.wait()
            backend = create(self.world, rank)
            for turn in range(1 << 30):
                self.meet.wait()  # done
                self.meet.wait()  # next
                order = self.orders[turn]
                if order is None:
                    break
                order(backend, self.world, rank)
            with suppress(RuntimeError):  # after a verdict
                backend.shutdown()
        except threading.BrokenBarrierError:
            pass
        except BaseException:
            self.failures.append(f"rank {rank}: {traceback.format_exc()}")
            self.meet.abort()

    def run(self) -> list[Row]:
        """Makes the group, and measures each operation after one that is not counted."""
        operations = dict(SMALL)
        if self.world.hosts <= MANY_HOSTS:
            operations |= LARGE
        if self.world.size <= MANY_RANKS:
            operations["a verdict"] = verdict
        for thread in self.threads:
            thread.start()
        rows = []
        try:
            self.meet.wait()
            self.meet.wait()
            rows.append(self._row("the group"))
            for name, operation in operations.items():
                for counted in (True,) if operation is verdict else (False, True):
                    self._reset()
                    self.orders.append(operation)
                    self.meet.wait()
                    self.meet.wait()
                    if counted:
                        rows.append(self._row(name))
            self.orders.append(None)
            self.meet.wait()
        except threading.BrokenBarrierError:
            raise RuntimeError("\n".join(self.failures[:3])) from None
        for thread in self.threads:
            thread.join()
        return rows

    def _reset(self) -> None:
        self.world.counts[:] = [Counts() for _ in range(self.world.size)]
        self.world.clocks[:] = [0] * self.world.size

    def _row(self, what: str) -> Row:
        world, row = self.world, Row(what, self.world)
        row.first = world.counts[0]
        others = world.counts[1:] or world.counts
        busiest = max(others, key=lambda counts: counts.asked)
        row.most = Counts(
            busiest.store,
            max(counts.store_bytes for counts in others),
            max(counts.sockets for counts in world.counts),
            max(counts.messages for counts in world.counts),
            max(counts.sent for counts in world.counts),
        )
        sent: collections.Counter[int] = collections.Counter()
        for rank, counts in enumerate(world.counts):
            sent[world.host(rank)] += counts.sent
        row.host_sent = max(sent.values())
        row.steps = max(world.clocks)
        return row


def missing() -> str:
    """Says why nothing can be counted here; empty if it can."""
    if os.geteuid() != 0:
        return "ranks with a host name of their own take root"
    if int(torch.__version__.split(".")[1]) < 15:
        return "connections that are written in Python take torch 2.15"
    return ""


def placement(text: str) -> tuple[int, int]:
    """Reads how many hosts there are, and how many ranks each has."""
    hosts, each = map(int, text.split("x"))
    if hosts < 2 or each < 1:
        raise ValueError
    return hosts, each


def measure(placements: Sequence[tuple[int, int]]) -> Iterator[list[Row]]:
    """Counts for one placement after the other."""
    size = threading.stack_size(1 << 20)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1)  # seconds; thousands that wait for the GIL would wake up all the time
    try:
        with mock.patch.object(dist, "ProcessGroupGloo", connect):
            for hosts, each in placements:
                yield Simulation(hosts, each).run()
    finally:
        threading.stack_size(size)
        sys.setswitchinterval(interval)


def as_text(rows: Sequence[Row]) -> str:
    """Writes a table; of ranks and hosts the figures are those that do most."""
    world = rows[0].world
    lines = [["", "store ops", "bytes", "rank 0", "bytes", "sockets", "messages", "bytes",
              "bytes a host", "steps"]]  # fmt: skip
    for row in rows:
        figures = (
            *(row.most.asked, row.most.store_bytes, row.first.asked, row.first.store_bytes),
            *(row.most.sockets, row.most.messages, row.most.sent, row.host_sent, row.steps),
        )
        lines.append([row.what, *(f"{figure:,}" if figure else "-" for figure in figures)])
    heading = f"{world.size:,} ranks on {world.hosts:,} hosts"
    return f"{heading}\n{table.align(lines)}"
