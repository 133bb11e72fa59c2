"""Hooks: what they are told, in which order, and what a hook may do, on both front ends."""

import contextlib
import datetime
import gc
import os
import re
import sys
import threading
import time
import weakref

import pytest
import torch
import torch.distributed as dist

from harness.comms import each_backend, make, torchcomms
from harness.ranks import time_limit, wait_for
from harness.values import assert_same, data
from torchcomms_pg import _C

pytestmark = pytest.mark.beyond_gloo
WAIT = 10.0


class Log:
    """Records what every kind of hook is called with."""

    def __init__(self, comm):
        self.pre, self.post, self.end = [], [], []
        self.handles = [
            comm.register_pre_hook(self.pre.append),
            comm.register_post_hook(self.post.append),
            comm.register_end_hook(self.end.append),
        ]

    def remove(self):
        [handle.remove() for handle in self.handles]

    def take(self, kind, least=0):
        """Those of an asynchronous operation come from another thread, in their time."""
        entries = getattr(self, kind)
        assert wait_for(lambda: len(entries) >= least, WAIT), f"{len(entries)} of {kind}"
        taken, entries[:] = list(entries), []
        return taken


@each_backend
@pytest.mark.ranks((2, 3))
def test_hooks_get_every_operation_with_its_arguments(world, backend):
    comm, rank, op = make("every", backend), dist.get_rank(), torchcomms().ReduceOp
    log, last = Log(comm), world - 1
    t, many = torch.ones(2), torch.ones(world * 2)
    lists = lambda: [torch.ones(2) for _ in range(world)]  # noqa: E731
    uneven = lambda: [torch.ones(r + 1) for r in range(world)]  # noqa: E731
    calls = {
        "broadcast": (lambda a: comm.broadcast(t, last, a), dict(root=last, tensor=t)),
        "all_reduce": (lambda a: comm.all_reduce(t, op.MAX, a), dict(reduce_op="MAX", tensor=t)),
        "reduce": (lambda a: comm.reduce(t, last, op.SUM, a), dict(reduce_op="SUM", root=last)),
        "all_gather": (lambda a: comm.all_gather(lists(), t, a), dict(input=t)),
        "all_gather_v": (
            lambda a: comm.all_gather_v(uneven(), torch.ones(rank + 1), a), dict(root=None)),
        "all_gather_single": (
            lambda a: comm.all_gather_single(many, t, a), dict(input=t, output=many)),
        "reduce_scatter": (lambda a: comm.reduce_scatter(t, lists(), op.SUM, a), dict(output=t)),
        "reduce_scatter_v": (
            lambda a: comm.reduce_scatter_v(torch.ones(rank + 1), uneven(), op.SUM, a), {}),
        "reduce_scatter_single": (
            lambda a: comm.reduce_scatter_single(t, many, op.SUM, a), dict(input=many)),
        "all_to_all": (lambda a: comm.all_to_all(lists(), lists(), a), {}),
        "all_to_all_single": (
            lambda a: comm.all_to_all_single(many, many.clone(), a), dict(output=many)),
        "all_to_all_v_single": (
            lambda a: comm.all_to_all_v_single(many, many.clone(), [2] * world, [2] * world, a),
            dict(input_split_sizes=[2] * world, output_split_sizes=[2] * world)),
        "barrier": (lambda a: comm.barrier(a), dict(inputs=[], outputs=[])),
        "scatter": (lambda a: comm.scatter(t, lists() if rank == 0 else [], 0, a), dict(root=0)),
        "gather": (lambda a: comm.gather(lists() if rank == 0 else [], t, 0, a), dict(input=t)),
        "gather_single": (
            lambda a: comm.gather_single(many if rank == 0 else None, t, 0, a), dict(root=0)),
    }  # fmt: skip
    ids = []
    for name, (call, wanted) in calls.items():
        for async_op in (False, True):
            work = call(async_op)
            work.wait()
            (pre,), (post,) = log.take("pre"), log.take("post", 1)
            assert pre.name == getattr(torchcomms().OpName, name), name
            assert pre.async_op == async_op and pre.peer is None, name
            assert post.name == pre.name and post.op_id == pre.op_id and post.error is None, name
            assert post.work.is_completed(), name
            for field, value in wanted.items():
                got = getattr(pre, field)
                same = got is value if isinstance(value, torch.Tensor) else got == value
                assert same, f"{name}: {field} is {got}, expected {value}"
            ids.append(pre.op_id)
    assert ids == sorted(set(ids))
    if rank == 0:
        comm.send(t, 1, False)
        assert (log.pre[0].name.name, log.pre[0].peer, log.pre[0].root) == ("send", 1, None)
    elif rank == 1:
        comm.recv(t, 0, False)
        assert (log.pre[0].name.name, log.pre[0].peer) == ("recv", 0)
        assert log.pre[0].outputs[0] is t and log.pre[0].inputs == []
    log.take("pre")
    child = comm.split([rank], "alone")
    (pre,) = log.take("pre")
    assert (pre.name.name, pre.ranks, pre.new_name) == ("split", [rank], "alone")
    child.finalize()
    comm.finalize()
    (pre,) = log.take("pre")
    assert pre.name.name == "finalize" and log.post[-1].name.name == "finalize"
    assert [e.op_id for e in log.end][: len(ids)] and {e.op_id for e in log.end} >= set(ids)
    assert {e.status for e in log.end} == {"completed"}
    assert all(e.error is None and e.duration > 0 for e in log.end)


