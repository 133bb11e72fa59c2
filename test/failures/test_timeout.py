"""A call that cannot finish ends in bounded time with an error that says who is missing.

The rank that is absent from the group under test waits in the store, and so for no rank.
"""

import contextlib
import datetime
import fcntl
import os
import re
import threading
import time

import pytest
import torch
import torch.distributed as dist

from harness.ranks import (
    BACKEND,
    Ranks,
    check,
    connect_store,
    init_default_group,
    meet,
    on_own_ranks,
    pool,
    time_limit,
)

beyond_gloo = pytest.mark.beyond_gloo
CPU = torch.device("cpu")
LIMIT = 1.0
TOGETHER = 3.0  # where several ranks call: one that comes later than that is missing, too
SLACK = 10.0


def short_group(limit=LIMIT, warm=True):
    """A group with this deadline; warm: set once all ranks have used it, however late they were."""
    limit = datetime.timedelta(seconds=limit)
    warm = warm and BACKEND != "gloo"  # its messages keep the group's first deadline
    group = dist.new_group(timeout=datetime.timedelta(seconds=30) if warm else limit)
    dist.barrier(group if warm else None)
    if warm:
        group.set_timeout(limit)
    return group


def check_error(error, op, missing, group):
    """The promises of every error from the wire."""
    if BACKEND == "gloo":
        return
    import torchcomms_pg

    text = str(error)
    assert isinstance(error, torchcomms_pg.CommError), f"{type(error)}: {text}"
    assert isinstance(error, dist.DistBackendError)
    assert error.op.replace("_", "").startswith(op.replace("_", "")), error.op
    assert error.op in text
    # A rank that stops for longer than the monitors wait is named, too, as one that did not answer.
    named = re.findall(r"ranks? ([\d, ]+) did not answer", text)
    silent = {int(rank) for ranks in named for rank in ranks.split(", ")}
    assert set(missing) <= set(error.ranks) <= {*missing, *silent}, (error.ranks, text)
    for rank in missing:
        assert re.search(rf"\brank(s|\(s\))?\b[^.]*\b{rank}\b", text), text
    assert isinstance(error.seq, int) and re.search(rf"\b{error.seq}\b", text), (error.seq, text)
    assert group is None or error.group == group.group_name, (error.group, group.group_name)


def fails(op, missing, group, call, limit=LIMIT):
    with time_limit(limit * 0.9, limit + SLACK, op):
        with pytest.raises(RuntimeError) as caught:
            call()
    check_error(caught.value, op, missing, group)


def drop(group):
    store = dist.distributed_c10d._get_default_store()
    meet(store, f"done with {group.group_name}", dist.get_world_size())
    dist.distributed_c10d._abort_process_group(group)


CALLS = {
    "all_reduce": lambda g, w: dist.all_reduce(torch.ones(5), group=g),
    "broadcast": lambda g, w: dist.broadcast(torch.ones(5), w - 1, group=g),
    "all_gather": lambda g, w: dist.all_gather_into_tensor(torch.ones(w), torch.ones(1), group=g),
    "reduce_scatter": lambda g, w: dist.reduce_scatter_tensor(
        torch.ones(1), torch.ones(w), group=g
    ),
    "all_to_all": lambda g, w: dist.all_to_all_single(torch.ones(w), torch.ones(w), group=g),
    "barrier": lambda g, w: dist.barrier(g),
}


@pytest.mark.ranks((2, 3))
def test_a_large_all_reduce_names_the_missing_rank(world):
    limit = LIMIT if world == 2 else TOGETHER
    group = short_group(limit)
    tensor = torch.ones(600_001)
    if dist.get_rank() != world - 1:
        fails("all_reduce", [world - 1], group, lambda: dist.all_reduce(tensor, group=group), limit)
    drop(group)


@pytest.mark.ranks(3)
@pytest.mark.rotation
@pytest.mark.parametrize("op", CALLS)
def test_every_collective_names_the_missing_rank(world, op):
    group = short_group(TOGETHER)
    if dist.get_rank() != world - 1:
        fails(op, [world - 1], group, lambda: CALLS[op](group, world), TOGETHER)
    drop(group)


@pytest.mark.ranks(4)
def test_all_missing_ranks_are_named(world):
    group = short_group(TOGETHER)
    if dist.get_rank() in (0, 2):
        call = lambda: dist.all_reduce(torch.ones(5), group=group)  # noqa: E731
        fails("all_reduce", [1, 3], group, call, TOGETHER)
    drop(group)


