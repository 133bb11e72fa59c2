"""Ranks on hosts of their own: namespaces of this machine with links between them."""

import datetime
import os
import re
import signal
import time

import pytest
import torch
import torch.distributed as dist

from harness.network import DEVICE, Network, missing
from harness.ranks import Ranks, check, wait_for
from harness.values import all_data, assert_reduced
from torchcomms_pg.testing.rank import receive, report

pytestmark = pytest.mark.beyond_gloo
DEADLINE = 8  # in seconds: longer than a rank may be held up
LATEST = DEADLINE + 5


@pytest.fixture(scope="module")
def possible():
    if why := missing():
        pytest.skip(why)


def move(network, hosts, own=None):
    """Moves this rank to its host; the store, which rank 0 serves there and itself calls `own`."""
    rank = int(os.environ["RANK"])
    network.enter(hosts[rank])
    timeout = datetime.timedelta(seconds=60)
    if rank == 0:
        address = network.address(hosts[0])
        here = own or address
        store = dist.TCPStore(here, 0, is_master=True, timeout=timeout, wait_for_workers=False)
        report((address, store.port))
    else:
        address, port = receive()
        store = dist.TCPStore(address, port, is_master=False, timeout=timeout)
    return store


def make_group(store, world, deadline=DEADLINE):
    rank = int(os.environ["RANK"])
    dist.init_process_group(
        "torchcomms", store=store, rank=rank, world_size=world,
        timeout=datetime.timedelta(seconds=deadline),
    )  # fmt: skip
    return rank, world


def meet(network, hosts):
    """Moves this rank to its host and makes the default group there."""
    return make_group(move(network, hosts), len(hosts))


def start(ranks, function, network, hosts, *args, firewall=False):
    ranks.start(function, network, hosts, *args)
    where = ranks.wait_report(0)
    if firewall:
        network.block(where[1])
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


def lose(hosts, number, lose, others, late=()):
    """What the other ranks are told when `lose` has happened to some."""
    with Network(max(hosts) + 1) as network, Ranks(len(hosts), init=False) as ranks:
        start(ranks, wait_for_the_lost, network, hosts, number)
        for rank in range(len(hosts)):
            assert ranks.wait_report(rank) == "ready"
        for rank in range(len(hosts)):
            ranks.tell(rank, "stay" if rank in late else "go on")
        lose(network, ranks)
        outcomes = ranks.wait(timeout=45, ranks=others)
        check(outcomes)
        for rank in set(range(len(hosts))) - set(others):
            ranks.kill(rank)
    for outcome in outcomes:
        assert outcome.value, f"rank {outcome.rank} has not noticed"
        assert outcome.value[1] < LATEST + 3, outcome.value  # a rank may be held up
    return [outcome.value for outcome in outcomes]


# What one rank of a host reduces for all of them, and what goes over every rail.
numbers = pytest.mark.parametrize(
    "number", [pytest.param(1000, marks=pytest.mark.slow), 1_000_000], ids=["small", "large"]
)


@numbers
@pytest.mark.parametrize("lost", [1, 3])
def test_a_dead_rank_is_named_with_its_host_on_all_hosts(possible, lost, number):
    others = [rank for rank in range(4) if rank != lost]
    for text, _, named in lose([0, 0, 1, 1], number, lambda _, ranks: ranks.kill(lost), others):
        assert f"rank {lost} on host{lost // 2}" in text and named == [lost], text


def test_a_rank_is_not_accused_by_others_when_the_store_went_with_the_one_that_died(possible):
    for text, _, named in lose([0, 0, 1, 1], 1_000_000, lambda _, ranks: ranks.kill(0), [1, 2, 3]):
        assert "rank 0 on host0" in text and named == [0], text


@pytest.mark.stops_ranks
@numbers
def test_a_stopped_rank_is_named_at_the_timeout(possible, number):
    for text, _, named in lose(
        [0, 0, 1, 1], number, lambda _, ranks: ranks.kill(3, signal.SIGSTOP), [0, 1, 2]
    ):
        assert named == [3] and "rank 3 on host1 did not answer" in text, text


@numbers
def test_a_late_rank_is_named_and_not_those_who_wait_for_it(possible, number):
    for text, _, named in lose([0, 0, 1, 1], number, lambda *_: None, [0, 1, 2], late=[3]):
        assert named == [3] and "3 on host1 did not arrive" in text, text