@each_backend
@pytest.mark.ranks(2)
def test_batches_are_one_operation_with_members(world, backend):
    comm, rank = make("batches", backend), dist.get_rank()
    log, other = Log(comm), 1 - dist.get_rank()
    for async_op in (False, True):
        batch, got = comm.batch_op_create(), torch.empty(4)
        batch.send(data(rank, 4), other)
        batch.recv(got, other)
        batch.issue(async_op).wait()
        (pre,), (post,) = log.take("pre"), log.take("post", 1)
        assert pre.name.name == post.name.name == "batch_op_issue" and pre.num_ops == 2
        assert post.work.is_completed()
        members = [(m.name.name, m.peer, m.op_id == pre.op_id) for m in pre.ops]
        assert members == [("send", other, True), ("recv", other, True)]
    with comm.group():
        comm.broadcast(got, 0, False)
        comm.all_reduce(got, torchcomms().ReduceOp.SUM, False)
        assert not log.pre
    (pre,) = log.take("pre")
    assert [m.name.name for m in pre.ops] == ["broadcast", "all_reduce"]
    comm.finalize()


@pytest.mark.ranks(2)
def test_hooks_run_in_order_and_removal_is_idempotent(world):
    comm, calls = make("order"), []
    handles = [comm.register_pre_hook(lambda args, i=i: calls.append(i)) for i in range(5)]
    posts = [comm.register_post_hook(lambda args, i=i: calls.append(10 + i)) for i in range(3)]
    comm.barrier(False)
    assert calls == [0, 1, 2, 3, 4, 10, 11, 12]
    handles[1].remove()
    handles[1].remove()
    posts[0].remove()
    calls.clear()
    comm.barrier(False)
    assert calls == [0, 2, 3, 4, 11, 12]
    comm.finalize()
    handles[0].remove()  # the communicator is gone
    del comm
    gc.collect()
    handles[2].remove()


@pytest.mark.ranks(2)
def test_a_hook_may_remove_itself_add_others_and_issue_operations(world):
    comm, calls, later = make("inside"), [], []

    def once(args):
        calls.append("once")
        handle.remove()
        later.append(comm.register_pre_hook(lambda args: calls.append("added")))
        comm.barrier(False)  # nested: told of as any other

    def every(args):
        calls.append(args.name.name)

    handle = comm.register_pre_hook(once)
    comm.register_pre_hook(every)
    comm.all_reduce(torch.ones(1), torchcomms().ReduceOp.SUM, False)
    assert calls == ["once", "barrier", "added", "all_reduce"]
    calls.clear()
    comm.barrier(False)
    assert calls == ["barrier", "added"]
    comm.finalize()


@pytest.mark.ranks(2)
def test_pre_hook_exception_cancels_with_nothing_enqueued(world):
    comm, op, posts, ends = make("cancel"), torchcomms().ReduceOp, [], []
    if dist.get_rank() == 0:

        def refuse(args):
            raise KeyError("refused")

        handle = comm.register_pre_hook(refuse)
        comm.register_post_hook(posts.append)
        comm.register_end_hook(ends.append)
        for async_op in (False, True):
            with pytest.raises(KeyError, match="refused"):
                comm.all_reduce(torch.ones(1), op.SUM, async_op)
        batch = comm.batch_op_create()
        batch.send(torch.ones(1), 1)
        with pytest.raises(KeyError, match="refused"):
            batch.issue(True)
        assert [type(post.error) for post in posts] == [KeyError] * 3
        assert all(post.work is None for post in posts) and not ends
        handle.remove()
    tensor = torch.ones(1)
    comm.all_reduce(tensor, op.SUM, False)
    assert_same(tensor, torch.full((1,), 2.0))
    comm.finalize()


