"""Every collective moves the right bytes, over torch.distributed and over TorchComm."""

import pytest
import torch
import torch.distributed as dist

from harness import catalogue
from harness.comms import each_backend, make
from harness.values import HUGE, MOVABLE, SIZES, all_data, assert_reduced, assert_same, data

moves = pytest.mark.parametrize("dtype", MOVABLE, ids=lambda d: str(d).removeprefix("torch."))
beyond_gloo = pytest.mark.beyond_gloo


@beyond_gloo
@pytest.mark.ranks((1, 2, 3, 4))
def test_all_gather_into_tensor_accepts_a_stacked_output(world):
    inputs = all_data(world, (3, 5))
    output = torch.empty(world, 3, 5)
    dist.all_gather_into_tensor(output, inputs[dist.get_rank()])
    assert_same(output, torch.stack(inputs))


@pytest.mark.ranks((1, 2, 3, 4))
def test_all_gather_into_tensor_may_gather_in_place(world):
    for size in SIZES:
        inputs = all_data(world, size)
        output = torch.full((world * size,), -1.0)
        mine = output[dist.get_rank() * size : (dist.get_rank() + 1) * size]
        mine.copy_(inputs[dist.get_rank()])
        dist.all_gather_into_tensor(output, mine)
        assert_same(output, torch.cat(inputs), f"size {size}")


@beyond_gloo
@pytest.mark.ranks((1, 2, 3, 4))
def test_reduce_scatter_tensor_may_scatter_in_place(world):
    for size in SIZES:
        inputs = all_data(world, (world, size))
        tensor = inputs[dist.get_rank()].clone()
        dist.reduce_scatter_tensor(tensor[dist.get_rank()], tensor)
        assert_reduced(tensor[dist.get_rank()], [x[dist.get_rank()] for x in inputs])


@beyond_gloo
@pytest.mark.ranks((1, 2, 3, 4))
@pytest.mark.parametrize("operation", ("all_gather_v", "reduce_scatter_v", "all_to_all_v_single"))
def test_sizes_may_differ_and_be_zero(world, operation):
    """Rank r has (r + 2 * p) % 4 rows for rank p: some have nothing."""
    splits = [[(r + 2 * p) % 4 for p in range(world)] for r in range(world)]
    widths = (0, 1, 777, 70_001)
    cases = (catalogue.Case(world, 1, row=(width,), splits=splits) for width in widths)
    catalogue.run(catalogue.OPERATIONS[operation], cases)


@pytest.mark.ranks((1, 2, 3, 4))
def test_all_to_all_single_with_splits_on_one_side_only(world):
    inputs = all_data(world, (world * 2, 3))
    output = torch.empty(world * 2, 3)
    dist.all_to_all_single(output, inputs[dist.get_rank()], input_split_sizes=[2] * world)
    assert_same(output, torch.cat([x.chunk(world)[dist.get_rank()] for x in inputs]))


@pytest.mark.product
@beyond_gloo
@pytest.mark.ranks((1, 2, 3, 4))
@moves
def test_all_to_all_of_lists_of_any_sizes(world, dtype):
    """What rank r sends to peer p has 3 * r + p elements of a common unit."""
    me = dist.get_rank()
    for unit in (1, 25_001):
        sent = [
            [data(rank, (3 * rank + peer) * unit, dtype, salt=peer) for peer in range(world)]
            for rank in range(world)
        ]
        received = [torch.empty_like(sent[rank][me]) for rank in range(world)]
        dist.all_to_all(received, sent[me])
        for rank in range(world):
            assert_same(received[rank], sent[rank][me], f"unit {unit}, from {rank}")


@pytest.mark.skipif(not hasattr(dist, "gather_single"), reason="torch 2.14 and later")
@beyond_gloo
@pytest.mark.ranks((1, 2, 3, 4))
def test_gather_single_concatenates_on_the_root(world):
    for size in SIZES:
        inputs = all_data(world, size)
        root = world - 1
        output = torch.empty(world * size) if dist.get_rank() == root else None
        dist.gather_single(inputs[dist.get_rank()], output, dst=root)
        if output is not None:
            assert_same(output, torch.cat(inputs), f"size {size}")