@pytest.mark.ranks((2, 3))
def test_the_first_operation_of_a_group_has_the_same_timeout(world):
    """Setting up the communicator is covered too: nothing of it waits for ever."""
    limit = LIMIT if world == 2 else TOGETHER
    group = short_group(limit, warm=False)
    if dist.get_rank() != world - 1:
        call = lambda: dist.all_reduce(torch.ones(5), group=group)  # noqa: E731
        fails("all_reduce", [world - 1], group, call, limit)
    drop(group)


@pytest.mark.ranks(3)
def test_an_async_operation_fails_in_wait(world):
    group = short_group(TOGETHER)
    if dist.get_rank() != 1:
        # Issued inside: its time runs from then on.
        issue = lambda: dist.all_reduce(torch.ones(5), group=group, async_op=True)  # noqa: E731
        fails("all_reduce", [1], group, lambda: issue().wait(), TOGETHER)
    drop(group)


@beyond_gloo
@pytest.mark.ranks(2)
def test_the_error_of_an_operation_that_another_takes_along_begins_with_its_own_name(world):
    group = dist.new_group()
    if dist.get_rank() == 0:
        works = [dist.barrier(group, async_op=True)]
        works += [dist.all_reduce(torch.ones(5), group=group, async_op=True)]
        errors = []
        for work, limit in zip(works, ([datetime.timedelta(seconds=LIMIT)], [])):
            with pytest.raises(RuntimeError) as raised:
                work.wait(*limit)
            errors.append(raised.value)
        assert str(errors[0]).startswith("barrier #1 ")
        assert str(errors[1]).startswith("all_reduce #2 ")
        assert str(errors[0]) in str(errors[1]) and errors[0].verdict == errors[1].verdict
    drop(group)


@pytest.mark.ranks(2)
def test_a_missing_message_names_the_sender(world):
    group = short_group()
    if dist.get_rank() == 0:
        fails("recv", [1], group, lambda: dist.recv(torch.empty(5), 1, group=group))
    drop(group)


@beyond_gloo
@pytest.mark.ranks(2)
def test_a_large_message_that_nobody_receives_names_the_receiver(world):
    """ncclSend may return early for small messages, never for one larger than all buffers."""
    group = short_group()
    if dist.get_rank() == 0:
        fails("send", [1], group, lambda: dist.send(torch.ones(8_000_000), 1, group=group))
    drop(group)


@beyond_gloo
@pytest.mark.ranks(2)
def test_a_batch_of_messages_fails_in_time(world):
    group = short_group()
    if dist.get_rank() == 0:
        receive = dist.P2POp(dist.irecv, torch.empty(5), 1, group=group)
        with pytest.raises(RuntimeError, match="(?i)recv|coalesced|batch"):
            for work in dist.batch_isend_irecv([receive]):
                work.wait()
    drop(group)


@pytest.mark.ranks(3)
def test_monitored_barrier_names_the_missing_rank(world):
    group = short_group()
    backend = group._get_backend(CPU)
    limit = datetime.timedelta(seconds=TOGETHER)
    if dist.get_rank() == 0:
        with time_limit(TOGETHER * 0.9, TOGETHER + SLACK, "monitored_barrier"):
            with pytest.raises(RuntimeError, match=r"(?i)rank[^.]*\b2\b") as error:
                backend.monitored_barrier(limit, wait_all_ranks=True)
        assert "monitored" in str(error.value)
    elif dist.get_rank() == 1:
        with pytest.raises(RuntimeError):
            backend.monitored_barrier(limit, wait_all_ranks=True)
    drop(group)


@pytest.mark.skipif(torch.__version__ < "2.14", reason="torch refuses plugins before 2.14")
@pytest.mark.ranks(2)
def test_dist_monitored_barrier_accepts_the_backend(world):
    dist.monitored_barrier()


@pytest.mark.ranks(2)
def test_a_late_rank_is_no_error(world):
    """A third of the limit late, several times in a row: lateness does not add up."""
    limit = 4.5
    group = short_group(limit)
    for _ in range(4):
        if dist.get_rank() == 1:
            time.sleep(limit / 3)  # being late is what is tested, nothing waits for it
        tensor = torch.ones(1000)
        dist.all_reduce(tensor, group=group)
        assert tensor[0] == 2
    drop(group)


@beyond_gloo
@pytest.mark.ranks(2)
def test_an_operations_own_timeout_overrides_the_groups(world):
    group = dist.new_group()
    dist.barrier(group)
    if dist.get_rank() == 0:
        options = dist.AllreduceOptions()
        options.timeout = datetime.timedelta(seconds=LIMIT)
        backend = group._get_backend(CPU)
        fails("all_reduce", [1], group, lambda: backend.allreduce([torch.ones(5)], options).wait())
    drop(group)


