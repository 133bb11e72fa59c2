"""Tensors of an accelerator: queued in streams, in the right order, on a simulated device.

Streams dawdle at random, so that a missing wait shows as wrong numbers in the tests of the
operations; those of the orderings hold a stream up and are not left to chance.
"""

import datetime
import gc
import os
import time

import pytest
import torch
import torch.distributed as dist

import torchcomms_pg
from harness.ranks import Ranks, check, connect_store, on_ranks, report, time_limit, wait_for
from harness.simulated_group import start
from harness.values import all_data, assert_reduced, assert_same, data

try:
    import simulated
    from simulated import _simulated, hold
except ImportError:
    pytest.skip("python test/simulated/build.py builds it", allow_module_level=True)

SIZES = (0, 1, 7, 70_001)
DEVICE = "sim:0"

on_sim = lambda *worlds, **kwargs: on_ranks(*(worlds or (2, 3)), init=start, **kwargs)  # noqa: E731
both = pytest.mark.parametrize("async_op", (False, True), ids=("sync", "async"))


def sim(tensor):
    return tensor.to(DEVICE)


def current():
    return torch.accelerator.current_stream()


def finish(work, async_op):
    assert (work is not None) == async_op
    if async_op:
        work.wait()


def idle_within(seconds):
    return wait_for(lambda: current().query(), seconds)


# ---------------------------------------------------------------- every operation


@on_sim()
@both
def test_all_reduce(world, async_op):
    for size in SIZES:
        inputs = all_data(world, size)
        tensor = sim(inputs[dist.get_rank()])
        finish(dist.all_reduce(tensor, async_op=async_op), async_op)
        assert_reduced(tensor.cpu(), inputs, what=f"size {size}")


@on_sim(2)
@pytest.mark.parametrize("op", ("AVG", "MAX", "BAND", "PREMUL_SUM", "BOOL"))
def test_all_reduce_with_every_kind_of_reduction(world, op):
    dtype = {"BAND": torch.int32, "BOOL": torch.bool}.get(op, torch.float32)
    inputs = all_data(world, 1000, dtype)
    tensor = sim(inputs[dist.get_rank()])
    if op == "PREMUL_SUM":
        factor = torch.tensor([0.5], device=DEVICE)
        dist.all_reduce(tensor, dist._make_nccl_premul_sum(factor), async_op=True).wait()
        return assert_reduced(tensor.cpu(), [x / 2 for x in inputs])
    reduce_op = dist.ReduceOp.SUM if op == "BOOL" else getattr(dist.ReduceOp, op)
    dist.all_reduce(tensor, reduce_op, async_op=True).wait()
    assert_reduced(tensor.cpu(), inputs, reduce_op)


@on_sim()
@both
def test_broadcast_and_reduce(world, async_op):
    for root in range(world):
        inputs = all_data(world, 7001, salt=root)
        tensor = sim(inputs[dist.get_rank()])
        finish(dist.broadcast(tensor, root, async_op=async_op), async_op)
        assert_same(tensor.cpu(), inputs[root])
        tensor = sim(inputs[dist.get_rank()])
        finish(dist.reduce(tensor, root, async_op=async_op), async_op)
        if dist.get_rank() == root:
            assert_reduced(tensor.cpu(), inputs)


@on_sim()
@both
def test_all_gather(world, async_op):
    rank = dist.get_rank()
    for size in SIZES:
        inputs = all_data(world, size)
        outputs = [torch.empty(size, device=DEVICE) for _ in range(world)]
        finish(dist.all_gather(outputs, sim(inputs[rank]), async_op=async_op), async_op)
        assert_same(torch.cat([x.cpu() for x in outputs]), torch.cat(inputs))
        output = torch.empty(world * size, device=DEVICE)
        work = dist.all_gather_into_tensor(output, sim(inputs[rank]), async_op=async_op)
        finish(work, async_op)
        assert_same(output.cpu(), torch.cat(inputs))
    uneven = [data(r, 5 * r + 1) for r in range(world)]
    outputs = [torch.empty(5 * r + 1, device=DEVICE) for r in range(world)]
    finish(dist.all_gather(outputs, sim(uneven[rank]), async_op=async_op), async_op)
    assert_same(torch.cat([x.cpu() for x in outputs]), torch.cat(uneven))


