"""Point-to-point: what is sent arrives, whole, in order, at the rank it was sent to."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from harness.ranks import woken
from harness.values import HUGE, MOVABLE, SIZES, assert_same, data

beyond_gloo = pytest.mark.beyond_gloo


@beyond_gloo
@pytest.mark.ranks((2, 3))
@pytest.mark.parametrize("dtype", MOVABLE, ids=lambda d: str(d).removeprefix("torch."))
def test_send_and_recv_around_a_ring(world, dtype):
    me = dist.get_rank()
    left, right = (me - 1) % world, (me + 1) % world
    for size in SIZES:
        received = torch.empty(size, dtype=dtype)
        steps = [
            lambda: dist.send(data(me, size, dtype), right),
            lambda: dist.recv(received, left),
        ]
        for step in steps if me == 0 else steps[::-1]:
            step()
        assert_same(received, data(left, size, dtype), f"size {size}")


@pytest.mark.ranks(2)
def test_large_messages(world):
    me = dist.get_rank()
    for sender in range(2):
        if me == sender:
            dist.send(data(me, HUGE), 1 - me)
        else:
            received = torch.empty(HUGE)
            assert dist.recv(received, sender) == sender
            assert_same(received, data(sender, HUGE))


@pytest.mark.ranks((2, 3, 4))
def test_isend_and_irecv_between_all_pairs_at_once(world):
    me = dist.get_rank()
    peers = [rank for rank in range(world) if rank != me]
    for size in SIZES:
        received = {peer: torch.empty(size) for peer in peers}
        works = [dist.irecv(received[peer], peer) for peer in peers]
        works += [dist.isend(data(me, size, salt=peer), peer) for peer in peers]
        for work in works:
            work.wait()
        for peer in peers:
            assert_same(received[peer], data(peer, size, salt=me), f"size {size}, from {peer}")


@beyond_gloo
@pytest.mark.ranks(2)
@pytest.mark.parametrize("batched", [False, True])
def test_what_is_sent_may_have_any_strides_though_its_receiver_is_late(world, batched):
    """Its contiguous copy lives until the message has left, whatever else takes memory."""
    begun = torch.empty(1)
    if dist.get_rank() == 1:
        dist.recv(begun, 0, tag=1)
        received = torch.empty(HUGE)
        dist.recv(received, 0)
        assert_same(received, data(0, HUGE))
        return
    sent = torch.stack([data(0, HUGE)] * 2, dim=1)[:, 0]
    if batched:
        (work,) = dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, 1)])
    else:
        work = dist.isend(sent, 1)
    others = [torch.full((HUGE,), -1.0) for _ in range(4)]
    dist.send(begun, 1, tag=1)
    work.wait()
    assert all(other[-1] == -1 for other in others)


@beyond_gloo
@pytest.mark.ranks(2)
def test_large_isend_both_ways_before_any_recv_does_not_deadlock(world):
    me = dist.get_rank()
    sent = dist.isend(data(me, HUGE), 1 - me)
    received = torch.empty(HUGE)
    arrived = dist.irecv(received, 1 - me)
    arrived.wait()
    sent.wait()
    assert_same(received, data(1 - me, HUGE))


@pytest.mark.ranks(2)
def test_works_may_be_waited_for_in_any_order(world):
    me = dist.get_rank()
    if me == 0:
        works = [dist.isend(data(turn, 5001), 1) for turn in range(6)]
        tensors = []
    else:
        tensors = [torch.empty(5001) for _ in range(6)]
        works = [dist.irecv(tensor, 0) for tensor in tensors]
    for turn in (5, 0, 3, 1, 4, 2):
        works[turn].wait()
    for turn, tensor in enumerate(tensors):
        assert_same(tensor, data(turn, 5001), f"message {turn}")


@pytest.mark.ranks(2)
def test_messages_between_two_ranks_do_not_overtake(world):
    for turn in range(50):
        size = (turn * 977) % 3000
        if dist.get_rank() == 0:
            dist.send(data(turn, size), 1)
        else:
            tensor = torch.empty(size)
            dist.recv(tensor, 0)
            assert_same(tensor, data(turn, size), f"message {turn}")


@pytest.mark.ranks(2)
def test_equal_tags_match(world):
    for tag in (0, 1, 77):
        tensor = data(dist.get_rank(), 100)
        if dist.get_rank() == 0:
            dist.send(tensor, 1, tag=tag)
        else:
            dist.recv(tensor, 0, tag=tag)
            assert_same(tensor, data(0, 100))


@beyond_gloo
@pytest.mark.ranks(2)
def test_tags_are_matched_or_refused_but_never_ignored(world):
    """Received in the other order, a message goes to its tag, or the first call says no."""
    me = dist.get_rank()
    tensors = [torch.zeros(10), torch.zeros(10)]
    try:
        if me == 0:
            works = [dist.isend(data(tag, 10), 1, tag=tag) for tag in (5, 6)]
        else:
            works = [dist.irecv(tensors[tag - 5], 0, tag=tag) for tag in (6, 5)]
        for work in works:
            work.wait()
    except (ValueError, NotImplementedError, RuntimeError) as error:
        assert "tag" in str(error) and not isinstance(error, dist.DistBackendError), error
        return
    if me == 1:
        for tag in (5, 6):
            assert_same(tensors[tag - 5], data(tag, 10), f"tag {tag}")


@pytest.mark.ranks((3, 4))
def test_recv_from_any_source_says_who_sent(world):
    """ProcessGroupNCCL cannot; over shared memory it costs nothing."""
    size = 1025
    if dist.get_rank() != 0:
        dist.send(data(dist.get_rank(), size), 0)
    else:
        seen = set()
        for _ in range(world - 1):
            tensor = torch.empty(size)
            source = dist.recv(tensor)
            assert_same(tensor, data(source, size), f"from {source}")
            seen.add(source)
        assert seen == set(range(1, world))


@pytest.mark.ranks((2, 3, 4))
def test_batch_isend_irecv_exchanges_with_both_neighbours(world):
    me = dist.get_rank()
    left, right = (me - 1) % world, (me + 1) % world
    for size in (*SIZES, HUGE // 2):
        from_left, from_right = torch.empty(size), torch.empty(size)
        operations = [
            dist.P2POp(dist.isend, data(me, size, salt=1), right),
            dist.P2POp(dist.isend, data(me, size, salt=2), left),
            dist.P2POp(dist.irecv, from_left, left),
            dist.P2POp(dist.irecv, from_right, right),
        ]
        if world == 2:  # the same peer twice: matched in order
            from_right, from_left = from_left, from_right
            operations[2:] = [
                dist.P2POp(dist.irecv, from_left, left),
                dist.P2POp(dist.irecv, from_right, right),
            ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        assert_same(from_left, data(left, size, salt=1), f"size {size}")
        assert_same(from_right, data(right, size, salt=2), f"size {size}")


@beyond_gloo
@pytest.mark.ranks(1)
def test_a_rank_alone_may_send_to_itself_in_a_batch(world):
    me = dist.get_rank()
    for size in SIZES:
        received = torch.empty(size)
        operations = [
            dist.P2POp(dist.isend, data(me, size), me),
            dist.P2POp(dist.irecv, received, me),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        assert_same(received, data(me, size), f"size {size}")


@beyond_gloo
@pytest.mark.ranks((2, 3, 4))
def test_batches_of_many_messages_of_mixed_sizes_and_dtypes(world):
    """Every rank sends three messages to every rank, itself included, in a rank's own order."""
    me = dist.get_rank()
    messages = [(11, torch.float32), (0, torch.int64), (150_001, torch.bfloat16)]
    received, operations = {}, []
    for shift in range(world):
        peer = (me + shift) % world
        for number, (size, dtype) in enumerate(messages):
            sent = data(me, size, dtype, salt=10 * peer + number)
            received[peer, number] = torch.empty(size, dtype=dtype)
            operations.append(dist.P2POp(dist.isend, sent, peer))
            operations.append(dist.P2POp(dist.irecv, received[peer, number], peer))
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    for (peer, number), tensor in received.items():
        size, dtype = messages[number]
        assert_same(tensor, data(peer, size, dtype, salt=10 * me + number), f"{peer}/{number}")