@pytest.mark.ranks(2)
def test_post_hook_exception_reaches_the_caller_after_the_operation(world):
    comm, calls, tensor = make("post"), [], torch.ones(1)

    def fail(args):
        raise KeyError("post")

    handle = comm.register_post_hook(fail)
    comm.register_post_hook(lambda args: calls.append(args.name.name))
    with pytest.raises(KeyError, match="post"):
        comm.all_reduce(tensor, torchcomms().ReduceOp.SUM, False)
    assert calls == ["all_reduce"]
    assert_same(tensor, torch.full((1,), 2.0))
    handle.remove()
    comm.barrier(False)
    comm.finalize()


@each_backend
@pytest.mark.ranks(2)
def test_post_hooks_of_asynchronous_operations_run_when_these_have_completed(world, backend):
    comm, op, posts, late = make("late", backend), torchcomms().ReduceOp, [], []
    comm.register_post_hook(lambda args: posts.append((args, threading.current_thread().name)))
    removed = comm.register_post_hook(late.append)
    tensor = torch.ones(1)
    if dist.get_rank() == 1:
        dist.barrier()  # rank 0 has looked
    work = comm.all_reduce(tensor, op.SUM, True)
    if dist.get_rank() == 0:
        assert not posts and not work.is_completed()
        removed.remove()
        dist.barrier()
    work.wait()
    assert wait_for(lambda: posts, WAIT)
    ((args, thread),) = posts
    assert args.work.is_completed() and args.error is None and thread != "MainThread"
    assert args.work.result()[0] is tensor
    comm.finalize()
    assert [args.name.name for args, _ in posts] == ["all_reduce", "finalize"]
    # Rank 0 has removed it when the operation was under way.
    assert [args.name.name for args in late] == [args.name.name for args, _ in posts][
        : 1 + dist.get_rank()
    ]


@pytest.mark.ranks(2)
def test_what_a_post_hook_of_an_asynchronous_operation_raises_is_written_to_stderr(world):
    comm, calls, raised = make("unraisable"), [], []

    def fail(args):
        raise KeyError("post")

    handle = comm.register_post_hook(fail)
    comm.register_post_hook(lambda args: calls.append(args.name.name))
    before, sys.unraisablehook = sys.unraisablehook, lambda info: raised.append(info.exc_value)
    try:
        comm.barrier(True).wait()
        assert wait_for(lambda: calls == ["barrier"], WAIT)
    finally:
        sys.unraisablehook = before
    assert [type(error) for error in raised] == [KeyError]
    handle.remove()
    comm.finalize()


@each_backend
@pytest.mark.ranks(2)
def test_a_failure_calls_end_post_and_abort_hooks(world, backend):
    comm, posts, ends, ended, aborted = make("failure", backend), [], [], threading.Event(), []
    comm.barrier(False)
    dist.barrier()  # all have left that one
    comm.register_post_hook(posts.append)
    comm.register_end_hook(lambda args: (ends.append(args), ended.set()))
    comm.register_abort_hook(lambda: aborted.append("first"))
    comm.register_abort_hook(lambda: aborted.append("second"))
    error = torchcomms().CommError
    if dist.get_rank() == 0:
        with pytest.raises(error, match="timed out"):
            comm.barrier(False, timeout=datetime.timedelta(seconds=0.3))
        assert aborted == ["first", "second"]
        assert isinstance(posts[0].error, error) and posts[0].work is None
        assert ends[0].status == "failed" and isinstance(ends[0].error, error)
    dist.barrier()
    if dist.get_rank() == 1:
        with pytest.raises(error):
            comm.barrier(True).wait()
    comm.finalize()


@pytest.mark.ranks(2)
def test_an_abort_hook_may_abort(world):
    comm, ran = make("again"), []
    comm.register_abort_hook(lambda: (comm.abort(), ran.append(True)))
    comm.barrier(False)
    dist.barrier()  # all have left that one
    with time_limit(0, 15, "abort"):
        comm.abort()
    assert ran
    dist.barrier()
    comm.finalize()


