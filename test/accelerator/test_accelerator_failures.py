"""What fails on an accelerator releases its streams, and what is left of a group goes on."""

import datetime
import os

import pytest
import torch
import torch.distributed as dist

import torchcomms_pg
from harness.ranks import Ranks, check, connect_store, meet, on_own_ranks, time_limit, wait_for
from torchcomms_pg.testing.rank import report

try:
    import simulated
    from harness.simulated_group import DEVICE, on_sim, start
    from simulated import hold
except ImportError:
    pytest.skip("python test/simulated/build.py builds it", allow_module_level=True)


# ---------------------------------------------------------------- failures


def all_reduce_alone(limit=None):
    """Rank 0 only, with a deadline once the peer has come; the failure's text."""
    tensor = torch.ones(10, device=DEVICE)
    dist.all_reduce(tensor)
    torch.accelerator.synchronize()
    if limit:
        dist.group.WORLD.set_timeout(datetime.timedelta(seconds=limit))
    report("ready")
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    with time_limit(0, 15, "finding out"), pytest.raises(torchcomms_pg.CommError) as error:
        while True:
            dist.all_reduce(tensor, async_op=True).wait(datetime.timedelta(seconds=20))
    assert wait_for(lambda: work.is_completed(), 15), "the stream still waits for the peer"
    assert not work.is_success()
    torch.accelerator.synchronize()
    with time_limit(0, 15, "shutting down"):
        dist.destroy_process_group()
    return str(error.value)


def all_reduce_once():
    tensor = torch.ones(10, device=DEVICE)
    dist.all_reduce(tensor)
    torch.accelerator.synchronize()


def test_a_missing_peer_ends_in_a_timeout():
    with Ranks(2, init=start) as ranks:
        ranks.start(all_reduce_alone, 2.0, ranks=[0])
        ranks.start(all_reduce_once, ranks=[1])
        (outcome,) = ranks.wait(ranks=[0])
        assert outcome.ok, outcome
        assert "timed out after 2 s" in outcome.value


def test_a_dead_peer_releases_the_streams_of_the_others():
    with Ranks(2, init=start) as ranks:
        ranks.start(all_reduce_alone, ranks=[0])
        ranks.start(all_reduce_once, ranks=[1])
        ranks.wait_report(0)
        ranks.wait(ranks=[1])
        ranks.kill(1)
        (outcome,) = ranks.wait(ranks=[0])
        assert outcome.ok, outcome


@on_own_ranks(2, init=start)
def test_abort_fails_what_is_queued_and_all_that_follows():
    tensor = torch.ones(10, device=DEVICE)
    dist.all_reduce(tensor)
    torch.accelerator.synchronize()
    store = dist.distributed_c10d._get_default_store()
    with hold():
        work = dist.all_reduce(tensor, async_op=True)
        meet(store, "queued", 2)
        with time_limit(0, 25, "aborting"):  # torch's flight recorder takes its time
            dist.group.WORLD._get_backend(torch.device(DEVICE)).abort()
    # Whoever is first tells the other, who may have aborted too.
    with pytest.raises(torchcomms_pg.CommError, match="abort|revoke"):
        dist.all_reduce(tensor)
    assert wait_for(lambda: work.is_completed(), 15)
    with pytest.raises(torchcomms_pg.CommError, match="abort|revoke"):
        work.wait()
    with time_limit(0, 15, "shutting down"):
        dist.destroy_process_group()


def eager(port, prefix, world, timeout):
    simulated.install()  # before there can be such a torch.device
    start(port, prefix, world, timeout, device_id=torch.device(DEVICE))


@on_own_ranks(3, init=eager)
def test_device_id_connects_at_once_and_groups_can_be_split():
    assert torchcomms_pg.get_comm(device=DEVICE).get_size() == 3
    tensor = torch.ones(10, device=DEVICE)
    dist.all_reduce(tensor)
    assert (tensor.cpu() == 3).all()
    group = dist.split_group(split_ranks=[[0, 2], [1]])
    tensor = torch.ones(10, device=DEVICE)
    dist.all_reduce(tensor, group=group)
    assert (tensor.cpu() == (1 if dist.get_rank() == 1 else 2)).all()
    dist.destroy_process_group()


