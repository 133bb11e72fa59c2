"""Collectives of GPU tensors beside plain values: torch's nccl and torchcomms alike."""

import concurrent.futures
import itertools

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from harness import catalogue, gpus
from harness.catalogue import LAYOUTS
from harness.gpus import on_gpus, on_ours
from harness.values import all_data, assert_reduced, assert_same, data

if reason := gpus.missing():
    pytest.skip(reason, allow_module_level=True)

pytestmark = [pytest.mark.torch_version, pytest.mark.product]

WAYS = ("sync", "async", "future", "side stream")
SIZES = (0, 1, 1000, 100_003)  # rows of three


class Case(catalogue.Case):
    """One call of torch.distributed on this GPU, in its stream or in one beside it."""

    device = "cuda"

    def issue(self, name, *args):
        self.options = dict(device_ids=[torch.cuda.current_device()]) if name == "barrier" else {}
        if self.how != "side stream":
            return super().issue(name, *args)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work = super().issue(name, *args)
        # torch 2.11 and 2.12 copy the root's own part in this stream, outside of the work.
        if gpus.by_root_over_nccl(name):
            torch.cuda.current_stream().wait_stream(side)
        return work

    def finish(self, name, work):
        if self.how == "future" and gpus.by_root_over_nccl(name):
            work.wait()  # futures of torch 2.11 fail but on the root
        else:
            super().finish(name, work)


each = pytest.mark.parametrize("operation", catalogue.OPERATIONS)


@each
@on_gpus(1, 2, 3)
def test_collectives_are_those_of_plain_values(world, operation):
    # Ranks that share a GPU go through sockets.
    sizes = SIZES if world <= torch.cuda.device_count() else SIZES[:-1]
    # The futures of torch 2.11's nccl come before operations of different sizes have ended.
    early = gpus.over_nccl() and "_v" in operation
    ways = [how for how in WAYS if how != "future" or not early]
    cases = (Case(world, rows).over(ways) for rows in sizes)
    catalogue.run(catalogue.OPERATIONS[operation], itertools.chain.from_iterable(cases))


@each
@on_ours(1, 2, 3)  # torch's nccl refuses most of them
def test_collectives_of_tensors_with_gaps_are_those_of_plain_values(world, operation):
    catalogue.run(catalogue.OPERATIONS[operation], Case(world, 7).over(WAYS, LAYOUTS[1:]))


@pytest.mark.parametrize("async_ops", [False, True], ids=["sync", "async"])
@on_gpus(1, 2, 3)
def test_coalesced_collectives_of_a_side_stream_are_those_of_plain_values(world, async_ops):
    inputs, side = [all_data(world, 1000 + k, salt=k) for k in range(3)], torch.cuda.Stream()
    with torch.cuda.stream(side):
        tensors = [each[dist.get_rank()].cuda() for each in inputs]
        device = gpus.current_device()
        with dist._coalescing_manager(device=device, async_ops=async_ops) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor)
        if async_ops:
            manager.wait()
        results = [tensor.clone() for tensor in tensors]
    side.synchronize()
    for result, each in zip(results, inputs, strict=True):
        assert_reduced(result.cpu(), each)


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
    for layout in LAYOUTS[1:]:
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
