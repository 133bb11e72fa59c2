"""Tensors of an accelerator: queued in streams, in the right order, on a simulated device.

Streams dawdle at random, so that a missing wait shows as wrong numbers in the tests of the
operations; those of the orderings hold a stream up and are not left to chance.
"""

import pytest
import torch
import torch.distributed as dist

import torchcomms_pg
from harness import catalogue
from harness.catalogue import LAYOUTS
from harness.ranks import time_limit, wait_for
from harness.values import all_data, assert_reduced

try:
    from harness.simulated_group import DEVICE, on_sim, sim
    from simulated import _simulated
except ImportError:
    pytest.skip("python test/simulated/build.py builds it", allow_module_level=True)

ROWS = (0, 1, 7, 23_334)
WAYS = ("sync", "async", "future")


class Case(catalogue.Case):
    device = DEVICE


class CommCase(Case):
    @property
    def comm(self):
        return torchcomms_pg.get_comm(device=DEVICE)


def cases(kind, world):
    for rows in ROWS:
        yield from kind(world, rows).over(WAYS)
    yield from kind(world, 30).over(WAYS, LAYOUTS[1:])


# ---------------------------------------------------------------- every operation


@pytest.mark.product
@on_sim()
@pytest.mark.parametrize("operation", catalogue.OPERATIONS)
def test_collectives_are_those_of_plain_values(world, operation):
    catalogue.run(catalogue.OPERATIONS[operation], cases(Case, world))


@pytest.mark.product
@on_sim()
@pytest.mark.parametrize("operation", catalogue.TORCHCOMM)
def test_operations_of_torchcomm_are_those_of_plain_values(world, operation):
    catalogue.run(catalogue.TORCHCOMM[operation], cases(CommCase, world))


@on_sim(2)
def test_a_factor_of_premul_sum_may_be_a_tensor_of_the_device(world):
    inputs = all_data(world, 1000)
    tensor = sim(inputs[dist.get_rank()])
    factor = torch.tensor([0.5], device=DEVICE)
    dist.all_reduce(tensor, dist._make_nccl_premul_sum(factor), async_op=True).wait()
    assert_reduced(tensor.cpu(), [x / 2 for x in inputs])


@on_sim(2)
def test_barriers_meet_whatever_device_a_rank_names(world):
    """Before the group has connected a device, and afterwards."""
    group, tensor = dist.new_group(), torch.ones(10, device=DEVICE)
    for connected in (False, True):
        if connected:
            dist.all_reduce(tensor, group=group)
        for named in ({}, {"device_ids": [dist.get_rank()]}, {"device_ids": [1 - dist.get_rank()]}):
            with time_limit(0, 15, f"a barrier with {named}"):
                dist.barrier(group, **named)
    dist.destroy_process_group(group)


@on_sim(2)
def test_a_second_device_has_a_communicator_of_its_own(world):
    inputs = all_data(world, 1000)
    tensors = [inputs[dist.get_rank()].to(f"sim:{i}") for i in (0, 1)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work, tensor in zip(works, tensors):
        with torch.sim.device(tensor.device.index):
            work.wait()
            assert_reduced(tensor.cpu(), inputs)


@on_sim(2)
def test_torchcomm_of_the_device(world):
    comm = torchcomms_pg.get_comm(device=DEVICE)
    seen = []
    handle = comm.register_pre_hook(lambda args: seen.append(str(args.name)))
    inputs = all_data(world, 100)
    tensor = sim(inputs[dist.get_rank()])
    comm.all_reduce(tensor, torchcomms_pg.ReduceOp.SUM, async_op=True).wait()
    handle.remove()
    assert_reduced(tensor.cpu(), inputs)
    assert len(seen) == 1 and "all_reduce" in seen[0]


# ---------------------------------------------------------------- works


@on_sim(2)
def test_a_work_tells_when_it_has_ended_and_how_long_it_took(world):
    group = dist.new_group()
    group._enable_collectives_timing()
    tensor = torch.ones(1000, device=DEVICE)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    work.wait()
    torch.accelerator.synchronize()
    assert work.is_completed() and work.is_success()
    assert wait_for(lambda: work.get_future_result().done(), 5)
    assert 0 < work._get_duration() < 5000
    assert (work.result()[0].cpu() == world).all()
    dist.destroy_process_group(group)


@on_sim(2)
def test_works_that_nobody_waits_for_end_too(world):
    tensors = [torch.ones(1000, device=DEVICE) for _ in range(5)]
    works = [dist.all_reduce(x, async_op=True) for x in tensors]
    assert wait_for(lambda: all(work.is_completed() for work in works), 10)
    torch.accelerator.synchronize()
    assert all((x.cpu() == world).all() for x in tensors)


@on_sim(2)
def test_an_operation_takes_few_calls_of_the_device(world):
    """Beside the library's own: four where it has a stream of its own, else two."""
    tensor = torch.ones(1000, device=DEVICE)

    def calls(body):
        before = _simulated.device_calls()
        result = body()
        return _simulated.device_calls() - before, result

    def leave_events():
        works = [dist.all_reduce(tensor, async_op=True) for _ in range(20)]
        works[-1].wait()
        assert wait_for(lambda: all(work.get_future_result().done() for work in works), 5)

    leave_events()  # those of works that are gone are used again
    for _ in range(5):
        count, work = calls(lambda: dist.all_reduce(tensor, async_op=True))
        assert count <= 4
        assert calls(work.wait)[0] <= 3  # two of them ask whether it has ended
        assert calls(lambda: dist.all_reduce(tensor))[0] <= 2


@on_sim(2)
def test_high_priority_is_handed_to_the_device(world):
    before = len(_simulated.high_priority_streams(0))
    options = torchcomms_pg.Backend.Options()
    options.is_high_priority_stream = True
    group = dist.new_group(pg_options=options)
    dist.all_reduce(torch.ones(10, device=DEVICE), group=group, async_op=True).wait()
    assert len(_simulated.high_priority_streams(0)) == before + 1
    dist.destroy_process_group(group)


@on_sim(2)
def test_a_mistake_enqueues_nothing(world):
    tensor = torch.ones(10, device=DEVICE)
    with pytest.raises(ValueError, match="root"):
        dist.group.WORLD._get_backend(torch.device(DEVICE)).broadcast(tensor, 5)
    with pytest.raises(ValueError, match="sim:0"):
        dist.all_gather_into_tensor(torch.ones(20), tensor)
    dist.all_reduce(tensor)
    assert (tensor.cpu() == world).all()
