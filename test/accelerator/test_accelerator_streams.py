"""The order of operations in the streams of an accelerator, and their graphs.

Streams of the simulated one are held up, so that nothing is left to chance.
"""

import gc

import pytest
import torch
import torch.distributed as dist

import torchcomms_pg
from harness.ranks import time_limit, wait_for
from harness.values import all_data, assert_reduced

try:
    import simulated
    from harness.simulated_group import DEVICE, both, on_sim, sim
    from simulated import hold, settled, waits
except ImportError:
    pytest.skip("python test/simulated/build.py builds it", allow_module_level=True)

WAIT = 20.0


def finish(work, async_op):
    assert (work is not None) == async_op
    if async_op:
        work.wait()


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
            assert wait_for(settled, WAIT)  # what has not been ordered has run
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
    current = torch.accelerator.current_stream()
    came = wait_for(lambda: waits(current) or current.query(), WAIT)
    stalled, completed = not current.query(), work.is_completed()
    store.set(f"{key} {dist.get_rank()}", "")
    assert came and stalled, "the current stream did not wait"
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
        # A copy out of the buffer that nothing orders has come then.
        torch.accelerator.current_stream().synchronize()
        store.set(f"strided {dist.get_rank()} {world}", "")
    work.wait()
    assert_reduced(tensor.cpu(), inputs)
    dist.barrier()
    store.delete_key(f"strided {dist.get_rank()} {world}")


@on_sim(2)
def test_an_operation_reads_what_the_one_before_it_has_written(world):
    """Its contiguous copy is made in the communicator's stream, as that one's result is."""
    tensor = torch.ones(30, 40, device=DEVICE).t()
    torch.accelerator.synchronize()
    for work in [dist.all_reduce(tensor, async_op=True) for _ in range(3)]:
        work.wait()
    assert (tensor.cpu() == world**3).all()


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
def test_operations_of_two_streams_keep_their_order_in_the_communicator(world):
    other = torch.sim.Stream()
    first, second = (torch.full((1000,), v, device=DEVICE) for v in (1.0, 2.0))
    torch.accelerator.synchronize()
    with hold(other) as held:
        with torch.sim.stream(other):
            work = dist.all_reduce(first, async_op=True)
        later = dist.all_reduce(second, async_op=True)
        assert wait_for(settled, WAIT)
        assert not later.is_completed()
        held.release()
    work.wait()
    later.wait()
    assert (first.cpu() == world).all() and (second.cpu() == 2 * world).all()


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
def test_a_capture_before_the_first_operation_is_refused_and_the_group_stands(world):
    group = dist.new_group()
    tensor, graph = torch.ones(10, device=DEVICE), simulated.Graph()
    for first in (lambda: dist.all_reduce(tensor, group=group), lambda: dist.barrier(group)):
        with pytest.raises(RuntimeError, match=f"no connections for {DEVICE}.* being captured; "):
            with graph.capture():
                first()
    dist.all_reduce(tensor, group=group)
    assert (tensor.cpu() == world).all()
    dist.destroy_process_group(group)


@graphs
@on_sim(2)
@pytest.mark.parametrize("end", ["destroy", "abort"])
def test_a_replay_after_its_group_has_ended_or_failed_holds_up_no_stream(world, end):
    group = dist.new_group()
    tensor, graph = torch.ones(10, device=DEVICE), simulated.Graph()
    dist.all_reduce(tensor, group=group)
    with graph.capture():
        dist.all_reduce(tensor, group=group)
    graph.replay()
    torch.accelerator.synchronize()
    dist.barrier()
    if end == "destroy":
        dist.destroy_process_group(group)
    else:
        group._get_backend(torch.device(DEVICE)).abort()
    with time_limit(0, 15, "the replay"):
        graph.replay()
        torch.accelerator.synchronize()
    if end == "abort":
        with pytest.raises(torchcomms_pg.CommError, match="aborted"):
            dist.all_reduce(tensor, group=group)
        dist.destroy_process_group(group)


def in_flight(group):
    """How many operations of the group have not ended as far as the process knows."""
    groups = torchcomms_pg._C.process_totals().groups
    return sum(each.in_flight for each in groups if each.name == group.group_name)


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
    with graph.capture():
        dist.all_reduce(tensor, group=group)
        dist.barrier(group, async_op=True).wait()
    # What is in flight has a deadline, and is asked for.
    assert wait_for(lambda: in_flight(group) == 0, WAIT), in_flight(group)
    assert "all_reduce" not in recorder.dump_json()
    tensor.fill_(1)
    graph.replay()
    assert (tensor.cpu() == world).all()
    dist.all_reduce(tensor, group=group)
    assert "all_reduce" in recorder.dump_json()
    recorder.unregister()
    dist.destroy_process_group(group)
    del graph  # after the group
