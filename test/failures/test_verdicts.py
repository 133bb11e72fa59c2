"""When a deadline passes, all ranks find out together who holds up the operation, and say so."""

import contextlib
import datetime
import importlib.util
import os
import pickle
import re
import signal
import time

import pytest
import torch
import torch.distributed as dist

import torchcomms_pg
from failures.faults import serve
from failures.joined import join
from failures.test_watch import NotAnsweredError, again_if_a_rank_did_not_answer
from harness.ranks import Ranks, check, connect_store, meet, time_limit, wait_for
from harness.stuck import keep_the_gil
from torchcomms_pg.testing.rank import receive, report

pytestmark = pytest.mark.beyond_gloo
LIMIT = 1.0
TOGETHER = 3.0  # where several ranks call: one that comes later than that is missing, too
SLACK = 10.0
BACKENDS = ["dist", "shm", "gloo"]
KEPT = []  # for as long as the process lives


class Group:
    """Either front end over either library, for a test that is about neither."""

    def __init__(self, kind, args, world, limit=LIMIT):
        self.kind = kind
        self.comm, self.store = join(kind, args, world, limit)

    def all_reduce(self, tensor):
        if self.kind == "dist":
            dist.all_reduce(tensor)
        else:
            self.comm.all_reduce(tensor, torchcomms_pg.ReduceOp.SUM, async_op=False)

    def all_reduce_async(self, tensor):
        if self.kind == "dist":
            return dist.all_reduce(tensor, async_op=True)
        return self.comm.all_reduce(tensor, torchcomms_pg.ReduceOp.SUM, async_op=True)

    def broadcast(self, tensor):
        if self.kind == "dist":
            dist.broadcast(tensor, 0)
        else:
            self.comm.broadcast(tensor, 0, async_op=False)

    def receive(self, tensor, source):
        if self.kind == "dist":
            dist.recv(tensor, source)
        else:
            self.comm.recv(tensor, source, async_op=False)


def all_answered(body, kind, world, *args):
    """Ranks, still there, and what `body` has returned on them, with a verdict of all of them.

    Again where a rank was held up for longer than the others wait for its answer.
    """
    for _ in range(4):
        with contextlib.ExitStack() as stack:
            ranks = stack.enter_context(Ranks(world, init=False))
            values = ranks.run(body, kind, ranks.store_args(), world, *args)
            if not re.search("did not answer|has not answered|its process is stopped", str(values)):
                stack.pop_all()
                return ranks, values
    raise AssertionError(f"in none of four runs did all ranks answer: {values}")


def one_stays_away(kind, args, world, absent):
    group = Group(kind, args, world, TOGETHER)
    if int(os.environ["RANK"]) == absent:
        KEPT.append(group)  # it prints the verdict, maybe after this has returned
        return saves_a_checkpoint(group, world)
    meet(group.store, "away or about to call", world)
    try:
        with time_limit(TOGETHER * 0.9, TOGETHER + SLACK, "the verdict"):
            with pytest.raises(torchcomms_pg.CommError) as caught:
                group.all_reduce(torch.ones(1024))
        return caught.value.ranks, caught.value.verdict, str(caught.value)
    finally:
        meet(group.store, "done", world - 1)


def saves_a_checkpoint(group, world):
    meet(group.store, "away or about to call", world)
    group.store.wait(["all done"])


@pytest.mark.rotation
@pytest.mark.parametrize("kind", BACKENDS)
def test_every_rank_raises_one_verdict_with_the_line_of_the_missing_rank_and_one_prints_it(kind):
    ranks, values = all_answered(one_stays_away, kind, 3, 1)
    with ranks:
        (named, verdict, text), other = values[0], values[2]
        assert named == [1] and other[0] == [1]
        assert other[1] == verdict and verdict in text and verdict in other[2]
        assert "rank 1 has not arrived at all_reduce #2 (1024 x Float, SUM)" in verdict
        assert "3 ranks" in verdict
        missing, waiting = verdict.split("\n  ranks 0, 2: ")
        assert "rank 1: last completed all_reduce #1 (7 x Float, SUM)" in missing
        assert re.search(r"MainThread: .*test_verdicts.py:\d+ in saves_a_checkpoint", missing)
        assert waiting.startswith("in all_reduce #2")
        assert re.search(r"test_verdicts.py:\d+ in all_reduce", waiting)
        for rank in range(3):
            said = lambda: "".join(ranks.verdicts(rank))  # noqa: E731
            assert wait_for(lambda: verdict in said()), ranks.output(rank)
        assert "".join(ranks.output(rank) for rank in range(3)).count(" prints the rest)") == 2


