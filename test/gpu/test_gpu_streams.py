"""The place of an operation among what is queued on a GPU, and what it costs the host."""

import gc

import pytest
import torch
import torch.distributed as dist

import emulated
from harness import gpus, ranks, streams
from harness.catalogue import LAYOUTS
from harness.gpus import on_gpus, on_ours
from harness.values import all_data, assert_same

if reason := gpus.missing():
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.torch_version

LENGTH = 10_000
MIB = 2**20


def connect(world):
    """NCCL connects, and CUDA loads kernels, at the first use, and may wait for streams then."""
    warm = torch.full((LENGTH,), 1.0, device="cuda").fill_(2).add_(1)
    for layout in LAYOUTS:
        gpus.empty((100, 10), layout=layout).copy_(warm[:1000].view(100, 10)).contiguous()
    dist.all_reduce(warm)
    dist.all_gather_into_tensor(torch.empty(world * LENGTH, device="cuda"), warm * 10)
    torch.cuda.synchronize()


@pytest.mark.parametrize("async_op", (False, True), ids=("sync", "async"))
@on_gpus(1, 2)
def test_an_operation_comes_after_what_its_stream_has_queued(world, async_op):
    connect(world)
    values = torch.ones(LENGTH, device="cuda")
    torch.cuda.synchronize()
    with streams.hold():
        values.add_(dist.get_rank())
        work = dist.all_reduce(values, async_op=async_op)
        gpus.settle()
        assert not torch.cuda.current_stream().query()
        assert work is None or not work.is_completed()
    if work is not None:
        work.wait()
    assert (values.cpu() == world * (world + 1) / 2).all()


def assert_in_order_of_issue(peer, rank):
    """A batch is issued in two streams, of which one is held up, and ended in the other."""
    side = torch.cuda.Stream()
    sent, got = (torch.zeros(LENGTH, device="cuda") for _ in range(2))
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, got, peer)]
    ):
        work.wait()  # NCCL connects the two ranks
    torch.cuda.synchronize()
    with streams.hold(side):
        device = gpus.current_device()
        with dist._coalescing_manager(device=device, async_ops=True) as batch:
            with torch.cuda.stream(side):
                sent.fill_(rank + 1)
                dist.isend(sent, peer)
            dist.irecv(got, peer)
        if not gpus.over_nccl():  # after which these streams go on
            with torch.cuda.stream(side):
                sent.fill_(-1)
        gpus.settle()
    batch.wait()
    assert (got.cpu() == peer + 1).all()


@on_gpus(1, 2, groups=("nccl-legacy", "torchcomms"))  # nccl of torch 2.15 takes one stream's
def test_a_batch_comes_after_what_each_stream_has_queued_in_which_it_was_issued(world):
    connect(world)
    rank = dist.get_rank()
    assert_in_order_of_issue((rank + 1) % world, rank)


@gpus.on_own_ranks(1)
def test_messages_to_itself_come_after_what_their_streams_have_queued(port, prefix, world):
    gpus.torchcomms(port, prefix, world, 30)
    assert_in_order_of_issue(0, 0)  # a copy: the group has no communicator


