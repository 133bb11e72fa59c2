"""Collectives in CUDA graphs: captured, replayed, and ended in any order."""

import concurrent.futures
import contextlib
import ctypes
import gc
import pathlib
import time

import pytest
import torch
import torch.distributed as dist

import emulated
import torchcomms_pg
from api import test_spec_examples
from harness import gpus, ranks, streams
from harness.gpus import on_gpus, on_ours
from harness.values import all_data, assert_reduced, assert_same

if reason := gpus.missing():
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.torch_version

MIB = 2**20
MODES = ("global", "thread_local", "relaxed")
LENGTH = 1000
BOUND = 20.0  # seconds for what must not hang

modes = pytest.mark.parametrize("mode", MODES)


@contextlib.contextmanager
def capture(mode="global"):
    """Captures a graph in the current stream of the block; gives the graph."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        yield graph


class Way:
    """How an operation in a capture is waited for."""

    def __init__(self, how):
        self.how = how

    def __call__(self, collective, *args):
        work = collective(*args, async_op=self.how != "sync")
        # Of torch 2.11 these futures fail but on the root.
        if self.how == "future" and not gpus.by_root_over_nccl(collective.__name__):
            work.get_future().wait()
        elif self.how != "sync":
            work.wait()


def bodies(world, issue):
    """What is captured, of a tensor of (world, LENGTH), and what holds for its result on a rank."""
    rank, last = dist.get_rank(), world - 1

    def all_reduce(tensor):
        result = tensor * 2
        issue(dist.all_reduce, result)
        return result + 1

    def broadcast(tensor):
        result = tensor.clone()
        issue(dist.broadcast, result, last)
        return result

    def reduce(tensor):
        result = tensor.clone()
        issue(dist.reduce, result, last)
        return result if rank == last else tensor.new_zeros(())

    def all_gather_into_tensor(tensor):
        result = tensor.new_empty(world * world, LENGTH)
        issue(dist.all_gather_into_tensor, result, tensor)
        return result

    def all_gather(tensor):
        results = [torch.empty_like(tensor) for _ in range(world)]
        issue(dist.all_gather, results, tensor)
        return torch.cat(results)

    def gather(tensor):
        results = [torch.empty_like(tensor) for _ in range(world)] if rank == last else None
        issue(dist.gather, tensor, results, last)
        return torch.cat(results) if rank == last else tensor.new_zeros(())

    def reduce_scatter_tensor(tensor):
        result = tensor.new_empty(1, LENGTH)
        issue(dist.reduce_scatter_tensor, result, tensor)
        return result

    def reduce_scatter(tensor):
        result = tensor.new_empty(LENGTH)
        issue(dist.reduce_scatter, result, list(tensor))
        return result

    def scatter(tensor):
        result = tensor.new_empty(LENGTH)
        issue(dist.scatter, result, list(tensor) if rank == last else None, last)
        return result

    def all_to_all_single(tensor):
        result = torch.empty_like(tensor)
        issue(dist.all_to_all_single, result, tensor)
        return result

    def all_to_all(tensor):
        results = [tensor.new_empty(LENGTH) for _ in range(world)]
        issue(dist.all_to_all, results, list(tensor))
        return torch.stack(results)

    def coalesced(tensor):
        results = [tensor + k for k in range(2)]
        later = issue.how != "sync"
        with dist._coalescing_manager(device=tensor.device, async_ops=later) as manager:
            for result in results:
                dist.all_reduce(result)
        if later:
            manager.wait()
        return sum(results)

    def messages(tensor):
        if world == 1:
            return tensor.new_zeros(())
        result = torch.empty_like(tensor)
        operations = [
            dist.P2POp(dist.isend, tensor, (rank + 1) % world),
            dist.P2POp(dist.irecv, result, (rank - 1) % world),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return result

    def close(got, wanted):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)

    def on(ranks, got, check):
        """Checks the result, which the other ranks do not have."""
        return check() if rank in ranks else close(got, torch.zeros(()))

    yield all_reduce, lambda got, x: close(got, 2 * sum(x) + 1)
    yield broadcast, lambda got, x: assert_same(got, x[last])
    yield reduce, lambda got, x: on([last], got, lambda: close(got, sum(x)))
    yield all_gather_into_tensor, lambda got, x: assert_same(got, torch.cat(x))
    yield all_gather, lambda got, x: assert_same(got, torch.cat(x))
    yield gather, lambda got, x: on([last], got, lambda: assert_same(got, torch.cat(x)))
    yield reduce_scatter_tensor, lambda got, x: close(got, sum(x)[rank : rank + 1])
    yield reduce_scatter, lambda got, x: close(got, sum(x)[rank])
    yield scatter, lambda got, x: assert_same(got, x[last][rank])
    yield all_to_all_single, lambda got, x: assert_same(got, torch.stack([y[rank] for y in x]))
    yield all_to_all, lambda got, x: assert_same(got, torch.stack([y[rank] for y in x]))
    yield coalesced, lambda got, x: close(got, 2 * sum(x) + world)
    yield (
        messages,
        lambda got, x: on(
            range(world) if world > 1 else (), got, lambda: assert_same(got, x[rank - 1])
        ),
    )


def replay(world, body, assert_right, mode):
    """Captures a body, and replays it with new inputs."""
    inputs = [all_data(world, (world, LENGTH), salt=salt) for salt in range(3)]
    tensor = inputs[0][dist.get_rank()].cuda()
    body(tensor)  # NCCL connects at the first operation
    with capture(mode) as graph:
        result = body(tensor)
    for values in inputs:
        tensor.copy_(values[dist.get_rank()])
        graph.replay()
        try:
            assert_right(result.cpu(), values)
        except AssertionError as error:
            raise AssertionError(f"{body.__name__}: {error}") from error
    torch.cuda.synchronize()


@pytest.mark.product
@modes
@pytest.mark.parametrize("how", ("sync", "async", "future"))
@on_gpus(1, 2)
def test_collectives_run_with_each_replay(world, mode, how):
    for body, assert_right in bodies(world, Way(how)):
        replay(world, body, assert_right, mode)


@on_ours(1, 2)  # torch's nccl refuses tensors with gaps
def test_collectives_with_temporary_buffers_run_with_each_replay(world):
    def strided(tensor):
        result = torch.empty(tensor.shape[::-1], device="cuda").t().copy_(tensor)
        dist.all_reduce(result)
        return result

    replay(world, strided, assert_reduced, "global")


def await_looks():
    """Until another thread has asked several times whether an operation has ended."""
    if not gpus.EMULATED:
        time.sleep(0.12)  # longer than the time between two looks, of which CUDA tells nobody
        return

    def looks():
        return sum(
            each["cudaEventQuery"] for thread, each in emulated.calls().items() if thread != "main"
        )

    with emulated.counted():
        assert ranks.wait_for(lambda: looks() >= 3, BOUND)


@modes
@on_gpus(1)
def test_a_capture_beside_an_operation_in_flight_is_not_disturbed(world, mode):
    tensor, graph = torch.ones(LENGTH, device="cuda"), torch.cuda.CUDAGraph()
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()), streams.hold():
        dist.all_reduce(torch.ones(LENGTH, device="cuda"), async_op=True)
        with torch.cuda.stream(torch.cuda.Stream()):
            graph.capture_begin(capture_error_mode=mode)
            result = tensor + 1
            await_looks()
            more = torch.empty(MIB, device="cuda").fill_(2)
            graph.capture_end()
    graph.replay()
    assert result.cpu()[0] == 2 and more.cpu()[0] == 2


@contextlib.contextmanager
def captured_beside(stream):
    """Captures a graph in the stream, in the mode that forbids most calls to all threads."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        graph.capture_begin()
    yield graph
    with torch.cuda.stream(stream):
        graph.capture_end()


