"""On a simulated accelerator: metrics count what its streams are past, as long as was seen."""

import time

import pytest
import torch
import torch.distributed as dist

from harness.comms import torchcomms
from harness.ranks import on_own_ranks, wait_for

try:
    from harness.simulated_group import DEVICE, start
except ImportError:
    pytest.skip("python test/simulated/build.py builds it", allow_module_level=True)

pytestmark = pytest.mark.beyond_gloo


def totals():
    """Of the default group, whose devices are counted together."""
    (group,) = torchcomms()._C.process_totals().groups
    return group, {operation.name: operation for operation in group.operations}


@on_own_ranks(2, init=start)
def test_operations_in_streams_are_counted_with_what_they_have_lasted_at_least(world):
    store = dist.distributed_c10d._get_default_store()
    tensor = torch.ones(10, device=DEVICE)
    begun = time.monotonic()
    dist.all_reduce(tensor)  # connects
    if dist.get_rank() == 1:
        store.wait(["seen"])
    works = [dist.all_reduce(tensor, async_op=True) for _ in range(3)]
    dist.all_reduce(tensor)
    if dist.get_rank() == 0:
        # Each look asks the device.
        assert wait_for(lambda: totals()[0].in_flight == 4 and totals()[0].oldest > 0.2)
        store.set("seen", "")
    for work in works:
        work.wait()
    torch.accelerator.synchronize()
    took = time.monotonic() - begun
    assert wait_for(lambda: totals()[0].in_flight == 0)
    each = totals()[1]["all_reduce"]
    assert (each.ended, each.failures, each.bytes) == (5, 0, 5 * 40)
    assert 0 <= each.seconds <= 5 * took
    if dist.get_rank() == 0:
        assert each.seconds > 0.1, "they were in flight while rank 1 waited"
