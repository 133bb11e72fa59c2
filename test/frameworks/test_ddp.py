"""DistributedDataParallel in every mode gives over torchcomms what it gives over Gloo."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import (
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
)
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from harness.parity import like_gloo, raised
from harness.values import data

pytestmark = pytest.mark.torch_version

STEPS = 3


class Net(nn.Module):
    """With a branch that not every step uses."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(12, 17, bias=False)  # before a norm its gradient is noise
        self.norm = nn.BatchNorm1d(17)
        self.second = nn.Linear(17, 6)
        self.seldom = nn.Linear(17, 6)

    def forward(self, x, seldom=False):
        x = self.norm(self.first(x)).relu()
        return self.seldom(x) if seldom else self.second(x)


def batch(step, count=4):
    return data(dist.get_rank(), (count, 12), salt=step)


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def train(net, optimizer=None, steps=STEPS, **forward):
    optimizer = optimizer or sgd(net)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = net(batch(step), **forward).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, dict(net.module.state_dict())


@like_gloo(1, 2)
def test_parameters_that_a_step_does_not_use():
    """Each rank uses another branch, so that the ranks must agree on what was used."""
    net = DistributedDataParallel(Net(), find_unused_parameters=True)
    optimizer = sgd(net)
    for step in range(STEPS):
        optimizer.zero_grad()
        seldom = (step + dist.get_rank()) % 2 == 0
        net(batch(step), seldom=seldom).square().mean().backward()
        optimizer.step()
    without = DistributedDataParallel(Net())
    errors = []
    for step in range(2):  # the second step tells that the first did not use everything
        errors.append(raised(lambda: without(batch(step)).sum().backward()))
    return net.module.state_dict(), errors


@like_gloo(2)
@pytest.mark.parametrize("bucket_views", [False, True])
@pytest.mark.parametrize("static_graph", [False, True])
def test_small_buckets_static_graph_and_bucket_views(static_graph, bucket_views):
    net = DistributedDataParallel(
        Net(),
        bucket_cap_mb=0.0005,
        static_graph=static_graph,
        find_unused_parameters=not static_graph,
        gradient_as_bucket_view=bucket_views,
    )
    return train(net)


@like_gloo(3, rounding=True)
def test_three_ranks():
    return train(DistributedDataParallel(Net(), find_unused_parameters=True))


@like_gloo(2)
def test_gradient_accumulation_with_no_sync():
    net = DistributedDataParallel(Net(), find_unused_parameters=True)
    optimizer = sgd(net)
    kept = []
    for step in range(STEPS):
        optimizer.zero_grad()
        with net.no_sync():
            for part in range(3):
                net(batch(10 * step + part)).square().mean().backward()
        kept.append([p.grad for p in net.parameters() if p.grad is not None])
        net(batch(10 * step + 3)).square().mean().backward()
        kept.append([p.grad for p in net.parameters() if p.grad is not None])
        optimizer.step()
    return kept


@like_gloo(2, 3, rounding=True)
@pytest.mark.parametrize("by_initial_world_size", [True, False])
def test_uneven_inputs_join(by_initial_world_size):
    net = DistributedDataParallel(nn.Linear(12, 6))
    with torch.no_grad():
        net.module.weight.fill_(0.1)
        net.module.bias.zero_()
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, lr=0.05)
    with dist.algorithms.join.Join(
        [net, optimizer], divide_by_initial_world_size=by_initial_world_size
    ):
        for step in range(2 + 2 * dist.get_rank()):
            optimizer.zero_grad()
            net(batch(step)).square().mean().backward()
            optimizer.step()

    def early():
        with net.join(throw_on_early_termination=True):
            for step in range(1 + dist.get_rank()):
                net(batch(step)).sum().backward()

    return net.module.state_dict(), raised(early)


def bf16_hook(state, bucket):
    # Under another name: DDP refuses torch's own where torch was built without CUDA.
    return default_hooks.bf16_compress_hook(state, bucket)


HOOKS = {
    "all_reduce": lambda: (None, default_hooks.allreduce_hook),
    "fp16": lambda: (None, default_hooks.fp16_compress_hook),
    "bf16": lambda: (None, bf16_hook),
    "powerSGD": lambda: (
        powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2),
        powerSGD_hook.powerSGD_hook,
    ),
}


@like_gloo(2)
@pytest.mark.parametrize("name", HOOKS)
def test_communication_hooks(name):
    whole = Net()
    del whole.seldom  # the search for unused parameters would overtake the hooks' own calls
    net = DistributedDataParallel(whole)
    net.register_comm_hook(*HOOKS[name]())
    return train(net, steps=5)