def computes_in_native_code(pipe):
    keep_the_gil(pipe)


@pytest.fixture
def pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    return str(tmp_path / "pipe")


def is_stopped(args, world):
    group = Group("dist", args, world)
    report("ready")
    receive()  # never, on the rank that is stopped
    with time_limit(LIMIT * 0.9, LIMIT + SLACK, "the verdict"):
        with pytest.raises(torchcomms_pg.CommError) as caught:
            group.all_reduce(torch.ones(1024))
    return caught.value.ranks, caught.value.verdict


def status(pid):
    with open(f"/proc/{pid}/status") as file:
        return file.read()


@pytest.mark.stops_ranks
@again_if_a_rank_did_not_answer
def test_the_verdict_names_a_stopped_process():
    """Over every library in the fault matrix."""
    with Ranks(2, init=False) as ranks:
        ranks.start(is_stopped, ranks.store_args(), 2)
        ranks.wait_report(1)
        ranks.kill(1, signal.SIGSTOP)
        assert wait_for(lambda: " (stopped)" in status(ranks.pids[1]))
        ranks.tell(0, "go")
        outcomes = ranks.wait(ranks=[0])
        check(outcomes)
        named, verdict = outcomes[0].value
    if "it cannot be known" in verdict:  # the store, of this process, had no core for 4 s
        raise NotAnsweredError(verdict)
    assert named == [1]
    assert f"rank 1: its process is stopped (pid {ranks.pids[1]})" in verdict


def loses_the_store(kind, args, world):
    group = Group(kind, args, world)
    report("ready")
    receive()
    if int(os.environ["RANK"]) == 1:
        return None  # the other has its verdict
    with time_limit(LIMIT * 0.9, LIMIT + SLACK, "the verdict"):
        with pytest.raises(torchcomms_pg.CommError) as caught:
            group.all_reduce(torch.ones(1024))
    return caught.value.ranks, caught.value.verdict


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(signal.SIGKILL, id="killed"),
        pytest.param(signal.SIGSTOP, id="stopped", marks=pytest.mark.stops_ranks),
    ],
)
@pytest.mark.rotation
@pytest.mark.parametrize("kind", BACKENDS)
def test_a_store_that_is_gone_is_not_waited_for(kind, how):
    with Ranks(1, init=False) as server, Ranks(2, init=False) as ranks:
        server.start(serve)
        ranks.start(loses_the_store, kind, (server.wait_report(0), "lost"), 2)
        ranks.wait_report(0)
        ranks.wait_report(1)
        server.kill(0, how)
        ranks.tell(0, "go")
        (outcome,) = ranks.wait(ranks=[0])
        check([outcome])
        ranks.tell(1, "go")
        check(ranks.wait(ranks=[1]))
    named, verdict = outcome.value
    # Shared memory shows who has not come; over Gloo a connection that is cut looks the same.
    assert named == ([] if kind == "gloo" else [1]), verdict
    assert "it cannot be known what the other ranks do: the store" in verdict


def calls_something_else(kind, args, world):
    group = Group(kind, args, world, TOGETHER)
    rank = int(os.environ["RANK"])
    meet(group.store, "about to call", world)
    with time_limit(0, TOGETHER + SLACK, "the verdict"):
        with pytest.raises(torchcomms_pg.CommError) as caught:
            group.broadcast(torch.ones(5)) if rank == 1 else group.all_reduce(torch.ones(1024))
    return caught.value.verdict


@pytest.mark.rotation
@pytest.mark.parametrize("kind", BACKENDS)
def test_ranks_that_call_different_operations_are_shown_with_both_lines(kind):
    with Ranks(2, init=False) as ranks:
        first, second = ranks.run(calls_something_else, kind, ranks.store_args(), 2)
    assert first == second
    assert "call different operations" in first
    assert re.search(r"rank 0: .*all_reduce #2 \(1024 x Float, SUM\)", first), first
    assert re.search(r"rank 1: .*broadcast #2 \(5 x Float, root 0\)", first), first
    assert re.search(r"in broadcast", first) and re.search(r"in all_reduce", first), first


