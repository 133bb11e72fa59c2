"""Groups of other backends, watched: the verdict comes, and nothing else changes."""

import concurrent.futures
import contextlib
import datetime
import functools
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref

import pytest
import torch
import torch.distributed as dist

import torchcomms_pg
from harness import parity
from harness.leaks import library_threads
from harness.programs import run_program
from harness.ranks import Ranks, check, connect_store, meet, on_own_ranks, wait_for
from harness.recorders import process_trace
from harness.stuck import keep_the_gil
from hosts.test_hosts import move
from torchcomms_pg.testing.rank import receive, report

pytestmark = [
    pytest.mark.beyond_gloo,
    pytest.mark.skipif(torch.__version__ < "2.14", reason="c10d has hooks from torch 2.14 on"),
]
LIMIT = 1.5
SOON = 20.0  # a verdict is there by then, on loaded cores, too
KEPT = []


def join(args, world, limit=LIMIT):
    """The store; a default group of gloo, and a second one, that are watched."""
    store = connect_store(*args)
    torchcomms_pg.watch(timeout=datetime.timedelta(seconds=limit))
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    second = dist.new_group()
    dist.all_reduce(torch.ones(7))
    dist.all_reduce(torch.ones(7), group=second)
    return store, second


class NotAnsweredError(Exception):
    """A rank had no core, or was stopped, when it was to answer, and the verdict is of that."""


def again_if_a_rank_did_not_answer(test):
    @functools.wraps(test)
    def tries(*args, **kwargs):
        for _ in range(3):
            with contextlib.suppress(NotAnsweredError):
                return test(*args, **kwargs)
        return test(*args, **kwargs)

    return tries


def all_say(ranks, words, who=None, stopped=False):
    """Waits until a verdict of each rank has the words; those verdicts. `stopped`: a rank is."""
    found = []
    for rank in range(ranks.world) if who is None else who:
        said = lambda: [text for text in ranks.verdicts(rank) if re.search(words, text)]  # noqa: E731
        other = lambda: not stopped and "did not answer" in "".join(ranks.verdicts(rank))  # noqa: E731
        assert wait_for(lambda: said() or other(), SOON), ranks.output(rank)
        wait_for(lambda: not said() or not said()[0].endswith(" prints the rest)"), SOON)
        silent = "did not answer"
        unheard = silent in "".join(said()[:1]) and not (stopped or silent in words)
        if not said() or "too little CPU time" in said()[0] or unheard:
            raise NotAnsweredError(ranks.output(rank))
        found.append(said()[0])
    return found


def body_of(verdict):
    return verdict.partition("torchcomms_pg: ")[2]


def stays_away():
    report("away")
    receive()


def one_skips_an_operation(args, world):
    store, _ = join(args, world)
    rank = int(os.environ["RANK"])
    tensor = torch.full((1024,), float(rank + 1))
    if rank == 1:
        stays_away()
    dist.all_reduce(tensor)
    meet(store, "done", world)
    return tensor[0].item()


@again_if_a_rank_did_not_answer
def test_who_is_missed_is_named_where_its_python_is_and_the_program_goes_on():
    with Ranks(3, init=False) as ranks:
        ranks.start(one_skips_an_operation, ranks.store_args(), 3)
        ranks.wait_report(1)
        first, second, third = all_say(ranks, "has not arrived at")
        assert body_of(first) == body_of(second) == body_of(third)
        missing, waiting = first.split("\n  ranks 0, 2: ")
        assert "rank 1 has not arrived at all_reduce #2 (1024 x Float)" in missing
        assert "rank 1: last completed all_reduce #1 (7 x Float)" in missing
        assert re.search(r"test_watch.py:\d+ in stays_away", missing), missing
        assert waiting.startswith("in all_reduce #2 (1024 x Float)")
        assert re.search(r"test_watch.py:\d+ in one_skips_an_operation", waiting), waiting
        ranks.tell(1, "go on")
        outcomes = ranks.wait()
        check(outcomes)
        assert [outcome.value for outcome in outcomes] == [6.0] * 3
        all_say(ranks, r"the verdict on group '0' is over: all_reduce #2 .* has ended, [\d.]+ s")
        assert all(len(ranks.verdicts(rank)) == 2 for rank in range(3)), ranks.output(0)


def skips_on_another_host(args, world):
    move("ab")
    return one_skips_an_operation(args, world)


@again_if_a_rank_did_not_answer
def test_ranks_of_two_hosts_find_out_together():
    with Ranks(2, init=False) as ranks:
        ranks.start(skips_on_another_host, ranks.store_args(), 2)
        ranks.wait_report(1)
        all_say(ranks, "rank 1 has not arrived at all_reduce #2")
        ranks.tell(1, "go on")
        check(ranks.wait())
        all_say(ranks, "is over: all_reduce #2")


