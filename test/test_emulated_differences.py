"""What torch's nccl does on a GPU torchcomms does, too: one body over each, on emulated CUDA."""

import contextlib
import datetime
import functools
import gc
import re
import time

import emulated
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import torchcomms_pg

if reason := emulated.available():
    pytest.skip(reason, allow_module_level=True)

import emulated_group
import ranks
from emulated_group import on_gpus

pytestmark = pytest.mark.torch_version

MIB = 2**20
MODES = ("global", "thread_local", "relaxed")
by_version = pytest.mark.parametrize("version", ("2.18", "2.24", "2.27", "2.30"))


def ones(size=1000):
    return torch.ones(size, device="cuda")


def apart(world, body, version=None):
    """Runs a body that makes its own groups, over a libnccl with the rules of a version."""
    options = dict(init=False, started_with=emulated.environment)
    if version:
        options["env"] = emulated.nccl_environment(version)
    with ranks.Ranks(world, **options) as processes:
        processes.run(body, *processes.store_args(), world)


def wait_for(condition):
    assert ranks.wait_for(condition), "the time is over"


@contextlib.contextmanager
def capture(mode="global", stream=None):
    """Captures a graph in the current stream of the block; gives the graph."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode=mode):
        yield graph


def collectives(world):
    """Each one's name, what issues it, input and output, and what ones become."""
    made = {
        "all_reduce": (dist.all_reduce, 7, 7, world),
        "broadcast": (lambda t, **how: dist.broadcast(t, 0, **how), 7, 7, 1),
        "all_gather_into_tensor": (dist.all_gather_into_tensor, 7, 7 * world, 1),
        "reduce_scatter_tensor": (dist.reduce_scatter_tensor, 7 * world, 7, world),
        "all_to_all_single": (dist.all_to_all_single, 7 * world, 7 * world, 1),
    }
    for name, (issue, sizes_in, sizes_out, expected) in made.items():
        source = ones(sizes_in)
        if name in ("all_reduce", "broadcast"):
            yield name, functools.partial(issue, source), source, source, expected
        else:
            output = torch.zeros(sizes_out, device="cuda")
            yield name, functools.partial(issue, output, source), source, output, expected


# ---------------------------------------------------------------- captures


@pytest.mark.parametrize("mode", MODES)
@on_gpus(1)
def test_a_capture_right_after_an_operation_is_not_disturbed(world, mode):
    tensor = ones()
    dist.all_reduce(tensor)  # whose end is still looked for
    dist.all_reduce(tensor, async_op=True)
    with capture(mode) as graph:
        result = tensor + 1
        # Longer than the time between two looks at what is in flight.
        time.sleep(0.12)
        more = torch.empty(MIB, device="cuda").fill_(2)
    graph.replay()
    assert result.cpu()[0] == 2 and more.cpu()[0] == 2


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ("sync", "async", "future"))
@on_gpus(2)
def test_collectives_run_with_each_replay(world, mode, how):
    for name, issue, source, output, expected in collectives(world):
        issue()
        with capture(mode) as graph:
            work = issue(async_op=how != "sync")
            if how == "async":
                work.wait()
            elif how == "future":
                work.get_future().wait()
            seen = output * 2
        for _ in range(2):
            source.fill_(1)
            graph.replay()
            assert (seen.cpu() == 2 * expected).all(), name
        del graph, work


@on_gpus(2)
def test_waiting_joins_the_streams_of_a_capture(world):
    tensor, side = ones(), torch.cuda.Stream()
    dist.all_reduce(tensor)
    with capture() as graph:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(5_000_000)
            work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        result = tensor * 2
    for _ in range(2):
        tensor.fill_(1)
        graph.replay()
        assert (result.cpu() == 2 * world).all()


# ---------------------------------------------------------------- groups


def groups_one_after_another(port, prefix, world):
    for i in range(3):
        emulated_group.torchcomms(port, f"{prefix}/{i}", world, 30)
        tensor = ones()
        dist.all_reduce(tensor)
        assert (tensor.cpu() == world).all()
        dist.destroy_process_group()
    assert emulated.misuses() == []


@by_version
def test_a_group_comes_up_where_another_one_was(version):
    apart(2, groups_one_after_another, version)