@gpus.on_own_ranks(1, 2)
def test_a_group_that_connects_its_gpus_disturbs_no_capture(port, prefix, world):
    gpus.take_device(world)
    device, values = gpus.current_device(), torch.ones(LENGTH, device="cuda")
    streams = [torch.cuda.Stream() for _ in range(2)]  # torch makes all of them now
    with captured_beside(streams[0]) as graph:
        gpus.torchcomms(port, prefix, world, 30, device_id=device)
        backend = dist.group.WORLD._get_backend(device)
        assert ranks.wait_for(backend._is_initialized, BOUND)
        with torch.cuda.stream(streams[0]):
            result = values * 2
            dist.all_reduce(result)
    graph.replay()
    assert (result.cpu() == 2 * world).all()
    del graph


def in_relaxed_thread(call):
    """Calls in a thread to which no capture of another thread forbids anything.

    CUDA refuses to destroy a graph where a capture forbids unsafe calls, and invalidates the
    capture (Runtime API, cudaThreadExchangeStreamCaptureMode).
    """

    def body():
        relaxed = ctypes.c_int(2)
        assert ctypes.CDLL(None).cudaThreadExchangeStreamCaptureMode(ctypes.byref(relaxed)) == 0
        call()

    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        thread.submit(body).result()


@gpus.on_own_ranks(1)
def test_a_group_that_ends_with_its_last_graph_disturbs_no_capture(port, prefix, world):
    gpus.torchcomms(port, prefix, world, 30)
    group = dist.new_group()
    values = torch.ones(LENGTH, device="cuda")
    dist.all_reduce(values)
    before = ranks.thread_names().count("tcpg_nccl")  # NCCL's own threads have the name, too
    dist.all_reduce(values, group=group)
    with capture() as graph:
        dist.all_reduce(values, group=group)
    dist.destroy_process_group(group)  # its end waits for the graph, in a thread of its own
    with captured_beside(torch.cuda.Stream()) as other:
        in_relaxed_thread(graph.reset)
        assert ranks.wait_for(lambda: ranks.thread_names().count("tcpg_nccl") == before, BOUND)
    other.replay()
    dist.all_reduce(values)
    torch.cuda.synchronize()


