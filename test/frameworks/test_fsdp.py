"""FSDP1, FSDP2 and HSDP train over torchcomms as over Gloo, and save and load the same states."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from harness.parity import like_gloo, raised
from harness.values import data

pytestmark = pytest.mark.torch_version

STEPS = 3
CPU = torch.device("cpu")


def model():
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(13, 21), nn.ReLU(), nn.Linear(21, 7), nn.Linear(7, 3))


def batch(step):
    return data(dist.get_rank(), (4, 13), salt=step)


def train(net, optimizer=None, steps=STEPS):
    optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = net(batch(step)).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def fsdp1(net, strategy=ShardingStrategy.FULL_SHARD, **kwargs):
    policy = ModuleWrapPolicy({nn.Linear})
    return FullyShardedDataParallel(
        net, sharding_strategy=strategy, auto_wrap_policy=policy, device_id=CPU, **kwargs
    )


def full_state(net):
    with FullyShardedDataParallel.state_dict_type(net, StateDictType.FULL_STATE_DICT):
        return dict(net.state_dict())


@like_gloo(2)
@pytest.mark.parametrize("original", [True, False], ids=["original", "flat"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_fsdp1(strategy, original):
    net = fsdp1(model(), ShardingStrategy[strategy], use_orig_params=original)
    losses = train(net)
    norm = net.clip_grad_norm_(0.01)
    with net.no_sync():
        net(batch(7)).sum().backward()
    net(batch(8)).sum().backward()
    return losses, norm, full_state(net)


@like_gloo(2)
def test_fsdp1_mixed_precision():
    """And `sync_module_states`, which torch has on GPUs only: its own error over both backends."""
    half = MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16)
    net = fsdp1(model(), mixed_precision=half)
    losses = train(net)
    reduced = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32)
    error = raised(fsdp1, model(), sync_module_states=True)
    return losses, full_state(net), train(fsdp1(model(), mixed_precision=reduced)), error


@like_gloo(4, rounding=True)
@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
def test_fsdp1_hybrid(strategy):
    """Once over a mesh, once over groups that torch makes for itself."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    net = fsdp1(model(), ShardingStrategy[strategy], device_mesh=mesh)
    shard, replicate = mesh.get_group("shard"), mesh.get_group("replicate")
    other = fsdp1(model(), ShardingStrategy[strategy], process_group=(shard, replicate))
    return train(net), full_state(net), train(other), full_state(other)


@pytest.mark.skipif(
    torch.__version__ < "2.14",
    reason="FSDP1 of these versions loses the full parameters on CPUs, over any backend",
)
@like_gloo(2)
@pytest.mark.parametrize("with_mesh", [False, True], ids=["sharded tensors", "dtensors"])
def test_fsdp1_state_dicts_of_every_kind(with_mesh):
    """Full, local and sharded, saved with torch.save and loaded into another model."""
    extra = dict(device_mesh=init_device_mesh("cpu", (2,))) if with_mesh else {}

    def trained():
        net = fsdp1(model(), **extra)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        train(net, optimizer)
        return net, optimizer

    results = {}
    kinds = set(StateDictType)
    if with_mesh:
        kinds.remove(StateDictType.LOCAL_STATE_DICT)  # torch: "not compatible"
    for kind in sorted(kinds, key=lambda kind: kind.name):
        net, optimizer = trained()
        other = fsdp1(model(), **extra)
        with FullyShardedDataParallel.state_dict_type(net, kind):
            file = io.BytesIO()
            torch.save(net.state_dict(), file)
        file.seek(0)
        with FullyShardedDataParallel.state_dict_type(other, kind):
            other.load_state_dict(torch.load(file, weights_only=False))
        results[kind.name] = full_state(other)
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    net, optimizer = trained()
    with FullyShardedDataParallel.state_dict_type(net, StateDictType.FULL_STATE_DICT, config):
        results["rank 0 only"] = dict(net.state_dict())
    net, optimizer = trained()
    whole = FullyShardedDataParallel.optim_state_dict(net, optimizer)
    results["optimizer"] = {k: v["exp_avg"] for k, v in whole["state"].items()}
    again = torch.optim.Adam(net.parameters(), lr=0.01)
    again.load_state_dict(
        FullyShardedDataParallel.optim_state_dict_to_load(net, again, copy.deepcopy(whole))
    )
    results["trained on"] = train(net, again)
    return results