def test_a_host_that_is_gone_is_named_by_a_rank_of_it(possible):
    def end(network, ranks):
        for rank in (2, 3):
            ranks.kill(rank)

    for text, _, named in lose([0, 0, 1, 1], 1000, end, [0, 1]):
        assert set(named) <= {2, 3} and named and "on host1" in text, text


@numbers
def test_a_link_that_is_cut_ends_every_wait_at_the_timeout(possible, number):
    told = lose([0, 0, 1, 1], number, lambda network, _: network.cut(1), [0, 1, 2, 3])
    for text, _, named in told[:2]:
        assert named == [2, 3] and "on host1" in text and "did not answer" in text, text
    for text, _, named in told[2:]:
        # The store was on the other host: nobody there, or here, is accused.
        assert named == [] and "nobody knows who is late" in text, text
        assert "cannot be known" in text, text
    # Of whoever gives up second nothing is awaited any more.
    assert any("waits for rank" in text for text, *_ in told[2:]), told


def reduce_under_loss(network, hosts):
    rank, world = meet(network, hosts)
    for salt in range(5):
        inputs = all_data(world, 300_001, salt=salt)
        tensor = inputs[rank].clone()
        dist.all_reduce(tensor)
        assert_reduced(tensor, inputs)
    dist.destroy_process_group()


def test_a_link_that_loses_packets_loses_no_data(possible):
    # A queue of a few packets drops what comes in bursts.
    with Network(2, gigabits=0.2, queue="10kb") as network, Ranks(3, init=False) as ranks:
        start(ranks, reduce_under_loss, network, [0, 0, 1])
        check(ranks.wait(timeout=50))
        assert network.dropped(1) > 0


def count_what_is_sent(network, hosts, number):
    rank, _ = meet(network, hosts)
    tensor = torch.ones(number)
    dist.all_reduce(tensor)  # connects
    report("ready")
    receive()
    dist.all_reduce(tensor)
    report("done")
    receive()
    dist.destroy_process_group()


@pytest.mark.parametrize("hosts", [(0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 1), (0, 1, 2)])
def test_data_crosses_the_wire_no_more_often_than_it_has_to(possible, hosts):
    number, count = 4_000_000, max(hosts) + 1
    # Large frames: headers are not what is counted.
    with Network(count, mtu=60_000) as network, Ranks(len(hosts), init=False) as ranks:
        start(ranks, count_what_is_sent, network, hosts, number)
        sent = []
        for word in ("ready", "done"):
            for rank in range(len(hosts)):
                assert ranks.wait_report(rank) == word
            # Without what TCP sends again, as it does when this machine holds up a receiver.
            sent.append([network.sent(host) - network.sent_again(host) for host in range(count)])
            for rank in range(len(hosts)):
                ranks.tell(rank, "go on")
        check(ranks.wait())
    least = 2 * 4 * number * (count - 1) / count
    for before, after in zip(*sent):
        assert after - before < 1.02 * least, (after - before) / least


NOWHERE = "nowhere0"  # no interface has this name
WITHOUT_END = 30  # a deadline that comes after all that is tested has ended


def reduce(rank):
    dist.all_reduce(torch.ones(1))


def send_from_1_to_2(rank):
    reduce(rank)
    if rank == 1:
        dist.send(torch.ones(1), 2)
    elif rank == 2:
        dist.recv(torch.ones(1), 1)
    else:
        reduce(rank)


def make_and_use_group(network, hosts, interfaces, use, deadline):
    """Reports what the rank is told, after how many seconds, and of which ranks."""
    rank = int(os.environ["RANK"])
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
    store = move(network, hosts)
    if interfaces[rank] is None:
        del os.environ["GLOO_SOCKET_IFNAME"]
    else:
        os.environ["GLOO_SOCKET_IFNAME"] = interfaces[rank]
    told, began = None, time.monotonic()
    try:
        make_group(store, len(hosts), deadline)
        use(rank)
    except (RuntimeError, KeyboardInterrupt) as error:
        text = f"{type(error).__name__}: {error}"
        told = text, time.monotonic() - began, getattr(error, "ranks", None)
    report(told)
    receive()  # the store is there until all have been told