def threads():
    """Those of this process that are not the device's, which stay."""
    found = set()
    for path in pathlib.Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it has just ended
            if not path.read_text().startswith(("gpu", "cuda")):
                found.add(path.parent.name)
    return found


@gpus.on_own_ranks(2)
def test_a_graph_outlives_its_group_that_has_failed(port, prefix, world):
    gpus.torchcomms(port, f"{prefix}/first", world, 30)
    store = ranks.connect_store(port, f"{prefix}/beside")
    values = torch.ones(LENGTH, device="cuda")
    dist.all_reduce(values)
    with capture() as graph:
        dist.all_reduce(values)
    graph.replay()
    torch.cuda.synchronize()
    ranks.meet(store, "replayed", world)
    before = threads()
    dist.distributed_c10d._abort_process_group()
    # A communicator that does not wait for its graphs is ended by a thread of its own.
    assert ranks.wait_for(lambda: not threads() - before, BOUND), ranks.thread_names()
    graph.reset()
    gc.collect()
    torch.cuda.synchronize()
    gpus.torchcomms(port, f"{prefix}/second", world, 30)
    dist.all_reduce(values.fill_(1))
    assert (values.cpu() == world).all()
    dist.destroy_process_group()


@gpus.emulated_only  # a kernel that waits for ever keeps a GPU busy
@gpus.on_own_ranks(2)
def test_a_failure_says_of_graphs_what_their_replays_would_do(port, prefix, world):
    """Which nobody sees: they wait, and the host and the other streams go on."""
    gpus.torchcomms(port, f"{prefix}/first", world, 30)
    store = ranks.connect_store(port, f"{prefix}/beside")
    values, eager = torch.ones(LENGTH, device="cuda"), dist.new_group()
    for group in (None, eager):
        dist.all_reduce(values, group=group)
    with capture() as graph:
        dist.all_reduce(values)
    torch.cuda.synchronize()
    ranks.meet(store, "captured", world)
    for group, said in ((dist.group.WORLD, True), (eager, False)):
        group._get_backend(gpus.current_device()).abort()
        with pytest.raises(torchcomms_pg.CommError) as raised:
            dist.all_reduce(values, group=group)
        assert ("a replay of which may wait for ever" in str(raised.value)) == said
    if dist.get_rank() != 0:
        store.wait(["replayed"])
        return
    # abort() returns before NCCL has revoked, which ends what has been launched until then.
    assert ranks.wait_for(lambda: emulated.revocations() == 2, BOUND)
    with ranks.time_limit(0, BOUND, "the replay"):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            graph.replay()
        (torch.ones(LENGTH, device="cuda") * 2).cpu()
        assert ranks.wait_for(lambda: stream.query() or emulated.kernels_spinning(), BOUND)
        assert not stream.query()
    store.set("replayed", "")


@on_gpus(2)
def test_waiting_joins_the_streams_of_a_capture(world):
    tensor, side = torch.ones(LENGTH, device="cuda"), torch.cuda.Stream()
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


@on_gpus(2)
def test_what_follows_an_asynchronous_operation_runs_beside_it_in_a_replay(world):
    """As the rest of a captured step does beside the reduction of its gradients."""
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    values, one = torch.ones(LENGTH, device="cuda"), torch.ones(1, device="cuda")
    seen = torch.zeros(1, pin_memory=True)
    dist.all_reduce(values)
    with capture() as graph:
        work = dist.all_reduce(values, async_op=True)
        seen.copy_(one, non_blocking=True)
        work.wait()
        result = values + 1
    values.fill_(1)
    torch.cuda.synchronize()
    try:
        if rank == 0:
            graph.replay()
            # The other rank replays after this, so that the reduction has not ended.
            assert ranks.wait_for(lambda: seen.item() == 1, BOUND), "it waits for the reduction"
        else:
            store.wait(["looked"])
    finally:
        if rank == 0:
            store.set("looked", "")
    if rank != 0:
        graph.replay()
    assert (result.cpu() == world + 1).all()
    if rank == 0:
        store.delete_key("looked")