def uses_two_groups(args, world):
    _, second = join(args, world)
    groups = [None, second] if os.environ["RANK"] == "0" else [second, None]
    for group in groups:
        dist.all_reduce(torch.ones(3), group=group)


@again_if_a_rank_did_not_answer
def test_two_groups_used_in_opposite_order_are_a_deadlock():
    with Ranks(2, init=False) as ranks:
        ranks.start(uses_two_groups, ranks.store_args(), 2)
        first, second = all_say(ranks, "deadlock: rank 0 waits in all_reduce #2")
        assert re.search(
            r"for rank 1, which waits in all_reduce #2 \(3 x Float\)( of group '\S+')? for rank 0",
            first,
        ), first
        assert "all ranks have to call the operations of several groups in one order" in first
        # Each group may have a verdict, and each rank may first print that of another.
        bodies = lambda rank: {body_of(verdict) for verdict in ranks.verdicts(rank)}  # noqa: E731
        assert wait_for(lambda: bodies(0) == bodies(1), SOON), (first, second)


def keeps_the_gil(args, world, pipe):
    join(args, world)
    report("ready")
    receive()
    if os.environ["RANK"] == "1":
        keep_the_gil(pipe)
    dist.all_reduce(torch.ones(3))


@again_if_a_rank_did_not_answer
def test_a_rank_that_keeps_the_gil_is_named(tmp_path):
    os.mkfifo(pipe := os.path.join(tempfile.mkdtemp(dir=tmp_path), "pipe"))
    with Ranks(2, init=False) as ranks:
        ranks.start(keeps_the_gil, ranks.store_args(), 2, pipe)
        for rank in range(2):
            ranks.wait_report(rank)
            ranks.tell(rank, "go")
        with open(pipe, "rb") as held:
            (verdict,) = all_say(ranks, "rank 1 has not arrived at all_reduce #2", who=[0])
            assert re.search(r"rank 1: .*(\n.*)*holds the GIL", verdict), verdict
            held.read()
        check(ranks.wait())


def is_gone(args, world):
    join(args, world)
    report("ready")
    receive()
    with contextlib.suppress(RuntimeError):  # Gloo's, of a connection that is closed
        dist.all_reduce(torch.ones(3))


@pytest.mark.stops_ranks
def test_a_stopped_rank_is_said_to_be_stopped():
    with Ranks(3, init=False) as ranks:
        ranks.start(is_gone, ranks.store_args(), 3)
        for rank in range(3):
            ranks.wait_report(rank)
        ranks.kill(1, signal.SIGSTOP)
        ranks.tell(0, "go")
        ranks.tell(2, "go")
        said = rf"rank 1: its process is stopped \(pid {ranks.pids[1]}\)"
        first, third = all_say(ranks, said, who=[0, 2], stopped=True)
        assert "rank 1 did not answer" in first
        ranks.kill(1, signal.SIGCONT)
        ranks.tell(1, "go")
        check(ranks.wait())
        all_say(ranks, "is over: all_reduce #2", who=[0, 2], stopped=True)


def waits_for_a_message(args, world):
    join(args, world)
    report("ready")
    receive()
    if os.environ["RANK"] == "0":
        dist.recv(torch.ones(3), 2)  # whose connection to the dead one is another


def test_a_dead_rank_is_said_to_be_dead():
    """Gloo itself ends what needs a connection to it."""
    with Ranks(3, init=False) as ranks:
        ranks.start(waits_for_a_message, ranks.store_args(), 3)
        for rank in range(3):
            ranks.wait_report(rank)
        ranks.kill(2)
        assert ranks.exit_code(2) == -9
        ranks.tell(0, "go")
        (outcome,) = ranks.wait(ranks=[0])
        assert outcome.error, "Gloo has no connection to a dead rank"


def calls_something_else(args, world, fault):
    join(args, world)
    rank = int(os.environ["RANK"])
    with contextlib.suppress(RuntimeError):
        if rank == 1 and fault == "another operation":
            dist.all_gather([torch.ones(2), torch.ones(2)], torch.ones(2))
        elif rank == 1 and fault == "another dtype":
            dist.all_reduce(torch.ones(8, dtype=torch.float64))
        elif rank == 1:
            dist.reduce(torch.ones(8), 1)
        elif fault == "another operation":
            dist.broadcast(torch.ones(8), 1)
        else:
            dist.reduce(torch.ones(8), 0)
        stays_away()


@again_if_a_rank_did_not_answer
def test_ranks_that_call_different_operations_are_shown_with_both():
    with Ranks(2, init=False) as ranks:
        ranks.start(calls_something_else, ranks.store_args(), 2, "another root")
        (first,) = all_say(ranks, "its ranks call different operations", who=[0])
        assert re.search(r"rank 0: in reduce #2 \(8 x Float, root 0\)", first), first
        assert re.search(r"rank 1: in reduce #2 \(8 x Float, root 1\)", first), first


