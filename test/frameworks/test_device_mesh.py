"""TorchComms as process groups and mesh dimensions: DDP, FSDP2, DTensor, and who ends what."""

import datetime
import gc
import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from harness.comms import each_backend, make, torchcomms
from harness.ranks import Ranks, connect_store
from harness.values import assert_same, data

pytestmark = [pytest.mark.beyond_gloo, pytest.mark.torch_version]


def new_comm(port, prefix, world, backend="shm"):
    """In a rank that has no process group."""
    return torchcomms().new_comm(
        backend, "cpu", store=connect_store(port, prefix), rank=int(os.environ["RANK"]), size=world,
        timeout=datetime.timedelta(seconds=20), abort_process_on_timeout_or_error=False,
    )  # fmt: skip


def dense_model():
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(37, 53), nn.ReLU(), nn.Linear(53, 11))


def step(net, rank):
    """The gradients of one step on this rank's own data."""
    net(data(rank, (4, 37))).square().mean().backward()
    return [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            for p in net.parameters()]  # fmt: skip


def averaged(world):
    """What `step` has to give on every rank."""
    ranks = [step(dense_model(), rank) for rank in range(world)]
    return [torch.stack(grads).mean(0) for grads in zip(*ranks)]


def assert_near(got, want):
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def _train_without_init_process_group(port, prefix, world, backend):
    comm = new_comm(port, prefix, world, backend)
    rank, told = comm.get_rank(), []
    mesh = torchcomms().device_mesh.init_device_mesh((comm,), ("dp",))
    group = mesh.get_group("dp")
    assert group is dist.group.WORLD and torchcomms().get_process_group(comm) is group
    assert mesh["dp"].size() == dist.get_world_size() == world and mesh.get_local_rank() == rank
    handle = comm.register_pre_hook(lambda args: told.append(args.name.name))
    want = averaged(world)
    assert_near(step(DistributedDataParallel(dense_model(), device_mesh=mesh), rank), want)
    assert "all_reduce" in told  # the communicator's hooks see what the group does
    told.clear()
    net = fully_shard(dense_model(), mesh=mesh)
    assert_near(step(net, rank), want)
    assert {"all_gather_single", "reduce_scatter_single"} <= set(told)
    handle.remove()
    whole = data(0, (world * 2, 3))
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    assert_same(sharded.redistribute(mesh, [Replicate()]).to_local(), whole)
    assert_same(fc.all_reduce(torch.ones(2), "sum", mesh).wait(), torch.full((2,), float(world)))
    halves = dist.new_group(list(range(world)))  # torch's own ways to make groups go on
    dist.barrier(halves)
    dist.destroy_process_group()
    tensor = torch.ones(1)
    comm.all_reduce(tensor, torchcomms().ReduceOp.SUM, False)  # it is not the group's
    assert tensor.item() == world
    comm.finalize()


@pytest.mark.parametrize("world,backend", [(3, "shm"), (2, "gloo")])
def test_ddp_fsdp2_and_dtensor_over_a_communicator_alone(world, backend):
    with Ranks(world, init=False) as ranks:
        ranks.run(_train_without_init_process_group, *ranks.store_args(), world, backend)