@on_sim()
@both
def test_reduce_scatter(world, async_op):
    rank = dist.get_rank()
    for size in SIZES:
        inputs = all_data(world, (world, size))
        expected = [x[rank] for x in inputs]
        output = torch.empty(size, device=DEVICE)
        work = dist.reduce_scatter_tensor(output, sim(inputs[rank]).view(-1), async_op=async_op)
        finish(work, async_op)
        assert_reduced(output.cpu(), expected)
        parts = [sim(x) for x in inputs[rank]]
        finish(dist.reduce_scatter(output, parts, async_op=async_op), async_op)
        assert_reduced(output.cpu(), expected)


@on_sim()
@both
def test_all_to_all(world, async_op):
    rank = dist.get_rank()
    inputs = all_data(world, (world, 601))
    output = torch.empty(world, 601, device=DEVICE)
    finish(dist.all_to_all_single(output, sim(inputs[rank]), async_op=async_op), async_op)
    assert_same(output.cpu(), torch.stack([x[rank] for x in inputs]))
    outputs = [torch.empty(601, device=DEVICE) for _ in range(world)]
    parts = [sim(x) for x in inputs[rank]]
    finish(dist.all_to_all(outputs, parts, async_op=async_op), async_op)
    assert_same(torch.stack([x.cpu() for x in outputs]), torch.stack([x[rank] for x in inputs]))
    # Rank r sends r + p + 1 rows to rank p.
    rows = [[r + p + 1 for p in range(world)] for r in range(world)]
    sent = [data(r, (sum(rows[r]), 3)) for r in range(world)]
    output = torch.empty(sum(rows[rank]), 3, device=DEVICE)
    work = dist.all_to_all_single(
        output, sim(sent[rank]), [rows[r][rank] for r in range(world)], rows[rank], None, async_op
    )
    finish(work, async_op)
    assert_same(output.cpu(), torch.cat([sent[r].split(rows[r])[rank] for r in range(world)]))


@on_sim()
@both
def test_gather_and_scatter(world, async_op):
    rank = dist.get_rank()
    for root in range(world):
        inputs = all_data(world, (world, 333), salt=root)
        outputs = [torch.empty(world, 333, device=DEVICE) for _ in range(world)]
        work = dist.gather(
            sim(inputs[rank]), outputs if rank == root else None, root, async_op=async_op
        )
        finish(work, async_op)
        if rank == root:
            assert_same(torch.stack([x.cpu() for x in outputs]), torch.stack(inputs))
        output = torch.empty(333, device=DEVICE)
        parts = [sim(x) for x in inputs[root]] if rank == root else None
        finish(dist.scatter(output, parts, root, async_op=async_op), async_op)
        assert_same(output.cpu(), inputs[root][rank])


@on_sim()
@both
def test_gather_to_one_tensor(world, async_op):
    comm, rank = torchcomms_pg.get_comm(device=DEVICE), dist.get_rank()
    for root in range(world):
        inputs = all_data(world, 333, salt=root)
        output = torch.empty(world * 333, device=DEVICE) if rank == root else None
        comm.gather_single(output, sim(inputs[rank]), root, async_op).wait()
        if rank == root:
            assert_same(output.cpu(), torch.cat(inputs))


@on_sim()
def test_tensors_of_any_strides(world):
    inputs = all_data(world, (40, 30))
    tensor = torch.empty(30, 40, device=DEVICE).t()
    tensor.copy_(sim(inputs[dist.get_rank()]))
    dist.all_reduce(tensor, async_op=True).wait()
    assert_reduced(tensor.cpu(), inputs)
    output = torch.empty(30, world * 40, device=DEVICE).t()
    dist.all_gather_into_tensor(output, sim(inputs[dist.get_rank()].t().contiguous().t()))
    assert_same(output.cpu(), torch.cat(inputs))