@like_gloo(2)
def test_sparse_embedding_gradients():
    torch.manual_seed(6)
    table = nn.EmbeddingBag(20, 5, mode="sum", sparse=True)
    net = DistributedDataParallel(nn.Sequential(table, nn.Linear(5, 3)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    gradients = []
    for step in range(STEPS):
        optimizer.zero_grad()
        words = data(dist.get_rank(), (4, 3), torch.int64, salt=step) + 5 + 4 * dist.get_rank()
        net(words).square().mean().backward()
        assert table.weight.grad.is_sparse
        gradients.append(table.weight.grad.to_dense())
        optimizer.step()
    return gradients, net.module.state_dict()


@like_gloo(2)
def test_buffers_are_broadcast_and_batch_norm_synchronises_where_torch_can():
    """SyncBatchNorm has no CPU kernels: both backends give torch's own error in training."""
    net = Net()
    net.norm.running_mean.fill_(dist.get_rank() + 1.0)
    net = DistributedDataParallel(net, find_unused_parameters=True)
    losses = train(net, steps=1)
    mean = net.module.norm.running_mean.clone()
    synced = nn.SyncBatchNorm.convert_sync_batchnorm(Net())
    error = raised(synced, batch(0))
    return losses, mean, error, synced.eval()(batch(0))


@like_gloo(2)
def test_mixed_precision():
    """Parameters and gradients in bfloat16, and under autocast."""
    half = DistributedDataParallel(Net().bfloat16(), find_unused_parameters=True)
    optimizer = sgd(half)
    for step in range(STEPS):
        optimizer.zero_grad()
        half(batch(step).bfloat16()).float().square().mean().backward()
        optimizer.step()
    cast = DistributedDataParallel(Net(), find_unused_parameters=True)
    with torch.autocast("cpu", torch.bfloat16):
        losses = train(cast)
    own = []
    try:
        from torch.nn.parallel.distributed import _MixedPrecision

        policy = _MixedPrecision(torch.bfloat16, torch.bfloat16, torch.float32)
        native = DistributedDataParallel(Net(), mixed_precision=policy)
        own.append(native(batch(0)).dtype == torch.bfloat16)
    except Exception as error:  # needs streams of an accelerator in some versions
        own.append(type(error).__name__)
    return half.module.state_dict(), losses, own


@like_gloo(2, 3, rounding=True)
@pytest.mark.parametrize("bucket_views", [False, True])
def test_zero_redundancy_optimizer(bucket_views):
    net = DistributedDataParallel(Net(), find_unused_parameters=True)
    optimizer = ZeroRedundancyOptimizer(
        net.parameters(), torch.optim.Adam, lr=0.01, parameters_as_bucket_view=bucket_views
    )
    result = train(net, optimizer)
    optimizer.consolidate_state_dict(to=0)
    state = optimizer.state_dict()["state"] if dist.get_rank() == 0 else {}
    return result, {number: [entry["exp_avg"]] for number, entry in state.items() if entry}


@like_gloo(2)
def test_ddp_overlaps_with_the_zero_optimizer_as_over_nccl():
    """Torch refuses Gloo for these hooks; what they train is what plain DDP trains."""

    def overlapped(make):
        torch.manual_seed(8)
        net = DistributedDataParallel(
            nn.Sequential(nn.Linear(12, 17), nn.Linear(17, 6)),
            static_graph=True,
            bucket_cap_mb=0.0005,
        )
        optimizer = ZeroRedundancyOptimizer(
            net.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1
        )
        net.register_comm_hook(None, make(default_hooks.allreduce_hook, net, optimizer))
        for step in range(6):
            optimizer.zero_grad()
            net(batch(step)).square().mean().backward()
            optimizer.step()
        dist.barrier()
        return net.module.state_dict()

    torch.manual_seed(8)
    plain = DistributedDataParallel(nn.Sequential(nn.Linear(12, 17), nn.Linear(17, 6)))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3, 6):  # the hooks take three steps to learn the buckets, without training
        optimizer.zero_grad()
        plain(batch(step)).square().mean().backward()
        optimizer.step()
    if dist.get_backend() == "gloo":
        assert raised(overlapped, hook_with_zero_step) == ["RuntimeError"]
    else:
        for make in (hook_with_zero_step, hook_with_zero_step_interleaved):
            for name, value in overlapped(make).items():
                torch.testing.assert_close(value, plain.module.state_dict()[name])
    return plain.module.state_dict()
