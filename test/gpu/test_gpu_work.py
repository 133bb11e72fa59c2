"""What a program does with Works, futures and gradients on GPUs, over torch's nccl as over ours."""

import gc
import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional

import emulated
from harness import gpus, ranks, streams
from harness.gpus import on_gpus
from harness.values import assert_same, data

if reason := gpus.missing():
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.torch_version

LENGTH = 1000


def ones():
    return torch.ones(LENGTH, device="cuda")


def assert_ended(work, count):
    """It says so in each way that a Work has, with `count` results, and as often as it is asked."""
    for _ in range(2):
        work.wait()
        work.wait(torch.distributed.constants.default_pg_timeout)
        torch.cuda.synchronize()
        assert work.is_completed()
        assert len(work.result()) == count
    work.synchronize()
    assert work.get_future().done()


@on_gpus(2)
def test_a_work_tells_its_end_and_its_results(world):
    rank, tensor = dist.get_rank(), ones()
    dist.all_reduce(tensor)  # NCCL connects, and may wait for streams meanwhile
    torch.cuda.synchronize()
    with streams.hold():
        work = dist.all_reduce(tensor, async_op=True)
        assert not work.is_completed()
        assert not work.get_future_result().done()
    assert_ended(work, 1)
    assert work.result()[0].data_ptr() == tensor.data_ptr()
    assert work.get_future_result().wait() == 0  # WorkResult::SUCCESS

    message = dist.isend(tensor, 1) if rank == 0 else dist.irecv(tensor, 0)
    assert_ended(message, 1)
    dist.barrier(async_op=True).wait()

    with dist._coalescing_manager(device=tensor.device, async_ops=True) as coalesced:
        dist.all_reduce(tensor)
        dist.all_reduce(tensor)
    assert len(coalesced.works) == 1
    coalesced.wait()
    other, received = 1 - rank, torch.empty_like(tensor)
    batch = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, tensor, other), dist.P2POp(dist.irecv, received, other)]
    )
    assert len(batch) == 1
    batch[0].wait()
    assert torch.equal(received, tensor)


@on_gpus(1, 2)
def test_what_follows_a_future_may_wait_in_any_stream(world):
    rank, got = dist.get_rank(), []
    for round_ in range(6):
        tensor = torch.full((LENGTH,), 1.0 + rank + round_, device="cuda")
        future = dist.all_reduce(tensor, async_op=True).get_future()
        after = future.then(lambda done: done.value()[0] * 2).then(lambda done: done.value() + 1)
        with torch.cuda.stream(torch.cuda.Stream()):
            got.append((after.wait() + 1)[0].item())
    assert got == [2 * sum(1.0 + r + round_ for r in range(world)) + 2 for round_ in range(6)]
    futures = [dist.all_reduce(ones(), async_op=True).get_future() for _ in range(3)]
    assert len(torch.futures.collect_all(futures).wait()) == 3


# Each gives a rank's result for its input. What is differentiated is the sum of the squares.
def functions():
    of = torch.distributed.nn.functional
    half = LENGTH // 2

    def stacked(parts):
        return torch.stack(list(parts)).sum(0)

    def empty(count):
        return torch.empty(count, device="cuda")

    return {
        "all_reduce": lambda tensor: of.all_reduce(tensor),
        "all_gather": lambda tensor: stacked(of.all_gather(tensor)),
        "reduce_scatter": lambda tensor: of.reduce_scatter(empty(half), list(tensor.chunk(2))),
        "all_to_all": lambda tensor: stacked(
            of.all_to_all([empty(half), empty(half)], list(tensor.chunk(2)))
        ),
        "broadcast": lambda tensor: of.broadcast(tensor, 0),
    }


def plain_gradients(name):
    """Of both ranks, by the same sums in one process."""
    inputs = [data(rank, LENGTH).requires_grad_() for rank in range(2)]
    first, second = inputs
    halves = [tensor.chunk(2) for tensor in inputs]
    results = {
        "all_reduce": lambda: [first + second] * 2,
        "all_gather": lambda: [first + second] * 2,
        "reduce_scatter": lambda: [halves[0][rank] + halves[1][rank] for rank in range(2)],
        "all_to_all": lambda: [halves[0][rank] + halves[1][rank] for rank in range(2)],
        "broadcast": lambda: [first, first],
    }[name]()
    sum(result.square().sum() for result in results).backward()
    return [torch.zeros(LENGTH) if t.grad is None else t.grad for t in inputs]


@pytest.mark.parametrize(
    "name", ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
)
@on_gpus(2)
def test_gradients_flow_through_operations(world, name):
    rank = dist.get_rank()
    tensor = data(rank, LENGTH).cuda().requires_grad_()
    functions()[name](tensor).square().sum().backward()
    assert_same(tensor.grad.cpu(), plain_gradients(name)[rank], name)