@pytest.mark.ranks(3)
def test_hooks_get_a_shrink(world):
    group, rank = dist.new_group(), dist.get_rank()
    if rank < 2:
        log = Log(torchcomms().get_comm(group))
        smaller = group._get_backend(torch.device("cpu")).shrink([2])
        (pre,), (post,), (end,) = log.take("pre"), log.take("post"), log.take("end")
        assert pre.name.name == post.name.name == end.name.name == "shrink"
        assert pre.op_id == post.op_id == end.op_id and pre.ranks == [0, 1]
        assert post.error is None and end.status == "completed"
        assert smaller.size() == 2
        log.remove()
        smaller.shutdown()
    dist.barrier()
    dist.destroy_process_group(group)


@each_backend
@pytest.mark.ranks(2)
def test_operations_torn_down_by_abort_end(world, backend):
    comm, ends, ended = make("torn", backend), [], threading.Event()
    comm.barrier(False)
    dist.barrier()  # all have left that one
    comm.register_end_hook(lambda args: (ends.append(args), ended.set()))
    posts = []
    comm.register_post_hook(posts.append)
    if dist.get_rank() == 0:
        work = comm.recv(torch.empty(1), 1, True)
        comm.abort()
        with pytest.raises(torchcomms().CommError, match="abort"):
            work.wait()
        assert ended.wait(WAIT) and ends[0].status == "failed" and ends[0].name.name == "recv"
        assert wait_for(lambda: posts, WAIT) and posts[0].op_id == ends[0].op_id
        assert isinstance(posts[0].error, torchcomms().CommError) and posts[0].work.is_completed()
    dist.barrier()
    comm.finalize()


@pytest.mark.ranks(2)
def test_end_hook_may_issue_operations(world):
    comm, done = make("end"), threading.Event()

    def answer(args):
        if args.name.name == "all_reduce":
            comm.barrier(False)
            done.set()

    comm.register_end_hook(answer)
    comm.all_reduce(torch.ones(1), torchcomms().ReduceOp.SUM, True).wait()
    assert done.wait(WAIT)
    comm.finalize()


