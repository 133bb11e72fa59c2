"""Collectives and messages of tensors that are not contiguous."""

import functools

import pytest
import torch
import torch.distributed as dist

from harness import catalogue
from harness.catalogue import ALL_LAYOUTS, LAYOUTS, place
from harness.values import all_data, assert_reduced, assert_same, data

pytestmark = [pytest.mark.beyond_gloo, pytest.mark.product]

each = pytest.mark.parametrize("operation", catalogue.OPERATIONS)


class ContiguousInputs(catalogue.Case):
    """The layout is that of the outputs alone."""

    def place(self, values):
        return values.clone()


@each
@pytest.mark.ranks((1, 2, 3, 4))
def test_tensors_of_every_layout_give_the_values_of_plain_pytorch(world, operation):
    for kind in (catalogue.Case, ContiguousInputs):
        for dtype in (torch.float32, torch.int64):
            cases = kind(world, 6, row=(5, 4), dtype=dtype).over(("sync", "async"), ALL_LAYOUTS)
            catalogue.run(catalogue.OPERATIONS[operation], cases)


@each
@pytest.mark.ranks((2, 3))
def test_ranks_may_use_different_layouts_of_one_shape(world, operation):
    """Values count, not memory order."""
    case = catalogue.Case(world, 6, layout=LAYOUTS[dist.get_rank()], row=(5, 4))
    catalogue.run(catalogue.OPERATIONS[operation], [case])


class Column(catalogue.Case):
    """Tensors are the first columns of matrices, whose second ones have to stay 7."""

    def room_for(self, values):
        matrix = values.new_full((*values.shape, 2), 7)
        self.matrices.append(matrix)
        return matrix[..., 0]

    def finish(self, name, work):
        super().finish(name, work)
        assert all((matrix[..., 1] == 7).all() for matrix in self.matrices), "a gap was written"


@each
@pytest.mark.ranks((1, 2, 3, 4))
def test_nothing_is_written_between_the_elements_of_a_tensor(world, operation):
    catalogue.run(catalogue.OPERATIONS[operation], [Column(world, 6, matrices=[])])


class LatePeer(catalogue.Case):
    """The last rank calls when the others have called and then taken all memory that is free."""

    def issue(self, name, *args, **kwargs):
        store, last = dist.distributed_c10d._get_default_store(), self.world - 1
        if self.rank == last:
            store.wait([f"memory taken {rank}" for rank in range(last)])
            return super().issue(name, *args, **kwargs)
        work = super().issue(name, *args, **kwargs)
        sizes = [each.numel() * factor for each in self.inputs for factor in (1, self.world)]
        self.taken = [torch.full((size,), -1.0) for size in sizes for _ in range(2)]
        store.set(f"memory taken {self.rank}", "")
        return work

    def finish(self, name, work):
        super().finish(name, work)
        assert all((memory == -1).all() for memory in self.taken), "memory of others was written"
        self.taken = []
        dist.barrier()
        dist.distributed_c10d._get_default_store().delete_key(f"memory taken {self.rank}")


@each
@pytest.mark.ranks((2, 3))
def test_contiguous_copies_live_until_an_operation_has_ended(world, operation):
    for size in (50, 20_011):
        cases = LatePeer(world, 6, row=(size, 2), taken=[]).over(("async",), LAYOUTS[1:])
        catalogue.run(catalogue.OPERATIONS[operation], cases)


@pytest.mark.ranks((2, 3))
@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_an_operation_reads_what_the_one_before_it_has_written(world, layout):
    """Though nobody has waited in between, and a contiguous copy is read."""
    last = world - 1
    first = place(torch.full((6, 5, 4), 1.0), layout)
    parts = [place(torch.full((6, 5, 4), 1.0), layout) for _ in range(world)]
    output, gathered = torch.empty(6, 5, 4), torch.empty(world * 6, 5, 4)
    works = [
        dist.all_reduce(first, async_op=True),
        dist.all_reduce(first, async_op=True),
        dist.reduce(first, last, async_op=True),
        dist.broadcast(first, last, async_op=True),
        dist.all_gather_into_tensor(gathered, first, async_op=True),
        *(dist.all_reduce(part, async_op=True) for part in parts),
        dist.reduce_scatter(output, parts, async_op=True),
    ]
    for work in works:
        work.wait()
    assert (first == world**3).all() and (gathered == world**3).all()
    assert (output == world**2).all()


@pytest.mark.ranks(2)
def test_send_and_recv_of_every_layout(world):
    operation, peer = (dist.send, 1) if dist.get_rank() == 0 else (dist.recv, 0)
    for layout in ALL_LAYOUTS:
        tensor = place(data(dist.get_rank(), (6, 5, 4)), layout)
        operation(tensor, peer)
        assert_same(tensor, data(0, (6, 5, 4)), layout)


@pytest.mark.ranks((2, 3))
@pytest.mark.parametrize("async_op", (False, True))
def test_results_reach_tensors_of_inference_mode_inside_it_and_after(world, async_op):
    me = dist.get_rank()
    inputs = all_data(world, (6, 5, 4))
    whole = all_data(world, 1025, torch.int32)
    with torch.inference_mode():
        strided = [inputs[me].clone().transpose(0, 2) for _ in range(2)]
        bits = [whole[me].clone() for _ in range(2)]
        parts = [[torch.empty(6, 5, 4) for _ in range(world)] for _ in range(2)]
    for turn in range(2):
        works = []
        with torch.inference_mode(turn == 0):
            works.append(dist.all_reduce(strided[turn], async_op=async_op))
            works.append(dist.all_reduce(bits[turn], dist.ReduceOp.BXOR, async_op=async_op))
            works.append(dist.all_gather(parts[turn], inputs[me], async_op=async_op))
        for work in works if async_op else ():
            work.wait()
        assert_reduced(strided[turn].transpose(0, 2).contiguous(), inputs)
        assert_same(bits[turn], functools.reduce(torch.bitwise_xor, whole))
        for part, expected in zip(parts[turn], inputs):
            assert_same(part, expected)