def what_is_told(
    hosts, interfaces, use=reduce, deadline=DEADLINE, act=None, others=None, firewall=False,
    prepare=None,
):  # fmt: skip
    """What the ranks are told, and of which ranks, where not all can be connected."""
    others = range(len(hosts)) if others is None else others
    with Network(max(hosts) + 1) as network, Ranks(len(hosts), init=False) as ranks:
        if prepare is not None:
            prepare(network)
        args = (network, hosts, interfaces, use, deadline)
        start(ranks, make_and_use_group, *args, firewall=firewall)
        if act is not None:
            act(network, ranks)
        outcomes = [ranks.wait_report(rank, timeout=45) for rank in others]
    for rank, outcome in zip(others, outcomes):
        assert outcome, f"rank {rank} is told nothing"
        assert outcome[1] < LATEST + 3, f"rank {rank}: {outcome}"  # a rank may be held up
    return [(text, named) for text, _, named in outcomes]


def assert_interface_is_named(rank, wrong, host, text, named):
    assert f"rank {wrong} on host{host}" in text, f"rank {rank}: {text}"
    assert NOWHERE in text and "GLOO_SOCKET_IFNAME" in text, f"rank {rank}: {text}"
    assert rank == wrong or named == [wrong], f"rank {rank}: {named}"


