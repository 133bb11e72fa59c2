"""torch.compile: TorchComm operations and functional collectives give what eager mode gives."""

import datetime
import os
import pathlib

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch._inductor import config
from torch._inductor.runtime.cache_dir_utils import cache_dir

from api.test_torchcomm import TAG
from harness.comms import make as make_comm
from harness.comms import torchcomms
from harness.ranks import on_ranks
from harness.values import assert_same, data

pytestmark = [pytest.mark.beyond_gloo, pytest.mark.torch_version]

# On a core that other tests share, the first compilation of a process takes more than 40 s.
compiled_on_ranks = on_ranks(2, timeout=100)
AFTER = datetime.timedelta(seconds=60)  # a graph cannot make one


def make(name):
    return make_comm(name, timeout=datetime.timedelta(seconds=120))  # the other rank may compile


def compiled(function, backend="aot_eager", **options):
    torch._dynamo.reset()
    return torch.compile(function, backend=backend, fullgraph=True, **options)


def every_operation(comm, t, many, async_op):
    """One of each; what they have written."""
    op, rank, world = torchcomms().ReduceOp, comm.get_rank(), comm.get_size()
    made = []

    def new(like):
        made.append(torch.zeros_like(like))
        return made[-1]

    def copy(like):
        made.append(like.clone())
        return made[-1]

    def lists():
        return [new(t) for _ in range(world)]

    uneven = [torch.zeros(r + 1) for r in range(world)]
    made.extend(uneven)
    parts = list(many.unbind(0))
    root = rank == 0
    comm.broadcast(copy(t), 1, async_op).wait()
    comm.all_reduce(copy(t), op.SUM, async_op, timeout=AFTER).wait()
    comm.all_reduce(copy(t), op.PREMUL_SUM(0.5), async_op).wait()
    comm.all_reduce(t, torch.distributed.ReduceOp.MAX, async_op, output=new(t)).wait()
    comm.reduce(copy(t), 1, op.AVG, async_op).wait()
    comm.all_gather(lists(), t, async_op).wait()
    comm.all_gather_v(uneven, t[: rank + 1], async_op).wait()
    comm.all_gather_single(new(many), t, async_op).wait()
    comm.reduce_scatter(new(t), parts, op.MIN, async_op).wait()
    comm.reduce_scatter_v(new(t), parts, op.SUM, async_op).wait()
    comm.reduce_scatter_single(new(t), many, op.PRODUCT, async_op).wait()
    comm.all_to_all_single(new(many), many, async_op).wait()
    comm.all_to_all_v_single(new(many), many, [1] * world, [1] * world, async_op).wait()
    comm.all_to_all(lists(), parts, async_op).wait()
    comm.barrier(async_op).wait()
    comm.scatter(new(t), parts if root else [], 0, async_op).wait()
    comm.gather(lists() if root else [], t, 0, async_op).wait()
    comm.gather_single(new(many) if root else None, t, 0, async_op).wait()
    batch = comm.batch_op_create()
    batch.send(t, (rank + 1) % world)
    batch.recv(new(t), (rank - 1) % world)
    batch.issue(async_op).wait()
    # All ranks receive first: only asynchronous messages can do that.
    got = new(t)
    receiving = comm.recv(got, (rank - 1) % world, True, {TAG: "3"})
    sending = comm.send(t, (rank + 1) % world, True, {TAG: "3"})
    receiving.wait()
    sending.wait()
    return made, got * 2


