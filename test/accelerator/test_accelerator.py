"""Tensors of an accelerator: queued in streams, in the right order, on a simulated device.

Streams dawdle at random, so that a missing wait shows as wrong numbers in the tests of the
operations; those of the orderings hold a stream up and are not left to chance.
"""

import pytest
import torch
import torch.distributed as dist

import torchcomms_pg
from harness import catalogue
from harness.catalogue import LAYOUTS
from harness.ranks import wait_for
from harness.values import all_data, assert_reduced, assert_same, data

try:
    from harness.simulated_group import DEVICE, on_sim, sim
    from simulated import _simulated
except ImportError:
    pytest.skip("python test/simulated/build.py builds it", allow_module_level=True)

ROWS = (0, 1, 7, 23_334)
WAYS = ("sync", "async", "future")


class Case(catalogue.Case):
    device = DEVICE


class CommCase(Case):
    @property
    def comm(self):
        return torchcomms_pg.get_comm(device=DEVICE)


def cases(kind, world):
    for rows in ROWS:
        yield from kind(world, rows).over(WAYS)
    yield from kind(world, 30).over(WAYS, LAYOUTS[1:])


# ---------------------------------------------------------------- every operation


@on_sim()
@pytest.mark.parametrize("operation", catalogue.OPERATIONS)
def test_collectives_are_those_of_plain_values(world, operation):
    catalogue.run(catalogue.OPERATIONS[operation], cases(Case, world))


@on_sim()
@pytest.mark.parametrize("operation", catalogue.TORCHCOMM)
def test_operations_of_torchcomm_are_those_of_plain_values(world, operation):
    catalogue.run(catalogue.TORCHCOMM[operation], cases(CommCase, world))


@on_sim(2)
@pytest.mark.parametrize("op", ("AVG", "MAX", "BAND", "PREMUL_SUM", "BOOL"))
def test_all_reduce_with_every_kind_of_reduction(world, op):
    dtype = {"BAND": torch.int32, "BOOL": torch.bool}.get(op, torch.float32)
    inputs = all_data(world, 1000, dtype)
    tensor = sim(inputs[dist.get_rank()])
    if op == "PREMUL_SUM":
        factor = torch.tensor([0.5], device=DEVICE)
        dist.all_reduce(tensor, dist._make_nccl_premul_sum(factor), async_op=True).wait()
        return assert_reduced(tensor.cpu(), [x / 2 for x in inputs])
    reduce_op = dist.ReduceOp.SUM if op == "BOOL" else getattr(dist.ReduceOp, op)
    dist.all_reduce(tensor, reduce_op, async_op=True).wait()
    assert_reduced(tensor.cpu(), inputs, reduce_op)