def uses_two_groups(args, world, waits, judge):
    """Each rank calls one of two groups; that of rank `judge` has a deadline. Its verdict."""
    group = Group("dist", args, world, limit=600)
    rank = int(os.environ["RANK"])
    comms = [torchcomms_pg.get_comm().split(list(range(world)), name) for name in ("one", "two")]
    reduce = lambda comm, **how: comm.all_reduce(  # noqa: E731
        torch.ones(5), torchcomms_pg.ReduceOp.SUM, **how
    )
    for comm in comms:
        reduce(comm, async_op=False)
    limit = 2 * TOGETHER  # the other rank may be held up before its call
    comms[judge].set_timeout(datetime.timedelta(seconds=limit))
    meet(group.store, "about to call", world)
    if rank != judge:
        reduce(comms[rank], async_op=waits).wait()
        return None
    with time_limit(0, limit + SLACK, "the verdict"):
        with pytest.raises(torchcomms_pg.CommError) as caught:
            reduce(comms[rank], async_op=waits).wait()
    reduce(comms[1 - rank], async_op=False)  # lets the other rank go
    return caught.value.verdict


@pytest.mark.rotation
@pytest.mark.parametrize("waits, judge", [(False, 0), (True, 1)], ids=["synchronous", "wait()"])
def test_two_groups_used_in_opposite_order_are_shown_as_a_deadlock(waits, judge):
    with Ranks(2, init=False) as ranks:
        verdicts = ranks.run(uses_two_groups, ranks.store_args(), 2, waits, judge)
    where = [rf" of group '\S*{name}'" for name in ("one", "two")]
    where[judge] = ""
    deadlock = (
        rf"deadlock: rank 0 waits in all_reduce #2 \(5 x Float, SUM\){where[0]} for rank 1, "
        rf"which waits in all_reduce #2 \(5 x Float, SUM\){where[1]} for rank 0; all ranks have to"
    )
    assert re.search(deadlock, verdicts[judge]), verdicts


def computes_while_another_waits(kind, args, world):
    """Rank 0 computes, with an operation in flight; rank 1 waits for it in another group."""
    group = Group(kind, args, world, limit=600)
    comm = torchcomms_pg.get_comm() if kind == "dist" else group.comm
    one, two = (comm.split(list(range(world)), name) for name in ("one", "two"))
    two.barrier(async_op=False)
    if int(os.environ["RANK"]) == 1:
        group.store.set("about to wait", "")
        two.barrier(async_op=False)
        return None
    one.set_timeout(datetime.timedelta(seconds=2 * TOGETHER))
    group.store.wait(["about to wait"])
    work = one.all_reduce(torch.ones(4), torchcomms_pg.ReduceOp.SUM, async_op=True)
    assert wait_for(work.is_completed, 2 * TOGETHER + SLACK)
    with pytest.raises(torchcomms_pg.CommError) as caught:
        work.wait()
    two.barrier(async_op=False)
    return caught.value.ranks, caught.value.verdict


@pytest.mark.rotation
@pytest.mark.parametrize("kind", BACKENDS)
def test_a_rank_that_computes_does_not_wait_in_the_verdict(kind):
    ranks, ((named, verdict), _) = all_answered(computes_while_another_waits, kind, 2)
    ranks.close()
    assert named == [0] and "deadlock" not in verdict, verdict
    assert "rank 0 has not arrived at barrier #2 of group" in verdict
    assert re.search(r"test_verdicts.py:\d+ in computes_while_another_waits", verdict)


def waits_for_the_next(kind, args, world):
    group = Group(kind, args, world, 2 * TOGETHER)
    rank = int(os.environ["RANK"])
    meet(group.store, "about to call", world)
    with time_limit(0, 2 * TOGETHER + SLACK, "the verdict"):
        with pytest.raises(torchcomms_pg.CommError) as caught:
            group.receive(torch.ones(3), (rank + 1) % world)
    return caught.value.ranks, caught.value.verdict, str(caught.value)


@pytest.mark.rotation
@pytest.mark.parametrize("kind", BACKENDS)
def test_ranks_that_wait_for_each_others_messages_are_a_deadlock_and_none_is_blamed(kind):
    ranks, values = all_answered(waits_for_the_next, kind, 3)
    ranks.close()
    for named, verdict, text in values:
        assert named == []
        assert "ranks 0, 1, 2 wait for each other" in text
        assert re.search(
            r"deadlock: rank 0 waits in recv #1 from rank 1 \(3 x Float\) for rank 1, which waits "
            r"in recv #1 from rank 2 \(3 x Float\) for rank 2, which waits in recv #1 from rank 0",
            verdict,
        ), verdict


def receives_what_is_reduced(kind, args, world):
    group = Group(kind, args, world, 2 * TOGETHER)
    meet(group.store, "about to call", world)
    with time_limit(0, 2 * TOGETHER + SLACK, "the verdict"):
        with pytest.raises(torchcomms_pg.CommError) as caught:
            if int(os.environ["RANK"]) == 1:
                group.receive(torch.ones(4), 0)
            else:
                group.all_reduce(torch.ones(4))
    return caught.value.ranks, caught.value.verdict