@compiled_on_ranks
@pytest.mark.parametrize("async_op", (False, True))
def test_every_operation_gives_what_eager_mode_gives(world, async_op):
    comm = make("every compiled")
    t, many = data(dist.get_rank(), 6), data(dist.get_rank(), (world, 6))
    want, last = every_operation(comm, t, many, async_op)
    told = []
    handle = comm.register_pre_hook(lambda args: told.append((args.name.name, args.async_op)))
    call = compiled(every_operation)
    for _ in range(2):  # compiling, and compiled
        got, doubled = call(comm, t, many, async_op)
        assert len(got) == len(want) > 15
        for i, (one, other) in enumerate(zip(got, want, strict=True)):
            assert_same(one, other, f"tensor {i}")
        assert_same(doubled, last)
    handle.remove()
    once = told[: len(told) // 2]
    assert once == told[len(told) // 2 :]  # in program order, every time
    assert [name for name, _ in once][:3] == ["broadcast", "all_reduce", "all_reduce"]
    assert ("barrier", async_op) in once  # what has no result is not dropped
    comm.finalize()


@pytest.mark.slow
@compiled_on_ranks
def test_inductor_keeps_order_and_overlaps_nothing_it_must_not(world):
    comm, rank, op = make("inductor"), dist.get_rank(), torchcomms().ReduceOp

    def step(x):
        y = x * 2
        work = comm.all_reduce(y, op.SUM, async_op=True)
        z = x + 1  # may use the memory of nothing that is under way
        work.wait()
        comm.all_reduce(z, op.MAX, async_op=False)
        comm.barrier(async_op=False)
        return y + z

    inputs = [data(r, 1000) for r in range(world)]
    want = sum(inputs) * 2 + torch.stack(inputs).amax(0) + 1
    call = compiled(step, "inductor")
    for _ in range(2):
        torch.testing.assert_close(call(inputs[rank]), want)
    comm.finalize()


@compiled_on_ranks
def test_what_inductor_compiles_does_not_outlive_the_tests(world):
    x = torch.arange(3.0)
    assert_same(compiled(lambda t: t * 2 + 1, "inductor")(x), x * 2 + 1)
    tests = pathlib.Path(os.environ["TORCHCOMMS_PG_STATUS"]).parent
    assert pathlib.Path(cache_dir()).is_relative_to(tests)
    assert list(pathlib.Path(cache_dir()).rglob("*.so"))
    if torch.__version__ >= "2.12":  # the first with a variable for it
        # The folder of precompiled headers is torch's default in any case.
        assert not config.cpp_cache_precompile_headers


@compiled_on_ranks
def test_dynamic_shapes_and_split_sizes(world):
    comm, rank, op = make("dynamic"), dist.get_rank(), torchcomms().ReduceOp
    graphs = []

    def count(graph, example):
        graphs.append(graph)
        return graph

    def step(x):
        y = x * 1
        comm.all_reduce(y, op.SUM, False)
        out = torch.empty(world * x.shape[0])
        comm.all_to_all_v_single(
            out, torch.cat([x] * world), [x.shape[0]] * world, [x.shape[0]] * world, False
        )
        return y, out

    call = compiled(step, count, dynamic=True)
    for n in (3, 5, 1000):
        inputs = [data(r, n) for r in range(world)]
        y, out = call(inputs[rank])
        torch.testing.assert_close(y, sum(inputs))
        assert_same(out, torch.cat(inputs))
    assert len(graphs) == 1
    comm.finalize()


@compiled_on_ranks
def test_gradients_flow_past_operations_as_in_eager_mode(world):
    comm, op = make("past"), torchcomms().ReduceOp

    def loss(w):
        comm.broadcast(w, 0, False)  # of a parameter, as at the start of training
        y = w * 3
        comm.all_reduce(y, op.SUM, False)
        return y.square().sum()

    gradients = []
    for call in (loss, compiled(loss)):
        w = data(dist.get_rank(), 4).requires_grad_()
        value = call(w)
        value.backward()
        assert_same(w.detach(), data(0, 4))
        gradients.append((value.detach(), w.grad))
    torch.testing.assert_close(*gradients)
    comm.finalize()


@compiled_on_ranks
def test_what_a_work_of_a_graph_gives_it_gives_after_the_operation(world):
    comm, op = make("asked"), torchcomms().ReduceOp

    def reduced(t):
        work = comm.all_reduce(t, op.SUM, True)
        before = work.status().name
        work.result()
        return t * 1, before, work.status().name

    value, before, after = compiled(reduced)(torch.full((3,), dist.get_rank() + 1.0))
    assert_same(value, torch.full((3,), 3.0))
    assert (before, after) == ("INPROGRESS", "COMPLETED")
    x = torch.full((3,), dist.get_rank() + 1.0)
    (value,) = compiled(lambda t: comm.all_reduce(t, op.SUM, True))(x).get_future().wait()
    assert_same(value, torch.full((3,), 3.0))
    assert_same(x, value)
    comm.finalize()


@compiled_on_ranks
def test_a_failure_shows_in_every_look_at_a_traced_work(world):
    comm, op, rank = make("shows"), torchcomms().ReduceOp, dist.get_rank()
    work = None
    if rank == 0:
        work = compiled(lambda t: comm.all_reduce(t, op.SUM, True))(torch.zeros(3))
    dist.barrier()
    if rank == 1:
        comm.abort()
    else:
        for look in (work.wait, work.wait, work.result, work.get_future):
            with pytest.raises(torchcomms().CommError, match="aborted"):
                look()
        assert not work.is_completed()
    comm.finalize()


@compiled_on_ranks
def test_an_output_is_checked_and_written_as_in_eager_mode(world):
    comm, op = make("output"), torchcomms().ReduceOp
    w = data(dist.get_rank(), (2, 3)).requires_grad_()

    def into(output):
        return lambda t: (comm.all_reduce(t * 2, op.SUM, False, output=output), output * 1)[1]

    for output, error in (
        (torch.zeros(6), None),
        (torch.zeros(5), "elements"),
        (torch.zeros(6, dtype=torch.float64), "dtype"),
    ):
        results = []
        for wrap in (lambda function: function, compiled):
            if error is not None:
                with pytest.raises(Exception, match=error):
                    wrap(into(output))(w)
                continue
            results.append(wrap(into(output.clone()))(w))
            assert not results[-1].requires_grad
        if error is None:
            assert_same(*results)
    comm.finalize()


@compiled_on_ranks
def test_split_sizes_of_the_wrong_length_are_refused_in_a_graph_too(world):
    comm = make("lengths")
    exchange = lambda t, out, into: comm.all_to_all_v_single(out, t, [4], into, False)  # noqa: E731
    for call in (exchange, compiled(exchange)):
        with pytest.raises(Exception, match="output_split_sizes has 1 entries"):
            call(torch.ones(4), torch.zeros(4), [1, 1, 2])
    comm.finalize()


@compiled_on_ranks
def test_a_work_may_leave_the_graph_and_a_failure_comes_out_of_it(world):
    comm, op, rank = make("leaves"), torchcomms().ReduceOp, dist.get_rank()
    x = torch.full((3,), float(rank + 1))
    work = compiled(lambda t: comm.all_reduce(t, op.SUM, True))(x)
    work.wait()
    assert_same(x, torch.full((3,), 3.0))
    barrier = compiled(lambda t: (comm.barrier(False), t + 1)[1])
    barrier(x)
    dist.barrier()
    if rank == 0:
        comm.abort()
    dist.barrier()
    with pytest.raises(torchcomms().CommError, match="aborted"):
        barrier(x)
    comm.finalize()
    with pytest.raises(RuntimeError, match="was finalized"):
        barrier(x)


@compiled_on_ranks
@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
def test_functional_collectives_and_their_gradients(world, backend):
    """Over a TorchComm's group; test_functional.py compiles them over the default group."""
    comm = make("functional")
    group = torchcomms().get_process_group(comm)
    rank = dist.get_rank()

    def forward(x):
        gathered = fc.all_gather_tensor_autograd(x, 0, group)
        scattered = fc.reduce_scatter_tensor_autograd(gathered * gathered, "sum", 0, group)
        turned = fc.all_to_all_single_autograd(scattered, [2] * world, [2] * world, group)
        return turned, fc.all_reduce(x.detach(), "sum", group)

    results = []
    for call in (forward, compiled(forward, backend)):
        x = data(rank, (2 * world, 3)).requires_grad_()
        turned, total = call(x)
        (turned * (rank + 1)).sum().backward()
        results.append((turned.detach(), torch.as_tensor(total), x.grad))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)
    assert results[0][2].abs().sum() > 0
    dist.destroy_process_group(group)
    comm.finalize()
