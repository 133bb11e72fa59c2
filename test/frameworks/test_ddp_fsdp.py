"""DDP, FSDP2, DTensor, object and functional collectives train and agree with Gloo."""

import copy
import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.nn.parallel import DistributedDataParallel

from harness.ranks import on_ranks
from harness.values import all_data, assert_same, data

pytestmark = pytest.mark.torch_version

beyond_gloo = pytest.mark.beyond_gloo
STEPS, BATCH = 4, 8


def model():
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 5, 3, bias=False),  # before batch norm its gradient is noise
        torch.nn.BatchNorm2d(5),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(5 * 36, 63),
        torch.nn.ReLU(),
        torch.nn.Linear(63, 10),
    )


def dense_model():
    torch.manual_seed(4)
    layers = [torch.nn.Linear(37, 53), torch.nn.ReLU(), torch.nn.Linear(53, 11)]
    return torch.nn.Sequential(*layers)


def train(net, shape, rank):
    """A few steps on this rank's own data; the losses."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(STEPS):
        inputs = data(rank, (BATCH, *shape), salt=step)
        targets = data(rank, (BATCH,), torch.int64, salt=step).abs()
        loss = torch.nn.functional.cross_entropy(net(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def ddp(group, **kwargs):
    net = DistributedDataParallel(model(), process_group=group, **kwargs)
    losses = train(net, (1, 8, 8), dist.get_rank())
    return losses, net.module.state_dict()


def assert_agrees(mine, gloo, exact):
    for (name, got), want in zip(mine.items(), gloo.values()):
        if exact:
            assert_same(got, want, name)
        else:
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, msg=name)


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("kind", ["plain", "small buckets", "static graph", "bucket views"])
def test_ddp_trains_like_gloo(world, kind):
    """Bit by bit with two ranks: there is one way to add two numbers."""
    arguments = {
        "plain": {},
        "small buckets": dict(bucket_cap_mb=0.001),
        "static graph": dict(static_graph=True),
        "bucket views": dict(gradient_as_bucket_view=True),
    }[kind]
    gloo = dist.new_group(backend="gloo")
    losses, state = ddp(None, **arguments)
    other_losses, other_state = ddp(gloo, **arguments)
    assert_agrees(state, other_state, exact=world <= 2)
    torch.testing.assert_close(losses, other_losses, rtol=1e-5, atol=1e-6)
    for tensor in state.values():  # and all ranks have one model (batch norm's statistics are own)
        if tensor.is_floating_point() and tensor.dim() > 1:
            copies = [torch.empty_like(tensor) for _ in range(world)]
            dist.all_gather(copies, tensor)
            for other in copies:
                assert_same(other, tensor)
    dist.destroy_process_group(gloo)


@on_ranks(2)
def test_ddp_reads_gradients_through_the_future_of_a_comm_hook(world):
    def scaled(state, bucket):
        work = dist.all_reduce(bucket.buffer() / world, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    net = DistributedDataParallel(model(), bucket_cap_mb=0.001)
    net.register_comm_hook(None, scaled)
    train(net, (1, 8, 8), dist.get_rank())
    plain = DistributedDataParallel(model(), bucket_cap_mb=0.001)
    train(plain, (1, 8, 8), dist.get_rank())
    assert_agrees(net.module.state_dict(), plain.module.state_dict(), exact=True)


@on_ranks(2)
def test_ddp_with_torchs_own_fp16_hook_and_no_sync(world):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    net = DistributedDataParallel(dense_model())
    net.register_comm_hook(None, default_hooks.fp16_compress_hook)
    with net.no_sync():
        net(data(dist.get_rank(), (4, 37))).sum().backward()
    net(data(dist.get_rank(), (4, 37), salt=1)).sum().backward()
    for parameter in net.parameters():
        copies = [torch.empty_like(parameter.grad) for _ in range(world)]
        dist.all_gather(copies, parameter.grad)
        assert_same(copies[0], copies[1])


@on_ranks(2)
def test_ddp_with_uneven_inputs_joins(world):
    net = DistributedDataParallel(dense_model())
    with net.join():
        for _ in range(2 + 2 * dist.get_rank()):
            net(data(dist.get_rank(), (4, 37))).sum().backward()
    dist.barrier()


@beyond_gloo  # no AVG
@on_ranks(2, 3)
@pytest.mark.parametrize("reshard", [True, False])
def test_fsdp2_trains_like_ddp_over_gloo(world, reshard):
    gloo = dist.new_group(backend="gloo")
    reference = DistributedDataParallel(dense_model(), process_group=gloo)
    wanted = train(reference, (37,), dist.get_rank())
    net = dense_model()
    mesh = init_device_mesh("cpu", (world,))
    for layer in net:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(net, mesh=mesh)
    losses = train(net, (37,), dist.get_rank())
    torch.testing.assert_close(losses, wanted, rtol=1e-5, atol=1e-6)
    for (name, parameter), want in zip(net.named_parameters(), reference.module.parameters()):
        got = parameter.full_tensor()
        torch.testing.assert_close(got, want.detach(), rtol=1e-4, atol=1e-5, msg=name)
    dist.destroy_process_group(gloo)


@beyond_gloo
@on_ranks(4)
def test_hybrid_fsdp2_on_a_two_dimensional_mesh(world):
    """Replicate over 2, shard over 2: all_reduce and reduce_scatter on subgroups."""
    reference = DistributedDataParallel(dense_model())
    wanted = train(reference, (37,), dist.get_rank())
    net = dense_model()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(net, mesh=mesh)
    losses = train(net, (37,), dist.get_rank())
    torch.testing.assert_close(losses, wanted, rtol=1e-5, atol=1e-6)


@beyond_gloo
@on_ranks(2)
def test_fsdp2_mixed_precision_and_a_custom_divide_factor(world):
    """bfloat16 reduction, and PREMUL_SUM for the factor."""
    net = dense_model()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(net, mesh=init_device_mesh("cpu", (world,)), mp_policy=policy)
    net.set_gradient_divide_factor(4.0)
    plain = dense_model().to(torch.bfloat16)
    total = [torch.zeros_like(p, dtype=torch.float32) for p in plain.parameters()]
    for rank in range(world):
        plain.zero_grad()
        plain(data(rank, (4, 37)).bfloat16()).float().sum().backward()
        for sum_, parameter in zip(total, plain.parameters()):
            sum_ += parameter.grad.float()
    net(data(dist.get_rank(), (4, 37))).float().sum().backward()
    for parameter, want in zip(net.parameters(), total):
        got = parameter.grad.full_tensor()
        torch.testing.assert_close(got, want / 4, rtol=2e-2, atol=2e-2)


@on_ranks(2, 3)
def test_object_collectives(world):
    me = dist.get_rank()
    mine = {"rank": me, "text": "x" * (1000 * me), "tensor": data(me, 5)}
    gathered = [None] * world
    dist.all_gather_object(gathered, mine)
    assert [len(x["text"]) for x in gathered] == [1000 * rank for rank in range(world)]
    for rank in range(world):
        assert_same(gathered[rank]["tensor"], data(rank, 5))
    things = [("a", 1), None, {2}] if me == world - 1 else [None] * 3
    dist.broadcast_object_list(things, src=world - 1)
    assert things == [("a", 1), None, {2}]
    collected = [None] * world if me == 0 else None
    dist.gather_object(me * 10, collected, dst=0)
    assert collected in (None, [10 * rank for rank in range(world)])
    part = [None]
    dist.scatter_object_list(part, [str(r) for r in range(world)] if me == 0 else None, src=0)
    assert part == [str(me)]


@beyond_gloo
@on_ranks()
def test_functional_collectives(world):
    me, group = dist.get_rank(), dist.group.WORLD
    for size in (1, 1025, 100_001):
        inputs = all_data(world, (world, size))
        x = inputs[me].clone()
        total = sum(inputs[1:], inputs[0])
        torch.testing.assert_close(fc.all_reduce(x, "sum", group) + 0, total)
        torch.testing.assert_close(fc.all_reduce(x, "avg", group) + 0, total / world)
        assert_same(x, inputs[me], "the input of a functional collective")
        assert_same(fc.all_gather_tensor(x, 0, group) + 0, torch.cat(inputs) + 0)
        assert_same(fc.all_gather_tensor(x, 1, group) + 0, torch.cat(inputs, 1) + 0)
        scattered = fc.reduce_scatter_tensor(x, "sum", 0, group) + 0
        torch.testing.assert_close(scattered, total[me : me + 1])
        swapped = fc.all_to_all_single(x, None, None, group) + 0
        assert_same(swapped, torch.stack([y[me] for y in inputs]) + 0)
        assert_same(fc.broadcast(x, world - 1, group) + 0, inputs[world - 1] + 0)
        ring = [(rank + 1) % world for rank in range(world)]
        if world > 1:
            moved = fc.permute_tensor(x.flatten(), ring, group) + 0
            assert_same(moved, inputs[(me - 1) % world].flatten() + 0)
    both = fc.all_reduce_coalesced([x, 2 * x], "sum", group)
    torch.testing.assert_close(fc.wait_tensor(both[1]), 2 * total)
    parts = fc.all_gather_into_tensor_coalesced([x, 2 * x], group)
    assert_same(fc.wait_tensor(parts[1]), 2 * torch.cat(inputs))
    parts = fc.reduce_scatter_tensor_coalesced([x.clone(), 2 * x], "sum", [0, 0], group)
    torch.testing.assert_close(fc.wait_tensor(parts[1]), 2 * total[me : me + 1])


@beyond_gloo
@on_ranks(2, 3)
def test_autograd_flows_through_functional_collectives(world):
    x = data(dist.get_rank(), (world, 6)).requires_grad_()
    gathered = fc.all_gather_tensor_autograd(x, 0, dist.group.WORLD)
    weight = data(99, gathered.shape)
    (gathered * weight).sum().backward()
    rows = slice(dist.get_rank() * world, (dist.get_rank() + 1) * world)
    torch.testing.assert_close(x.grad, weight[rows] * world)


@beyond_gloo
@on_ranks()
def test_dtensor_redistributes_between_all_placements(world):
    """Sizes that do not divide by the number of ranks included."""
    mesh = DeviceMesh("cpu", list(range(world)))
    for shape in ((8, 12), (7, 5), (1, 3), (world, 0)):
        whole = data(0, shape, torch.int64)
        placements = [Shard(0), Shard(1), Replicate()]
        for start in placements:
            tensor = distribute_tensor(whole, mesh, [start])
            for end in placements:
                moved = tensor.redistribute(mesh, [end])
                assert_same(moved.full_tensor(), whole, f"{shape} {start} {end}")
        mine = data(dist.get_rank(), shape, torch.int64)
        total = sum(all_data(world, shape, torch.int64))
        partial = DTensor.from_local(mine, mesh, [Partial()])
        for end in placements:
            moved = partial.redistribute(mesh, [end]).full_tensor()
            assert_same(moved, total, f"{shape} Partial {end}")


@beyond_gloo
@on_ranks(2, 4)
def test_tensor_parallel_linear_layers(world):
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch.manual_seed(1)
    plain = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
    split = copy.deepcopy(plain)
    mesh = init_device_mesh("cpu", (world,))
    parallelize_module(split, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x = data(5, (6, 16))
    torch.testing.assert_close(split(x), plain(x))
    split(x).sum().backward()
    plain(x).sum().backward()
    got = split[0].weight.grad.full_tensor()
    torch.testing.assert_close(got, plain[0].weight.grad)


@beyond_gloo
@on_ranks(2)
def test_fsdp2_state_dict_round_trip(world):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    net = dense_model()
    fully_shard(net, mesh=init_device_mesh("cpu", (world,)))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=False)
    for got, want in zip(
        get_model_state_dict(net, options=options).values(), dense_model().state_dict().values()
    ):
        if dist.get_rank() == 0:
            assert_same(torch.as_tensor(got), want)


@on_ranks(2)
def test_gloo_and_the_backend_live_side_by_side(world):
    gloo = dist.new_group(backend="gloo")
    for _ in range(3):
        a, b = torch.ones(1000), torch.ones(1000)
        works = [dist.all_reduce(a, async_op=True), dist.all_reduce(b, group=gloo, async_op=True)]
        for work in works:
            work.wait()
        assert_same(a, b)
    dist.destroy_process_group(gloo)
    assert os.environ["RANK"] == str(dist.get_rank())