@pytest.mark.rotation
@pytest.mark.parametrize("kind", BACKENDS)
def test_no_verdict_calls_a_rank_missing_where_it_waits(kind):
    ranks, values = all_answered(receives_what_is_reduced, kind, 2)
    ranks.close()
    for named, verdict in values:
        assert named == [], verdict
        assert "deadlock: rank 0 waits in all_reduce #2 (4 x Float, SUM) for rank 1" in verdict


def one_is_two_behind(kind, args, world):
    """Rank 2 stays away from a gather, in which rank 0 waits; rank 1 is in what follows."""
    rank, group = int(os.environ["RANK"]), Group(kind, args, world, 2 * TOGETHER)
    if rank == 2:
        return saves_a_checkpoint(group, world)
    meet(group.store, "away or about to call", world)
    outputs = [torch.empty(4) for _ in range(world)] if rank == 0 else None
    try:
        with pytest.raises(torchcomms_pg.CommError) as caught:
            if kind == "dist":
                dist.gather(torch.ones(4), outputs, dst=0)
            else:
                group.comm.gather(outputs or [], torch.ones(4), 0, async_op=False)
            group.all_reduce(torch.ones(4))
        return caught.value.ranks, caught.value.verdict
    finally:
        meet(group.store, "done", world - 1)


@pytest.mark.rotation
@pytest.mark.parametrize("kind", BACKENDS)
def test_a_rank_one_operation_behind_is_not_blamed_for_the_rank_it_waits_for(kind):
    ranks, (first, second, _) = all_answered(one_is_two_behind, kind, 3)
    ranks.close()
    for named, verdict in (first, second):
        assert named == [2], verdict
        assert "rank 2 has not arrived at " in verdict


def waits_for_a_message(kind, args, world):
    group = Group(kind, args, world)
    if int(os.environ["RANK"]) == 1:
        return saves_a_checkpoint(group, world)
    meet(group.store, "away or about to call", world)
    with time_limit(LIMIT * 0.9, LIMIT + SLACK, "the verdict"):
        with pytest.raises(torchcomms_pg.CommError) as caught:
            group.receive(torch.ones(3), 1)
    meet(group.store, "done", world - 1)
    return caught.value.ranks, caught.value.verdict


@pytest.mark.rotation
@pytest.mark.parametrize("kind", BACKENDS)
def test_the_verdict_shows_the_sender_of_a_missing_message(kind):
    ranks, ((named, verdict), _) = all_answered(waits_for_a_message, kind, 2)
    ranks.close()
    assert named == [1]
    assert "rank 1 has not arrived at recv #1 from rank 1 (3 x Float), issued" in verdict
    assert re.search(r"test_verdicts.py:\d+ in saves_a_checkpoint", verdict)


def gives_up_soon(kind, args, world):
    """The deadline is the group's, far away; the wait is short."""
    group = Group(kind, args, world, limit=600)
    if int(os.environ["RANK"]) == 1:
        return saves_a_checkpoint(group, world)
    meet(group.store, "away or about to call", world)
    began = time.monotonic()
    work = group.all_reduce_async(torch.ones(1024))
    with pytest.raises(torchcomms_pg.CommError) as caught:
        work.wait(datetime.timedelta(milliseconds=1))
    took = time.monotonic() - began
    meet(group.store, "done", world - 1)
    return caught.value.verdict, took


@pytest.mark.rotation
@pytest.mark.parametrize("kind", BACKENDS)
def test_the_verdict_says_how_long_ago_the_operation_was_issued(kind):
    with Ranks(2, init=False) as ranks:
        verdict, took = ranks.run(gives_up_soon, kind, ranks.store_args(), 2)[0]
    told = re.search(r", issued ([\d.]+) (s|ms) ago", verdict)
    assert told, verdict
    assert float(told[1]) * (1 if told[2] == "s" else 0.001) <= took


def two_verdicts(args, world):
    """One after another, in groups of their own: the second knows nothing of the first."""
    store = connect_store(*args)
    joining, limit = datetime.timedelta(seconds=30), datetime.timedelta(seconds=LIMIT)
    verdicts = []
    for turn in range(2):
        prefixed = dist.PrefixStore("same", store)
        rank = int(os.environ["RANK"])
        options = {"store": prefixed, "rank": rank, "world_size": world}
        dist.init_process_group("torchcomms", timeout=joining, **options)
        dist.barrier()
        dist.group.WORLD.set_timeout(limit)
        if rank == turn:
            store.wait([f"done{turn}"])
        else:
            with pytest.raises(torchcomms_pg.CommError) as caught:
                dist.all_reduce(torch.ones(10 + turn))
            verdicts.append(caught.value.verdict)
            store.set(f"done{turn}", "")
        dist.distributed_c10d._abort_process_group()
    return verdicts