def raises_and_computes(args, world):
    # The operation that rank 1 has left is not overdue there when rank 0 asks.
    join(args, world, LIMIT if os.environ["RANK"] == "0" else 120)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(3).to(torch.float8_e4m3fn))
    with pytest.raises(RuntimeError):  # before the post hook, unlike those above
        dist.distributed_c10d._get_default_group().allreduce([torch.ones(3), torch.ones(4)])
    report("computes")
    receive()
    dist.all_reduce(tensor := torch.ones(3))
    return tensor[0].item()


@again_if_a_rank_did_not_answer
def test_an_operation_whose_call_raises_is_not_waited_for_and_has_no_number():
    with Ranks(2, init=False) as ranks:
        ranks.start(raises_and_computes, ranks.store_args(), 2)
        for rank in range(2):
            ranks.wait_report(rank)
        ranks.tell(0, "go")
        first, _ = all_say(ranks, r"rank 1 has not arrived at all_reduce #4 \(3 x Float\)")
        assert "rank 1: last completed all_reduce #1 (7 x Float)" in first
        ranks.tell(1, "go")
        check(ranks.wait())
        all_say(ranks, "is over: all_reduce #4")
        assert all(len(ranks.verdicts(rank)) == 2 for rank in range(2)), ranks.output(1)


@on_own_ranks(2, init=False)
def test_an_operation_in_whose_call_python_is_called_has_not_raised(world, port, prefix):
    join((port, prefix), world, limit=60)
    group = dist.distributed_c10d._get_default_group()
    group.register_post_hook(0, lambda args: time.sleep(1))  # Python is asked after 0.2 s
    dist.all_reduce(torch.ones(3))
    group.unregister_post_hook(0)
    ended = lambda: all(entry["state"] == "completed" for entry in process_trace()["entries"])  # noqa: E731
    assert wait_for(ended, SOON), process_trace()["entries"]


def keeps_its_requests(args, world):
    store, second = join(args, world)
    rank = int(os.environ["RANK"])
    received = torch.zeros(3)
    KEPT.append(dist.isend(torch.full((3,), 3.0), 1 - rank))
    KEPT.append(dist.irecv(received, 1 - rank))
    meet(store, "issued", world)
    time.sleep(2 * LIMIT)  # of which a verdict would have come by the time of that on the following
    if rank == 1:
        stays_away()
    dist.all_reduce(torch.ones(3), group=second)
    for request in KEPT:
        request.wait()
    return received[0].item()


@again_if_a_rank_did_not_answer
def test_a_message_that_nobody_waits_for_is_no_hang():
    with Ranks(2, init=False) as ranks:
        ranks.start(keeps_its_requests, ranks.store_args(), 2)
        ranks.wait_report(1)
        all_say(ranks, r"rank 1 has not arrived at all_reduce #2 \(3 x Float\)")
        ranks.tell(1, "go on")
        outcomes = ranks.wait()
        check(outcomes)
        assert [outcome.value for outcome in outcomes] == [3.0, 3.0]
        all_say(ranks, "is over: all_reduce #2")
        assert all(len(ranks.verdicts(rank)) == 2 for rank in range(2)), ranks.output(0)


def wait_for_each_others_messages(args, world):
    join(args, world)
    tensor = torch.ones(3)
    peer = 1 - int(os.environ["RANK"])
    dist.recv(tensor, peer)
    dist.send(tensor, peer)


@again_if_a_rank_did_not_answer
def test_ranks_that_receive_from_each_other_are_a_deadlock():
    with Ranks(2, init=False) as ranks:
        ranks.start(wait_for_each_others_messages, ranks.store_args(), 2)
        for verdict in all_say(ranks, r"deadlock: rank \d waits in recv #1 from rank \d \(3 x"):
            assert "may go on" not in verdict, verdict  # as of one that may not wait for it


def issues_and_does_not_wait(args, world):
    _, second = join(args, world)
    tensors = torch.ones(3), torch.ones(3)
    if os.environ["RANK"] == "0":
        for tensor, group in zip(tensors, (second, None), strict=True):
            dist.all_reduce(tensor, group=group)
    else:
        work = dist.all_reduce(tensors[1], async_op=True)
        stays_away()
        dist.all_reduce(tensors[0], group=second)
        work.wait()


@again_if_a_rank_did_not_answer
def test_of_a_rank_that_has_issued_asynchronously_it_is_said_that_it_may_go_on():
    with Ranks(2, init=False) as ranks:
        ranks.start(issues_and_does_not_wait, ranks.store_args(), 2)
        ranks.wait_report(1)
        for verdict in all_say(ranks, r"deadlock: rank 0 waits in all_reduce #2 .* for rank 1, "):
            assert "one of them only by its device's queue or by a future, so that" in verdict
        ranks.tell(1, "go on")
        check(ranks.wait())