@pytest.mark.ranks((3, 4))
def test_group_ranks_are_translated_in_subgroups(world):
    """In the group of ranks 1 and 2, dist.send takes the global rank."""
    group = dist.new_group([1, 2])
    me = dist.get_rank()
    if me in (1, 2):
        tensor = data(me, 1000)
        if me == 1:
            dist.send(tensor, 2, group=group)
        else:
            assert dist.recv(tensor, 1, group=group) == 1
            assert_same(tensor, data(1, 1000))
        dist.destroy_process_group(group)


@beyond_gloo
@pytest.mark.ranks(2)
def test_collectives_and_messages_may_alternate(world):
    me = dist.get_rank()
    for turn in range(5):
        tensor = torch.ones(3001)
        first = dist.all_reduce(tensor, async_op=True)
        message = data(me, 3001, salt=turn)
        second = dist.isend(message, 1) if me == 0 else dist.irecv(message, 0)
        dist.barrier()
        first.wait(), second.wait()
        assert_same(tensor, torch.full((3001,), 2.0))
        assert_same(message, data(0, 3001, salt=turn))


@pytest.mark.ranks(2)
def test_waiting_for_a_message_does_not_wait_for_collectives(world):
    """Rank 1 calls the collective when it has had the answer to its message."""
    me, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    dist.all_reduce(torch.ones(1), async_op=True).wait()  # the thread for collectives is there
    for size in (5, 300_001):
        tensor, message = torch.ones(size), torch.empty(3)
        about_to_wait = f"about to wait for a message, {size}"
        if me == 0:
            first = dist.all_reduce(tensor, async_op=True)
            second = dist.irecv(message, 1)
            store.set(about_to_wait, "")
            second.wait()
            dist.send(message, 1)
            first.wait()
        else:
            store.wait([about_to_wait])
            sent = dist.isend(data(1, 3), 0)
            dist.recv(message, 0)
            sent.wait()
            dist.all_reduce(tensor)
        assert_same(message, data(1, 3))
        assert_same(tensor, torch.full((size,), 2.0))