def graphs_live_on(port, prefix, world):
    emulated_group.torchcomms(port, prefix, world, 30)
    tensor = ones()
    dist.all_reduce(tensor)
    with capture() as graph:
        dist.all_reduce(tensor)
    begun = time.monotonic()
    dist.destroy_process_group()  # NCCL frees a communicator when its graphs have gone
    assert time.monotonic() - begun < 8
    del graph


@by_version
def test_a_group_ends_while_a_graph_holds_its_operations(version):
    apart(2, graphs_live_on, version)


@on_gpus(2)
def test_a_barrier_waits_for_the_streams_of_all_ranks(world):
    tensor = ones()
    dist.all_reduce(tensor)
    device = torch.cuda.current_device()
    for arguments in ({}, {"device_ids": [device]}):
        torch.cuda.synchronize()
        torch.cuda._sleep(50_000_000 * (1 + dist.get_rank()))
        event = torch.cuda.Event()
        event.record()
        dist.barrier(**arguments)
        assert event.query()
        work = dist.barrier(async_op=True, **arguments)
        work.wait()


@on_gpus(2)
def test_a_wrong_argument_leaves_the_group_as_it_was(world):
    tensor = ones()
    dist.all_reduce(tensor)
    with pytest.raises((ValueError, RuntimeError)):
        dist.all_gather_into_tensor(torch.empty(7, device="cuda"), tensor)
    dist.all_reduce(tensor)
    assert (tensor.cpu() == world**2).all()


# ---------------------------------------------------------------- memory


def peak(body):
    """How many bytes more than before `body` has at most, called a second time."""
    for _ in range(2):
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        body()
        torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("how", ("work", "functional"))
