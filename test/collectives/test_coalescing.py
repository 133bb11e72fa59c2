"""Coalesced calls: many operations, one launch, the results of each as if issued alone."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from harness.ranks import Ranks, wait_for
from harness.values import all_data, assert_reduced, assert_same, data

pytestmark = [pytest.mark.beyond_gloo, pytest.mark.torch_version]  # Gloo does not coalesce
CPU = torch.device("cpu")
SIZES = (0, 1, 1025, 100_001)
flavours = pytest.mark.parametrize(
    "device", [None, CPU], ids=["fast path", "start and end of coalescing"]
)


def the_backend():
    return dist.group.WORLD._get_backend(CPU)


def in_thread(body):
    """The id of a thread that has run `body`, and ended."""
    with ThreadPoolExecutor(1) as threads:
        threads.submit(body).result()
        return threads.submit(threading.get_ident).result()


def leave_a_batch_open():
    """A thread ends in a batch; later threads, one of which gets its id, issue outside of it."""

    def begin():
        dist.group.WORLD._start_coalescing(CPU)
        dist.all_reduce(torch.ones(7))

    def gather():
        for async_op in (False, True):
            out = torch.zeros(1)
            work = dist.all_gather([out], torch.ones(1), async_op=async_op)
            if work:
                work.wait()
            assert out.item() == 1

    gather()  # starts the worker, which else may get the id
    left = in_thread(begin)
    wait_for(lambda: in_thread(gather) == left, 5)  # another thread of the process may have the id


def test_a_batch_goes_with_the_thread_that_has_left_it_open():
    with Ranks(1) as ranks:
        ranks.run(leave_a_batch_open)
        assert "left a batch open on group '0', which is dropped" in ranks.output(0)
        assert "which have not run: 1, first all_reduce" in ranks.output(0)


@pytest.mark.ranks(2)
def test_the_backend_says_that_it_coalesces(world):
    assert the_backend().supports_coalescing


@pytest.mark.ranks((1, 2, 3, 4))
@flavours
@pytest.mark.parametrize("async_ops", [False, True])
def test_coalescing_manager_all_reduce(world, device, async_ops):
    inputs = [all_data(world, size) for size in SIZES]
    tensors = [x[dist.get_rank()].clone() for x in inputs]
    with _coalescing_manager(device=device, async_ops=async_ops) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    if async_ops:
        manager.wait()
    for tensor, expected in zip(tensors, inputs):
        assert_reduced(tensor, expected)


@pytest.mark.ranks((1, 2, 3, 4))
@flavours
def test_coalescing_manager_all_gather_into_tensor(world, device):
    inputs = [all_data(world, size) for size in SIZES]
    outputs = [torch.empty(world * size) for size in SIZES]
    with _coalescing_manager(device=device, async_ops=True) as manager:
        for output, x in zip(outputs, inputs):
            dist.all_gather_into_tensor(output, x[dist.get_rank()])
    manager.wait()
    for output, x in zip(outputs, inputs):
        assert_same(output, torch.cat(x))


@pytest.mark.ranks((1, 2, 3, 4))
@flavours
def test_coalescing_manager_reduce_scatter_tensor(world, device):
    me = dist.get_rank()
    inputs = [all_data(world, (world, size)) for size in SIZES]
    outputs = [torch.empty(1, size) for size in SIZES]
    with _coalescing_manager(device=device, async_ops=True) as manager:
        for output, x in zip(outputs, inputs):
            dist.reduce_scatter_tensor(output, x[me].clone())
    manager.wait()
    for output, x in zip(outputs, inputs):
        assert_reduced(output, [y[me : me + 1] for y in x])


@pytest.mark.ranks(2)
def test_coalesced_calls_and_a_group_of_the_communicator_behind_them_are_one_batch(world):
    import torchcomms_pg

    comm, me = torchcomms_pg.get_comm(), dist.get_rank()
    first, second, third = data(me, 7), data(me, 9), data(me, 5)
    with comm.group():
        comm.broadcast(first, 0, False)
        with _coalescing_manager(device=CPU, async_ops=True):
            dist.broadcast(second, 0)
        comm.broadcast(third, 0, False)
        assert_same(first, data(me, 7))
    assert_same(first, data(0, 7))
    assert_same(second, data(0, 9))
    assert_same(third, data(0, 5))
    first, second, third = data(me, 7), data(me, 9), data(me, 5)
    with _coalescing_manager(device=CPU, async_ops=True) as manager:
        dist.broadcast(first, 0)
        with comm.group():
            comm.broadcast(second, 0, False)
        dist.broadcast(third, 0)
    manager.wait()
    assert_same(first, data(0, 7))
    assert_same(second, data(0, 9))
    assert_same(third, data(0, 5))


def asynchronous(name):
    options = getattr(torch._C._distributed_c10d, name + "Options")()
    options.asyncOp = True
    return options


@pytest.mark.ranks((1, 2, 3, 4))
def test_mixed_collectives_between_start_and_end(world):
    """Directly on the backend: torch's manager takes one kind of collective at a time."""
    me, backend = dist.get_rank(), the_backend()
    inputs = all_data(world, 5003)
    reduced, copied, gathered = inputs[me].clone(), inputs[me].clone(), torch.empty(world * 5003)
    broadcast = asynchronous("Broadcast")
    broadcast.rootRank = world - 1
    backend._start_coalescing()
    backend.allreduce([reduced], asynchronous("Allreduce"))
    backend.broadcast([copied], broadcast)
    backend._allgather_base(gathered, inputs[me], asynchronous("Allgather"))
    backend._end_coalescing().wait()
    assert_reduced(reduced, inputs)
    assert_same(copied, inputs[world - 1])
    assert_same(gathered, torch.cat(inputs))