def _train_on_two_dimensions(port, prefix, world):
    comm = new_comm(port, prefix, world)
    rank = comm.get_rank()
    row, column = divmod(rank, 2)
    dp = comm.split([column, column + 2], "dp")
    tp = comm.split([2 * row, 2 * row + 1], "tp")
    init = torchcomms().device_mesh.init_device_mesh
    with pytest.raises(ValueError, match="the communicator of all its ranks"):
        init((dp, tp), ("dp", "tp"))
    with pytest.raises(ValueError, match="no default process group"):
        torchcomms().get_process_group(tp)
    mesh = init((dp, tp), ("dp", "tp"), _global_comm=comm)
    assert mesh.mesh.tolist() == [[0, 1], [2, 3]] and list(mesh.get_coordinate()) == [row, column]
    assert dist.get_process_group_ranks(mesh.get_group("dp")) == [column, column + 2]
    with pytest.raises(ValueError, match="not the lines of one mesh"):
        init((dp, dp), ("a", "b"))
    whole = data(0, (4, 6))
    sharded = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    assert_same(sharded.to_local(), whole[2 * row : 2 * row + 2, 3 * column : 3 * column + 3])
    assert_same(sharded.redistribute(mesh, [Replicate(), Replicate()]).to_local(), whole)
    # Hybrid sharding: replicas along dp, shards along tp.
    assert_near(step(fully_shard(dense_model(), mesh=mesh), rank), averaged(world))
    total = fc.all_reduce(torch.tensor([float(rank)]), "sum", (mesh, 1)).wait()
    assert total.item() == 4 * row + 1
    dist.destroy_process_group()
    [c.finalize() for c in (tp, dp, comm)]


def test_two_dimensions_of_split_communicators():
    with Ranks(4, init=False) as ranks:
        ranks.run(_train_on_two_dimensions, *ranks.store_args(), 4)


@pytest.mark.ranks(2)
@each_backend
def test_the_communicator_outlives_its_group_and_not_the_other_way(world, backend):
    comm, op = make("life", backend), torchcomms().ReduceOp
    get = torchcomms().get_process_group
    group = get(comm)
    assert get(comm) is group and dist.get_process_group_ranks(group) == [0, 1]
    assert get(torchcomms().get_comm(group)) is group
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=group)
    dist.destroy_process_group(group)
    comm.all_reduce(tensor, op.SUM, False)
    assert tensor.item() == 4
    with pytest.raises((RuntimeError, ValueError)):
        dist.all_reduce(tensor, group=group)
    again = get(comm)
    assert again is not group
    del group
    gc.collect()  # frees the old group's side, and leaves the new one its hooks
    work = dist.all_reduce(tensor, group=again, async_op=True)
    work.wait()
    assert tensor.item() == 8
    comm.finalize()
    with pytest.raises(RuntimeError, match="shut down"):
        dist.all_reduce(tensor, group=again)
    with pytest.raises(RuntimeError, match="was finalized"):
        get_new = make("other", backend)
        get_new.finalize()
        get(get_new)
    dist.destroy_process_group(again)


@pytest.mark.ranks(2)
def test_a_failure_of_one_is_a_failure_of_both(world):
    comm = make("fails")
    group = torchcomms().get_process_group(comm)
    dist.barrier(group)
    dist.barrier()  # all have left that one
    if dist.get_rank() == 0:
        comm.abort()
    dist.barrier()
    with pytest.raises(torchcomms().CommError, match="aborted on rank 0"):
        dist.all_reduce(torch.ones(1), group=group)
    comm.finalize()
    dist.destroy_process_group(group)


@pytest.mark.ranks(3)
def test_ranks_in_another_order_are_the_groups_order(world):
    comm = make("order")
    child = comm.split([2, 0, 1], "turned")
    try:
        group = torchcomms().get_process_group(child)
    except ValueError as error:  # older torch sorts
        assert "not in ascending order" in str(error)
    else:
        got = [torch.empty(1) for _ in range(world)]
        dist.all_gather(got, torch.tensor([float(dist.get_rank())]), group=group)
        assert [t.item() for t in got] == [2.0, 0.0, 1.0]
        assert_same(torch.cat(got), torch.cat([torch.tensor([float(r)]) for r in (2, 0, 1)]))
        dist.destroy_process_group(group)
    others = torchcomms().new_comm(
        "shm", "cpu", "other numbers", store=dist.distributed_c10d._get_default_store(),
        rank=(dist.get_rank() + 1) % world, size=world,
    )  # fmt: skip
    with pytest.raises(ValueError, match="and the default process group rank"):
        torchcomms().get_process_group(others)
    others.finalize()
    child.finalize()
    comm.finalize()
