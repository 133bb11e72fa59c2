"""TorchComm: operations that are launched together, and collectives of objects, which cannot be."""

import pytest
import torch
import torch.distributed as dist

from harness.comms import each_backend, make, torchcomms
from harness.values import all_data, assert_same, data

pytestmark = pytest.mark.beyond_gloo


@each_backend
@pytest.mark.ranks((1, 2, 3))
def test_group_launches_together(world, backend):
    comm, rank, op = make("group", backend), dist.get_rank(), torchcomms().ReduceOp
    for async_op in (False, True):
        first, second = data(rank, 7), data(rank, 9)
        with comm.group() as group:
            inner = comm.all_reduce(first, op.MAX, async_op)
            comm.broadcast(second, 0, async_op)
            assert inner.status().name == "NOT_STARTED"
            with pytest.raises(RuntimeError, match="has not been launched"):
                inner.wait()
        group.work.wait()
        inner.wait()
        assert inner.status().name == group.work.status().name == "COMPLETED"
        assert_same(first, torch.stack(all_data(world, 7)).amax(0))
        assert_same(second, data(0, 9))
    with pytest.raises(KeyError):
        with comm.group():
            comm.all_reduce(first, op.SUM, False)
            raise KeyError("dropped")
    assert_same(first, torch.stack(all_data(world, 7)).amax(0))
    with comm.group() as group:
        pass
    assert group.work.is_completed()
    comm.finalize()


@each_backend
@pytest.mark.ranks((1, 2, 3))
def test_groups_and_batches_inside_a_group_join_it(world, backend):
    comm, rank, op = make("joined", backend), dist.get_rank(), torchcomms().ReduceOp
    first, second, third, got = data(rank, 7), data(rank, 9), data(rank, 5), torch.empty(6)
    batch = comm.batch_op_create()
    batch.send(data(rank, 6), (rank + 1) % world)
    batch.recv(got, (rank - 1) % world)
    with comm.group() as group:
        before = comm.all_reduce(first, op.MAX, False)
        with comm.group() as inner:
            comm.broadcast(second, 0, False)
        messages = batch.issue(False)
        comm.broadcast(third, 0, False)
        works = (before, inner.work, messages)
        assert {work.status().name for work in works} == {"NOT_STARTED"}
    for work in (*works, group.work):
        work.wait()
    assert_same(first, torch.stack(all_data(world, 7)).amax(0))
    assert_same(second, data(0, 9))
    assert_same(got, data((rank - 1) % world, 6))
    assert_same(third, data(0, 5))
    again = comm.group()
    with again, again:
        comm.all_reduce(third, op.SUM, False)
    assert_same(third, data(0, 5) * world)
    comm.finalize()


@pytest.mark.ranks(2)
def test_an_exception_inside_an_inner_group_drops_that_group_alone(world):
    comm, rank, op = make("inner"), dist.get_rank(), torchcomms().ReduceOp
    first, second = data(rank, 7), data(rank, 9)
    batch = comm.batch_op_create()
    batch.send(data(rank, 6), rank)
    batch.recv(torch.empty(6), world)  # no such rank
    with comm.group():
        comm.all_reduce(first, op.MAX, False)
        with pytest.raises(KeyError), comm.group():
            comm.broadcast(second, 0, False)
            raise KeyError
        with pytest.raises(ValueError, match=f"recv: src {world} is not a rank"):
            batch.issue(False)
        assert len(batch) == 2
    assert_same(first, torch.stack(all_data(world, 7)).amax(0))
    assert_same(second, data(rank, 9))
    comm.finalize()


@each_backend
@pytest.mark.ranks(2)
def test_object_collectives_refuse_to_be_collected(world, backend):
    comm, rank = make("objects in a group", backend), dist.get_rank()
    for call in (
        lambda: comm.all_gather_object([None] * world, rank),
        lambda: comm.gather_object(rank, 0, [None] * world),
        lambda: comm.broadcast_object_list([rank], 0),
        lambda: comm.scatter_object_list(0, [None], [0] * world),
        lambda: comm.send_object_list([rank], 1 - rank),
        lambda: comm.recv_object_list([rank], 1 - rank),
    ):
        with pytest.raises(RuntimeError, match=r"inside `with comm.group\(\):`"), comm.group():
            call()
    comm.barrier(False)
    comm.finalize()


@each_backend
@pytest.mark.ranks((1, 2, 3))
def test_object_collectives(world, backend):
    comm, rank = make("objects", backend), dist.get_rank()
    values = [{"rank": r, "text": "x" * (r * 1000), "size": torch.Size([r])} for r in range(world)]
    got = [None] * world
    comm.all_gather_object(got, values[rank])
    assert got == values
    for root in range(world):
        got = [None] * world if rank == root else None
        comm.gather_object(values[rank], root, got)
        assert got == (values if rank == root else None)
        got = [values[0], "second"] if rank == root else [None, None]
        comm.broadcast_object_list(got, root)
        assert got == [values[0], "second"]
        got = [None]
        comm.scatter_object_list(root, got, values if rank == root else None)
        assert got == [values[rank]]
    if world > 1 and rank == 0:
        comm.send_object_list([values[1], None], 1)
    elif rank == 1:
        got = [None, 1]
        comm.recv_object_list(got, 0)
        assert got == [values[1], None]
    with pytest.raises(ValueError, match=f"wanted a list of {world}"):
        comm.all_gather_object([None] * (world + 1), 1)
    comm.finalize()
