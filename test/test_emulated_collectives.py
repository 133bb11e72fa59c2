"""Collectives, streams, graphs and training on emulated CUDA: torch's nccl and torchcomms alike."""

import contextlib
import threading

import emulated
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

if reason := emulated.available():
    pytest.skip(reason, allow_module_level=True)

import test_spec_examples
from emulated_group import on_gpus

pytestmark = pytest.mark.torch_version


def of_all_ranks(world, make):
    return [make(rank) for rank in range(world)]


def reference(rank, size=12):
    return torch.arange(size, dtype=torch.float32) * (rank + 1) + rank


# ---------------------------------------------------------------- collectives


class Issue:
    """How a collective is issued and waited for."""

    def __init__(self, how):
        self.how = how
        self.side = torch.cuda.Stream() if how == "side stream" else None

    def __call__(self, collective, *args, **kwargs):
        if self.how == "sync":
            collective(*args, **kwargs)
            return
        if self.side:
            self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side) if self.side else contextlib.nullcontext():
            work = collective(*args, async_op=True, **kwargs)
        # Over torch's nccl of 2.11 the futures of these fail but on the root.
        if self.how == "future" and collective not in (dist.gather, dist.scatter):
            work.get_future().wait()
        else:
            work.wait()


def with_gaps(tensor):
    """The same values on the GPU, with others between them."""
    return torch.stack([tensor, tensor + 1], dim=-1).cuda()[..., 0]


def collect(world, how, put):
    """Every collective, of inputs that `put` brings to the GPU, beside the same on the CPU."""
    rank, issue = dist.get_rank(), Issue(how)
    inputs = of_all_ranks(world, reference)
    mine, total = put(inputs[rank]), sum(inputs)
    zeros = lambda size: torch.zeros(size, device="cuda")  # noqa: E731
    whole = inputs[rank].cuda()

    out = put(inputs[rank])
    issue(dist.all_reduce, out)
    assert torch.equal(out.cpu(), total)
    out = put(inputs[rank])
    issue(dist.broadcast, out, src=world - 1)
    assert torch.equal(out.cpu(), inputs[-1])
    out = put(inputs[rank])
    issue(dist.reduce, out, dst=0, op=dist.ReduceOp.MAX)
    assert rank != 0 or torch.equal(out.cpu(), torch.stack(inputs).amax(0))
    out = zeros(12 * world)
    issue(dist.all_gather_into_tensor, out, whole)
    assert torch.equal(out.cpu(), torch.cat(inputs))
    parts = [zeros(12) for _ in inputs]
    issue(dist.all_gather, parts, whole)
    assert all(torch.equal(part.cpu(), its) for part, its in zip(parts, inputs))
    out = zeros(12 // world)
    issue(dist.reduce_scatter_tensor, out, whole)
    assert torch.equal(out.cpu(), total.chunk(world)[rank])
    out = zeros(12)
    issue(dist.all_to_all_single, out, whole)
    assert torch.equal(out.cpu(), torch.cat([each.chunk(world)[rank] for each in inputs]))
    parts = [zeros(12) for _ in inputs]
    issue(dist.gather, mine, parts if rank == 0 else None, dst=0)
    assert rank != 0 or all(torch.equal(part.cpu(), its) for part, its in zip(parts, inputs))
    out = zeros(12)
    issue(dist.scatter, out, [each.cuda() for each in inputs] if rank == 0 else None, src=0)
    assert torch.equal(out.cpu(), inputs[rank])
    dist.barrier()


ways = pytest.mark.parametrize("how", ["sync", "async", "future", "side stream"])


@ways
@on_gpus(1, 2)
def test_collectives_are_those_of_the_cpu(world, how):
    collect(world, how, torch.Tensor.cuda)


@ways
@on_gpus(1, 2, groups=("torchcomms",))  # torch's nccl refuses them
def test_collectives_of_tensors_with_gaps_are_those_of_the_cpu(world, how):
    collect(world, how, with_gaps)


@pytest.mark.parametrize("async_ops", [False, True], ids=["sync", "async"])
@on_gpus(1, 2)
def test_coalesced_collectives_of_a_side_stream_are_those_of_the_cpu(world, async_ops):
    inputs = of_all_ranks(world, reference)
    side, device = torch.cuda.Stream(), torch.device("cuda", torch.cuda.current_device())
    with torch.cuda.stream(side):
        tensors = [(inputs[dist.get_rank()] + k).cuda() for k in range(3)]
        with dist._coalescing_manager(device=device, async_ops=async_ops) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor)
        if async_ops:
            manager.wait()
        results = [tensor.clone() for tensor in tensors]
    side.synchronize()
    for k, result in enumerate(results):
        assert torch.equal(result.cpu(), sum(inputs) + k * world)


