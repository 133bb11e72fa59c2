"""torch's own nccl, watched: verdicts, and graphs that are left alone."""

import datetime
import functools
import json

import pytest
import torch
import torch.distributed as dist

from harness import gpus

if reason := gpus.missing():
    pytest.skip(reason, allow_module_level=True)

import torchcomms_pg
from failures.test_watch import again_if_a_rank_did_not_answer, all_say, stays_away
from harness.ranks import Ranks, check, connect_store, meet, on_own_ranks, wait_for, woken

pytestmark = pytest.mark.skipif(
    torch.__version__ < "2.14", reason="c10d has hooks from torch 2.14 on"
)
on_emulated_ranks = functools.partial(
    on_own_ranks, init=False, started_with=gpus.environment, timeout=45
)


def join(args, world, limit):
    torchcomms_pg.watch(timeout=datetime.timedelta(seconds=limit))
    gpus.start("nccl", *args, world)
    tensor = torch.ones(7, device="cuda")
    dist.all_reduce(tensor)
    torch.cuda.synchronize()


def one_skips_an_operation(args, world):
    join(args, world, 1.5)
    if dist.get_rank() == 1:
        stays_away()
    tensor = torch.ones(1024, device="cuda")
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    meet(connect_store(*args), "done", world)
    return tensor[0].item()


@again_if_a_rank_did_not_answer
def test_a_missing_rank_is_named_and_the_program_goes_on():
    with Ranks(2, init=False, started_with=gpus.environment) as ranks:
        ranks.start(one_skips_an_operation, ranks.store_args(), 2)
        ranks.wait_report(1)
        first, second = all_say(ranks, "rank 1 has not arrived at all_reduce #2")
        assert "rank 1: last completed all_reduce #1 (7 x Float)" in first
        assert "in stays_away" in first and "called at" in first, first
        ranks.tell(1, "go on")
        outcomes = ranks.wait()
        check(outcomes)
        assert [outcome.value for outcome in outcomes] == [2.0, 2.0]
        all_say(ranks, "is over: all_reduce #2")


def recorded():
    entries = json.loads(torchcomms_pg.hooks.process_recorder().dump_json())["entries"]
    return [(entry["profiling_name"], entry["state"]) for entry in entries]


@on_emulated_ranks(2)
def test_what_a_graph_captures_is_not_watched_and_its_replays_are_right(world, port, prefix):
    join((port, prefix), world, 30)
    values, before = torch.ones(100, device="cuda"), len(recorded())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            dist.all_reduce(values)
            values.div_(world)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert (values == 1).all()
    assert len(recorded()) == before
    dist.all_reduce(values)
    assert wait_for(lambda: all(state == "completed" for _, state in recorded())), recorded()
    assert len(recorded()) == before + 1
    gpus.assert_no_misuse()
    del graph
    dist.destroy_process_group()


def ends_before_its_call_returns(args):
    """Called by c10d between the operation and the watch's post hook."""
    assert wait_for(args.work.is_completed, 20)
    # Its thread has no name; when it has slept twice it has looked once, and told of the end.
    nccl = r"(?!tcpg_|gpu|cuda).*"
    looked = woken(nccl) + 3
    assert wait_for(lambda: woken(nccl) >= looked, 20)


@pytest.mark.skipif(torch.__version__ < "2.15", reason="nccl tells of completions from 2.15 on")
@on_emulated_ranks(2)
def test_an_operation_that_is_told_to_have_ended_before_its_call_returns_has(world, port, prefix):
    join((port, prefix), world, 30)
    assert wait_for(lambda: all(state == "completed" for _, state in recorded())), recorded()
    group = dist.distributed_c10d._get_default_group()
    group.register_post_hook(0, ends_before_its_call_returns)
    dist.all_reduce(torch.ones(3, device="cuda"))
    group.unregister_post_hook(0)
    assert wait_for(lambda: recorded()[1:] == [("nccl:all_reduce", "completed")]), recorded()
    dist.destroy_process_group()