@on_gpus(2)
def test_no_operation_makes_the_host_wait_for_a_stream(world):
    """As torch.cuda.set_sync_debug_mode("error") finds it, which knows of torch's own waits."""
    rank, tensor, whole = dist.get_rank(), ones(), torch.empty(world * LENGTH, device="cuda")
    parts = [torch.empty(LENGTH, device="cuda") for _ in range(world)]
    factor = torch.full((1,), 2.0, device="cuda")
    flags, halves, copies = tensor > 0, tensor.half(), [part.clone() for part in parts]

    def messages():
        ends = [dist.P2POp(dist.isend, tensor, 1 - rank), dist.P2POp(dist.irecv, whole, 1 - rank)]
        ends[1].tensor = parts[0]
        return dist.batch_isend_irecv(ends)[0].wait()

    operations = (
        lambda: dist.all_reduce(tensor),
        lambda: dist.all_reduce(tensor, op=dist._make_nccl_premul_sum(factor)),
        lambda: dist.all_reduce(tensor, op=dist._make_nccl_premul_sum(0.5)),
        lambda: dist.all_reduce(flags),
        lambda: dist.all_reduce(halves, op=dist.ReduceOp.AVG),
        lambda: dist.all_reduce(tensor, async_op=True).wait(),
        lambda: dist.all_reduce(tensor, async_op=True).get_future().wait(),
        lambda: dist.all_gather(parts, tensor),
        lambda: dist.all_gather_into_tensor(whole, tensor),
        lambda: dist.reduce_scatter(tensor, parts),
        lambda: dist.all_to_all(parts, copies),
        lambda: dist.gather(tensor, parts if rank == 0 else None),
        lambda: dist.scatter(tensor, parts if rank == 0 else None),
        messages,
    )
    for operation in operations:  # the first of each may connect
        operation()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for operation in operations:
            operation()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


@gpus.emulated_only
@on_gpus(1)
def test_events_are_used_again(world):
    tensor = ones()

    def many():
        works = [dist.all_reduce(tensor, async_op=bool(number % 3)) for number in range(200)]
        futures = [work.get_future_result() for work in works if work is not None]
        for work in works[1::2]:
            if work is not None:
                work.wait()
        torch.cuda.synchronize()
        assert ranks.wait_for(lambda: all(future.done() for future in futures), 20)

    many()
    gc.collect()
    with emulated.counted() as counts:
        many()
    calls = {}
    for thread in counts.values():
        for name, count in thread.items():
            calls[name] = calls.get(name, 0) + count
    made = calls.get("cudaEventCreateWithFlags", 0) + calls.get("cudaEventCreate", 0)
    # Of 200; the later the thread that asks for ends comes to it, the more.
    assert made - calls.get("cudaEventDestroy", 0) <= 100, calls


@on_gpus(2)
def test_groups_objects_and_forks_go_beside_each_other(world):
    rank, tensor = dist.get_rank(), torch.ones(16, device="cuda")
    groups = [dist.new_group() for _ in range(3)]
    for group in groups * 2:
        dist.all_reduce(tensor, group=group, async_op=True).wait()
    assert (tensor.cpu() == world**6).all()
    child = os.fork()
    if child == 0:
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7

    objects = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": number} for number in range(world)]
    objects = [rank]
    dist.broadcast_object_list(objects, 1, device=tensor.device)
    assert objects == [1]
    objects = [None]
    dist.scatter_object_list(objects, ["first", "second"] if rank == 0 else None, 0)
    assert objects == [["first", "second"][rank]]
    for group in reversed(groups):
        dist.destroy_process_group(group)
    dist.all_reduce(tensor)
    assert (tensor.cpu() == world**7).all()


@on_gpus(2)
def test_a_batch_has_messages_of_several_types_and_of_none(world):
    rank = dist.get_rank()
    dtypes, sizes = (torch.float32, torch.int64, torch.bfloat16, torch.float32), (4, 3, 5, 0)

    def values(of):
        return [
            (torch.arange(size) + of).to(dtype) for size, dtype in zip(sizes, dtypes, strict=True)
        ]

    other = 1 - rank
    received = [torch.full_like(value, 9).cuda() for value in values(other)]
    messages = [dist.P2POp(dist.isend, value.cuda(), other) for value in values(rank)]
    messages += [dist.P2POp(dist.irecv, value, other) for value in received]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    for got, wanted in zip(received, values(other), strict=True):
        assert torch.equal(got.cpu(), wanted)


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.full((4,), float(index))


@pytest.mark.slow
@on_gpus(2)
def test_workers_that_load_data_are_forked_beside_a_group(world):
    loader = torch.utils.data.DataLoader(Numbers(), batch_size=2, num_workers=2, pin_memory=True)
    total = 0.0
    for batch in loader:
        part = batch.cuda(non_blocking=True).sum()
        dist.all_reduce(part)
        total += part.item()
    assert total == world * 4 * sum(range(8))
