"""Whom ranks of several hosts accuse: only one of which they have proof."""

# Hosts and the letters for them are those of test_hosts.py.

import datetime
import os
import re
import signal
import socket
import threading
import time

import pytest
import torch
import torch.distributed as dist

import torchcomms_pg
from failures.faults import serve
from harness.limits import grown
from harness.ranks import Ranks, check, connect_store, init_default_group, wait_for
from harness.scarcity import no_more_threads
from hosts.test_hosts import move
from torchcomms_pg.testing.rank import receive, report

pytestmark = pytest.mark.beyond_gloo
HALF_AN_HOUR = datetime.timedelta(minutes=30)
SOON = 20  # seconds on a busy machine, of which none is the group's timeout


def told_by(action):
    """(text, ranks named, seconds) of the CommError that an action raises."""
    begun = time.monotonic()
    with pytest.raises(torchcomms_pg.CommError) as raised:
        action()
    return str(raised.value), raised.value.ranks, time.monotonic() - begun


KEPT = []  # stores of Python, of which C++ keeps its own part only


class PassingStore(dist.Store):
    """Passes on what torchcomms_pg asks; before each write calls `before` with key and value."""

    def __init__(self, store, before):
        super().__init__()
        self.store, self.before = store, before
        KEPT.append(self)

    def set(self, key, value):
        self.before(self.store, key, value)
        return self.store.set(key, value)

    def get(self, key):
        return self.store.get(key)

    def add(self, key, amount):
        self.before(self.store, key, str(amount))
        return self.store.add(key, amount)

    def check(self, keys):
        return self.store.check(keys)

    def delete_key(self, key):
        return self.store.delete_key(key)

    def compare_set(self, key, old, new):
        self.before(self.store, key, new)
        return self.store.compare_set(key, old, new)

    def wait(self, keys, timeout=HALF_AN_HOUR):
        return self.store.wait(keys, timeout)

    def clone(self):
        return PassingStore(self.store.clone(), self.before)

    def has_extended_api(self):
        return False


def die_at_host(store, key, value):
    if "/host " in key:
        os.kill(os.getpid(), signal.SIGKILL)


def join_with(victim, args, places):
    """What a new communicator tells the others when one of them dies while its host joins."""
    rank = int(os.environ["RANK"])
    move(places)
    store = connect_store(*args)
    if rank == victim:
        store = PassingStore(store, die_at_host)
    return told_by(
        lambda: dist.init_process_group(
            "torchcomms", store=store, rank=rank, world_size=len(places), timeout=HALF_AN_HOUR
        )
    )


@pytest.mark.parametrize("places, victim", [("aabb", 3), ("abba", 2), ("aaabb", 1)])
def test_a_rank_dead_while_a_host_joins_is_named_by_its_number_in_the_group(places, victim):
    world = len(places)
    others = [rank for rank in range(world) if rank != victim]
    with Ranks(world, init=False) as ranks:
        ranks.start(join_with, victim, ranks.store_args(), places)
        outcomes = ranks.wait(ranks=others)
        check(outcomes)
    for text, named, took in (outcome.value for outcome in outcomes):
        assert f"rank {victim} on host-{places[victim]} (pid" in text and "died" in text, text
        assert named == [victim], named
        assert took < grown(SOON)


def make_group_without(victim, args, places):
    rank = int(os.environ["RANK"])
    move(places)
    init_default_group(*args, rank, len(places), 60)
    dist.barrier()
    if rank == victim:
        report("goes")
        os.kill(os.getpid(), signal.SIGKILL)
    receive()
    return told_by(lambda: dist.new_group(timeout=HALF_AN_HOUR))


def all_name(victim, outcomes):
    """Soon, and nobody else."""
    check(outcomes)
    for text, named, took in (outcome.value for outcome in outcomes):
        assert re.search(rf"rank {victim} \(pid \d+\) died", text), text
        assert named == [victim] and took < grown(SOON), (named, took)


@pytest.mark.parametrize("victim", [0, 1, 2, 3])
def test_a_rank_dead_before_new_group_is_named_on_all_hosts(victim):
    others = [rank for rank in range(4) if rank != victim]
    with Ranks(4, init=False) as ranks:
        ranks.start(make_group_without, victim, ranks.store_args(), "aabb")
        assert ranks.wait_report(victim) == "goes" and ranks.exit_code(victim) == -9
        for rank in others:
            ranks.tell(rank, "go on")
        all_name(victim, ranks.wait(ranks=others))


@pytest.mark.parametrize("places", ["aabb", "aaaa"])
def test_a_rank_that_has_ended_after_anothers_death_is_not_called_dead(places):
    """Rank 0 comes when rank 1, which waited for rank 3, has raised and ended."""
    with Ranks(4, init=False) as ranks:
        ranks.start(make_group_without, 3, ranks.store_args(), places)
        assert ranks.wait_report(3) == "goes" and ranks.exit_code(3) == -9
        for others in ([1, 2], [0]):
            for rank in others:
                ranks.tell(rank, "go on")
            all_name(3, ranks.wait(ranks=others))
            ranks.kill(1)
            ranks.exit_code(1)