@pytest.mark.ranks(2)
def test_a_synchronous_call_inside_a_group_returns_no_work_to_wait_for(world):
    """dist.broadcast waits for whatever Work it gets, which would be before the launch."""
    tensor = data(dist.get_rank(), 5003)
    with _coalescing_manager(device=CPU, async_ops=True) as manager:
        dist.broadcast(tensor, 1)
    manager.wait()
    assert_same(tensor, data(1, 5003))


@pytest.mark.ranks((2, 3))
def test_mixed_dtypes_in_one_group(world):
    dtypes = (torch.float32, torch.int64, torch.bfloat16, torch.uint8)
    inputs = [all_data(world, 1025, dtype) for dtype in dtypes]
    tensors = [x[dist.get_rank()].clone() for x in inputs]
    with _coalescing_manager(device=CPU):
        for tensor in tensors:
            dist.all_reduce(tensor)
    for tensor, x in zip(tensors, inputs):
        assert_reduced(tensor, x)


@pytest.mark.ranks((1, 2, 3, 4))
def test_backend_coalesced_methods(world):
    backend, me = the_backend(), dist.get_rank()
    inputs = [all_data(world, size) for size in SIZES]
    tensors = [x[me].clone() for x in inputs]
    backend.allreduce_coalesced(tensors).wait()
    for tensor, x in zip(tensors, inputs):
        assert_reduced(tensor, x)


@pytest.mark.ranks((1, 2, 3, 4))
def test_process_group_coalesced_methods(world):
    group, me = dist.group.WORLD, dist.get_rank()
    inputs = [all_data(world, (world, size)) for size in SIZES]
    gathered = [torch.empty(world * world, size) for size in SIZES]
    group.allgather_into_tensor_coalesced(gathered, [x[me] for x in inputs]).wait()
    scattered = [torch.empty(1, size) for size in SIZES]
    group.reduce_scatter_tensor_coalesced(scattered, [x[me].clone() for x in inputs]).wait()
    for output, part, x in zip(gathered, scattered, inputs):
        assert_same(output, torch.cat(x))
        assert_reduced(part, [y[me : me + 1] for y in x])


@pytest.mark.ranks(2)
def test_an_empty_group_is_harmless(world):
    the_backend()._start_coalescing()
    work = the_backend()._end_coalescing()
    if work is not None:
        work.wait()
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert_same(tensor, torch.full((3,), 2.0))


@pytest.mark.ranks(2)
def test_an_exception_inside_a_group_leaves_the_next_calls_working(world):
    """Nothing of the abandoned group may run, on any rank, and the group must not stay open."""
    untouched = data(dist.get_rank(), 100)
    with pytest.raises(ZeroDivisionError):
        with _coalescing_manager(device=CPU):
            dist.all_reduce(untouched)
            raise ZeroDivisionError
    dist.distributed_c10d._world.pg_coalesce_state.clear()  # torch itself leaves this behind
    tensor = torch.ones(100)
    if (work := the_backend()._end_coalescing()) is not None:
        work.wait()
    dist.all_reduce(tensor)
    assert_same(tensor, torch.full((100,), 2.0))


@pytest.mark.ranks(2)
def test_a_sparse_all_reduce_inside_a_group_is_refused(world):
    tensor = torch.eye(3).to_sparse()
    with pytest.raises(RuntimeError, match="sparse.*several operations"):
        with _coalescing_manager(device=CPU):
            the_backend().allreduce([tensor], dist.AllreduceOptions())
    dist.distributed_c10d._world.pg_coalesce_state.clear()  # torch itself leaves this behind
    the_backend()._end_coalescing()
    dist.all_reduce(tensor)
    assert_same(tensor.to_dense(), 2 * torch.eye(3))


@pytest.mark.ranks(2)
def test_a_bad_call_inside_a_group_is_refused_at_once_and_breaks_nothing(world):
    """The rest of the group runs, or the group is dropped whole and its end says so."""
    backend = the_backend()
    backend._start_coalescing()
    good = torch.ones(10)
    backend.allreduce([good], asynchronous("Allreduce"))
    options = asynchronous("Broadcast")
    options.rootRank = 17
    with pytest.raises((ValueError, TypeError, RuntimeError), match="(?i)root|rank"):
        backend.broadcast([torch.ones(10)], options)
    try:
        backend._end_coalescing().wait()
    except RuntimeError as error:
        assert "dropped" in str(error)
        assert_same(good, torch.ones(10))
    else:
        assert_same(good, torch.full((10,), 2.0))
    dist.all_reduce(tensor := torch.ones(10))
    assert_same(tensor, torch.full((10,), 2.0))


@pytest.mark.ranks(2)
def test_one_coalesced_group_bumps_the_sequence_number_once(world):
    backend = the_backend()
    before = backend._get_sequence_number_for_group()
    with _coalescing_manager(device=CPU):
        for _ in range(5):
            dist.all_reduce(torch.ones(3))
    assert backend._get_sequence_number_for_group() == before + 1


@pytest.mark.ranks((2, 3))
def test_point_to_point_and_collectives_in_one_group(world):
    me, backend = dist.get_rank(), the_backend()
    left, right = (me - 1) % world, (me + 1) % world
    tensor, received = torch.ones(2001), torch.empty(50_001)
    backend._start_coalescing()
    backend.send([data(me, 50_001)], right, 0)
    backend.recv([received], left, 0)
    backend.allreduce([tensor], asynchronous("Allreduce"))
    backend._end_coalescing().wait()
    assert_same(tensor, torch.full((2001,), float(world)))
    assert_same(received, data(left, 50_001))