def fsdp2(net, **kwargs):
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **kwargs)
    fully_shard(net, **kwargs)
    return net


@like_gloo(2)
@pytest.mark.parametrize("reshard", [True, False, 1])
def test_fsdp2(reshard):
    net = fsdp2(model(), mesh=init_device_mesh("cpu", (2,)), reshard_after_forward=reshard)
    losses = train(net)
    net.set_requires_gradient_sync(False)
    net(batch(5)).sum().backward()
    net.set_requires_gradient_sync(True)
    net(batch(6)).sum().backward()
    norm = nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    return losses, norm, dict(net.named_parameters()), [p.grad for p in net.parameters()]


POLICIES = {
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    "bf16, reduced in fp32": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    "fp16": MixedPrecisionPolicy(param_dtype=torch.float16, output_dtype=torch.float32),
    "reduced in bf16": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16),
}


@like_gloo(2)
@pytest.mark.parametrize("policy", POLICIES)
def test_fsdp2_mixed_precision(policy):
    net = fsdp2(model(), mesh=init_device_mesh("cpu", (2,)), mp_policy=POLICIES[policy])
    return train(net), dict(net.named_parameters())


@like_gloo(2, 3, rounding=True)
def test_fsdp2_cpu_offload_custom_reduce_factor_and_allocation_from_the_group(world):
    """PREMUL_SUM for the factor. No group has an allocator for CPUs; torch then takes its own."""
    mesh = init_device_mesh("cpu", (world,))
    offloaded = fsdp2(model(), mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    losses = train(offloaded)
    factor = fsdp2(model(), mesh=mesh)
    factor.set_gradient_divide_factor(3.0)
    train(factor)
    summed = fsdp2(model(), mesh=mesh)
    for module in summed.modules():
        if hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_force_sum_reduction_for_comms(True)
    train(summed)
    allocated = fsdp2(model(), mesh=mesh)
    allocated.set_allocate_memory_from_process_group_for_comm(True)
    train(allocated)
    nets = (offloaded, factor, summed, allocated)
    return losses, [dict(net.named_parameters()) for net in nets]


@like_gloo(4, rounding=True)
def test_hsdp2_with_all_reduce_and_state_dicts():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    net = fsdp2(model(), mesh=mesh)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    losses = train(net, optimizer)
    net.set_requires_all_reduce(False)
    net(batch(5)).sum().backward()
    net.set_requires_all_reduce(True)
    net(batch(6)).sum().backward()
    gradients = [p.grad for p in net.parameters()]
    whole = StateDictOptions(full_state_dict=True)
    saved, saved_optimizer = get_state_dict(net, optimizer, options=whole)
    torch.manual_seed(9)
    other = fsdp2(model(), mesh=mesh)
    other_optimizer = torch.optim.Adam(other.parameters(), lr=0.01)
    spread = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_state_dict(
        other,
        other_optimizer,
        model_state_dict=saved,
        optim_state_dict=saved_optimizer,
        options=spread,
    )
    return losses, gradients, train(other, other_optimizer), dict(other.named_parameters())


@like_gloo(2)
def test_fsdp2_sharded_state_dict_through_torch_save():
    net = fsdp2(model(), mesh=init_device_mesh("cpu", (2,)))
    train(net)
    file = io.BytesIO()
    torch.save(get_model_state_dict(net), file)
    file.seek(0)
    other = fsdp2(model(), mesh=init_device_mesh("cpu", (2,)))
    set_model_state_dict(other, torch.load(file, weights_only=False))
    return dict(other.named_parameters()), train(other)