def waits_for_two(args, world):
    join(args, world)
    works = []
    for size in (3, 4):
        if os.environ["RANK"] == "1":
            stays_away()
        works.append(dist.all_reduce(torch.ones(size), async_op=True))
    for work in works:
        work.wait()


@again_if_a_rank_did_not_answer
def test_what_is_still_overdue_once_a_verdict_is_over_gets_its_own():
    with Ranks(2, init=False) as ranks:
        ranks.start(waits_for_two, ranks.store_args(), 2)
        for number in (2, 3):
            ranks.wait_report(1)
            all_say(ranks, rf"rank 1 has not arrived at all_reduce #{number}")
            ranks.tell(1, "go on")
            all_say(ranks, f"is over: all_reduce #{number}")
        check(ranks.wait())


def has_more_patience(args, world):
    rank = int(os.environ["RANK"])
    join(args, world, LIMIT * (rank + 1))
    if rank == 1:
        stays_away()
    dist.all_reduce(torch.ones(3))


@again_if_a_rank_did_not_answer
def test_a_deadline_that_passes_while_a_verdict_stands_gives_no_other():
    with Ranks(3, init=False) as ranks:
        ranks.start(has_more_patience, ranks.store_args(), 3)
        ranks.wait_report(1)
        all_say(ranks, "rank 1 has not arrived at all_reduce #2")
        # The deadline of rank 2, and a verdict's time. One that passes in silence tells nobody.
        time.sleep(3 * LIMIT)
        ranks.tell(1, "go on")
        check(ranks.wait())
        all_say(ranks, "is over: all_reduce #2")
        assert all(len(ranks.verdicts(rank)) == 2 for rank in range(3)), ranks.output(2)


def destroys_the_group(args, world):
    join(args, world)
    if os.environ["RANK"] == "1":
        stays_away()
    work = dist.all_reduce(torch.ones(3), async_op=os.environ["RANK"] == "0")
    if work is not None:
        report("issued")
        receive()
        dist.destroy_process_group()  # does not end before the other rank has come


@again_if_a_rank_did_not_answer
def test_of_a_group_that_is_destroyed_the_verdict_is_said_to_be_over():
    with Ranks(2, init=False) as ranks:
        ranks.start(destroys_the_group, ranks.store_args(), 2)
        ranks.wait_report(0)
        all_say(ranks, "rank 1 has not arrived at all_reduce #2")
        ranks.tell(0, "destroy")
        # The backend may end the operation first, with an error.
        over = "is over: (the group has been destroyed|all_reduce #2 .* has ended)"
        all_say(ranks, over, who=[0])
        ranks.tell(1, "go on")
        check(ranks.wait())


def posts_a_receive_for_later(args, world):
    join(args, world)
    rank, received = int(os.environ["RANK"]), torch.zeros(3)
    if rank == 0:
        KEPT.append(dist.irecv(received, 1))
    report("posted")
    if rank == 0:
        stays_away()
    receive()
    dist.all_reduce(torch.ones(3))
    if rank == 0:
        KEPT.pop().wait()
        assert received.tolist() == [7.0] * 3
        return
    report("reduced")
    receive()
    dist.send(torch.full((3,), 7.0), 0)


@again_if_a_rank_did_not_answer
def test_a_message_that_no_thread_waits_for_accuses_nobody_and_is_not_where_its_rank_is():
    with Ranks(2, init=False) as ranks:
        ranks.start(posts_a_receive_for_later, ranks.store_args(), 2)
        for rank in (0, 1, 0):
            ranks.wait_report(rank)
        time.sleep(3 * LIMIT)  # its deadline passes in silence
        assert not any(ranks.verdicts(rank) for rank in range(2)), ranks.output(0)
        ranks.tell(1, "reduce")
        for verdict in all_say(ranks, "rank 0 has not arrived at all_reduce #2"):
            assert "rank 0: last completed all_reduce #1" in verdict
            assert "in stays_away" in verdict and not re.search(r"\brecv\b", verdict)
        ranks.tell(0, "go on")
        ranks.tell(0, "reduce")
        ranks.wait_report(1)
        for verdict in all_say(ranks, "rank 1 has not arrived at recv #1 from rank 1"):
            assert re.search(r"test_watch.py:\d+ in posts_a_receive_for_later", verdict)
        ranks.tell(1, "send")
        check(ranks.wait())


def listens_for_commands(args, world):
    _, second = join(args, world)
    rank, command = int(os.environ["RANK"]), torch.zeros(1)
    if rank == 1:
        listener = threading.Thread(
            target=dist.recv, args=(command, 0, second), name="listener", daemon=True
        )
        listener.start()
        stays_away()
    dist.all_reduce(torch.ones(3))
    if rank == 0:
        dist.send(torch.ones(1), 1, group=second)
    else:
        listener.join()