@on_gpus(2)
def test_groups_of_several_threads_do_not_meet(world):
    rank, groups, results = dist.get_rank(), [dist.new_group() for _ in range(2)], {}
    device = torch.cuda.current_device()

    def run(number):
        torch.cuda.set_device(device)
        with torch.cuda.stream(torch.cuda.Stream()):
            values = torch.full((1000,), float(rank + number), device="cuda")
            for _ in range(10):
                dist.all_reduce(values, group=groups[number])
                values /= world
            results[number] = values.cpu()

    for group in groups:  # comes up before: torch's nccl has one thread do that
        dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    for number in range(2):
        assert (results[number] == number + 0.5).all()


@on_gpus(2, groups=("torchcomms",))  # torch's nccl keeps to the device of the first operation
def test_a_rank_has_several_devices(world):
    rank = dist.get_rank()
    for offset in range(2):
        tensor = torch.full((1000,), rank + 1.0, device=f"cuda:{(rank + offset) % 2}")
        dist.all_reduce(tensor)
        dist.all_reduce(tensor, async_op=True).wait()
        assert (tensor.cpu() == 6).all()


@on_gpus(2)
def test_messages_cross(world):
    rank = dist.get_rank()
    mine, theirs = reference(rank).cuda(), torch.zeros(12, device="cuda")
    operations = [
        dist.P2POp(dist.isend, mine, 1 - rank),
        dist.P2POp(dist.irecv, theirs, 1 - rank),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert torch.equal(theirs.cpu(), reference(1 - rank))


@on_gpus(2)
def test_a_collective_comes_after_what_its_stream_has_queued(world):
    values = torch.ones(1000, device="cuda")
    with emulated.hold():
        values.add_(dist.get_rank())
        dist.all_reduce(values)
        work = dist.all_reduce(values, async_op=True)
        assert not torch.cuda.current_stream().query() and not work.is_completed()
    work.wait()
    assert values.cpu()[0] == 6


@on_gpus(1, 2)
def test_a_graph_holds_a_collective(world):
    values = torch.ones(1000, device="cuda")
    dist.all_reduce(values)  # comes up before
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        dist.all_reduce(values)
        work = dist.all_reduce(values, async_op=True)
        work.wait()
        result = values + 1
    for _ in range(3):
        values.fill_(1)
        graph.replay()
        assert result.cpu()[0] == world * world + 1
    graph.reset()  # the communicator cannot end before
    dist.all_reduce(values)
    assert values.cpu()[0] == world**3


@on_gpus(2, groups=("torchcomms",))
def test_the_documents_example_of_graphs_runs(world):
    test_spec_examples.cuda_graphs(world)


def functional_cases(world, rank):
    """Name, what is called, and what it gives, of functional collectives on CUDA tensors."""
    group, device = dist.group.WORLD, f"cuda:{torch.cuda.current_device()}"

    def part(r, size=6):
        return torch.randn(size, generator=torch.Generator().manual_seed(r))

    mine, wide = part(rank).to(device), part(rank, 6 * world).to(device)
    parts, wides = of_all_ranks(world, part), [part(r, 6 * world) for r in range(world)]
    chunk = slice(6 * rank, 6 * rank + 6)
    yield "all_reduce", lambda: functional.all_reduce(mine, "sum", group), sum(parts)
    yield "all_gather", lambda: functional.all_gather_tensor(mine, 0, group), torch.cat(parts)
    yield (
        "reduce_scatter",
        lambda: functional.reduce_scatter_tensor(wide, "sum", 0, group),
        sum(wides)[chunk],
    )
    yield (
        "all_to_all",
        lambda: functional.all_to_all_single(wide, None, None, group),
        torch.cat([other[chunk] for other in wides]),
    )
    yield "broadcast", lambda: functional.broadcast(mine, world - 1, group), parts[world - 1]
    yield (
        "coalesced",
        lambda: functional.all_reduce_coalesced([mine, wide], "sum", group)[1],
        sum(wides),
    )


@on_gpus(2, 3)
@pytest.mark.parametrize("stream", ("current", "side"))
def test_functional_collectives_are_those_of_the_cpu(world, stream):
    for name, call, expected in functional_cases(world, dist.get_rank()):
        side = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(side if stream == "side" else torch.cuda.current_stream()):
            result = functional.wait_tensor(call()) * 2
        torch.cuda.synchronize()
        torch.testing.assert_close(result.cpu(), expected * 2, msg=lambda text: f"{name}: {text}")


@on_gpus(2)
def test_tensors_of_a_registered_pool_are_reduced(world):
    device = torch.device("cuda", torch.cuda.current_device())
    dist.all_reduce(torch.ones(1, device=device))  # the communicator is there
    backend = dist.group.WORLD._get_backend(device)
    try:
        pool = torch.cuda.MemPool(backend.mem_allocator)
    except RuntimeError as error:
        assert "allocator is not supported" in str(error)
        pytest.skip("this torch's nccl has no allocator")
    with torch.cuda.use_mem_pool(pool):
        tensor = torch.full((1000,), dist.get_rank() + 1.0, device=device)
    backend.register_mem_pool(pool)
    dist.all_reduce(tensor)
    dist.all_reduce(tensor, async_op=True).wait()
    assert (tensor.cpu() == 6).all()
    backend.deregister_mem_pool(pool)
    del tensor, pool
    torch.cuda.empty_cache()
    assert not emulated.misuses()


# ---------------------------------------------------------------- training


def a_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))