@pytest.mark.skipif(not hasattr(dist, "all_gather_single"), reason="torch 2.13 and later")
@pytest.mark.ranks((1, 2, 3, 4))
def test_canonical_single_names_do_the_same(world):
    me = dist.get_rank()
    inputs = all_data(world, (world, 1025))
    gathered = torch.empty(world * world, 1025)
    dist.all_gather_single(gathered, inputs[me])
    assert_same(gathered, torch.cat(inputs))
    part = torch.empty(1, 1025)
    dist.reduce_scatter_single(part, inputs[me])
    assert_reduced(part, [x[me : me + 1] for x in inputs])


@pytest.mark.ranks((1, 2, 3, 4))
def test_zero_dimensional_tensors_are_tensors_of_one_element(world):
    tensor = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(tensor)
    assert tensor.shape == () and tensor.item() == sum(range(1, world + 1))
    outputs = [torch.tensor(0.0) for _ in range(world)]
    dist.all_gather(outputs, torch.tensor(float(dist.get_rank())))
    assert [x.item() for x in outputs] == list(range(world))


@beyond_gloo
@pytest.mark.ranks((1, 2, 3))
@pytest.mark.parametrize("dtype", (torch.uint8, torch.bfloat16, torch.float32, torch.bool))
def test_nothing_outside_the_tensors_is_written(world, dtype):
    """Outputs of every small size, at every alignment, between bytes that must stay."""
    me = dist.get_rank()

    def guarded(size, offset):
        whole = torch.ones(size + offset + 64, dtype=dtype)
        return whole, whole[offset : offset + size]

    for size in (*range(1, 20), 31, 32, 33, 63, 64, 65, 4095, 70_001):
        offset = size % 7
        calls = {
            "all_reduce": (size, lambda x: dist.all_reduce(x)),
            "max": (size, lambda x: dist.all_reduce(x, dist.ReduceOp.MAX)),
            "broadcast": (size, lambda x: dist.broadcast(x, 0)),
            "all_gather": (
                size * world,
                lambda x: dist.all_gather_into_tensor(x, data(me, size, dtype)),
            ),
            "reduce_scatter": (
                size,
                lambda x: dist.reduce_scatter_tensor(x, data(me, size * world, dtype)),
            ),
            "all_to_all": (
                size * world,
                lambda x: dist.all_to_all_single(x, data(me, size * world, dtype)),
            ),
        }
        for name, (length, call) in calls.items():
            whole, tensor = guarded(length, offset)
            call(tensor)
            outside = torch.cat([whole[:offset], whole[offset + length :]])
            assert_same(outside, torch.ones_like(outside), f"{name}, size {size}")


@pytest.mark.ranks((1, 2, 3, 4))
def test_tensors_that_require_grad_are_reduced_in_place(world):
    parameter = torch.nn.Parameter(data(dist.get_rank(), 1025))
    with torch.no_grad():
        dist.all_reduce(parameter.data)
        dist.broadcast(parameter, 0)
    assert parameter.requires_grad
    assert_reduced(parameter.data, all_data(world, 1025))


class Case(catalogue.Case):
    def finish(self, name, work):
        super().finish(name, work)
        assert work is None or work.is_completed()
        if self.comm:
            assert work.status().name == "COMPLETED" and work.exception() is None


ROWS = (0, 1, 7, 23_334)


def cases(world, **others):
    for how in ("sync", "async", "future"):
        yield from (Case(world, rows, how, **others) for rows in ROWS)


@pytest.mark.product
@beyond_gloo
@pytest.mark.ranks((1, 2, 3, 4))
@pytest.mark.parametrize("operation", catalogue.OPERATIONS)
def test_each_way_to_wait_gives_the_values_of_plain_pytorch(world, operation):
    catalogue.run(catalogue.OPERATIONS[operation], cases(world))


@pytest.mark.product
@beyond_gloo
@pytest.mark.ranks((1, 2, 3, 4))
@moves
@pytest.mark.parametrize(
    "operation", ("broadcast", "all_gather", "all_gather_single", "all_to_all_single")
)
def test_every_dtype_moves_bit_by_bit(world, operation, dtype):
    cases = (catalogue.Case(world, size, row=(), dtype=dtype) for size in SIZES)
    catalogue.run(catalogue.OPERATIONS[operation], cases)