@again_if_a_rank_did_not_answer
def test_a_helper_thread_that_waits_makes_no_deadlock_of_its_ranks_lateness():
    with Ranks(2, init=False) as ranks:
        ranks.start(listens_for_commands, ranks.store_args(), 2)
        ranks.wait_report(1)
        for verdict in all_say(ranks, "rank 1 has not arrived at all_reduce #2"):
            assert "wait for each other" not in verdict and "\n  deadlock:" not in verdict
            assert re.search(r"MainThread: .*test_watch.py:\d+ in stays_away", verdict), verdict
            assert "for rank 1 (listener), which waits in recv #1 from rank 0 " in verdict
        ranks.tell(1, "go on")
        check(ranks.wait())


def computes_beside_an_operation(args, world):
    join(args, world)
    rank = os.environ["RANK"]
    if rank == "2":
        stays_away()
    work = dist.all_reduce(torch.ones(3), async_op=rank == "1")
    if work is not None:
        stays_away()
        work.wait()


@again_if_a_rank_did_not_answer
def test_a_rank_that_computes_beside_its_operation_is_shown_at_its_line():
    with Ranks(3, init=False) as ranks:
        ranks.start(computes_beside_an_operation, ranks.store_args(), 3)
        for verdict in all_say(ranks, "rank 2 has not arrived at all_reduce #2"):
            told = r"rank 1: issued all_reduce #2 .*in computes_beside_an_operation.*\n      "
            told += r"MainThread: .*test_watch.py:\d+ in stays_away"
            assert re.search(told, verdict), verdict
            assert "rank 0: in all_reduce #2" in verdict
        for rank in (1, 2):
            ranks.tell(rank, "go on")
        check(ranks.wait())


def gets_less_time(args, world):
    join(args, world, limit=300)
    torchcomms_pg.watch(timeout=datetime.timedelta(seconds=LIMIT))
    if os.environ["RANK"] == "1":
        stays_away()
    dist.all_reduce(torch.ones(3))


@again_if_a_rank_did_not_answer
def test_to_watch_again_changes_the_timeout():
    with Ranks(2, init=False) as ranks:
        ranks.start(gets_less_time, ranks.store_args(), 2)
        ranks.wait_report(1)
        all_say(ranks, "rank 1 has not arrived at all_reduce #2")
        ranks.tell(1, "go on")
        check(ranks.wait())


def comes_to_one_after_another(args, world):
    join(args, world, limit=4.0)
    waits = os.environ["RANK"] == "1"
    works = []
    for _ in range(3):
        time.sleep(2.5 * waits)
        works.append(dist.all_reduce(torch.ones(3), async_op=True))
        if waits:
            works[-1].wait()
    for work in works:
        work.wait()


@pytest.mark.stops_ranks  # its times tell what is waited for
def test_the_time_of_a_collective_counts_from_the_end_of_the_one_before():
    with Ranks(2, init=False) as ranks:
        ranks.run(comes_to_one_after_another, ranks.store_args(), 2)
        assert not any(ranks.verdicts(rank) for rank in range(2)), ranks.output(0)


@on_own_ranks(2, init=False)
def test_every_operation_is_in_the_ring_and_readable(world, port, prefix):
    join((port, prefix), world, limit=60)
    peer = 1 - dist.get_rank()
    t = torch.ones(4)
    dist.barrier()
    requests = [dist.P2POp(dist.isend, t, peer), dist.P2POp(dist.irecv, torch.ones(4), peer)]
    for request in dist.batch_isend_irecv(requests):
        request.wait()
    dist.all_gather_into_tensor(torch.ones(8), t)
    dist.all_gather([torch.ones(4), torch.ones(4)], t)
    dist.reduce_scatter_tensor(torch.ones(2), t)
    dist.all_to_all_single(torch.ones(4), t)
    dist.broadcast_object_list(["any"], src=0)
    with dist.distributed_c10d._coalescing_manager():
        dist.all_reduce(t)
        dist.all_reduce(torch.ones(3))
    entries = lambda: process_trace()["entries"]  # noqa: E731
    names = [entry["profiling_name"] for entry in entries()]
    assert names == [
        "nccl:all_reduce",
        "nccl:all_reduce",
        "nccl:all_reduce_barrier",
        f"nccl:send {dist.get_rank()}->{peer}",
        f"nccl:recv {dist.get_rank()}<-{peer}",
        "nccl:_all_gather_base",
        "nccl:all_gather",
        "nccl:_reduce_scatter_base",
        "nccl:all_to_all",
        "nccl:broadcast",
        "nccl:broadcast",
        "nccl:allreduce_coalesced",
    ], names
    assert wait_for(lambda: all(entry["state"] == "completed" for entry in entries())), entries()