def reduce(number):
    for _ in range(1000):
        dist.all_reduce(torch.ones(number))
        time.sleep(0.001)


def end_connections(store_port):
    """Ends this process's connections to others, as a firewall that resets them does."""
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6) and one.getpeername()[1:2] != (
                    store_port,
                ):
                    one.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue  # no socket, or none with a peer


def lose(args, places, number, culprit, how):
    rank = int(os.environ["RANK"])
    move(places)
    init_default_group(*args, rank, len(places), 60)
    dist.all_reduce(torch.ones(number))
    dist.barrier()
    report("ready")
    receive()
    if rank == culprit and how == "cut":
        end_connections(args[0])
    if rank == culprit and how == "leave":
        dist.destroy_process_group()
        receive()
        return None
    return told_by(lambda: reduce(number))


def what_is_told(places, number, culprit, how):
    world = len(places)
    others = [rank for rank in range(world) if rank != culprit or how == "cut"]
    with Ranks(world, init=False) as ranks:
        ranks.start(lose, ranks.store_args(), places, number, culprit, how)
        for rank in range(world):
            assert ranks.wait_report(rank) == "ready"
        if how == "kill":
            ranks.kill(culprit)
        for rank in others if how == "kill" else range(world):
            ranks.tell(rank, "go on")
        outcomes = ranks.wait(ranks=others)
        check(outcomes)
        if how == "leave":
            ranks.tell(culprit, "go on")
    for outcome in outcomes:
        assert outcome.value[2] < grown(SOON), outcome.value
    return [outcome.value[:2] for outcome in outcomes]


numbers = pytest.mark.parametrize("number", [1000, 1_000_000], ids=["small", "large"])


@numbers
@pytest.mark.parametrize("places, culprit", [("ab", 1), ("aabb", 2), ("aab", 2)])
def test_a_connection_that_breaks_between_living_ranks_accuses_neither(places, culprit, number):
    for text, named in what_is_told(places, number, culprit, "cut"):
        assert named == [], (named, text)
        assert re.search(r"connection between rank \d on host-. and rank \d on host-.", text), text
        assert "both ranks are there" in text and "died" not in text, text


@pytest.mark.parametrize("places, culprit", [("ab", 1), ("aab", 2), ("abc", 1)])
def test_a_rank_dead_alone_on_its_host_is_named_since_it_does_not_answer(places, culprit):
    for text, named in what_is_told(places, 1000, culprit, "kill"):
        assert named == [culprit] and f"rank {culprit} on host-" in text, (named, text)
        assert "does not answer" in text, text


@pytest.mark.parametrize("places, culprit", [("ab", 1), ("abc", 1), ("aabb", 3)])
def test_a_rank_that_has_left_its_group_is_named(places, culprit):
    for text, named in what_is_told(places, 1000, culprit, "leave"):
        assert named == [culprit] and f"rank {culprit}" in text, (named, text)
        assert re.search("left|finalized|destroyed", text), text


def wait_beside_one_that_aborts(port, places):
    rank = int(os.environ["RANK"])
    move(places)
    init_default_group(port, "lost", rank, len(places), 1800)
    dist.all_reduce(torch.ones(1000))
    report("ready")
    receive()
    if rank == 2:
        torchcomms_pg.get_comm(None).abort()
        return None
    return told_by(lambda: reduce(1000))


def test_a_reason_is_heard_without_the_store_while_another_host_is_silent():
    """Each host is asked in turn: the wait for the silent one does not hide the next one's word."""
    with Ranks(1, init=False) as server, Ranks(3, init=False) as ranks:
        server.start(serve)
        ranks.start(wait_beside_one_that_aborts, server.wait_report(0), "abc")
        for rank in range(3):
            assert ranks.wait_report(rank) == "ready"
        server.kill(0)
        ranks.kill(1, signal.SIGSTOP)
        for rank in (0, 2):
            ranks.tell(rank, "go on")
        outcomes = ranks.wait(ranks=[0, 2])
        os.kill(ranks.pids[1], signal.SIGCONT)
        check(outcomes)
    text, named, took = outcomes[0].value
    assert "was aborted on rank 2" in text and named == [2], (named, text)
    assert took < grown(SOON), took


def is_busy(store):
    """Whether a call in another thread waits for this client of the store."""
    call = threading.Thread(target=store.check, args=(["any"],))
    call.start()
    call.join(0.3)
    return call.is_alive()