# Of each operation: sizes, of which test_reduce_ops.py has the smaller ones, and dtypes.
LARGE = {
    "all_reduce": ((HUGE,), (torch.float32, torch.int64)),
    "broadcast": ((HUGE,), (torch.float32,)),
    "reduce": ((HUGE,), (torch.float32,)),
    "all_gather_single": ((HUGE,), (torch.float32,)),
    "reduce_scatter_single": ((HUGE // 4,), (torch.float32, torch.int32)),
    "gather": ((*SIZES, HUGE // 4), (torch.float32, torch.uint8)),
    "scatter": ((*SIZES, HUGE // 4), (torch.float32, torch.uint8)),
}


@pytest.mark.product
@pytest.mark.ranks((1, 2, 3, 4))
@pytest.mark.parametrize("operation", LARGE)
def test_tensors_of_all_sizes_up_to_many_chunks_arrive_whole(world, operation):
    sizes, dtypes = LARGE[operation]
    cases = [catalogue.Case(world, size, row=(), dtype=dtype) for dtype in dtypes for size in sizes]
    catalogue.run(catalogue.OPERATIONS[operation], cases)


@pytest.mark.product
@beyond_gloo
@each_backend
@pytest.mark.ranks((1, 2, 3))
@pytest.mark.parametrize("operation", catalogue.TORCHCOMM)
def test_operations_of_torchcomm_give_the_values_of_plain_pytorch(world, operation, backend):
    comm = make("catalogue", backend)
    catalogue.run(catalogue.TORCHCOMM[operation], cases(world, comm=comm))
    comm.finalize()


@beyond_gloo
@pytest.mark.ranks((1, 2, 3, 4))
def test_many_async_operations_in_flight_run_in_issue_order(world):
    """Each reads what the one before wrote."""
    tensor = torch.ones(2049)
    works = [dist.all_reduce(tensor, async_op=True) for _ in range(8)]
    for work in reversed(works):
        work.wait()
    assert_same(tensor, torch.full((2049,), float(world**8)))


@beyond_gloo
@pytest.mark.ranks((1, 2, 3, 4))
def test_sync_after_async_runs_after_it(world):
    tensor = torch.ones(100_001)
    work = dist.all_reduce(tensor, async_op=True)
    dist.all_reduce(tensor)
    assert_same(tensor, torch.full((100_001,), float(world**2)))
    work.wait()


@pytest.mark.ranks((1, 2, 3, 4))
def test_results_have_the_same_bits_on_every_rank_and_in_every_run(world):
    for size in (1, 1025, 300_001):
        runs = []
        for _ in range(3):
            tensor = data(dist.get_rank(), size)
            dist.all_reduce(tensor)
            outputs = [torch.empty_like(tensor) for _ in range(world)]
            dist.all_gather(outputs, tensor)
            runs += outputs
        for other in runs[1:]:
            assert_same(other, runs[0], f"size {size}")


@pytest.mark.ranks((1, 2, 3, 4))
def test_barrier_lets_nobody_through_before_the_last_has_come(world):
    """Before each barrier every rank counts itself in the store; after it all must be counted."""
    store = dist.PrefixStore("barrier", dist.group.WORLD.get_group_store())
    first = store.add("round", 0) == 0
    dist.barrier()
    for turn in range(20):
        key = f"{turn}/{first}/{id(world)}" if world == 1 else f"{turn}"
        before = store.add(key, 1)
        if turn % 2:
            dist.barrier()
        else:
            dist.barrier(async_op=True).wait()
        assert before >= 1 and store.add(key, 0) % world == 0 and store.add(key, 0) >= world
        dist.barrier()


@pytest.mark.ranks((2, 3))
def test_many_asynchronous_barriers(world):
    works = [dist.barrier(async_op=True) for _ in range(50)]
    for work in works:
        work.wait()


@pytest.mark.ranks((1, 2, 3, 4))
def test_monitored_barrier_passes_when_all_arrive(world):
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    for wait_all_ranks in (False, True):
        backend.monitored_barrier(wait_all_ranks=wait_all_ranks)


@pytest.mark.ranks((1, 2, 3, 4))
def test_sparse_all_reduce_sums_sparse_tensors(world):
    def mine(rank):
        index = torch.tensor([[rank, rank + 1, 0], [0, 1, 2]])
        return torch.sparse_coo_tensor(index, data(rank, 3), (world + 1, 3))

    tensor = mine(dist.get_rank())
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    dense = [mine(rank).to_dense() for rank in range(world)]
    assert_reduced(work.result()[0].to_dense(), dense)
