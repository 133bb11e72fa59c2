"""On a simulated accelerator: waits that stop the host, and hooks that are told of the end."""

import concurrent.futures
import datetime
import threading

import pytest
import torch
import torch.distributed as dist

import torchcomms_pg
from accelerator import test_memory
from harness.comms import new_group_with
from harness.ranks import Ranks, check, time_limit, wait_for
from torchcomms_pg.testing.rank import report

try:
    import simulated
    from harness.simulated_group import DEVICE, on_sim, start
    from simulated import hold
except ImportError:
    pytest.skip("python test/simulated/build.py builds it", allow_module_level=True)

pytestmark = pytest.mark.beyond_gloo
WAIT = 20.0
LOOKS = 200  # of a wait that stops the host, which asks for the event again and again


def set_when_it_waits(store, key, early, returned):
    """Sets the key when the main thread waits for an event, or has returned from the wait."""
    waits = lambda: simulated.early_queries()[0] >= early + LOOKS  # noqa: E731
    assert wait_for(lambda: returned.is_set() or waits(), WAIT)
    store.set(key, "")


@on_sim(2)
@pytest.mark.parametrize("how", ("variable", "wait_blocking"))
def test_a_blocking_wait_stops_the_host_until_the_operation_has_ended(world, how):
    group = new_group_with("TORCH_NCCL_BLOCKING_WAIT") if how == "variable" else dist.new_group()
    comm = torchcomms_pg.get_comm(group, DEVICE)
    store = dist.distributed_c10d._get_default_store()
    key = f"waits {group.group_name}"
    tensor = torch.ones(1000, device=DEVICE)
    comm.all_reduce(tensor, torchcomms_pg.ReduceOp.SUM, False)
    torch.accelerator.synchronize()
    wait = "wait" if how == "variable" else "wait_blocking"
    if dist.get_rank() == 0:
        with hold():
            work = comm.all_reduce(tensor, torchcomms_pg.ReduceOp.SUM, True)
            store.wait([key])
        getattr(work, wait)()
        assert work.is_completed()
    else:
        early, returned = simulated.early_queries()[0], threading.Event()
        work = comm.all_reduce(tensor, torchcomms_pg.ReduceOp.SUM, True)
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            setting = thread.submit(set_when_it_waits, store, key, early, returned)
            getattr(work, wait)()
            completed = work.is_completed()
            returned.set()
            setting.result()
        assert completed, "rank 0 was still held up when the wait returned"
    assert (tensor.cpu() == world * world).all()
    dist.destroy_process_group(group)


def waits_alone():
    """Rank 0 only, with a deadline once the peer has come; the failure's text."""
    tensor = torch.ones(10, device=DEVICE)
    dist.all_reduce(tensor)
    torch.accelerator.synchronize()
    dist.group.WORLD.set_timeout(datetime.timedelta(seconds=1))
    work = dist.all_reduce(tensor, async_op=True)
    report("issued")
    with time_limit(0, 15, "the wait"), pytest.raises(torchcomms_pg.CommError) as error:
        work.wait()
    dist.destroy_process_group()
    return str(error.value)


def end_four_groups():
    for group in (None, *(dist.new_group([0]) for _ in range(3))):
        dist.all_reduce(torch.ones(1, device=DEVICE), group=group)
    hang = test_memory.library.functions.fakeHang
    hang(True)
    with time_limit(0, 25, "the end of four groups"):  # 10 s for the first one
        dist.destroy_process_group()
    hang(False)


@pytest.mark.slow
def test_an_abort_that_hangs_in_the_library_delays_one_group_and_not_each():
    with Ranks(1, init=test_memory.over_fake) as ranks:
        ranks.run(end_four_groups)


def comes_once():
    dist.all_reduce(torch.ones(10, device=DEVICE))
    torch.accelerator.synchronize()


def test_a_blocking_wait_raises_at_the_timeout():
    # torchrun sets the other variable, by which a failure would end the process.
    env = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    with Ranks(2, init=start, env=env) as ranks:
        ranks.start(waits_alone, ranks=[0])
        ranks.start(comes_once, ranks=[1])
        outcomes = ranks.wait(ranks=[0])
        check(outcomes)
    assert "timed out after 1 s" in outcomes[0].value


@on_sim(2)
def test_a_post_hook_runs_when_the_stream_is_past_the_operation(world):
    group, posts = dist.new_group(), []
    comm = torchcomms_pg.get_comm(group, DEVICE)
    dist.all_reduce(torch.ones(1, device=DEVICE), group=group)
    torch.accelerator.synchronize()
    handle = comm.register_post_hook(
        lambda args: posts.append((args.name.name, args.work.is_completed()))
    )
    tensor = torch.ones(1000, device=DEVICE)
    torch.accelerator.synchronize()
    with hold():
        early = simulated.early_queries()[1]
        work = dist.all_reduce(tensor, group=group, async_op=True)
        work.wait()  # orders the stream, and nothing more
        # Those who tell of ends have asked, and were told that it has not ended.
        assert wait_for(lambda: posts or simulated.early_queries()[1] >= early + 3, WAIT)
        assert not posts
    assert wait_for(lambda: posts, WAIT)
    assert posts == [("all_reduce", True)]
    dist.all_reduce(tensor, group=group)  # a synchronous one: when it is in the stream
    assert len(posts) == 2
    handle.remove()
    dist.destroy_process_group(group)


@pytest.mark.skipif(not hasattr(torch.Stream, "is_capturing"), reason="torch has it from 2.12 on")
@on_sim(2)
def test_nan_check_looks_at_tensors_of_the_device_and_not_inside_a_graph(world):
    group = new_group_with("TORCH_NCCL_NAN_CHECK")
    nan = torch.tensor([float("nan")], device=DEVICE)
    with pytest.raises(RuntimeError, match="holds 1 NaN in 1 elements; it was not sent"):
        dist.all_reduce(nan, group=group, async_op=True)
    dist.all_reduce(torch.ones(1, device=DEVICE), group=group)
    graph = simulated.Graph()
    with graph.capture():
        dist.all_reduce(nan, group=group)
    graph.replay()
    torch.accelerator.synchronize()
    dist.destroy_process_group(group)


@on_sim(2)
@pytest.mark.parametrize("how", ("abort", "timeout"))
def test_a_rank_that_calls_nothing_knows_that_its_group_has_failed(world, how):
    group, hooks = dist.new_group(), []
    comm = torchcomms_pg.get_comm(group, DEVICE)
    comm.register_abort_hook(lambda: hooks.append("ran"))
    store = dist.distributed_c10d._get_default_store()
    keys = [f"{group.group_name} is used by {rank}" for rank in range(world)]
    tensor = torch.ones(1, device=DEVICE)
    dist.all_reduce(tensor, group=group)
    torch.accelerator.synchronize()
    store.set(keys[dist.get_rank()], "")
    store.wait(keys)
    if dist.get_rank() == 0 and how == "abort":
        comm.abort()
    elif dist.get_rank() == 0:
        comm.set_timeout(datetime.timedelta(seconds=0.5))
        comm.all_reduce(tensor, torchcomms_pg.ReduceOp.SUM, async_op=True)
    assert wait_for(lambda: comm.is_aborted() and hooks, WAIT), (comm.is_aborted(), hooks)
    assert hooks == ["ran"]
    store.set(keys[dist.get_rank()] + " no more", "")
    store.wait([key + " no more" for key in keys])
    dist.destroy_process_group(group)