@on_own_ranks(2, init=False)
def test_what_a_thread_has_waited_for_keeps_no_tensor_once_the_thread_goes_on(world, port, prefix):
    join((port, prefix), world, limit=60)
    for _ in range(3):  # it is also asked for, 20 times a second
        tensors = [torch.ones(1000) for _ in range(50)]
        kept = [weakref.ref(tensor) for tensor in tensors]
        while tensors:
            dist.all_reduce(tensors.pop())
        dist.all_reduce(torch.ones(1))
        assert sum(tensor() is not None for tensor in kept) < 10


class Told(torch._C._distributed_c10d.Backend):
    """A backend in Python, of one operation, whose Works end when the test says so."""

    futures = 0  # number of times that one was asked for

    def getBackendName(self):  # noqa: N802
        return "told"

    @property
    def options(self):
        """What torch 2.15 asks for; without it a Python 3.13 or later recurses until it crashes."""
        return torch._C._distributed_c10d.Backend.Options("told")

    def allreduce(self, tensors, opts):
        return ToldWork()


class ToldWork(dist.Work):
    def wait(self, timeout=None):
        report("waits")
        receive()
        return True

    def get_future(self):
        Told.futures += 1
        future = torch.futures.Future()
        future.set_result([])
        return future


def init_told(args, world):
    if not hasattr(dist.Backend, "TOLD"):
        create = lambda store, rank, size, timeout: Told(rank, size)  # noqa: E731
        dist.Backend.register_backend("told", create, devices=["cpu"])
    rank = int(os.environ["RANK"])
    torchcomms_pg.watch(timeout=datetime.timedelta(seconds=LIMIT))
    dist.init_process_group("told", store=connect_store(*args), rank=rank, world_size=world)


def works_are_pythons(args, world):
    init_told(args, world)
    for asynchronous in (False, True):
        work = dist.all_reduce(torch.ones(3), async_op=asynchronous)
        del work
    ended = lambda: [entry["state"] for entry in process_trace()["entries"]] == ["completed"] * 2  # noqa: E731
    assert wait_for(ended, SOON), process_trace()["entries"]
    return Told.futures


def test_works_of_python_end_and_are_asked_for_no_future():
    with Ranks(2, init=False) as ranks:
        ranks.start(works_are_pythons, ranks.store_args(), 2)
        for rank in range(2):
            ranks.wait_report(rank)
            ranks.tell(rank, "end")
        outcomes = ranks.wait()
        check(outcomes)
        assert [outcome.value for outcome in outcomes] == [0, 0]


def is_made_twice(args, world):
    for late in (1, 0):
        init_told(args, world)
        if os.environ["RANK"] == str(late):
            stays_away()
        else:
            dist.all_reduce(torch.ones(3))
        dist.destroy_process_group()


@again_if_a_rank_did_not_answer
def test_a_group_that_is_made_again_under_its_name_has_verdicts_of_its_own():
    with Ranks(2, init=False) as ranks:
        ranks.start(is_made_twice, ranks.store_args(), 2)
        for late in (1, 0):
            for rank in range(2):
                ranks.wait_report(rank)
            all_say(ranks, f"rank {late} has not arrived at all_reduce #1")
            for rank in range(2):
                ranks.tell(rank, "go on")
        check(ranks.wait())


@on_own_ranks(1, init=False)
def test_a_fake_group_has_a_ring_and_asks_no_store(world, port, prefix):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torchcomms_pg.watch(timeout=datetime.timedelta(seconds=0.1))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    work = dist.all_reduce(torch.ones(3), async_op=True)
    dist.barrier()
    assert [entry["state"] for entry in process_trace()["entries"]] == ["completed"] * 2
    del work
    assert not {"tcpg_bell", "tcpg_hosts"} & set(library_threads())


@on_own_ranks(2, init=False)
def test_destroyed_groups_are_forgotten_and_made_again(world, port, prefix):
    for life in range(3):
        store, second = join((port, f"{prefix}/{life}"), world, limit=60)
        third = dist.new_group()
        dist.all_reduce(torch.ones(2), group=third)
        dist.destroy_process_group(third)
        assert "0" in torchcomms_pg.diagnosis.watching._watches
        dist.destroy_process_group()
        assert not torchcomms_pg.diagnosis.watching._watches
        del store, second, third
    assert wait_for(lambda: not library_threads(), 5), library_threads()


def gives_a_name_to_others(args, world):
    """Ranks 1 and 2 make the same group of other members."""
    join(args, world)
    rank = int(os.environ["RANK"])
    made = dist.new_group([0, 2] if rank == 2 else [1, 2])
    receive()
    return made != dist.GroupMember.NON_GROUP_MEMBER


