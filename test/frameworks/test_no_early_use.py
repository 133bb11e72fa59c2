"""What torch's own parallelisms do uses no tensor of an asynchronous operation too early."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
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