def abort_while_a_thread_waits_in_the_store(args, places):
    rank = int(os.environ["RANK"])
    move(places)
    init_default_group(*args, rank, len(places), 1800)
    dist.all_reduce(torch.ones(1000))
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        waiting = threading.Thread(target=store.wait, args=(["heard"],))
        waiting.start()
        assert wait_for(lambda: is_busy(store), SOON)
        torchcomms_pg.get_comm(None).abort()
        waiting.join()
        return None
    told = told_by(lambda: reduce(1000))
    store.set("heard", "")
    return told


def test_a_failure_is_told_while_a_thread_of_the_program_waits_in_the_groups_store():
    with Ranks(2, init=False) as ranks:
        _, told = ranks.run(abort_while_a_thread_waits_in_the_store, ranks.store_args(), "ab")
    text, named, took = told
    assert "was aborted on rank 0" in text and named == [0], (named, text)
    assert took < grown(SOON), took


def be_idle(args, places, folder):
    rank = int(os.environ["RANK"])
    move(places)
    os.environ["TORCHCOMMS_PG_STATUS"] = f"{folder}-{places[rank]}" if folder else "0"
    init_default_group(*args, rank, len(places), 1800)
    comm = torchcomms_pg.get_comm(None)
    dist.barrier()
    report("idle")
    receive()
    if rank == 0:
        comm.abort()
    assert wait_for(comm.is_aborted, SOON)
    return told_by(dist.barrier)


@pytest.mark.parametrize("status", [True, False])
@pytest.mark.parametrize("stopped", [None, 1, 2])
def test_an_idle_host_hears_of_a_failure_also_if_one_of_its_ranks_is_stopped(
    stopped, status, tmp_path
):
    """One rank of a host looks for all of them."""
    folder = str(tmp_path / "status") if status else ""
    others = [rank for rank in range(3) if rank != stopped]
    with Ranks(3, init=False) as ranks:
        ranks.start(be_idle, ranks.store_args(), "abb", folder)
        for rank in range(3):
            assert ranks.wait_report(rank) == "idle"
        if stopped:
            ranks.kill(stopped, signal.SIGSTOP)
        for rank in reversed(others):
            ranks.tell(rank, "go on")
        outcomes = ranks.wait(ranks=others)
        if stopped:
            os.kill(ranks.pids[stopped], signal.SIGCONT)
        check(outcomes)
    for text, _, _ in (outcome.value for outcome in outcomes):
        assert "was aborted on rank 0" in text, text


def abort_while_another_host_has_failed(args, places):
    """What the store has as the group's failure: before rank 1's write, and in the end."""
    rank = int(os.environ["RANK"])
    move(places)
    store = connect_store(*args)
    first = []

    def overtake(store, key, value):
        if key.endswith("/failed") and not first:
            first.append(bytes(value, "utf-8") if isinstance(value, str) else bytes(value))
            store.set(key, first[0].replace(b"rank 1", b"rank 0"))
            first.append(key)

    dist.init_process_group(
        "torchcomms",
        store=PassingStore(store, overtake) if rank == 1 else store,
        rank=rank,
        world_size=len(places),
        timeout=HALF_AN_HOUR,
    )
    dist.all_reduce(torch.ones(1000))
    if rank == 0:
        return told_by(lambda: reduce(1000))
    torchcomms_pg.get_comm(None).abort()
    dist.destroy_process_group()  # waits until the reason is in the store
    text, key = first
    return text, store.get(key)


def test_the_first_reason_of_a_failure_stays_if_two_hosts_fail_at_once():
    with Ranks(2, init=False) as ranks:
        _, (written, stays) = ranks.run(
            abort_while_another_host_has_failed, ranks.store_args(), "ab"
        )
    assert b"aborted on rank 1" in written, written
    assert b"aborted on rank 0" in stays, stays


def wait_without_threads(args, places):
    """What messages from rank 1 tell rank 0, which can start no thread, and rank 2."""
    rank = int(os.environ["RANK"])
    move(places)
    init_default_group(*args, rank, len(places), 60)
    groups = [dist.new_group() for _ in range(4)]
    for group in groups:
        dist.all_reduce(torch.ones(1), group=group)
    works = [dist.irecv(torch.ones(4), 1, group=group) for group in groups] if rank != 1 else []
    if rank == 0:
        no_more_threads()
    report("ready")
    receive()
    return [told_by(work.wait) for work in works]


def test_the_death_of_a_rank_is_told_by_each_message_where_no_thread_can_be_started():
    """Only rank 0 sees the process end; its spare thread writes the reason of each group."""
    with Ranks(3, init=False) as ranks:
        ranks.start(wait_without_threads, ranks.store_args(), "aab")
        for rank in range(3):
            assert ranks.wait_report(rank) == "ready"
        ranks.kill(1)
        for rank in (0, 2):
            ranks.tell(rank, "go on")
        outcomes = ranks.wait(ranks=[0, 2])
        check(outcomes)
    told = outcomes[0].value + outcomes[1].value
    assert len(told) == 8
    for text, named, took in told:
        assert named == [1] and re.search(r"rank 1 .*died", text), (named, text)
        assert took < grown(SOON), took