def test_ranks_that_give_one_name_to_other_members_are_told_when_they_make_the_group():
    with Ranks(3, init=False) as ranks:
        ranks.start(gives_a_name_to_others, ranks.store_args(), 3)
        warning = (
            r"(?m)^\[rank (\d)\] torchcomms_pg: group '2' has other members on rank \1 "
            r"\(ranks (.*?)\) than on rank (\d) \(ranks (.*?)\)\. .* Call new_group on all ranks"
        )
        found = lambda: re.findall(warning, ranks.output(1) + ranks.output(2))  # noqa: E731
        assert wait_for(found, SOON), ranks.output(1) + ranks.output(2)
        lists = {"1": "1-2", "2": "0, 2"}
        for rank in range(3):
            ranks.tell(rank, "go on")
        outcomes = ranks.wait()
        ((rank, own, first, theirs),) = found()  # once, also if Gloo serves two types of devices
        assert {rank, first} == {"1", "2"}
        assert (lists[rank], lists[first]) == (own, theirs)
        check(outcomes)
        assert [outcome.value for outcome in outcomes] == [False, True, True]
        assert "has other members" not in ranks.output(0)


def issues_in_two_threads(args, world):
    """A thread's call raises on rank 0, and the thread's next call follows another thread's."""
    join(args, world, limit=60)
    if int(os.environ["RANK"]) == 0:
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            with pytest.raises(RuntimeError):
                thread.submit(dist.group.WORLD.allreduce, [torch.ones(3), torch.ones(4)]).result()
            dist.all_reduce(torch.ones(1))
            thread.submit(dist.all_reduce, torch.ones(1)).result()
    else:
        dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(1))
    return [
        entry["collective_seq_id"]
        for entry in process_trace()["entries"]
        if entry["process_group"][0] == "0"
        and entry["input_sizes"] == [[1]]
        and entry["input_dtypes"] == ["Float"]
    ]


def test_operations_of_two_threads_have_different_numbers_after_a_call_that_raised():
    with Ranks(2, init=False) as ranks:
        ranks.start(issues_in_two_threads, ranks.store_args(), 2)
        outcomes = ranks.wait()
        check(outcomes)
        first, second = (outcome.value for outcome in outcomes)
        assert second == [2, 3]
        assert len(set(first)) == len(first) == 2, first


@on_own_ranks(2, init=False)
def test_a_fork_inherits_no_watch(world, port, prefix):
    store, second = join((port, prefix), world, limit=0.3)
    import torch.testing._internal.distributed.fake_pg

    fake = dist.new_group(backend="fake")  # whose operations end in a child, too
    dist.all_reduce(torch.ones(1), group=fake)
    assert len(torchcomms_pg.diagnosis.watching._watches) == 3 and library_threads()
    recorder = torchcomms_pg.hooks.process_recorder()
    recorded = len(recorder)
    child = os.fork()
    if child == 0:
        code = 99
        try:
            dist.all_reduce(torch.ones(1), group=fake)
            code = len(library_threads()) + 10 * (torchcomms_pg._C.process_recorder() is not None)
            code += 20 * (len(recorder) - recorded)
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    dist.all_reduce(torch.ones(1))
    assert len(recorder) > recorded


@on_own_ranks(2, init=False)
def test_groups_that_torchcomms_serves_are_not_watched_twice(world, port, prefix):
    torchcomms_pg.watch()
    store = connect_store(port, prefix)
    rank = int(os.environ["RANK"])
    dist.init_process_group("torchcomms", store=store, rank=rank, world_size=world)
    gloo = dist.new_group(backend="gloo")
    assert list(torchcomms_pg.diagnosis.watching._watches) == [gloo.group_name]
    dist.all_reduce(torch.ones(1))
    dist.all_reduce(torch.ones(1), group=gloo)
    assert len(torchcomms_pg.hooks.process_recorder()) == 2


def models():
    """What trains in each way, as the tests over Gloo have it, with what it is called with."""
    from frameworks import test_ddp, test_dtensor, test_fsdp, test_pipeline

    views = {"static_graph": False, "bucket_views": True}
    yield test_ddp.test_small_buckets_static_graph_and_bucket_views.over_one, views
    yield test_fsdp.test_fsdp2.over_one, {"reshard": True}
    plan = next(iter(test_dtensor.PLANS))
    yield test_dtensor.test_tensor_and_sequence_parallel.over_one, {"plan": plan}
    schedule = {"kind": test_pipeline.Schedule1F1B}
    yield test_pipeline.test_schedules_of_one_stage_a_rank.over_one, schedule