@on_gpus(1, 2)
def test_after_waiting_the_current_stream_waits_and_the_host_does_not(world):
    connect(world)
    current, other = torch.cuda.current_stream(), torch.cuda.Stream()
    inputs = all_data(world, LENGTH)
    tensor = inputs[dist.get_rank()].cuda()
    output = torch.full((world * LENGTH,), -7.0, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(other), streams.hold():
        work = dist.all_gather_into_tensor(output, tensor, async_op=True)
        with torch.cuda.stream(current):
            work.wait()  # returns, although the other stream is held
            after = output * 2
            gpus.settle()
            assert not current.query(), "the current stream did not wait"
    assert_same(after.cpu(), torch.cat(inputs) * 2)


@pytest.mark.parametrize("layout", ("contiguous", "strided"))
@on_ours(1, 2)  # torch's nccl refuses tensors with gaps
def test_memory_that_an_operation_still_uses_is_given_to_nobody(world, layout):
    connect(world)
    current, other = torch.cuda.current_stream(), torch.cuda.Stream()
    inputs = all_data(world, (LENGTH, 1))
    mine = gpus.place(inputs[dist.get_rank()], layout)
    first = torch.zeros(1, device="cuda")
    output = torch.empty(world * LENGTH, 1, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(other), streams.hold():
        works = [dist.all_reduce(first, async_op=True)]  # holds up what comes after it
        with torch.cuda.stream(current):
            works.append(dist.all_gather_into_tensor(output, mine, async_op=True))
            del mine
            reused = [torch.full((LENGTH,), -7.0, device="cuda") for _ in range(20)]
            current.synchronize()
            gpus.settle()
            assert not any(work.is_completed() for work in works)
    for work in works:
        work.wait()
    assert_same(output.cpu(), torch.cat(inputs))
    del reused


@on_ours(2)
def test_memory_of_an_operation_that_raises_is_given_to_nobody_before_it_has_run(world):
    """The library fills a buffer, and the reduction that follows finds no memory."""
    connect(world)
    current, other = torch.cuda.current_stream(), torch.cuda.Stream()
    first = torch.zeros(1, device="cuda")
    values = torch.ones(16 * MIB, dtype=torch.int16, device="cuda")  # NCCL has no such type
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    room = torch.cuda.memory_reserved() + world * values.nbytes + values.nbytes // 2
    torch.cuda.set_per_process_memory_fraction(room / torch.cuda.mem_get_info()[1])
    try:
        with torch.cuda.stream(other), streams.hold():
            dist.all_reduce(first, async_op=True)  # holds up what comes after it
            with torch.cuda.stream(current):
                with pytest.raises(torch.OutOfMemoryError):
                    dist.all_reduce(values, op=dist.ReduceOp.MAX, async_op=True)
                reused = torch.full((world * 16 * MIB,), 7, dtype=torch.int16, device="cuda")
                gpus.settle()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.synchronize()
    assert (reused.cpu() == 7).all()


@pytest.mark.skipif(gpus.EMULATED, reason="the emulated CUDA does not sort sparse tensors' indices")
@on_ours(1, 2)
def test_after_waiting_for_a_sparse_sum_the_current_stream_waits(world):
    connect(world)
    other = torch.cuda.Stream()
    tensor = torch.eye(100, device="cuda").to_sparse()
    torch.cuda.synchronize()
    work = dist.all_reduce(tensor, async_op=True)
    with torch.cuda.stream(other):
        work.wait()
        total = tensor.to_dense()
    assert (total.cpu() == world * torch.eye(100)).all()


@on_ours(2)
def test_a_temporary_is_not_used_again_while_another_stream_waits(world):
    connect(world)
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    for _ in range(3):
        base = torch.ones(64, 32, device="cuda")
        torch.cuda.synchronize()
        with streams.hold(first):
            with torch.cuda.stream(first):
                work = dist.all_reduce(base.t(), async_op=True)  # of a copy, since it has gaps
            with torch.cuda.stream(second):
                work.wait()
            with torch.cuda.stream(first):
                torch.empty(64 * 32, device="cuda").fill_(100)
        torch.cuda.synchronize()
        assert (base.cpu() == world).all()


@on_ours(1)
def test_a_future_holds_up_no_stream_of_the_user(world):
    connect(world)
    tensor = torch.ones(LENGTH, device="cuda")
    torch.cuda.synchronize()
    with streams.hold():
        future = dist.all_reduce(tensor, async_op=True).get_future()
        done = future.then(lambda future: future.value()[0] * 2)
        # torch has 32, which it hands out in turn.
        busy = [stream for stream in (torch.cuda.Stream() for _ in range(32)) if not stream.query()]
        assert len(busy) <= 2, busy
    assert (done.wait().cpu() == 2).all()


@gpus.on_own_ranks(1, 2)
def test_an_operation_that_has_completed_has_a_duration(port, prefix, world):
    """At once, and not when the thread has come by that looks for ends."""
    gpus.torchcomms(port, prefix, world, 30)
    dist.group.WORLD._get_backend(gpus.current_device())._enable_collectives_timing()
    tensor = torch.ones(LENGTH, device="cuda")
    for _ in range(20):
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        torch.cuda.synchronize()
        assert work.is_completed() and work._get_duration() >= 0
    with streams.hold():
        work = dist.all_reduce(tensor, async_op=True)
        with pytest.raises(RuntimeError, match="the duration is known when the operation has fin"):
            work._get_duration()


# ---------------------------------------------------------------- what it costs the host


@gpus.emulated_only
@gpus.on_own_ranks(2)  # contexts stay as long as their process
def test_operations_and_the_monitor_make_no_context_elsewhere(port, prefix, world):
    gpus.torchcomms(port, prefix, world, 30)
    tensor = torch.ones(1000, device="cuda")
    for _ in range(3):
        dist.all_reduce(tensor)
        dist.all_reduce(tensor, async_op=True).wait()
    torch.cuda.synchronize()
    work = dist.all_reduce(tensor, async_op=True)
    assert ranks.wait_for(work.get_future_result().done, 20)
    assert set(emulated.contexts()) == {torch.cuda.current_device()}


@gpus.emulated_only
@on_ours(1)
def test_an_operation_takes_few_calls_of_cuda(world):
    tensor = torch.ones(1000, device="cuda")

    def calls(body, times=20):
        futures = [dist.all_reduce(tensor, async_op=True).get_future_result() for _ in range(50)]
        # Their events are used again.
        assert ranks.wait_for(lambda: all(future.done() for future in futures), 20)
        gc.collect()  # what it frees would be counted
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


@gpus.emulated_only
@on_ours(1)
def test_of_what_waits_in_a_stream_the_oldest_alone_is_asked_for(world):
    connect(world)
    tensor = torch.ones(1000, device="cuda")
    with streams.hold():
        works = [dist.all_reduce(tensor, async_op=True) for _ in range(300)]
        looks = ranks.woken("tcpg_events") + 10
        with emulated.counted() as calls:
            assert ranks.wait_for(lambda: ranks.woken("tcpg_events") >= looks, 20)
        assert 0 < calls["tcpg_events"]["cudaEventQuery"] <= 100, calls
    for work in works:
        work.wait()