@pytest.mark.parametrize("kept", ("work", "future", "nothing"))
@on_ours(1, 2)
def test_memory_that_an_operation_of_a_graph_still_uses_is_given_to_nobody(world, kept):
    inputs = all_data(world, LENGTH)
    mine, output = inputs[dist.get_rank()].cuda(), torch.empty(world * LENGTH, device="cuda")
    dist.all_gather_into_tensor(output, mine)
    with capture() as graph:
        sent = mine * 1
        waited = dist.all_gather_into_tensor(output, sent, async_op=True)
        if kept != "work":
            waited = waited.get_future() if kept == "future" else None
        del sent
        # Would be written while the operation reads, if its memory were that of `sent`.
        others = [torch.full((LENGTH,), -7.0, device="cuda") for _ in range(8)]
        if waited is not None:
            waited.wait()
        result = output * 2
    for _ in range(3):
        graph.replay()
        assert_same(result.cpu(), 2 * torch.cat(inputs))
    del others


@on_ours(1, 2)
def test_a_graph_waits_for_what_nobody_waits_for(world):
    values = torch.ones(LENGTH, device="cuda")
    dist.all_reduce(values)
    with capture() as graph:
        dist.all_reduce(values, async_op=True)
        result = values + 1
    for _ in range(2):
        values.fill_(1)
        graph.replay()
        assert (result.cpu() == world + 1).all()


@on_ours(2)
def test_what_a_thread_issues_while_another_one_captures_is_not_in_the_graph(world):
    captured, eager = (torch.ones(LENGTH, device="cuda") for _ in range(2))
    dist.all_reduce(captured)

    def issue():
        with torch.cuda.stream(torch.cuda.Stream()):
            dist.all_reduce(eager, async_op=True).wait()
            torch.cuda.current_stream().synchronize()

    with concurrent.futures.ThreadPoolExecutor(1) as thread, capture("thread_local") as graph:
        work = dist.all_reduce(captured, async_op=True)
        thread.submit(issue).result()
        work.wait()
    captured.fill_(1)
    for _ in range(2):
        graph.replay()
    assert (captured.cpu() == world**2).all() and (eager.cpu() == world).all()


@on_gpus(1, 2)
def test_graphs_of_one_group_are_replayed_in_turn_with_operations_between(world):
    tensors = [torch.zeros(LENGTH, device="cuda") for _ in range(3)]
    dist.all_reduce(tensors[0])
    graphs = []
    for tensor in tensors[:2]:
        with capture("thread_local") as graph:
            dist.all_reduce(tensor.add_(1))
        graphs.append(graph)
    counts = [0.0, 0.0, 0.0]
    for turn in (0, 1, 1, 2, 0, 2, 1, 0):
        if turn < 2:
            graphs[turn].replay()
        else:
            dist.all_reduce(tensors[2].add_(1), async_op=True).wait()
        counts[turn] = (counts[turn] + 1) * world
    for tensor, count in zip(tensors, counts):
        assert (tensor.cpu() == count).all(), f"got {tensor[:4].cpu()}, expected {count}"


@on_ours(2)
def test_the_documents_example_of_graphs_runs(world):
    if torch.cuda.device_count() < world:
        pytest.skip("needs a GPU for each rank")
    test_spec_examples.cuda_graphs(world)


def a_graph_and_its_group_end(port, prefix, world, first):
    gpus.torchcomms(port, prefix, world, 30)
    tensor = torch.ones(LENGTH, device="cuda")
    dist.all_reduce(tensor)
    with capture() as graph:
        dist.all_reduce(tensor)
    tensor.fill_(1)
    graph.replay()
    assert (tensor.cpu() == world).all()

    def end_graph():
        nonlocal graph
        if first == "group":  # NCCL frees a communicator when its graphs have gone
            tensor.fill_(1)
            graph.replay()
            assert (tensor.cpu() == world).all()
        graph = None
        gc.collect()
        torch.cuda.synchronize()

    for end in (end_graph, dist.destroy_process_group)[:: 1 if first == "graph" else -1]:
        with ranks.time_limit(0, BOUND, end.__name__):
            end()


@pytest.mark.parametrize("first", ("graph", "group"))
@gpus.by_version
def test_a_group_and_its_graph_end_in_any_order(version, first):
    gpus.apart(2, a_graph_and_its_group_end, first, env=gpus.nccl_environment(version))


def capture_first(port, prefix, world):
    gpus.torchcomms(port, prefix, world, 30)
    tensor = torch.ones(LENGTH, device="cuda")
    for first in (lambda: dist.all_reduce(tensor), dist.barrier):
        with pytest.raises(
            RuntimeError, match="no connections for cuda:0 yet, .* being captured; run "
        ):
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                first()
    dist.all_reduce(tensor)
    assert (tensor == world).all()


def test_a_capture_before_the_first_operation_is_refused_and_the_group_stands():
    gpus.apart(1, capture_first)