def test_a_later_group_of_the_same_name_gets_a_verdict_of_its_own():
    with Ranks(2, init=False) as ranks:
        second, first = ranks.run(two_verdicts, ranks.store_args(), 2)
    assert "rank 0 has not arrived at all_reduce #2 (10 x" in first[0]
    assert "rank 1 has not arrived at all_reduce #2 (11 x" in second[0]


def shrinks_twice(kind, args, world):
    """Rank 2 is left out both times, and another of the two that stay is late in the new group."""
    rank, store = int(os.environ["RANK"]), connect_store(*args)
    joining, limit = datetime.timedelta(seconds=30), datetime.timedelta(seconds=TOGETHER)
    options = {"store": store, "rank": rank, "world_size": world}
    dist.init_process_group("torchcomms", timeout=joining, **options)
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    verdicts = []
    for turn in range(2 if rank < 2 else 0):
        smaller = backend.shrink([2])
        smaller.barrier().wait()
        smaller.set_timeout(limit)
        meet(store, f"shrunk {turn}", 2)
        if rank != turn:
            with pytest.raises(torchcomms_pg.CommError) as caught:
                smaller.allreduce([torch.ones(10 + turn)]).wait()
            verdicts.append(caught.value.verdict)
        meet(store, f"judged {turn}", 2)
        KEPT.append(smaller)
    meet(store, "done", world)
    return verdicts


@pytest.mark.parametrize("home", ["/home/me/pytorch", "/opt/python/lib/python3/dist-packages"])
def test_the_verdict_has_the_programs_line_wherever_torch_lies(monkeypatch, home):
    monkeypatch.setattr(torch, "__file__", f"{home}/torch/__init__.py")
    stacks = importlib.util.module_from_spec(torchcomms_pg.diagnosis.python_stacks.__spec__)
    stacks.__spec__.loader.exec_module(stacks)
    library = [(f"{home}/torch/distributed/c10d.py", line, "wait") for line in range(5)]
    told = stacks._tell([*library, ("/home/me/train.py", 7, "step")])
    assert told == "torch/distributed/c10d.py:0 in wait <- /home/me/train.py:7 in step"


def test_a_group_shrunk_again_to_the_same_ranks_gets_a_verdict_of_its_own():
    ranks, ((second,), (first,), _) = all_answered(shrinks_twice, "dist", 3)
    ranks.close()
    assert "rank 0 has not arrived at all_reduce #2 (10 x" in first
    assert "rank 1 has not arrived at all_reduce #2 (11 x" in second


def test_the_verdict_survives_pickling():
    error = torchcomms_pg.CommError("short", op="all_reduce", seq=3, ranks=[1], verdict="long")
    again = pickle.loads(pickle.dumps(error))
    assert (again.verdict, again.ranks, str(again)) == ("long", [1], "short")
    assert torchcomms_pg.CommError("short").verdict == "short"


def idle(kind, args, world):
    """Returns the CPU time that the process spends in two seconds without operations."""
    group = Group(kind, args, world)
    meet(group.store, "ready", world)
    before = time.process_time()
    time.sleep(2)  # the time that is measured
    spent = time.process_time() - before
    meet(group.store, "measured", world)
    return spent


@pytest.mark.rotation
@pytest.mark.parametrize("kind", BACKENDS)
def test_being_ready_for_questions_costs_next_to_nothing(kind):
    with Ranks(2, init=False) as ranks:
        for spent in ranks.run(idle, kind, ranks.store_args(), 2):
            assert spent < 0.1


def keeps_the_gil(args, world, pipe):
    group = Group("shm", args, world)
    meet(group.store, "ready", world)
    if int(os.environ["RANK"]) == 1:
        computes_in_native_code(pipe)
    meet(group.store, "done", world)


def test_the_heartbeat_says_that_the_gil_is_held(pipe):
    with Ranks(2, init=False, env={"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "3"}) as ranks:
        ranks.start(keeps_the_gil, ranks.store_args(), 2, pipe)
        with open(pipe, "rb") as holder:
            wait_for(lambda: "in computes_in_native_code" in ranks.output(1), 20)
            holder.read()
        check(ranks.wait())
        output = ranks.output(1)
        assert "for 3 s a thread holds the GIL" in output
        assert "in computes_in_native_code" in output
        assert "GIL" not in ranks.output(0)