@on_sim()
def test_send_and_receive(world):
    rank, ring = dist.get_rank(), 70_001
    right, left = (rank + 1) % world, (rank - 1) % world
    tensor = torch.empty(ring, device=DEVICE)
    if rank == 0:
        dist.send(sim(data(0, ring)), right)
        dist.recv(tensor, left)
    else:
        dist.recv(tensor, left)
        dist.send(sim(data(rank, ring)), right)
    assert_same(tensor.cpu(), data(left, ring))
    ops = [dist.P2POp(dist.isend, sim(data(rank, ring, salt=1)), right)]
    ops += [dist.P2POp(dist.irecv, tensor, left)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert_same(tensor.cpu(), data(left, ring, salt=1))


@on_sim()
def test_coalesced_operations(world):
    inputs = [all_data(world, 1000 + i, salt=i) for i in range(4)]
    tensors = [sim(x[dist.get_rank()]) for x in inputs]
    with dist._coalescing_manager(device=torch.device(DEVICE), async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    for tensor, values in zip(tensors, inputs):
        assert_reduced(tensor.cpu(), values)


@on_sim()
def test_cpu_and_accelerator_tensors_in_one_group(world):
    rank = dist.get_rank()
    inputs = all_data(world, 1000)
    here, there = inputs[rank].clone(), sim(inputs[rank])
    works = [dist.all_reduce(x, async_op=True) for x in (there, here, there)]
    for work in works:
        work.wait()
    assert_reduced(here, inputs)
    total = sum(inputs)
    torch.testing.assert_close(there.cpu(), total * world)
    objects = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in range(world)]


@on_sim(2)
def test_a_second_device_has_a_communicator_of_its_own(world):
    inputs = all_data(world, 1000)
    tensors = [inputs[dist.get_rank()].to(f"sim:{i}") for i in (0, 1)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work, tensor in zip(works, tensors):
        with torch.sim.device(tensor.device.index):
            work.wait()
            assert_reduced(tensor.cpu(), inputs)


@on_sim()
def test_new_groups_carry_the_device(world):
    group = dist.new_group(list(range(1, world)))
    if dist.get_rank() > 0:
        inputs = all_data(world, 100)[1:]
        tensor = sim(inputs[dist.get_rank() - 1])
        dist.all_reduce(tensor, group=group)
        assert_reduced(tensor.cpu(), inputs)
        dist.destroy_process_group(group)


@on_sim(2)
def test_torchcomm_of_the_device(world):
    comm = torchcomms_pg.get_comm(device=DEVICE)
    seen = []
    handle = comm.register_pre_hook(lambda args: seen.append(str(args.name)))
    inputs = all_data(world, 100)
    tensor = sim(inputs[dist.get_rank()])
    comm.all_reduce(tensor, torchcomms_pg.ReduceOp.SUM, async_op=True).wait()
    handle.remove()
    assert_reduced(tensor.cpu(), inputs)
    assert len(seen) == 1 and "all_reduce" in seen[0]


# ---------------------------------------------------------------- the order of streams


@on_sim()
@both
def test_an_operation_comes_after_what_the_current_stream_has_queued(world, async_op):
    tensor = torch.zeros(1000, device=DEVICE)
    torch.accelerator.synchronize()
    with hold():
        tensor.fill_(dist.get_rank() + 1)
        work = dist.all_reduce(tensor, async_op=async_op)
        if async_op:
            time.sleep(0.05)  # what has not been ordered would run now
            assert not work.is_completed()
    finish(work, async_op)
    assert (tensor.cpu() == world * (world + 1) / 2).all()


def others_held_up(world, wait):
    """Rank 0 dawdles; on the others `wait` must order the current stream, and not the host."""
    store = dist.distributed_c10d._get_default_store()
    key = f"queued {dist.get_process_group_ranks(None)} {others_held_up.calls}"
    others_held_up.calls += 1
    tensor = torch.full((1000,), float(dist.get_rank() + 1), device=DEVICE)
    torch.accelerator.synchronize()
    if dist.get_rank() == 0:
        with hold():
            work = dist.all_reduce(tensor, async_op=True)
            store.wait([f"{key} {rank}" for rank in range(1, world)])
        work.wait()
        return tensor, None
    work = dist.all_reduce(tensor, async_op=True)
    with time_limit(0, 15, "waiting in the stream"):
        wait(work, tensor)
        after = tensor * 10
    stalled = not idle_within(0.2)
    completed = work.is_completed()
    store.set(f"{key} {dist.get_rank()}", "")
    assert stalled, "the current stream did not wait"
    assert not completed
    return tensor, after


others_held_up.calls = 0


@on_sim()
@pytest.mark.parametrize("how", ("wait", "block_current_stream", "future"))
def test_waiting_holds_up_the_current_stream_and_not_the_host(world, how):
    ways = {
        "wait": lambda work, _: work.wait(),
        "block_current_stream": lambda work, _: work.block_current_stream(),
        "future": lambda work, _: work.get_future().wait(),
    }
    tensor, after = others_held_up(world, ways[how])
    total = world * (world + 1) / 2
    assert (tensor.cpu() == total).all()
    assert after is None or (after.cpu() == total * 10).all()


@on_sim()
def test_what_a_futures_callback_does_comes_after_the_operation(world):
    def double(work, tensor):
        def callback(future):
            (value,) = future.value()
            return value.mul_(2)

        work.get_future().then(callback).wait()

    tensor, after = others_held_up(world, double)
    total = world * (world + 1) / 2
    if after is not None:
        assert (tensor.cpu() == total * 2).all() and (after.cpu() == total * 20).all()


@on_sim()
def test_the_operation_keeps_its_tensors_while_it_runs(world):
    store = dist.distributed_c10d._get_default_store()
    rank = dist.get_rank()
    inputs = all_data(world, 1000)
    mine = sim(inputs[rank])
    output = torch.empty(world * 1000, device=DEVICE)
    torch.accelerator.synchronize()
    if rank == 0:
        with hold():
            work = dist.all_gather_into_tensor(output, mine, async_op=True)
            store.wait([f"freed {r} {world}" for r in range(1, world)])
    else:
        # One tensor and one temporary buffer, used by the operation alone from here on.
        spread = torch.empty(1000, 2, device=DEVICE)[:, 0].copy_(mine)
        work = dist.all_gather_into_tensor(output, spread, async_op=True)
        del spread, mine
        gc.collect()
        current().synchronize()  # freed memory would be poisoned now
        reused = [torch.full((1000,), -7.0, device=DEVICE) for _ in range(20)]
        current().synchronize()
        store.set(f"freed {rank} {world}", "")
        del reused
    work.wait()
    assert_same(output.cpu(), torch.cat(inputs))
    store.delete_key(f"freed {rank} {world}")


@on_sim(2)
def test_waiting_lets_go_of_the_memory(world):
    tensor = torch.ones(12345, device=DEVICE)
    output = torch.empty(world * 12345, device=DEVICE)
    with hold():  # it has not ended, which would let go of the memory too, on another thread
        work = dist.all_gather_into_tensor(output, tensor, async_op=True)
        address = tensor.data_ptr()
        work.wait()
        del tensor
        gc.collect()
        assert torch.empty(12345, device=DEVICE).data_ptr() == address
    assert (output.cpu() == 1).all()


@on_sim()
def test_results_of_temporary_buffers_come_after_the_operation(world):
    store = dist.distributed_c10d._get_default_store()
    inputs = all_data(world, (30, 40), salt=4)
    tensor = torch.empty(40, 30, device=DEVICE).t()
    tensor.copy_(sim(inputs[dist.get_rank()]))
    torch.accelerator.synchronize()
    if dist.get_rank() == 0:
        with hold():
            work = dist.all_reduce(tensor, async_op=True)
            store.wait([f"strided {r} {world}" for r in range(1, world)])
    else:
        work = dist.all_reduce(tensor, async_op=True)
        time.sleep(0.05)  # a copy out of the buffer that nothing orders would come now
        store.set(f"strided {dist.get_rank()} {world}", "")
    work.wait()
    assert_reduced(tensor.cpu(), inputs)
    dist.barrier()
    store.delete_key(f"strided {dist.get_rank()} {world}")


@on_sim(2)
def test_no_buffer_of_an_operation_is_used_again_before_its_end(world):
    store = dist.distributed_c10d._get_default_store()
    tensor = torch.ones(40, 30, device=DEVICE).t()
    torch.accelerator.synchronize()
    if dist.get_rank() == 1:
        store.wait(["buffers taken"])
    work = dist.all_reduce(tensor, async_op=True)  # through a contiguous copy
    others = [torch.full((30, 40), 7.0, device=DEVICE) for _ in range(4)]
    torch.accelerator.current_stream().synchronize()
    store.set("buffers taken", "")
    work.wait()
    assert (tensor.cpu() == world).all()
    assert all((other.cpu() == 7).all() for other in others)
    dist.barrier()
    store.delete_key("buffers taken")


@on_sim(2)
def test_a_synchronous_operation_runs_in_the_current_stream_and_returns_at_once(world):
    tensor = torch.ones(1000, device=DEVICE)
    torch.accelerator.synchronize()
    with hold():
        with time_limit(0, 15, "queueing"):
            assert dist.all_reduce(tensor) is None
            tensor.mul_(3)
        assert not current().query()
    assert (tensor.cpu() == 3 * world).all()


@on_sim(2)
def test_operations_of_two_streams_keep_their_order_in_the_communicator(world):
    other = torch.sim.Stream()
    first, second = (torch.full((1000,), v, device=DEVICE) for v in (1.0, 2.0))
    torch.accelerator.synchronize()
    with hold(other) as held:
        with torch.sim.stream(other):
            work = dist.all_reduce(first, async_op=True)
        later = dist.all_reduce(second, async_op=True)
        time.sleep(0.02)
        assert not later.is_completed()
        held.release()
    work.wait()
    later.wait()
    assert (first.cpu() == world).all() and (second.cpu() == 2 * world).all()


@on_sim(2)
def test_a_barrier_waits_for_the_streams_of_all_ranks(world):
    store = dist.distributed_c10d._get_default_store()
    dist.all_reduce(torch.ones(1, device=DEVICE))
    group = dist.group.WORLD._get_backend(torch.device(DEVICE))
    options = dist.BarrierOptions()
    options.device = torch.device(DEVICE)
    torch.accelerator.synchronize()
    if dist.get_rank() == 0:
        with hold():
            options.asyncOp = True
            work = group.barrier(options)
            assert not work.is_completed()
            store.set("held", "")
        work.wait()
        assert work.is_completed()
    else:
        store.wait(["held"])
        options.asyncOp = False
        group.barrier(options)
    dist.barrier()
    store.delete_key("held")


# ---------------------------------------------------------------- graphs

# Before, streams do not tell of a capture, except CUDA's.
graphs = pytest.mark.skipif(
    not hasattr(torch.Stream, "is_capturing"), reason="streams tell of a capture from torch 2.12 on"
)


@graphs
@on_sim()
@both
def test_a_graph_with_operations_can_be_replayed(world, async_op):
    rank = dist.get_rank()
    value = torch.zeros(70_001, device=DEVICE)
    spread = torch.zeros(500, 2, device=DEVICE)[:, 0]  # goes through a temporary buffer
    dist.all_reduce(value)  # connects
    graph = simulated.Graph()
    with graph.capture():
        doubled = value * 2
        work = dist.all_reduce(doubled, async_op=async_op)
        finish(work, async_op)
        result = -doubled
        finish(dist.broadcast(spread, world - 1, async_op=async_op), async_op)
        copied = spread * 1
    assert work is None or work.is_completed()
    for salt in range(3):
        inputs = all_data(world, 70_001, salt=salt)
        value.copy_(sim(inputs[rank]))
        spread.fill_(rank + salt)
        graph.replay()
        between = torch.ones(3, device=DEVICE)
        dist.all_reduce(between, async_op=True).wait()  # keeps its place between the replays
        assert_reduced(result.cpu(), [-2 * x for x in inputs])
        assert (copied.cpu() == world - 1 + salt).all() and (between.cpu() == world).all()


@graphs
@on_sim(2)
def test_messages_and_batches_in_graphs(world):
    rank = dist.get_rank()
    peer = 1 - rank
    sent, received = (torch.zeros(1000, device=DEVICE) for _ in range(2))
    tensors = [torch.zeros(10 + i, device=DEVICE) for i in range(3)]
    dist.all_reduce(tensors[0])
    first, second = simulated.Graph(), simulated.Graph()
    with first.capture():
        ops = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
    with second.capture():
        device = torch.device(DEVICE)
        with dist._coalescing_manager(device=device, async_ops=True) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor)
        manager.wait()
    for salt in range(3):
        sent.copy_(sim(data(rank, 1000, salt=salt)))
        for tensor in tensors:
            tensor.fill_(1 + rank)
        first.replay()
        second.replay()
        assert_same(received.cpu(), data(peer, 1000, salt=salt))
        assert all((tensor.cpu() == 3).all() for tensor in tensors)


@graphs
@on_sim(2)
def test_nothing_watches_or_records_what_a_graph_holds(world):
    group = dist.new_group()
    comm = torchcomms_pg.get_comm(group, DEVICE)
    recorder = torchcomms_pg.hooks.FlightRecorderHook(max_entries=10)
    tensor = torch.ones(10, device=DEVICE)
    dist.all_reduce(tensor, group=group)
    recorder.register_with_comm(comm)
    graph = simulated.Graph()
    group.set_timeout(datetime.timedelta(seconds=2))
    with graph.capture():
        dist.all_reduce(tensor, group=group)
        dist.barrier(group, async_op=True).wait()
    time.sleep(2.5)  # its deadline, had it one
    group.set_timeout(datetime.timedelta(seconds=30))  # of what is not in it
    assert "all_reduce" not in recorder.dump_json()
    tensor.fill_(1)
    graph.replay()
    assert (tensor.cpu() == world).all()
    dist.all_reduce(tensor, group=group)
    assert "all_reduce" in recorder.dump_json()
    recorder.unregister()
    dist.destroy_process_group(group)
    del graph  # after the group


@graphs
@on_sim(2)
def test_a_capture_before_the_ranks_are_connected_says_what_to_do(world):
    group = dist.new_group()
    tensor = torch.ones(10, device=DEVICE)
    with simulated.Graph().capture():
        with pytest.raises(RuntimeError, match="before the capture"):
            dist.all_reduce(tensor, group=group)
    dist.all_reduce(tensor, group=group)
    assert (tensor.cpu() == world).all()
    dist.destroy_process_group(group)


# ---------------------------------------------------------------- works


@on_sim(2)
def test_a_work_tells_when_it_has_ended_and_how_long_it_took(world):
    group = dist.new_group()
    group._enable_collectives_timing()
    tensor = torch.ones(1000, device=DEVICE)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    work.wait()
    torch.accelerator.synchronize()
    assert work.is_completed() and work.is_success()
    assert wait_for(lambda: work.get_future_result().done(), 5)
    assert 0 < work._get_duration() < 5000
    assert (work.result()[0].cpu() == world).all()
    dist.destroy_process_group(group)


@on_sim(2)
def test_works_that_nobody_waits_for_end_too(world):
    tensors = [torch.ones(1000, device=DEVICE) for _ in range(5)]
    works = [dist.all_reduce(x, async_op=True) for x in tensors]
    assert wait_for(lambda: all(work.is_completed() for work in works), 10)
    torch.accelerator.synchronize()
    assert all((x.cpu() == world).all() for x in tensors)


@on_sim(2)
def test_an_operation_takes_few_calls_of_the_device(world):
    """Beside the library's own: four where it has a stream of its own, else two."""
    tensor = torch.ones(1000, device=DEVICE)

    def calls(body):
        before = _simulated.device_calls()
        result = body()
        return _simulated.device_calls() - before, result

    def leave_events():
        works = [dist.all_reduce(tensor, async_op=True) for _ in range(20)]
        works[-1].wait()
        assert wait_for(lambda: all(work.get_future_result().done() for work in works), 5)

    leave_events()  # those of works that are gone are used again
    for _ in range(5):
        count, work = calls(lambda: dist.all_reduce(tensor, async_op=True))
        assert count <= 4
        assert calls(work.wait)[0] <= 3  # two of them ask whether it has ended
        assert calls(lambda: dist.all_reduce(tensor))[0] <= 2


@on_sim(2)
def test_high_priority_is_handed_to_the_device(world):
    before = len(_simulated.high_priority_streams(0))
    options = torchcomms_pg.Backend.Options()
    options.is_high_priority_stream = True
    group = dist.new_group(pg_options=options)
    dist.all_reduce(torch.ones(10, device=DEVICE), group=group, async_op=True).wait()
    assert len(_simulated.high_priority_streams(0)) == before + 1
    dist.destroy_process_group(group)


@on_sim(2)
def test_a_mistake_enqueues_nothing(world):
    tensor = torch.ones(10, device=DEVICE)
    with pytest.raises(ValueError, match="root"):
        dist.group.WORLD._get_backend(torch.device(DEVICE)).broadcast(tensor, 5)
    with pytest.raises(ValueError, match="sim:0"):
        dist.all_gather_into_tensor(torch.ones(20), tensor)
    dist.all_reduce(tensor)
    assert (tensor.cpu() == world).all()


# ---------------------------------------------------------------- models


def train(device, wrap, world, rank):
    torch.manual_seed(3)
    model = torch.nn.Sequential(
        torch.nn.Linear(12, 40), torch.nn.Tanh(), torch.nn.Linear(40, 40), torch.nn.Linear(40, 4)
    ).to(device)
    model = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    batch = data(7, (4 * world, 12)).to(device)
    mine = batch[4 * rank : 4 * rank + 4] if world > 1 and rank is not None else batch
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(mine).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return model, losses


def reference(world):
    model, losses = train("cpu", lambda m: m, world, None)
    return [p.detach() for p in model.parameters()]


@on_sim()
@pytest.mark.parametrize("bucket", (0.001, 25), ids=("many_buckets", "one_bucket"))
def test_ddp_trains_as_one_process_on_the_cpu(world, bucket):
    wrap = lambda m: torch.nn.parallel.DistributedDataParallel(m, bucket_cap_mb=bucket)  # noqa: E731
    model, _ = train(DEVICE, wrap, world, dist.get_rank())
    for ours, expected in zip(model.parameters(), reference(world)):
        torch.testing.assert_close(ours.detach().cpu(), expected, rtol=1e-4, atol=1e-5)


@on_sim()
def test_fsdp2_trains_as_one_process_on_the_cpu(world):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(dist.group.WORLD, "sim")

    def wrap(model):
        for layer in model:
            if isinstance(layer, torch.nn.Linear):
                fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    model, _ = train(DEVICE, wrap, world, dist.get_rank())
    for ours, expected in zip(model.parameters(), reference(world)):
        full = ours.full_tensor().detach().cpu()
        torch.testing.assert_close(full, expected, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- failures


def all_reduce_alone(limit=None):
    """Rank 0 only, with a deadline once the peer has come; the failure's text."""
    tensor = torch.ones(10, device=DEVICE)
    dist.all_reduce(tensor)
    torch.accelerator.synchronize()
    if limit:
        dist.group.WORLD.set_timeout(datetime.timedelta(seconds=limit))
    report("ready")
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    with time_limit(0, 15, "finding out"), pytest.raises(torchcomms_pg.CommError) as error:
        while True:
            dist.all_reduce(tensor, async_op=True).wait(datetime.timedelta(seconds=20))
    assert wait_for(lambda: work.is_completed(), 15), "the stream still waits for the peer"
    assert not work.is_success()
    torch.accelerator.synchronize()
    with time_limit(0, 15, "shutting down"):
        dist.destroy_process_group()
    return str(error.value)


def all_reduce_once():
    tensor = torch.ones(10, device=DEVICE)
    dist.all_reduce(tensor)
    torch.accelerator.synchronize()


def test_a_peer_that_does_not_come_ends_in_a_timeout():
    with Ranks(2, init=start) as ranks:
        ranks.start(all_reduce_alone, 2.0, ranks=[0])
        ranks.start(all_reduce_once, ranks=[1])
        (outcome,) = ranks.wait(ranks=[0])
        assert outcome.ok, outcome
        assert "timed out after 2 s" in outcome.value


def test_a_peer_that_dies_releases_the_streams_of_the_others():
    with Ranks(2, init=start) as ranks:
        ranks.start(all_reduce_alone, ranks=[0])
        ranks.start(all_reduce_once, ranks=[1])
        ranks.wait_report(0)
        ranks.wait(ranks=[1])
        ranks.kill(1)
        (outcome,) = ranks.wait(ranks=[0])
        assert outcome.ok, outcome


def abort_what_is_queued():
    tensor = torch.ones(10, device=DEVICE)
    dist.all_reduce(tensor)
    torch.accelerator.synchronize()
    store = dist.distributed_c10d._get_default_store()
    with hold():
        work = dist.all_reduce(tensor, async_op=True)
        if store.add("queued", 1) == 2:
            store.set("both queued", "")
        store.wait(["both queued"])
        with time_limit(0, 25, "aborting"):  # torch's flight recorder takes its time
            dist.group.WORLD._get_backend(torch.device(DEVICE)).abort()
    # Whoever is first tells the other, who may have aborted too.
    with pytest.raises(torchcomms_pg.CommError, match="abort|revoke"):
        dist.all_reduce(tensor)
    assert wait_for(lambda: work.is_completed(), 15)
    with pytest.raises(torchcomms_pg.CommError, match="abort|revoke"):
        work.wait()
    with time_limit(0, 15, "shutting down"):
        dist.destroy_process_group()


def test_abort_fails_what_is_queued_and_all_that_follows():
    with Ranks(2, init=start) as ranks:
        ranks.run(abort_what_is_queued)


def eager(port, prefix, world, timeout):
    simulated.install()  # before there can be such a torch.device
    start(port, prefix, world, timeout, device_id=torch.device(DEVICE))


def split_eagerly():
    assert torchcomms_pg.get_comm(device=DEVICE).get_size() == 3
    tensor = torch.ones(10, device=DEVICE)
    dist.all_reduce(tensor)
    assert (tensor.cpu() == 3).all()
    group = dist.split_group(split_ranks=[[0, 2], [1]])
    tensor = torch.ones(10, device=DEVICE)
    dist.all_reduce(tensor, group=group)
    assert (tensor.cpu() == (1 if dist.get_rank() == 1 else 2)).all()
    dist.destroy_process_group()


def test_device_id_connects_at_once_and_groups_can_be_split():
    with Ranks(3, init=eager) as ranks:
        ranks.run(split_eagerly)


def mismatched():
    tensor = torch.ones(3 + dist.get_rank(), device=DEVICE)
    with time_limit(0, 15, "the check"):
        with pytest.raises(RuntimeError, match="mismatch between collectives"):
            dist.all_reduce(tensor)
    return tensor.cpu().unique().tolist()


def test_debug_detail_finds_a_mismatch_before_anything_is_queued():
    with Ranks(2, init=start, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}) as ranks:
        assert ranks.run(mismatched) == [[1], [1]]


# ---------------------------------------------------------------- shrinking


def shrink_by_one():
    # Torch registers what is left of a group for the one device that the group is bound to.
    group = dist.new_group(device_id=torch.device(DEVICE))
    if dist.get_rank() != 2:
        smaller = dist.shrink_group([2], group)
        backend = smaller._get_backend(torch.device("sim"))
        assert backend.comm_ptr  # there before the first operation
        tensor = torch.full((1000,), dist.get_rank() + 1.0, device=DEVICE)
        dist.all_reduce(tensor, group=smaller)
        assert (tensor.cpu() == 3).all()
        tensor = torch.full((1000,), dist.get_rank() + 1.0)
        backend.allreduce([tensor]).wait()
        assert (tensor == 3).all()
    dist.barrier()


@pytest.mark.skipif(not hasattr(dist, "shrink_group"), reason="torch has it from 2.12 on")
def test_dist_shrink_group_shrinks_the_communicator_of_the_device_too():
    with Ranks(3, init=start) as ranks:
        ranks.run(shrink_by_one)


def survivors(how, store_args):
    """Rank 2 dies; ranks 0 and 1, with an operation in flight, shrink the group and go on."""
    store = connect_store(*store_args)
    dist.all_reduce(torch.ones(5, device=DEVICE))
    torch.accelerator.synchronize()
    if dist.get_rank() != 2:
        work = dist.all_reduce(torch.ones(5, device=DEVICE), async_op=True)
        store.set(f"issued by {dist.get_rank()}", "")
    # After a death, or a shrinking, what is not yet issued raises at once.
    store.wait(["issued by 0", "issued by 1"])
    if dist.get_rank() == 2:
        os._exit(3)
    if how == "after the failure":
        assert wait_for(lambda: work.is_completed(), 15)
    backend = dist.group.WORLD._get_backend(torch.device("sim"))
    child = backend.shrink([2], dist.distributed_c10d.SHRINK_ABORT)
    assert wait_for(lambda: work.is_completed(), 15)
    with pytest.raises(torchcomms_pg.CommError):
        work.wait()
    for device in ("cpu", DEVICE):
        tensor = torch.full((1000,), dist.get_rank() + 1.0, device=device)
        child.allreduce([tensor]).wait()
        assert (tensor.cpu() == 3).all()
    child.shutdown()


@pytest.mark.skipif(not hasattr(dist, "shrink_group"), reason="torch has it from 2.12 on")
@pytest.mark.parametrize("how", ("after the failure", "before anybody knows"))
def test_the_ranks_that_are_left_shrink_the_group_of_a_dead_peer(how):
    with Ranks(3, init=start) as ranks:
        ranks.start(survivors, how, ranks.store_args())
        outcomes = ranks.wait()
        check(outcomes[:2])
        assert "exit code 3" in outcomes[2].died
