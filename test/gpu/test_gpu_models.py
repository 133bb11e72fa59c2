"""Training on GPUs: DDP, FSDP and pipelines over torch's nccl and torchcomms, as in one process."""

import contextlib
import functools
import tempfile

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


def step(model, optimizer, inputs):
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def trained(model, inputs, optimizer=sgd):
    """The model after three steps on a batch."""
    optimizer = optimizer(model.parameters())
    for _ in range(3):
        step(model, optimizer, inputs)
    return model


def assert_trained(parameters, world, tolerance=1e-5, optimizer=sgd):
    """As in one process that has the batches of all ranks; bf16 rounds on the way."""
    whole = trained(a_model(), torch.cat([batch(rank) for rank in range(world)]), optimizer)
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


def halves_its_double(_, bucket):
    """A communication hook of futures that follow each other."""
    mean = bucket.buffer().div_(dist.get_world_size())
    future = dist.all_reduce(mean, async_op=True).get_future()
    return future.then(lambda done: done.value()[0] * 2).then(lambda done: done.value() / 2)


def power_sgd():
    """One rank of the matrices from the second step on; the first two are exact."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    return state, powerSGD_hook.powerSGD_hook


@on_gpus(2)
def test_hooks_of_ddp_may_issue_operations_of_their_own(world):
    model = DistributedDataParallel(a_model().cuda(), bucket_cap_mb=0.01)
    model.register_comm_hook(None, halves_its_double)
    assert_trained(trained(model, batch(dist.get_rank()).cuda()).parameters(), world)

    model = DistributedDataParallel(a_model().cuda(), bucket_cap_mb=0.01)
    model.register_comm_hook(*power_sgd())
    trained(model, batch(dist.get_rank()).cuda())
    for parameter in model.parameters():  # all ranks have the same, whatever was left out
        of_root = parameter.detach().clone()
        dist.broadcast(of_root, 0)
        assert torch.equal(of_root, parameter.detach())


@on_gpus(2)
def test_ranks_with_more_batches_than_others_go_on_after_them(world):
    model = DistributedDataParallel(a_model().cuda())
    optimizer, rank = torch.optim.SGD(model.parameters(), lr=0.1), dist.get_rank()
    with model.join():
        for _ in range(2 + rank):
            step(model, optimizer, batch(rank).cuda())
    for parameter in model.parameters():
        of_last = parameter.detach().clone()
        dist.broadcast(of_last, world - 1)
        assert torch.equal(of_last, parameter.detach())


@on_gpus(2)
def test_an_optimizer_whose_state_is_spread_over_the_ranks_steps_as_a_whole_one(world):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def spread(parameters):
        return ZeroRedundancyOptimizer(parameters, torch.optim.Adam, lr=0.01)

    model = DistributedDataParallel(a_model().cuda())
    trained(model, batch(dist.get_rank()).cuda(), spread)
    adam = functools.partial(torch.optim.Adam, lr=0.01)
    assert_trained(model.parameters(), world, 1e-4, adam)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ((2, 1), (1, 2)), ids=("replicated", "sharded"))
@on_gpus(2)
def test_hybrid_shards_that_accumulate_gradients_train_as_one_process_does(world, shape):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cuda", shape, mesh_dim_names=("replicas", "shards"))
    model = a_model().cuda()
    for layer in model[0], model[2], model[3], model:
        fully_shard(layer, mesh=mesh)
    optimizer, inputs = sgd(model.parameters()), batch(dist.get_rank()).cuda()
    for _ in range(3):
        optimizer.zero_grad()
        for last in False, True:  # half of the gradient each
            model.set_requires_gradient_sync(last)
            model.set_is_last_backward(last)
            (model(inputs).square().mean() / 2).backward()
        optimizer.step()
    assert_trained(model.parameters(), world)


@pytest.mark.slow
@on_gpus(2, groups=("torchcomms",))
def test_shards_kept_on_the_cpu_are_saved_meanwhile_and_loaded(world):
    """One group moves both the gradients on GPUs and the parts of a checkpoint on CPUs."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    def a_sharded_model():
        model = a_model()
        for layer in model[0], model[2], model[3], model:
            fully_shard(layer, offload_policy=CPUOffloadPolicy())
        return model

    model, inputs = a_sharded_model(), batch(dist.get_rank()).cuda()
    trained(model, inputs)
    saved = [parameter.detach().to_local().clone() for parameter in model.parameters()]
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, 0)
    saving = dcp.async_save({"model": model.state_dict()}, checkpoint_id=folder[0])
    step(model, sgd(model.parameters()), inputs)
    saving.result()

    other = a_sharded_model()
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=folder[0])
    other.load_state_dict(state["model"])
    assert next(other.parameters()).device.type == "cpu"
    for parameter, wanted in zip(other.parameters(), saved, strict=True):
        assert torch.equal(parameter.detach().to_local(), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("how", ("FULL_SHARD", "SHARD_GRAD_OP"))
@on_gpus(2)
def test_fsdp1_that_accumulates_gradients_trains_as_one_process_does(world, how):
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    model = FullyShardedDataParallel(
        a_model().cuda(),
        device_id=torch.cuda.current_device(),
        use_orig_params=True,
        sharding_strategy=ShardingStrategy[how],
        forward_prefetch=True,
    )
    optimizer, inputs = sgd(model.parameters()), batch(dist.get_rank()).cuda()
    for _ in range(3):
        optimizer.zero_grad()
        for last in False, True:
            with contextlib.nullcontext() if last else model.no_sync():
                (model(inputs).square().mean() / 2).backward()
        optimizer.step()
    with FullyShardedDataParallel.summon_full_params(model):
        assert_trained([parameter.detach().clone() for parameter in model.parameters()], world)


@on_gpus(2)
def test_a_pipeline_trains_as_one_process_does(world):
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    def layer(rank):
        torch.manual_seed(rank)
        return torch.nn.Linear(8, 8)

    def loss(output, target):
        return (output - target).square().mean()

    rank = dist.get_rank()
    inputs, target = data(0, (8, 8)), data(1, (8, 8))
    mine = layer(rank).cuda()
    stage = PipelineStage(mine, rank, world, gpus.current_device())
    schedule = Schedule1F1B(stage, 4, loss_fn=loss)
    if rank == 0:
        schedule.step(inputs.cuda())
    else:
        schedule.step(target=target.cuda(), losses=[])
    whole = torch.nn.Sequential(*map(layer, range(world)))
    loss(whole(inputs), target).backward()
    torch.testing.assert_close(mine.weight.grad.cpu(), whole[rank].weight.grad)


@on_gpus(2)
def test_a_step_of_ddp_that_was_captured_trains_as_one_process_does(world):
    inputs, side = batch(dist.get_rank()).cuda(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        model = DistributedDataParallel(
            a_model().cuda(), gradient_as_bucket_view=True, static_graph=True, bucket_cap_mb=0.01
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(11):  # before a capture, as DDP's documentation of CUDA graphs has it
            optimizer.zero_grad(set_to_none=True)
            model(inputs).square().mean().backward()
        optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        model(inputs).square().mean().backward()
        optimizer.step()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert_trained(model.parameters(), world, 1e-4, functools.partial(torch.optim.SGD, lr=0.01))
