"""Collectives of GPU tensors beside plain values: torch's nccl and torchcomms alike."""

import concurrent.futures
import contextlib

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from harness import gpus
from harness.gpus import on_gpus, on_ours
from harness.values import assert_reduced, assert_same, data

if reason := gpus.missing():
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.torch_version

WAYS = ("sync", "async", "future", "side stream")
SIZES = (0, 1, 1000, 100_003)  # rows of three


class Case(gpus.Case):
    """One call of an operation: how it is issued and waited for, and of what tensors."""

    def __init__(self, world, how, rows, layout):
        super().__init__(world, rows, layout)
        self.how = how
        self.side = torch.cuda.Stream() if how == "side stream" else None

    def __str__(self):
        return f"{self.how}, {self.rows} x 3, {self.layout}"

    def issue(self, collective, *args, **kwargs):
        if self.how == "sync":
            assert collective(*args, **kwargs) is None, "a synchronous operation returned a work"
            return
        if self.side:
            self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side) if self.side else contextlib.nullcontext():
            work = collective(*args, async_op=True, **kwargs)
        by_root = gpus.by_root_over_nccl(collective)
        if self.how == "future" and not by_root:  # of torch 2.11 they fail but on the root
            work.get_future().wait()
        else:
            work.wait()
        # torch 2.11 and 2.12 copy the root's own part in this stream, outside of the work.
        if self.side and by_root:
            torch.cuda.current_stream().wait_stream(self.side)


def joined(tensors):
    return torch.cat([tensor.cpu() for tensor in tensors])


def all_reduce(case):
    tensor = case.mine()
    case.issue(dist.all_reduce, tensor)
    assert_reduced(tensor.cpu(), case.inputs)


def broadcast(case):
    for root in range(case.world):
        tensor = case.mine()
        case.issue(dist.broadcast, tensor, src=root)
        assert_same(tensor.cpu(), case.inputs[root])


def reduce(case):
    for root in range(case.world):
        tensor = case.mine()
        case.issue(dist.reduce, tensor, dst=root, op=dist.ReduceOp.MAX)
        if case.rank == root:
            assert_reduced(tensor.cpu(), case.inputs, dist.ReduceOp.MAX)


def all_gather(case):
    outputs = [case.empty() for _ in case.inputs]
    case.issue(dist.all_gather, outputs, case.mine())
    assert_same(joined(outputs), torch.cat(case.inputs))


def all_gather_of_different_sizes(case):
    inputs = [data(rank, (case.rows + rank, 3)) for rank in range(case.world)]
    outputs = [case.empty(len(each)) for each in inputs]
    case.issue(dist.all_gather, outputs, case.place(inputs[case.rank]))
    assert_same(joined(outputs), torch.cat(inputs))


def all_gather_into_tensor(case):
    output = case.empty(case.world * case.rows)
    case.issue(dist.all_gather_into_tensor, output, case.mine())
    assert_same(output.cpu(), torch.cat(case.inputs))


def reduce_scatter(case):
    output = case.empty()
    case.issue(dist.reduce_scatter, output, case.my_parts())
    assert_reduced(output.cpu(), case.column())


def reduce_scatter_of_different_sizes(case):
    everyone = range(case.world)
    parts = [[data(r, (case.rows + p, 3), salt=p) for p in everyone] for r in everyone]
    output = case.empty(case.rows + case.rank)
    case.issue(dist.reduce_scatter, output, [case.place(part) for part in parts[case.rank]])
    assert_reduced(output.cpu(), [each[case.rank] for each in parts])


def reduce_scatter_tensor(case):
    output = case.empty()
    whole = case.place(case.parts[case.rank].flatten(0, 1))
    case.issue(dist.reduce_scatter_tensor, output, whole)
    assert_reduced(output.cpu(), case.column())


def all_to_all(case):
    outputs = [case.empty() for _ in case.parts]
    case.issue(dist.all_to_all, outputs, case.my_parts())
    assert_same(joined(outputs), torch.cat(case.column()))


def all_to_all_single(case):
    output = case.empty(case.world * case.rows)
    case.issue(dist.all_to_all_single, output, case.place(case.parts[case.rank].flatten(0, 1)))
    assert_same(output.cpu(), torch.cat(case.column()))


def all_to_all_single_of_different_sizes(case):
    everyone, rank = range(case.world), case.rank
    splits = [[case.rows + r + p for p in everyone] for r in everyone]  # of rank r for rank p
    sent = [data(r, (sum(splits[r]), 3)) for r in everyone]
    takes = [splits[r][rank] for r in everyone]
    output, tensor = case.empty(sum(takes)), case.place(sent[rank])
    case.issue(dist.all_to_all_single, output, tensor, takes, splits[rank])
    assert_same(output.cpu(), torch.cat([sent[r].split(splits[r])[rank] for r in everyone]))


def gather(case):
    for root in range(case.world):
        outputs = [case.empty() for _ in case.inputs] if case.rank == root else None
        case.issue(dist.gather, case.mine(), outputs, dst=root)
        if outputs is not None:
            assert_same(joined(outputs), torch.cat(case.inputs))


def scatter(case):
    for root in range(case.world):
        output = case.empty()
        tensors = [case.place(x) for x in case.parts[root]] if case.rank == root else None
        case.issue(dist.scatter, output, tensors, src=root)
        assert_same(output.cpu(), case.parts[root][case.rank])


