"""What torch's own parallelisms do uses no tensor of an asynchronous operation too early."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _symmetric_memory, checkpoint
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from frameworks.test_no_nccl_hazards import CASES, FIRST
from harness.parity import run_over
from harness.ranks import BACKEND, Ranks
from torchcomms_pg import check_async


def run_case(name, store):
    """Called in a rank; returns the rank's findings."""
    world, test, kwargs = CASES[name]
    check_async.start()
    try:
        run_over(BACKEND, store, world, test.over_one, kwargs, {})
    finally:
        findings = check_async.finish()
    return findings.as_dict()


@pytest.mark.parametrize(
    "name",
    [name if name in FIRST else pytest.param(name, marks=pytest.mark.slow) for name in CASES],
)
def test_what_frameworks_do_is_not_accused(name):
    with Ranks(CASES[name][0], init=False) as ranks:
        parts = ranks.run(run_case, name, ranks.store_args())
    report = check_async.merged(map(check_async.Findings.from_dict, parts))
    assert not report.found, f"{report}"


def hooks_of_ddp(folder):
    """Trains with each comm hook that torch has, and saves asynchronously; returns the findings."""
    check_async.start()
    try:
        for views, static in ((False, False), (True, True)):
            for hook in (
                None,
                default_hooks.allreduce_hook,
                default_hooks.fp16_compress_hook,
                default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
                powerSGD_hook.powerSGD_hook,
            ):
                train(hook, gradient_as_bucket_view=views, static_graph=static)
        model = train(None)
        state = {"model": model.module.state_dict()}
        saved = checkpoint.async_save(state, checkpoint_id=folder)
        model.module.weight.data.add_(1)
        saved.result()
    finally:
        findings = check_async.finish()
    return findings.as_dict()


def train(hook, **options):
    model = torch.nn.Linear(40, 40)
    model = DistributedDataParallel(model, bucket_cap_mb=0.001, **options)
    state = dist.group.WORLD
    if hook is powerSGD_hook.powerSGD_hook:
        state = powerSGD_hook.PowerSGDState(state, start_powerSGD_iter=2)
    if hook is not None:
        model.register_comm_hook(state, hook)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, lr=0.01, parameters_as_bucket_view=False
    )
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(3, 40)).sum().backward()
        assert all(each.grad.isfinite().all() for each in model.parameters())
        optimizer.step()
    return model


def test_comm_hooks_of_ddp_and_asynchronous_saves_are_not_accused(tmp_path):
    with Ranks(2) as ranks:
        parts = ranks.run(hooks_of_ddp, str(tmp_path))
    report = check_async.merged(map(check_async.Findings.from_dict, parts))
    assert not report.found, f"{report}"
    assert report.operations > 2 * 10 * 4


def fsdp2_that_prefetches():
    """Trains with explicit prefetch forward and backward; returns the parameters."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,))
    layers = [nn.Linear(16, 16) for _ in range(4)]
    net = nn.Sequential(*layers)
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    for at, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[at + 1 : at + 3])
        layer.set_modules_to_backward_prefetch(layers[max(at - 2, 0) : at][::-1])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        layers[0].unshard(async_op=True)
        net(torch.randn(3, 16)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [each.full_tensor() for each in net.parameters()]


def asynchronous_tensor_parallelism():
    """Runs what torch's asynchronous tensor parallelism has on CPUs; returns its results."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,))
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    plan = {
        "0": ColwiseParallel(input_layouts=Shard(0)),
        "2": RowwiseParallel(output_layouts=Shard(0)),
    }
    parallelize_module(net, mesh, plan)
    net(torch.randn(4, 8)).square().sum().backward()
    sharded = distribute_tensor(torch.randn(4, 8), mesh, [Shard(0)])
    wholes = [sharded.redistribute(mesh, [Replicate()], async_op=True) for _ in range(2)]
    name, weight = mesh.get_group().group_name, torch.randn(8, 8)
    gathered, products = _symmetric_memory._fused_all_gather_matmul_fallback(
        sharded.to_local(), [weight], 0, name
    )
    scattered = _symmetric_memory._fused_matmul_reduce_scatter_fallback(
        gathered, weight, "sum", 0, name
    )
    gradients = [each.grad.full_tensor() for each in net.parameters()]
    return [*gradients, *(each.to_local() + 1 for each in wholes), *products, scattered]


def checked_and_not(body):
    """Called in a rank; returns its findings, and whether the check has changed the results."""
    want = body()
    check_async.start()
    try:
        got = body()
    finally:
        findings = check_async.finish()
    same = len(got) == len(want) and all(map(torch.equal, got, want))
    return findings.as_dict(), same


@pytest.mark.parametrize(
    ("body", "least"), [(fsdp2_that_prefetches, 10), (asynchronous_tensor_parallelism, 5)]
)
def test_prefetch_and_asynchronous_tensor_parallelism_are_not_accused(body, least):
    with Ranks(2) as ranks:
        parts = ranks.run(checked_and_not, body)
    report = check_async.merged(check_async.Findings.from_dict(found) for found, _ in parts)
    assert not report.found, f"{report}"
    assert report.operations > 2 * least and all(same for _, same in parts)