@contextlib.contextmanager
def on_one_core():
    """For this thread and those it starts, which so begin only when this one waits."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@each_backend
@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["collective", "message"])
def test_finalize_waits_for_the_hooks_of_the_last_operation(world, backend, kind):
    with on_one_core():
        waits_for_the_last_callback(backend, kind)


def waits_for_the_last_callback(backend, kind):
    comm, peer, told = make("told", backend), 1 - dist.get_rank(), []
    tensor = torch.ones(1)
    if kind == "collective":
        work = comm.all_reduce(tensor, torchcomms().ReduceOp.SUM, True)
    elif peer == 1:
        time.sleep(0.3)  # the other rank waits by now, and so moves the message itself
        work = comm.send(tensor, peer, True)
    else:
        work = comm.recv(tensor, peer, True)

    def callback(future):
        time.sleep(0.3)  # a slow callback is what is tested
        told.append("callback")

    work.get_future().then(callback)
    work.wait()
    comm.finalize()
    assert told == ["callback"]


@each_backend
@pytest.mark.ranks(2)
def test_an_end_hook_may_end_the_communicator(world, backend):
    for register in (
        lambda comm, end: comm.register_end_hook(lambda args: end()),
        lambda comm, end: comm.register_post_hook(lambda args: end()),
        None,
    ):
        for async_op in (False, True):
            comm, ended = make("ender", backend), threading.Event()

            def end(comm=comm, ended=ended):
                if not ended.is_set():
                    ended.set()  # finalize() has hooks of its own
                    comm.finalize()

            if register:
                register(comm, end)
            with time_limit(0, WAIT, "finalize() in a hook"):
                work = comm.all_reduce(torch.ones(1), torchcomms().ReduceOp.SUM, async_op)
                if not register:
                    work.get_future().then(lambda future: end()).wait()
                assert ended.wait(WAIT)
            comm.finalize()


@pytest.mark.ranks(2)
def test_an_operation_that_has_ended_has_no_timeout_while_its_hooks_run(world):
    comm, told = make("slow"), threading.Event()
    comm.barrier(False)
    dist.barrier()  # all have left that one
    comm.set_timeout(datetime.timedelta(seconds=0.5))

    def slow(args):
        time.sleep(1.5)  # a slow hook is what is tested
        told.set()

    handle = comm.register_end_hook(slow)
    comm.all_reduce(torch.ones(1), torchcomms().ReduceOp.SUM, False)
    assert told.is_set()
    handle.remove()
    comm.set_timeout(datetime.timedelta(seconds=30))
    dist.barrier()
    comm.all_reduce(torch.ones(1), torchcomms().ReduceOp.SUM, False)  # which raises a failure
    comm.finalize()


@pytest.mark.ranks(2)
def test_abort_hooks_of_a_process_group_are_called_though_others_raise(world):
    group, called = dist.new_group(), []

    def raises():
        called.append("first")
        raise KeyError("mine")

    group.register_abort_hook(1, raises)
    group.register_abort_hook(2, lambda: called.append("second"))
    dist.barrier(group)
    dist.barrier()  # all have left that one
    dist.distributed_c10d._abort_process_group(group)
    assert called == ["first", "second"]


@pytest.mark.ranks(2)
def test_the_last_reference_to_a_communicator_goes_while_its_hook_runs(world):
    comm, running, go_on, done = make("left"), *(threading.Event() for _ in range(3))

    def hook(args):
        running.set()
        go_on.wait(WAIT)
        done.set()

    handle = comm.register_end_hook(hook)
    work = comm.all_reduce(torch.ones(1), torchcomms().ReduceOp.SUM, True)
    work.wait()
    assert running.wait(WAIT)
    timer = threading.Timer(0.2, go_on.set)  # the destructor of the handle waits for the hook
    timer.start()
    with time_limit(0, WAIT, "dropping"), pytest.warns(RuntimeWarning, match="not finalized"):
        del work, comm
        gc.collect()
        del handle
    assert done.wait(WAIT)
    timer.join()


@pytest.mark.ranks(2)
def test_hooks_see_what_goes_through_a_process_group(world):
    group = dist.new_group()
    comm = torchcomms().get_comm(group)
    assert comm.get_size() == world and comm.get_ranks() == list(range(world))
    log = Log(comm)
    del comm
    gc.collect()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2), process_group=group)
    log.take("pre")
    model(torch.ones(4, 3)).sum().backward()
    assert [args.name.name for args in log.take("pre")] == ["all_reduce"]
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=group)
    (pre,) = log.take("pre")
    assert (pre.name.name, pre.reduce_op, pre.async_op) == ("all_reduce", "SUM", False)
    refuse = torchcomms().get_comm(group).register_pre_hook(lambda args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        dist.all_reduce(tensor, group=group)
    refuse.remove()
    dist.all_reduce(tensor, group=group)
    log.remove()
    log.take("pre")
    dist.barrier(group)
    assert not log.pre
    with pytest.raises(RuntimeError, match="belongs to a process group"):
        torchcomms().get_comm(group).finalize()
    with pytest.raises(ValueError, match="wanted a process group"):
        torchcomms().get_comm(dist.GroupMember.NON_GROUP_MEMBER)
    dist.destroy_process_group(group)


@pytest.mark.ranks(2)
def test_no_hook_keeps_a_group_from_ending(world):
    tensor = torch.ones(2)
    for kind in ("pre", "post"):
        group, comm = dist.new_group(), make(f"raising {kind}")
        for hooked in (torchcomms().get_comm(group), comm):
            getattr(hooked, f"register_{kind}_hook")(
                lambda args: 1 / 0 if args.name.name == "finalize" else None
            )
        dist.all_reduce(tensor, group=group)
        comm.finalize()
        dist.destroy_process_group(group)
        with pytest.raises(RuntimeError, match="was finalized"):
            comm.barrier(False)


@pytest.mark.ranks(2)
def test_nan_check_looks_at_what_is_sent(world):
    comm, rank, op = make("nan"), dist.get_rank(), torchcomms().ReduceOp
    hook = torchcomms().hooks.NanCheckHook()
    assert not hook.is_enabled()
    hook.register_with_comm(comm)
    assert hook.is_enabled()
    nan = torch.tensor([1.0, float("nan")])
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"all_reduce \(op_id \d+\) on rank 0.*1 NaN in 2"):
            comm.all_reduce(nan, op.SUM, False)
        with pytest.raises(RuntimeError, match=r"send .*on rank 0"):
            comm.send(nan, 1, False)
        batch = comm.batch_op_create()
        batch.send(nan, 1)
        batch.recv(torch.ones(2), 1)
        with pytest.raises(RuntimeError, match=r"send .*on rank 0"):
            batch.issue(False)
    # NaN where nothing is sent from is nobody's concern.
    tensor = torch.ones(2) if rank == 0 else nan.clone()
    comm.broadcast(tensor, 0, False)
    assert_same(tensor, torch.ones(2))
    got = [torch.full((2,), float("nan")) for _ in range(world)]
    comm.all_gather(got, torch.ones(2), False)
    comm.all_reduce(torch.ones(2, dtype=torch.int32), op.SUM, False)
    hook.unregister()
    hook.unregister()
    assert not hook.is_enabled()
    comm.all_reduce(nan, op.SUM, False)
    comm.finalize()


@pytest.mark.ranks(1)
def test_finalize_frees_the_hooks(world):
    comm = make("frees")

    class Hook:
        def __call__(self, args):
            assert comm is not None

    hook = Hook()
    gone = weakref.ref(hook)
    comm.register_pre_hook(hook)
    comm.barrier(False)
    comm.finalize()
    del hook
    gc.collect()
    assert gone() is None


# ---------------------------------------------------------------- what print() and help() show


@pytest.mark.parametrize("name", ["PreHookArgs", "PostHookArgs", "EndHookArgs", "NcclConfig"])
def test_help_shows_every_member_with_its_type(name):
    described = getattr(_C, name)
    assert described.__doc__.strip()
    members = {key: value for key, value in vars(described).items() if not key.startswith("_")}
    assert members
    for member, value in members.items():
        type_, _, text = value.__doc__.partition(": ")
        assert re.fullmatch(r"[\w.\[\]]+( or [\w.\[\]]+)?", type_) and text.endswith("."), member
    assert "milliseconds" in _C.EndHookArgs.duration.__doc__
    assert "every `register_" in _C.RemovableHandle.__doc__
    assert "Idempotent" in _C.RemovableHandle.remove.__doc__


@pytest.mark.ranks(1)
def test_the_repr_of_hook_arguments_has_their_values(world):
    comm, op = make("printed"), torchcomms().ReduceOp
    log = Log(comm)
    comm.all_reduce(torch.ones(2, 3), op.SUM, False)
    comm.send(torch.ones(2, dtype=torch.int64), 0, True)
    comm.recv(torch.ones(2, dtype=torch.int64), 0, True).wait()
    refuses = comm.register_pre_hook(lambda args: 1 / 0)
    assert repr(refuses) == "RemovableHandle(registered)"
    with pytest.raises(ZeroDivisionError):
        comm.broadcast(torch.ones(1), 0, False)
    refuses.remove()
    assert repr(refuses) == "RemovableHandle(removed)"
    pres = [re.sub(r"op_id=\d+", "op_id=N", repr(args)) for args in log.take("pre", 4)]
    assert pres == [
        "PreHookArgs(name=all_reduce, op_id=N, async_op=False, inputs=[Float[2, 3]] on cpu, "
        "outputs=[Float[2, 3]] on cpu, reduce_op='SUM')",
        "PreHookArgs(name=send, op_id=N, async_op=True, inputs=[Long[2]] on cpu, peer=0)",
        "PreHookArgs(name=recv, op_id=N, async_op=True, outputs=[Long[2]] on cpu, peer=0)",
        "PreHookArgs(name=broadcast, op_id=N, async_op=False, inputs=[Float[1]] on cpu, "
        "outputs=[Float[1]] on cpu, root=0)",
    ]
    posts = [repr(args) for args in log.take("post", 4)]
    says = r"op_id=\d+, work=TorchWork\(.*\)\)"
    assert re.fullmatch(rf"PostHookArgs\(name=all_reduce, {says}", posts[0]), posts[0]
    (cancelled,) = (text for text in posts if "broadcast" in text)
    says = r"op_id=\d+, work=None, error=ZeroDivisionError\('division by zero'\)\)"
    assert re.fullmatch(rf"PostHookArgs\(name=broadcast, {says}", cancelled), cancelled
    end = repr(log.take("end", 3)[0])
    says = r"op_id=\d+, async_op=False, status='completed', duration=[\d.e-]+ ms\)"
    assert re.fullmatch(rf"EndHookArgs\(name=all_reduce, {says}", end), end
    config = _C.NcclConfig()
    assert repr(config) == "NcclConfig()"
    config.min_ctas, config.net_name = 2, "Socket"
    assert repr(config) == "NcclConfig(min_ctas=2, net_name='Socket')"
    comm.finalize()