@beyond_gloo
@pytest.mark.ranks(2)
def test_after_a_timeout_every_later_call_says_so_at_once(world):
    group = short_group()
    if dist.get_rank() == 0:
        fails("all_reduce", [1], group, lambda: dist.all_reduce(torch.ones(5), group=group))
        group.set_timeout(datetime.timedelta(seconds=20))  # what it would wait for
        with time_limit(0, SLACK, "a call after the timeout"):
            with pytest.raises(RuntimeError, match="all_?reduce"):
                dist.broadcast(torch.ones(5), 0, group=group)
    drop(group)


@beyond_gloo
@pytest.mark.ranks(2)
def test_a_timeout_in_one_group_leaves_the_others_alone(world):
    """Those that there are, and those that are made later: nothing ends the process."""
    group = short_group()
    if dist.get_rank() == 0:
        fails("all_reduce", [1], group, lambda: dist.all_reduce(torch.ones(5), group=group))
    drop(group)  # where rank 1 waits for rank 0
    dist.all_reduce(tensor := torch.ones(1000))
    assert tensor[0] == 2
    again = dist.new_group()
    dist.all_reduce(tensor := torch.ones(10), group=again)
    assert tensor[0] == 2
    dist.destroy_process_group(again)


def join_short(port, prefix, world):
    rank = int(os.environ["RANK"])
    with time_limit(0, LIMIT + 2 * SLACK, "init and the first all_reduce"):
        with pytest.raises(RuntimeError) as caught:
            init_default_group(port, prefix, rank, world, LIMIT)
            dist.all_reduce(torch.ones(5))
    if BACKEND == "torchcomms":
        assert re.search(r"(?i)rank[^.]*\b2\b", str(caught.value)), str(caught.value)


def test_a_rank_missing_from_init_is_named():
    with Ranks(2, init=False) as ranks:
        ranks.start(join_short, *ranks.store_args(), 3)
        check(ranks.wait())


def interrupted(args):
    """Another thread runs while the main thread waits, and has the peer come."""
    store = connect_store(*args)
    if dist.get_rank() == 0:
        # Gives the call time to block; it is right whenever it does.
        thread = threading.Timer(0.5, store.set, ("go", "1"))
        thread.start()
        dist.all_reduce(tensor := torch.ones(5))
        thread.join()
    else:
        store.wait(["go"])
        dist.all_reduce(tensor := torch.ones(5))
    assert tensor[0] == 2


def test_a_blocked_synchronous_call_does_not_hold_the_gil():
    pool(2).run(interrupted, pool(2).store_args())


def fill_stderr():
    """Makes stderr a pipe that is full and that nobody reads, as of a launcher that has stopped."""
    _, end = os.pipe()  # stays open
    flags = fcntl.fcntl(end, fcntl.F_GETFL)
    fcntl.fcntl(end, fcntl.F_SETFL, flags | os.O_NONBLOCK)
    for size in (4096, 1):
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(end, bytes(size))
    fcntl.fcntl(end, fcntl.F_SETFL, flags)
    os.dup2(end, 2)


@beyond_gloo
@pytest.mark.parametrize("relaxed", [False, True], ids=["", "a rank asks for time"])
@on_own_ranks(2)
def test_a_stderr_that_nobody_reads_delays_no_timeout(world, relaxed):
    """Nor does the monitor's line about a rank that asks for time."""
    import torchcomms_pg

    groups = [short_group(LIMIT), short_group(2 * LIMIT)]
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        with contextlib.ExitStack() as stack:
            if relaxed:
                stack.enter_context(torchcomms_pg.get_comm(groups[0]).relaxed_timeout(60))
            dist.barrier()
            store.wait(["rank 0 has its errors"])
        return
    dist.barrier()
    fill_stderr()
    raised = []

    def reduce(number):
        with pytest.raises(torchcomms_pg.CommError, match="rank 1 (has not arrived|did not)"):
            dist.all_reduce(torch.ones(1), group=groups[number])
        raised.append(number)

    threads = [threading.Thread(target=reduce, args=(number,), daemon=True) for number in (0, 1)]
    with time_limit(0, 30, "the errors"):
        for thread in threads:
            thread.start()
        for thread in threads[relaxed:]:
            thread.join(29)
    assert sorted(raised) == [0, 1][relaxed:]
    store.set("rank 0 has its errors", "")