def there_and_back(sent, received, peer):
    steps = [lambda: dist.send(sent, peer), lambda: dist.recv(received, peer)]
    for step in steps if dist.get_rank() == 0 else steps[::-1]:
        step()


def both_in_a_batch(sent, received, peer):
    operations = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def both_apart(sent, received, peer):
    for work in [dist.irecv(received, peer), dist.isend(sent, peer)]:
        work.wait()


def both_with_a_timeout(sent, received, peer):
    for work in [dist.irecv(received, peer), dist.isend(sent, peer)]:
        work.wait(timedelta(seconds=60))


EXCHANGES = [there_and_back, both_in_a_batch, both_apart, both_with_a_timeout]


@beyond_gloo
@pytest.mark.ranks(2)
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("count", [3, 15_000])
def test_a_message_that_is_waited_for_at_once_wakes_no_thread(world, exchange, count):
    me = dist.get_rank()
    sent, received = data(me, count), torch.empty(count)
    exchange(sent, received, 1 - me)
    series = []
    for _ in range(5):
        before = woken()
        for _ in range(100):
            exchange(sent, received, 1 - me)
        series.append(woken() - before)
    assert_same(received, data(1 - me, count))
    # The monitor has one go on that nobody waits for, as when a rank is stopped before it does.
    assert min(series) == 0, series


@beyond_gloo
@pytest.mark.ranks(2)
def test_receives_that_nobody_waits_for_make_room_for_more(store):
    """Rank 0 sends more than fits between the ranks, and rank 1 waits for something else."""
    me = dist.get_rank()
    count = 5000
    if me == 0:
        for number in range(count):
            dist.send(torch.tensor([number]), 1)
        store.set("all is sent", "")
    else:
        received = [torch.empty(1, dtype=torch.int64) for _ in range(count)]
        works = [dist.irecv(tensor, 0) for tensor in received]
        store.wait(["all is sent"])
        for work in works:
            work.wait()
        assert torch.cat(received).tolist() == list(range(count))