@on_sim()
def test_send_and_receive(world):
    rank, ring = dist.get_rank(), 70_001
    right, left = (rank + 1) % world, (rank - 1) % world
    tensor = torch.empty(ring, device=DEVICE)
    if rank == 0:
        dist.send(sim(data(0, ring)), right)
        dist.recv(tensor, left)
    else:
        dist.recv(tensor, left)
        dist.send(sim(data(rank, ring)), right)
    assert_same(tensor.cpu(), data(left, ring))
    ops = [dist.P2POp(dist.isend, sim(data(rank, ring, salt=1)), right)]
    ops += [dist.P2POp(dist.irecv, tensor, left)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert_same(tensor.cpu(), data(left, ring, salt=1))


@on_sim()
def test_coalesced_operations(world):
    inputs = [all_data(world, 1000 + i, salt=i) for i in range(4)]
    tensors = [sim(x[dist.get_rank()]) for x in inputs]
    with dist._coalescing_manager(device=torch.device(DEVICE), async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    for tensor, values in zip(tensors, inputs):
        assert_reduced(tensor.cpu(), values)


@on_sim()
def test_cpu_and_accelerator_tensors_in_one_group(world):
    rank = dist.get_rank()
    inputs = all_data(world, 1000)
    here, there = inputs[rank].clone(), sim(inputs[rank])
    works = [dist.all_reduce(x, async_op=True) for x in (there, here, there)]
    for work in works:
        work.wait()
    assert_reduced(here, inputs)
    total = sum(inputs)
    torch.testing.assert_close(there.cpu(), total * world)
    objects = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in range(world)]


@on_sim(2)
def test_a_second_device_has_a_communicator_of_its_own(world):
    inputs = all_data(world, 1000)
    tensors = [inputs[dist.get_rank()].to(f"sim:{i}") for i in (0, 1)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work, tensor in zip(works, tensors):
        with torch.sim.device(tensor.device.index):
            work.wait()
            assert_reduced(tensor.cpu(), inputs)


@on_sim()
def test_new_groups_carry_the_device(world):
    group = dist.new_group(list(range(1, world)))
    if dist.get_rank() > 0:
        inputs = all_data(world, 100)[1:]
        tensor = sim(inputs[dist.get_rank() - 1])
        dist.all_reduce(tensor, group=group)
        assert_reduced(tensor.cpu(), inputs)
        dist.destroy_process_group(group)


@on_sim(2)
def test_torchcomm_of_the_device(world):
    comm = torchcomms_pg.get_comm(device=DEVICE)
    seen = []
    handle = comm.register_pre_hook(lambda args: seen.append(str(args.name)))
    inputs = all_data(world, 100)
    tensor = sim(inputs[dist.get_rank()])
    comm.all_reduce(tensor, torchcomms_pg.ReduceOp.SUM, async_op=True).wait()
    handle.remove()
    assert_reduced(tensor.cpu(), inputs)
    assert len(seen) == 1 and "all_reduce" in seen[0]


# ---------------------------------------------------------------- works


@on_sim(2)
def test_a_work_tells_when_it_has_ended_and_how_long_it_took(world):
    group = dist.new_group()
    group._enable_collectives_timing()
    tensor = torch.ones(1000, device=DEVICE)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    work.wait()
    torch.accelerator.synchronize()
    assert work.is_completed() and work.is_success()
    assert wait_for(lambda: work.get_future_result().done(), 5)
    assert 0 < work._get_duration() < 5000
    assert (work.result()[0].cpu() == world).all()
    dist.destroy_process_group(group)


@on_sim(2)
def test_works_that_nobody_waits_for_end_too(world):
    tensors = [torch.ones(1000, device=DEVICE) for _ in range(5)]
    works = [dist.all_reduce(x, async_op=True) for x in tensors]
    assert wait_for(lambda: all(work.is_completed() for work in works), 10)
    torch.accelerator.synchronize()
    assert all((x.cpu() == world).all() for x in tensors)


@on_sim(2)
def test_an_operation_takes_few_calls_of_the_device(world):
    """Beside the library's own: four where it has a stream of its own, else two."""
    tensor = torch.ones(1000, device=DEVICE)

    def calls(body):
        before = _simulated.device_calls()
        result = body()
        return _simulated.device_calls() - before, result

    def leave_events():
        works = [dist.all_reduce(tensor, async_op=True) for _ in range(20)]
        works[-1].wait()
        assert wait_for(lambda: all(work.get_future_result().done() for work in works), 5)

    leave_events()  # those of works that are gone are used again
    for _ in range(5):
        count, work = calls(lambda: dist.all_reduce(tensor, async_op=True))
        assert count <= 4
        assert calls(work.wait)[0] <= 3  # two of them ask whether it has ended
        assert calls(lambda: dist.all_reduce(tensor))[0] <= 2


@on_sim(2)
def test_high_priority_is_handed_to_the_device(world):
    before = len(_simulated.high_priority_streams(0))
    options = torchcomms_pg.Backend.Options()
    options.is_high_priority_stream = True
    group = dist.new_group(pg_options=options)
    dist.all_reduce(torch.ones(10, device=DEVICE), group=group, async_op=True).wait()
    assert len(_simulated.high_priority_streams(0)) == before + 1
    dist.destroy_process_group(group)


@on_sim(2)
def test_a_mistake_enqueues_nothing(world):
    tensor = torch.ones(10, device=DEVICE)
    with pytest.raises(ValueError, match="root"):
        dist.group.WORLD._get_backend(torch.device(DEVICE)).broadcast(tensor, 5)
    with pytest.raises(ValueError, match="sim:0"):
        dist.all_gather_into_tensor(torch.ones(20), tensor)
    dist.all_reduce(tensor)
    assert (tensor.cpu() == world).all()


# ---------------------------------------------------------------- models


def train(device, wrap, world, rank):
    torch.manual_seed(3)
    model = torch.nn.Sequential(
        torch.nn.Linear(12, 40), torch.nn.Tanh(), torch.nn.Linear(40, 40), torch.nn.Linear(40, 4)
    ).to(device)
    model = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    batch = data(7, (4 * world, 12)).to(device)
    mine = batch[4 * rank : 4 * rank + 4] if world > 1 and rank is not None else batch
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(mine).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return model, losses


def reference(world):
    model, losses = train("cpu", lambda m: m, world, None)
    return [p.detach() for p in model.parameters()]


@on_sim()
@pytest.mark.parametrize("bucket", (0.001, 25), ids=("many_buckets", "one_bucket"))
def test_ddp_trains_as_one_process_on_the_cpu(world, bucket):
    wrap = lambda m: torch.nn.parallel.DistributedDataParallel(m, bucket_cap_mb=bucket)  # noqa: E731
    model, _ = train(DEVICE, wrap, world, dist.get_rank())
    for ours, expected in zip(model.parameters(), reference(world)):
        torch.testing.assert_close(ours.detach().cpu(), expected, rtol=1e-4, atol=1e-5)


@on_sim()
def test_fsdp2_trains_as_one_process_on_the_cpu(world):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(dist.group.WORLD, "sim")

    def wrap(model):
        for layer in model:
            if isinstance(layer, torch.nn.Linear):
                fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    model, _ = train(DEVICE, wrap, world, dist.get_rank())
    for ours, expected in zip(model.parameters(), reference(world)):
        full = ours.full_tensor().detach().cpu()
        torch.testing.assert_close(full, expected, rtol=1e-4, atol=1e-5)
