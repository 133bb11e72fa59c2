"""Each patch of torch is still needed, works, and leaves groups of other backends alone."""

import datetime

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

from harness.limits import grown

pytestmark = [pytest.mark.beyond_gloo, pytest.mark.torch_version]
CPU = torch.device("cpu")
OLD = pytest.mark.skipif(torch.__version__ >= "2.14", reason="torch 2.14 needs no patch for this")
NO_NEED = "torch needs this patch no longer: torchcomms_pg/_patches.py should limit its versions"


def original(function):
    assert function.replaced_by == "torchcomms_pg._patches", "the patch is not applied"
    return function.__wrapped__


def test_nothing_is_patched_twice_or_without_need():
    import torchcomms_pg
    from torchcomms_pg import _patches

    before = dist_nn._AllGatherBase.backward, c10d.monitored_barrier
    torchcomms_pg.register()
    _patches.apply(int(torch.__version__.split(".")[1]))
    assert (dist_nn._AllGatherBase.backward, c10d.monitored_barrier) == before
    if torch.__version__ >= "2.14":
        assert not hasattr(c10d.monitored_barrier, "replaced_by")


@pytest.mark.ranks(2)
def test_all_gather_base_has_gradients(world):
    gloo = dist.new_group(backend="gloo")
    x = torch.ones(2, 3, requires_grad=True)
    output = dist_nn._all_gather_base(torch.empty(2 * world, 3), x)
    (output * (dist.get_rank() + 1)).sum().backward()
    assert x.grad.unique().tolist() == [3.0]
    over_gloo = dist_nn._all_gather_base(torch.empty(2 * world, 3), x, gloo)
    with pytest.raises(RuntimeError, match="Backend not supported"):
        over_gloo.sum().backward()
    context = type("Context", (), {"group": dist.group.WORLD})()
    with pytest.raises(RuntimeError, match="multiple of the 2 ranks"):
        dist_nn._AllGatherBase.backward(context, torch.ones(5, 1))
    try:
        original(dist_nn._AllGatherBase.backward)(context, torch.ones(2 * world, 3))
    except RuntimeError as error:
        assert "Backend not supported" in str(error)
    else:
        pytest.fail(NO_NEED)
    dist.destroy_process_group(gloo)


@OLD
@pytest.mark.ranks(2)
def test_monitored_barrier_takes_more_than_gloo(world):
    gloo = dist.new_group(backend="gloo")
    dist.monitored_barrier()
    dist.monitored_barrier(gloo, timeout=datetime.timedelta(seconds=20))
    dist.monitored_barrier(timeout=datetime.timedelta(seconds=20), wait_all_ranks=True)
    with pytest.raises(TypeError):
        dist.monitored_barrier(timeout="soon")
    with pytest.raises(ValueError, match="(?i)gloo"):
        original(dist.monitored_barrier)()
        pytest.fail(NO_NEED)
    dist.destroy_process_group(gloo)


@OLD
@pytest.mark.ranks(2)
def test_timeouts_reach_the_backend(world):
    group, gloo = dist.new_group(), dist.new_group(backend="gloo")
    backend = group._get_backend(CPU)
    c10d._set_pg_timeout(datetime.timedelta(seconds=21), group)
    assert backend.options._timeout == datetime.timedelta(seconds=21)
    c10d._set_pg_timeout(datetime.timedelta(seconds=22), gloo)
    original(c10d._set_pg_timeout)(datetime.timedelta(seconds=23), group)
    assert backend.options._timeout == datetime.timedelta(seconds=21), NO_NEED
    dist.destroy_process_group(group)
    dist.destroy_process_group(gloo)


def wait_for_nobody(limit):
    """Calls a barrier on rank 0 alone; returns the seconds until it fails there, else None."""
    import time

    group = dist.new_group(timeout=datetime.timedelta(seconds=0.5))
    c10d._add_ephemeral_timeout_for_all_pgs(datetime.timedelta(seconds=limit))
    begin = time.monotonic()
    if dist.get_rank() == 0:
        with pytest.raises(dist.DistBackendError):
            group.barrier().wait()
        return time.monotonic() - begin
    return None


@OLD
def test_ephemeral_timeouts_reach_the_backend():
    from harness.ranks import Ranks

    with Ranks(2) as ranks:
        took = ranks.run(wait_for_nobody, 1.5)[0]
    assert 1.9 < took < grown(20), took


@OLD
@pytest.mark.ranks(2)
def test_groups_tell_their_sequence_number(world):
    group, gloo = dist.new_group(), dist.new_group(backend="gloo")
    for each in (group, gloo):
        before = each._get_sequence_number_for_group()
        dist.all_reduce(torch.ones(1), group=each)
        assert each._get_sequence_number_for_group() == before + 1
    with pytest.raises(RuntimeError):
        original(ProcessGroup._get_sequence_number_for_group)(group)
        pytest.fail(NO_NEED)
    dist.destroy_process_group(group)
    dist.destroy_process_group(gloo)
