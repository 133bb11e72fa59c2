"""Training on GPUs: DDP and FSDP over torch's nccl and over torchcomms, as in one process."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from harness import gpus
from harness.gpus import on_gpus
from harness.values import data

if reason := gpus.missing():
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.torch_version


def a_model():
    torch.manual_seed(0)
    layers = torch.nn.Linear(12, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64)
    return torch.nn.Sequential(*layers, torch.nn.Linear(64, 4))


def batch(rank):
    return data(rank, (4, 12))


def trained(model, inputs):
    """The model after three steps on a batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    return model


def assert_trained(parameters, world, tolerance=1e-5):
    """As in one process that has the batches of all ranks; bf16 rounds on the way."""
    whole = trained(a_model(), torch.cat([batch(rank) for rank in range(world)]))
    for ours, theirs in zip(parameters, whole.parameters(), strict=True):
        ours = ours.full_tensor() if hasattr(ours, "full_tensor") else ours
        torch.testing.assert_close(
            ours.detach().cpu(), theirs.detach(), rtol=tolerance, atol=tolerance
        )


@pytest.mark.parametrize("how", ("one bucket", "many buckets", "bf16 gradients"))
@on_gpus(1, 2)
def test_ddp_trains_as_one_process_does(world, how):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model = DistributedDataParallel(
        a_model().cuda(), bucket_cap_mb=0.01 if how == "many buckets" else 25
    )
    if how == "bf16 gradients":
        model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    trained(model, batch(dist.get_rank()).cuda())
    assert_trained(model.parameters(), world, 1e-2 if how == "bf16 gradients" else 1e-5)


@pytest.mark.parametrize("how", ("implicit", "prefetch", "bf16 parameters"))
@on_gpus(1, 2)
def test_fsdp2_trains_as_one_process_does(world, how):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model, policy = a_model().cuda(), MixedPrecisionPolicy()
    if how == "bf16 parameters":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    linear = model[0], model[2], model[3]
    for layer in *linear, model:
        fully_shard(layer, mp_policy=policy)
    if how == "prefetch":
        model[0].set_modules_to_forward_prefetch([model[2]])
        model[2].set_modules_to_backward_prefetch([model[0]])
    trained(model, batch(dist.get_rank()).cuda())
    assert_trained(model.parameters(), world, 2e-2 if how == "bf16 parameters" else 1e-5)


@on_gpus(1, 2)
def test_fsdp1_trains_as_one_process_does(world):
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(a_model().cuda(), device_id=torch.cuda.current_device())
    trained(model, batch(dist.get_rank()).cuda())
    whole = list(a_model().parameters())
    with FullyShardedDataParallel.summon_full_params(model):
        flat = [
            ours.detach().reshape(-1)[: theirs.numel()].reshape(theirs.shape)
            for ours, theirs in zip(model.parameters(), whole, strict=True)
        ]
        assert_trained(flat, world)