@pytest.mark.timeout(120)
@on_own_ranks(2, init=False, timeout=100)
def test_models_train_to_the_bit_of_unwatched_ones(world, port, prefix):
    results = []
    for watched in (False, True):
        if watched:
            torchcomms_pg.watch(timeout=datetime.timedelta(seconds=60))
        results.append(
            [
                parity.run_over("gloo", (port, f"{prefix}/{watched}/{i}"), world, body, given, {})
                for i, (body, given) in enumerate(models())
            ]
        )
    assert len(torchcomms_pg.hooks.process_recorder()) > 50
    parity.assert_equal(results[1], results[0])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_random_operations_and_groups_give_no_verdict_and_leave_nothing():
    """WATCH_SOAK_SECONDS of it, 6 unless given."""
    seconds = float(os.environ.get("WATCH_SOAK_SECONDS", "6"))
    with Ranks(3, init=False) as ranks:
        ranks.start(works_at_random, ranks.store_args(), 3, seconds)
        outcomes = ranks.wait(seconds + 60)
        check(outcomes)
        for rank, outcome in enumerate(outcomes):
            operations, grown, left = outcome.value
            assert operations > 100
            assert not ranks.verdicts(rank), ranks.output(rank)
            assert grown < 30 and not left, (grown, left)


def resident():
    """MiB of memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def works_at_random(args, world, seconds):
    """(number of operations, MiB grown after the first half, threads left)."""
    store, _ = join(args, world, limit=10)
    rank, draw = int(os.environ["RANK"]), random.Random(5)
    begun, operations, half = time.monotonic(), 0, None
    groups, pending = [None], []
    goes_on = torch.ones(1)
    while True:
        goes_on.fill_(float(time.monotonic() - begun < seconds))
        dist.broadcast(goes_on, 0)
        if not goes_on.item():
            break
        if half is None and time.monotonic() - begun > seconds / 2:
            half = resident()
        for _ in range(20):
            group, size = draw.choice(groups), draw.choice((1, 100, 5000))
            tensor = torch.ones(size)
            kind = draw.choice(("all_reduce", "async", "message", "batch", "gather", "barrier"))
            peers = (rank + 1) % world, (rank - 1) % world
            if kind == "all_reduce":
                dist.all_reduce(tensor, group=group)
                assert (tensor == world).all()
            elif kind == "async":
                pending.append(dist.all_reduce(tensor, group=group, async_op=True))
            elif kind == "message" and rank < 2:
                (dist.send if rank == 0 else dist.recv)(tensor, 1 - rank)
            elif kind == "batch":
                sent, got = dist.isend(tensor, peers[0]), dist.irecv(tensor.clone(), peers[1])
                sent.wait()
                got.wait()
            elif kind == "gather":
                dist.all_gather([torch.empty(size) for _ in range(world)], tensor, group=group)
            elif kind == "barrier":
                dist.barrier(group)
            operations += 1
        while pending:
            pending.pop().wait()
        if len(groups) < 4 and draw.random() < 0.3:
            groups.append(dist.new_group())
        elif len(groups) > 1 and draw.random() < 0.3:
            dist.destroy_process_group(groups.pop())
    grown = resident() - half
    dist.destroy_process_group()
    del groups
    wait_for(lambda: not library_threads(), 10)
    return operations, grown, library_threads()


PROGRAM = """
import os, sys, time
import torch
import torch.distributed as dist

def late():
    time.sleep(6)

def main():
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        late()
    tensor = torch.ones(5)
    dist.all_reduce(tensor)
    assert (tensor == 2).all()
    dist.destroy_process_group()
    assert "torchcomms_pg" in sys.modules

main()
"""


@pytest.mark.timeout(120)
def test_an_unchanged_program_is_watched(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = run_program(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
            *("-m", "torchcomms_pg.run", "--watch", program),
        ],
        cwd=tmp_path,
        env={
            **os.environ,
            "TORCHCOMMS_PG_WATCH_TIMEOUT": "1.5",
            "TORCH_FR_DUMP_TEMP_FILE": "dump_",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout
    for rank in range(2):
        assert f"[rank {rank}] torchcomms_pg: verdict on group '0', 2 ranks: rank 1 has not" in (
            done.stdout
        )
        assert re.search(rf"\[rank {rank}\] torchcomms_pg: the verdict .* is over", done.stdout)
        assert (tmp_path / f"dump_{rank}").exists()
    assert re.search(r"program.py:7 in late", done.stdout), done.stdout


def test_what_is_wrong_with_the_arguments_is_said():
    with pytest.raises(ValueError, match="timeout is 0:00:00, wanted 1 ms or more"):
        torchcomms_pg.watch(timeout=datetime.timedelta(0))
    with pytest.raises(ValueError, match="not in the group"):
        torchcomms_pg.watch(dist.GroupMember.NON_GROUP_MEMBER)


def test_an_older_torch_is_said_to_lack_the_hooks(monkeypatch):
    monkeypatch.setattr(torchcomms_pg._C, "groups_have_hooks", False)
    with pytest.raises(RuntimeError, match="needs torch 2.14 or later"):
        torchcomms_pg.watch()