def trained(model, inputs):
    """The model after three steps on a batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    return model


def batch(rank):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))


def expected_weights(world):
    model = trained(a_model(), torch.cat(of_all_ranks(world, batch)))
    return [parameter.detach() for parameter in model.parameters()]


@on_gpus(1, 2)
def test_ddp_trains_as_one_process_does(world):
    model = torch.nn.parallel.DistributedDataParallel(a_model().cuda())
    trained(model, batch(dist.get_rank()).cuda())
    for ours, theirs in zip(model.parameters(), expected_weights(world)):
        torch.testing.assert_close(ours.detach().cpu(), theirs)


@on_gpus(1, 2)
@pytest.mark.parametrize("prefetch", (False, True), ids=("implicit", "prefetch"))
def test_fsdp2_trains_as_one_process_does(world, prefetch):
    from torch.distributed.fsdp import fully_shard

    model = a_model().cuda()
    for layer in model[0], model[2], model:
        fully_shard(layer)
    if prefetch:
        model[0].set_modules_to_forward_prefetch([model[2]])
        model[2].set_modules_to_backward_prefetch([model[0]])
    trained(model, batch(dist.get_rank()).cuda())
    for ours, theirs in zip(model.parameters(), expected_weights(world)):
        torch.testing.assert_close(ours.detach().full_tensor().cpu(), theirs)


@on_gpus(1, 2)
def test_fsdp1_trains_as_one_process_does(world):
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(a_model().cuda(), device_id=torch.cuda.current_device())
    trained(model, batch(dist.get_rank()).cuda())
    with FullyShardedDataParallel.summon_full_params(model):
        for ours, theirs in zip(model.parameters(), expected_weights(world)):
            torch.testing.assert_close(
                ours.detach().cpu().reshape(-1)[: theirs.numel()], theirs.reshape(-1)
            )