@on_own_ranks(2, init=start, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
def test_debug_detail_finds_a_mismatch_before_anything_is_queued():
    tensor = torch.ones(3 + dist.get_rank(), device=DEVICE)
    with time_limit(0, 15, "the check"):
        with pytest.raises(RuntimeError, match="mismatch between collectives"):
            dist.all_reduce(tensor)
    assert tensor.cpu().unique().tolist() == [1]


# ---------------------------------------------------------------- shrinking


@pytest.mark.skipif(not hasattr(dist, "shrink_group"), reason="torch has it from 2.12 on")
@on_own_ranks(3, init=start)
def test_dist_shrink_group_shrinks_the_communicator_of_the_device_too():
    # Torch registers what is left of a group for the one device that the group is bound to.
    group = dist.new_group(device_id=torch.device(DEVICE))
    if dist.get_rank() != 2:
        smaller = dist.shrink_group([2], group)
        backend = smaller._get_backend(torch.device("sim"))
        assert backend.comm_ptr  # there before the first operation
        tensor = torch.full((1000,), dist.get_rank() + 1.0, device=DEVICE)
        dist.all_reduce(tensor, group=smaller)
        assert (tensor.cpu() == 3).all()
        tensor = torch.full((1000,), dist.get_rank() + 1.0)
        backend.allreduce([tensor]).wait()
        assert (tensor == 3).all()
    dist.barrier()


def survivors(how, store_args):
    """Rank 2 dies; ranks 0 and 1, with an operation in flight, shrink the group and go on."""
    store = connect_store(*store_args)
    dist.all_reduce(torch.ones(5, device=DEVICE))
    torch.accelerator.synchronize()
    if dist.get_rank() != 2:
        work = dist.all_reduce(torch.ones(5, device=DEVICE), async_op=True)
        store.set(f"issued by {dist.get_rank()}", "")
    # After a death, or a shrinking, what is not yet issued raises at once.
    store.wait(["issued by 0", "issued by 1"])
    if dist.get_rank() == 2:
        os._exit(3)
    if how == "after the failure":
        assert wait_for(lambda: work.is_completed(), 15)
    backend = dist.group.WORLD._get_backend(torch.device("sim"))
    child = backend.shrink([2], dist.distributed_c10d.SHRINK_ABORT)
    assert wait_for(lambda: work.is_completed(), 15)
    with pytest.raises(torchcomms_pg.CommError):
        work.wait()
    for device in ("cpu", DEVICE):
        tensor = torch.full((1000,), dist.get_rank() + 1.0, device=device)
        child.allreduce([tensor]).wait()
        assert (tensor.cpu() == 3).all()
    child.shutdown()


@pytest.mark.skipif(not hasattr(dist, "shrink_group"), reason="torch has it from 2.12 on")
@pytest.mark.parametrize("how", ("after the failure", "before anybody knows"))
def test_the_ranks_that_are_left_shrink_the_group_of_a_dead_peer(how):
    with Ranks(3, init=start) as ranks:
        ranks.start(survivors, how, ranks.store_args())
        outcomes = ranks.wait()
        check(outcomes[:2])
        assert "exit code 3" in outcomes[2].died


@on_sim(2)
def test_a_batch_that_is_refused_on_one_device_is_dropped_on_the_other(world):
    tensors = [torch.ones(10, device=device) for device in ("cpu", DEVICE)]
    [dist.all_reduce(tensor) for tensor in tensors]
    hook = torchcomms_pg.get_comm().register_pre_hook(lambda args: 1 / 0)
    with pytest.raises(ZeroDivisionError), dist._coalescing_manager(device=tensors[1].device):
        [dist.broadcast(tensor, 0) for tensor in tensors]
    dist.distributed_c10d._world.pg_coalesce_state.clear()  # torch itself leaves this behind
    hook.remove()
    for tensor in tensors:
        dist.all_reduce(tensor)
        assert tensor.cpu().tolist() == [world**2] * 10
