"""On a simulated accelerator: dumps of the flight recorder ask the device, which may not answer."""

import time

import pytest
import torch
import torch.distributed as dist

from harness.ranks import on_own_ranks, time_limit, wait_for
from harness.recorders import process_entries, process_trace
from torchcomms_pg.trace.dumps import Dumps, parse

try:
    import simulated
    from harness.simulated_group import DEVICE, on_sim, start
except ImportError:
    pytest.skip("python test/simulated/build.py builds it", allow_module_level=True)

pytestmark = pytest.mark.beyond_gloo
PATIENCE = 0.5  # of a dump: one that takes as long may be older
WAIT = 20.0


@on_sim(2)
def test_a_dump_has_the_states_of_the_moment(world):
    group, seen = dist.new_group(), 0
    tensor = torch.ones(10, device=DEVICE)
    for number in range(20):
        dist.all_reduce(tensor, group=group, async_op=number % 2 == 0)
        torch.accelerator.synchronize()
        begin = time.monotonic()
        entries = process_entries(group)
        if time.monotonic() - begin < PATIENCE:
            seen += 1
            assert len(entries) == number + 1
            assert all(entry["state"] == "completed" for entry in entries), entries[-1]
    assert seen
    dist.destroy_process_group(group)


@on_sim(2)
def test_a_dump_has_the_ranks_of_a_group_that_one_of_its_devices_has_not_used(world):
    group = dist.new_group()
    dist.all_reduce(torch.ones(10, device=DEVICE), group=group)
    torch.accelerator.synchronize()
    dump = parse(process_trace(), dist.get_rank())
    Dumps([dump])  # finds the groups of the entries
    entries = [entry for entry in dump.entries if entry.group.name == group.group_name]
    assert [(entry.device, entry.group.ranks) for entry in entries] == [("sim", (0, 1))]
    dist.destroy_process_group(group)


@on_own_ranks(1, init=start)
def test_a_dump_does_not_wait_for_a_driver_that_hangs(world):
    group, tensor = dist.group.WORLD, torch.ones(10, device=DEVICE)
    dist.all_reduce(tensor)
    assert wait_for(lambda: process_entries(group)[-1]["state"] == "completed", WAIT)
    with simulated.hanging_driver():
        dist.all_reduce(tensor)
        with time_limit(0, 10, "two dumps"):
            states = [[entry["state"] for entry in process_entries(group)] for _ in range(2)]
        assert states == [["completed", "scheduled"]] * 2
    assert wait_for(lambda: process_entries(group)[-1]["state"] == "completed", WAIT)