def barrier(case):
    """Of the device's own communicator."""
    case.issue(dist.barrier, device_ids=[torch.cuda.current_device()])


DIFFERENT_SIZES = (
    all_gather_of_different_sizes,
    reduce_scatter_of_different_sizes,
    all_to_all_single_of_different_sizes,
)
OPERATIONS = (
    *(all_reduce, broadcast, reduce, all_gather, all_gather_into_tensor, reduce_scatter),
    *(reduce_scatter_tensor, all_to_all, all_to_all_single, gather, scatter, *DIFFERENT_SIZES),
    barrier,
)
each = pytest.mark.parametrize("operation", [operation.__name__ for operation in OPERATIONS])


def run(operation, cases):
    for case in cases:
        try:
            globals()[operation](case)
        except Exception as error:
            raise AssertionError(f"{case}: {error}") from error


@each
@on_gpus(1, 2, 3)
def test_collectives_are_those_of_plain_values(world, operation):
    # Ranks that share a GPU go through sockets.
    sizes = SIZES if world <= torch.cuda.device_count() else SIZES[:-1]
    # The futures of torch 2.11's nccl come before such operations have ended.
    early = dist.get_backend() == "nccl" and globals()[operation] in DIFFERENT_SIZES
    ways = [how for how in WAYS if how != "future" or not early]
    run(operation, (Case(world, how, rows, "contiguous") for how in ways for rows in sizes))


@each
@on_ours(1, 2, 3)  # torch's nccl refuses most of them
def test_collectives_of_tensors_with_gaps_are_those_of_plain_values(world, operation):
    run(operation, (Case(world, how, 7, layout) for how in WAYS for layout in gpus.LAYOUTS[1:]))


@pytest.mark.parametrize("async_ops", [False, True], ids=["sync", "async"])
@on_gpus(1, 2, 3)
def test_coalesced_collectives_of_a_side_stream_are_those_of_plain_values(world, async_ops):
    inputs, side = [data(rank, 1000) for rank in range(world)], torch.cuda.Stream()
    with torch.cuda.stream(side):
        tensors = [(inputs[dist.get_rank()] + k).cuda() for k in range(3)]
        device = gpus.current_device()
        with dist._coalescing_manager(device=device, async_ops=async_ops) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor)
        if async_ops:
            manager.wait()
        results = [tensor.clone() for tensor in tensors]
    side.synchronize()
    for k, result in enumerate(results):
        assert_reduced(result.cpu(), [each + k for each in inputs])


def exchange(world, layout, how):
    """Messages round a ring, one by one and in a batch."""
    rank, inputs = dist.get_rank(), [data(rank, (1000, 3)) for rank in range(world)]
    right, left = (rank + 1) % world, (rank - 1) % world
    mine, got = gpus.place(inputs[rank], layout), gpus.empty((1000, 3), layout=layout)
    if how == "batch":
        operations = [dist.P2POp(dist.isend, mine, right), dist.P2POp(dist.irecv, got, left)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    else:
        # Messages that are not batched run in NCCL in their order: somebody has to receive first.
        for step in "send", "recv":
            sends = (step == "send") == (rank == 0)
            tensor, peer = (mine, right) if sends else (got, left)
            if how == "async":
                (dist.isend if sends else dist.irecv)(tensor, peer).wait()
            else:
                (dist.send if sends else dist.recv)(tensor, peer)
    assert_same(got.cpu(), inputs[left])


messages = pytest.mark.parametrize("how", ("sync", "async", "batch"))


@messages
@on_gpus(2, 3)
def test_messages_go_round(world, how):
    exchange(world, "contiguous", how)


@messages
@on_ours(2, 3)  # torch's nccl refuses them
def test_messages_with_gaps_go_round(world, how):
    for layout in gpus.LAYOUTS[1:]:
        exchange(world, layout, how)


def functional_cases(world, rank):
    """Name, what is called, and what it gives, of functional collectives."""
    group = dist.group.WORLD
    parts, wides = ([data(r, size) for r in range(world)] for size in (6, 6 * world))
    mine, wide, chunk = parts[rank].cuda(), wides[rank].cuda(), slice(6 * rank, 6 * rank + 6)
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
def test_functional_collectives_are_those_of_plain_values(world, stream):
    for name, call, expected in functional_cases(world, dist.get_rank()):
        side = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(side if stream == "side" else torch.cuda.current_stream()):
            result = functional.wait_tensor(call()) * 2
        torch.cuda.synchronize()
        torch.testing.assert_close(result.cpu(), expected * 2, msg=lambda text: f"{name}: {text}")


@gpus.emulated_only  # on GPUs several groups take turns, in one order on all ranks: docs/gpu.md
@on_gpus(2)
def test_groups_of_several_threads_do_not_meet(world):
    rank, groups = dist.get_rank(), [dist.new_group() for _ in range(2)]
    device = torch.cuda.current_device()

    def run(number):
        torch.cuda.set_device(device)
        with torch.cuda.stream(torch.cuda.Stream()):
            values = torch.full((1000,), float(rank + number), device="cuda")
            for _ in range(10):
                dist.all_reduce(values, group=groups[number])
                values /= world
            return values.cpu()

    for group in groups:  # comes up before: torch's nccl has one thread do that
        dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        for number, result in enumerate(threads.map(run, range(2))):
            assert (result == number + 0.5).all()