@pytest.mark.parametrize("wrong", [0, 3])
def test_an_interface_that_one_rank_lacks_is_in_the_error_of_all(possible, wrong):
    interfaces = [NOWHERE if rank == wrong else DEVICE for rank in range(4)]
    for rank, told in enumerate(what_is_told([0, 0, 1, 1], interfaces)):
        assert_interface_is_named(rank, wrong, wrong // 2, *told)


def test_an_interface_that_no_rank_has_is_in_the_error_of_all(possible):
    for text, _ in what_is_told([0, 0, 1, 1], [NOWHERE] * 4):
        assert re.search(r"rank \d on host\d", text), text
        assert NOWHERE in text and "GLOO_SOCKET_IFNAME" in text, text


def test_an_interface_that_only_messages_need_is_in_the_error_of_all(possible):
    # Rank 1 has no counterpart, and so no connection, until it sends.
    told = what_is_told([0, 0, 1], [DEVICE, NOWHERE, DEVICE], send_from_1_to_2)
    for rank, (text, named) in enumerate(told):
        assert_interface_is_named(rank, 1, 0, text, named)


def reduce_without_an_interface(network, hosts, own):
    store = move(network, hosts, own)
    del os.environ["GLOO_SOCKET_IFNAME"]
    rank, world = make_group(store, len(hosts), WITHOUT_END)
    inputs = all_data(world, 100_001)
    dist.all_reduce(inputs[rank])
    assert_reduced(inputs[rank], all_data(world, 100_001))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("own", [None, "localhost"], ids=["store", "default route"])
def test_hosts_whose_names_lead_nowhere_find_the_address_that_others_reach(possible, own):
    with Network(2) as network, Ranks(3, init=False) as ranks:
        network.route(0)
        start(ranks, reduce_without_an_interface, network, [0, 0, 1], own)
        check(ranks.wait())


def assert_nobody_is_accused(told, why):
    for text, named in told:
        assert re.search(r"rank \d on host0 .* host1|rank \d on host1 .* host0", text), text
        assert why in text and "GLOO_SOCKET_IFNAME" in text, text
        assert named == [], (named, text)


def test_hosts_that_offer_each_other_their_own_loopback_are_told_so(possible):
    assert_nobody_is_accused(what_is_told([0, 0, 1, 1], ["lo"] * 4), "127.0.0.1")


def test_a_rank_that_cannot_reach_the_address_of_another_one_accuses_neither(possible):
    interfaces = [DEVICE, DEVICE, "lo:apart", "lo:apart"]
    # Less than the others' address: Gloo has the rank with the greater one connect.
    told = what_is_told(
        [0, 0, 1, 1], interfaces, prepare=lambda network: network.offer(1, "9.9.9.9")
    )
    assert_nobody_is_accused(told, "unreachable")


def test_a_firewall_between_hosts_is_in_the_error_of_all_ranks_at_the_timeout(possible):
    for text, _ in what_is_told([0, 0, 1, 1], [DEVICE] * 4, firewall=True):
        assert "host0" in text and "host1" in text, text
        assert re.search(r"firewall|\bports?\b", text) and "GLOO_SOCKET_IFNAME" in text, text


def end_connecting(number, others):
    """What ranks that a firewall has wait for connections are told when rank 3 gets a signal."""

    def signal_3(network, ranks):
        # Both ranks of the host wait to be connected.
        assert wait_for(lambda: network.listeners(1) == 2, timeout=30)
        ranks.kill(3, number)

    return what_is_told(
        [0, 0, 1, 1], [DEVICE] * 4,
        deadline=WITHOUT_END, act=signal_3, others=others, firewall=True,
    )  # fmt: skip


def test_a_rank_dead_while_the_hosts_are_connected_is_named_before_the_timeout(possible):
    for text, named in end_connecting(signal.SIGKILL, [0, 1, 2]):
        assert named == [3] and re.search(r"rank 3 .*died", text), text


def test_ctrl_c_reaches_ranks_while_the_hosts_are_connected(possible):
    *others, (interrupted, _) = end_connecting(signal.SIGINT, [0, 1, 2, 3])
    assert interrupted.startswith("KeyboardInterrupt"), interrupted
    for text, named in others:
        assert named == [3] and re.search("rank 3 .*(KeyboardInterrupt|interrupted)", text), text


def wait_without_the_store(network, hosts, call):
    make_group(move(network, hosts), len(hosts), WITHOUT_END)
    dist.all_reduce(torch.ones(1))
    report("ready")
    receive()
    began = time.monotonic()
    try:
        if call == "recv":
            dist.recv(torch.ones(4), 0)
        else:
            dist.new_group(timeout=datetime.timedelta(minutes=30))
    except RuntimeError as error:
        text = f"{type(error).__name__}: {error}"
        return text, time.monotonic() - began, getattr(error, "ranks", None)
    return None


def told_without_the_store(call):
    """What the others are told when rank 0, which serves the store, dies: (text, ranks named)."""
    hosts = [0, 0, 1, 1]
    with Network(2) as network, Ranks(4, init=False) as ranks:
        start(ranks, wait_without_the_store, network, hosts, call)
        for rank in range(4):
            assert ranks.wait_report(rank) == "ready"
        for rank in (1, 2, 3):
            ranks.tell(rank, "go on")
        ranks.kill(0)
        outcomes = ranks.wait(timeout=45, ranks=[1, 2, 3])
        check(outcomes)
    for outcome in outcomes:
        # A process that is killed may take a while to end, and its connections with it.
        assert outcome.value and outcome.value[1] < WITHOUT_END - 5, outcome
        assert outcome.value[0].startswith("CommError"), outcome.value
    return [(outcome.value[0], outcome.value[2]) for outcome in outcomes]


def test_ranks_that_wait_for_a_message_name_the_rank_that_died_with_its_store(possible):
    # Rank 3 has no connection to rank 0 before this message: they would find each other there.
    for text, named in told_without_the_store("recv"):
        assert named == [0] and "rank 0 on host0" in text, (named, text)
        assert "GLOO_SOCKET_IFNAME" not in text, text


def test_ranks_that_make_a_group_name_the_store_that_died_or_its_rank(possible):
    (text, named), *elsewhere = told_without_the_store("new_group")
    assert named == [0] and re.search(r"rank 0 .*died", text), (named, text)
    for text, named in elsewhere:  # no rank there sees the process
        assert named in ([], [0]), (named, text)
        assert re.search("rank 0 .*died|the store .* is gone", text), text


def end_groups_without_the_store(network, hosts):
    """Seconds that it takes to destroy all groups, once their operations have failed."""
    rank, _ = meet(network, hosts)
    groups = [dist.new_group(timeout=datetime.timedelta(seconds=DEADLINE)) for _ in range(4)]
    for group in groups:
        dist.all_reduce(torch.ones(1), group=group)
    report("ready")
    receive()
    works = [dist.all_reduce(torch.ones(1), group=group, async_op=True) for group in groups]
    for work in works:
        with pytest.raises(RuntimeError):
            work.wait()
    began = time.monotonic()
    dist.destroy_process_group()
    return time.monotonic() - began


@pytest.mark.slow
def test_the_ends_of_all_groups_share_one_patience_with_a_store_whose_host_is_gone(possible):
    hosts = [0, 0, 1, 1]
    with Network(2) as network, Ranks(4, init=False) as ranks:
        start(ranks, end_groups_without_the_store, network, hosts)
        for rank in range(4):
            assert ranks.wait_report(rank) == "ready"
        network.cut(1)
        for rank in range(4):
            ranks.tell(rank, "go on")
        outcomes = ranks.wait(timeout=55, ranks=[2, 3])
        check(outcomes)
        for rank in (0, 1):
            ranks.kill(rank)
    for outcome in outcomes:
        assert outcome.value < 15, outcome.value  # of one group alone: 5