@on_gpus(2)
def test_the_result_of_an_operation_lives_as_long_as_its_users(world, how):
    part = ones(MIB // 4)

    def gather():
        for _ in range(12):
            if how == "functional":
                functional.wait_tensor(functional.all_gather_tensor(part, 0, dist.group.WORLD))
                continue
            output = torch.empty(world * part.numel(), device="cuda")
            work = dist.all_gather_into_tensor(output, part, async_op=True)
            work.wait()
            del work, output

    assert peak(gather) <= 2 * world * MIB


@on_gpus(2, groups=("torchcomms",))
def test_a_temporary_is_not_used_again_while_another_stream_waits(world):
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    for _ in range(3):
        base = torch.ones(64, 32, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(first):
            torch.cuda._sleep(5_000_000)
            work = dist.all_reduce(base.t(), async_op=True)  # of a copy, since it has gaps
        with torch.cuda.stream(second):
            work.wait()
        with torch.cuda.stream(first):
            torch.empty(64 * 32, device="cuda").fill_(100)
        torch.cuda.synchronize()
        assert (base.cpu() == world).all()


# ---------------------------------------------------------------- the device


def operations_and_the_monitor(port, prefix, world):
    emulated_group.torchcomms(port, prefix, world, 30)
    tensor = ones()
    for _ in range(3):
        dist.all_reduce(tensor)
        dist.all_reduce(tensor, async_op=True).wait()
    torch.cuda.synchronize()
    work = dist.all_reduce(tensor, async_op=True)
    wait_for(work.get_future_result().done)
    assert set(emulated.contexts()) == {torch.cuda.current_device()}


def test_operations_and_the_monitor_make_no_context_elsewhere():
    apart(2, operations_and_the_monitor)  # contexts stay as long as their process


@on_gpus(1, groups=("torchcomms",))
def test_an_operation_takes_few_calls_of_cuda(world):
    tensor = ones()

    def calls(body, times=20):
        futures = [dist.all_reduce(tensor, async_op=True).get_future_result() for _ in range(50)]
        wait_for(lambda: all(future.done() for future in futures))  # their events are used again
        with emulated.counted() as counts:
            for _ in range(times):
                body()
        main = {name: count for name, count in counts["main"].items() if name != "cudaGetDevice"}
        return sum(main.values()) / times

    assert calls(lambda: dist.all_reduce(tensor)) <= 1
    assert calls(lambda: dist.all_reduce(tensor, async_op=True).wait()) <= 4
    with torch.cuda.stream(torch.cuda.Stream()):  # which might be captured: that is asked
        assert calls(lambda: dist.all_reduce(tensor)) <= 2
        assert calls(lambda: dist.all_reduce(tensor, async_op=True).wait()) <= 5


def a_deadline_behind_the_driver(port, prefix, world):
    emulated_group.torchcomms(port, prefix, world, 30)
    store = dist.distributed_c10d._get_default_store()
    on_gpu, on_cpu = ones(), torch.ones(4)
    dist.all_reduce(on_gpu)
    torch.cuda.synchronize()
    torchcomms_pg.get_comm().set_timeout(datetime.timedelta(seconds=3))
    if dist.get_rank() == 1:
        store.wait(["rank 0 has seen it"])
        return
    held = dist.all_reduce(on_gpu, async_op=True)
    with emulated.hold_driver() as waiters:
        assert ranks.wait_for(waiters, 20)
        with pytest.raises(torchcomms_pg.CommError, match="timed out.* rank 1 did not arrive"):
            dist.all_reduce(on_cpu)
    store.set("rank 0 has seen it", "")
    del held


def test_a_deadline_is_kept_while_the_driver_holds_up_whoever_asks_for_events():
    apart(2, a_deadline_behind_the_driver)


def a_deadline_behind_a_kernel(port, prefix, world):
    emulated_group.torchcomms(port, prefix, world, 30)
    tensor = ones()
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    torchcomms_pg.get_comm(device="cuda").set_timeout(datetime.timedelta(seconds=6))
    dist.barrier()  # both are here
    with emulated.hold():
        dist.all_reduce(tensor, async_op=True)
        assert ranks.wait_for(torchcomms_pg.get_comm(device="cuda").is_aborted, 30)
        with pytest.raises(torchcomms_pg.CommError) as raised:
            dist.all_reduce(tensor)
    # A rank that was held up for longer than its answer is waited for is not accused either.
    known = "all ranks have queued|did not answer, so that nobody knows whether it has queued"
    assert re.search(f"({known}) all_reduce #3", str(raised.value)), raised.value
    assert "arrived" not in str(raised.value)


def test_nobody_is_said_to_have_arrived_whose_stream_has_not():
    apart(2, a_deadline_behind_a_kernel)


# ---------------------------------------------------------------- bad input


@on_gpus(1, groups=("torchcomms",))
def test_tensors_of_several_devices_in_one_call_are_refused_with_nothing_issued(world):
    here, elsewhere, cpu = ones(), torch.ones(1000, device="cuda:1"), torch.ones(1000)
    dist.all_reduce(here)
    backend = dist.group.WORLD._get_backend(here.device)
    before = backend._get_sequence_number_for_group()
    for other in (elsewhere, cpu):
        for call in (
            lambda: dist.all_gather([other], here),
            lambda: dist.all_gather_into_tensor(other, here),
            lambda: dist.reduce_scatter_tensor(other, here),
            lambda: dist.all_to_all([other], [here]),
            lambda: dist.all_to_all_single(other, here),
            lambda: dist.scatter(here, [other], 0),
            lambda: dist.gather(here, [other], 0),
        ):
            with pytest.raises(ValueError, match=rf"is on {other.device}, wanted cuda:0; move it "):
                call()
        comm = torchcomms_pg.get_comm(device=here.device)
        with pytest.raises(ValueError, match=rf"tensor is on {other.device}, wanted cuda:0"):
            comm.all_reduce(other, torchcomms_pg.ReduceOp.SUM, False)
    assert backend._get_sequence_number_for_group() == before


def capture_first(port, prefix, world):
    emulated_group.torchcomms(port, prefix, world, 30)
    tensor, graph = ones(), torch.cuda.CUDAGraph()
    with pytest.raises(
        RuntimeError, match="no connections for cuda:0 yet, .* being captured; run "
    ):
        with torch.cuda.graph(graph):
            dist.all_reduce(tensor)
    dist.all_reduce(tensor)
    assert (tensor == world).all()


def test_a_capture_before_the_first_operation_is_refused_and_the_group_stands():
    apart(1, capture_first)
