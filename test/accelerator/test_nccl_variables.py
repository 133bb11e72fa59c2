"""Variables, and methods of its backend, that users of torch's ``nccl`` know, have their effect."""

import datetime
import os
import re

import pytest
import torch
import torch.distributed as dist

import torchcomms_pg
from harness.comms import new_group_with
from harness.programs import run_python
from harness.ranks import Ranks, check, init_default_group, wait_for
from harness.recorders import short_group
from harness.values import assert_same
from torchcomms_pg import _C
from torchcomms_pg._patches import unwrapped

pytestmark = pytest.mark.beyond_gloo
CPU = torch.device("cpu")
NAN = float("nan")

ALONE = """
    import torch, torch.distributed as dist, torchcomms_pg
    from datetime import timedelta
    store, limit = dist.HashStore(), timedelta(seconds=7)
    dist.init_process_group("torchcomms", store=store, rank=0, world_size=1, timeout=limit)
    options = torchcomms_pg.Backend.Options(timedelta(seconds=5))
    options.group_name = "part"
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    part = backend.split(dist.PrefixStore("part", store), [0], options)
    part.shutdown()
    dist.destroy_process_group()
"""


def test_a_group_logs_its_options_and_what_the_environment_says():
    env = {"TORCH_NCCL_ENABLE_TIMING": "1", "TORCHCOMM_COMPILE_TIMEOUT_SECONDS": "7"}
    done = run_python("-c", ALONE, TORCH_CPP_LOG_LEVEL="INFO", NCCL_ALGO="Ring", **env)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    options = [line.partition(" initialization options: ")[2] for line in lines]
    whole, part = (line for line in options if line)  # the group, and one that it is split into
    words = "size: 1, global rank: 0, TIMEOUT(ms): {}, USE_HIGH_PRIORITY_STREAM: 0, PG Name: {}, "
    assert whole.startswith(words.format(7000, 0)) and part.startswith(words.format(5000, "part"))
    assert whole.endswith("a failure on CPU tensors raises, on an accelerator ends the process")
    (line,) = (line for line in lines if "torchcomms_pg environment" in line)
    assert f"version {torchcomms_pg.__version__}, built with torch {_C.torch_version} and " in line
    for name, value in (*env.items(), ("NCCL_ALGO", "Ring")):
        assert f"{name}={value}" in line
    with Ranks(1, env=env) as rank:  # without a level
        assert "built with torch" not in rank.output(0)


def one_is_late():
    """Rank 1 does not come, and is in no operation of the group."""
    group, store = short_group(), dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        return store.wait(["told"])
    for _ in range(2):
        with pytest.raises(torchcomms_pg.CommError):
            dist.all_reduce(torch.ones(8, 2), group=group)
    store.set("told", "")


def one_dies():
    dist.barrier()
    if dist.get_rank() == 1:
        os._exit(3)
    with pytest.raises(torchcomms_pg.CommError):
        dist.broadcast(torch.ones(3), 1)


TIMED_OUT = (
    r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=2, OpType=ALLREDUCE, "
    r"NumelIn=16, NumelOut=16, Timeout\(ms\)=1000\) ran for \d{4,} milliseconds before timing out\."
)
DIED = (
    r"Collective WorkNCCL\(SeqNum=2, OpType=BROADCAST, NumelIn=3, NumelOut=3, "
    r"Timeout\(ms\)=\d+\) raised the following async exception: broadcast #2 .*died"
)


def informed():
    return {"TORCH_CPP_LOG_LEVEL": "INFO"}


@pytest.mark.parametrize("body, words", [(one_is_late, TIMED_OUT), (one_dies, DIED)])
@pytest.mark.parametrize("started_with", (informed, None))
def test_on_a_cpu_readers_of_logs_find_the_words_of_nccl_if_they_ask_for_information(
    body, words, started_with
):
    with Ranks(2, started_with=started_with) as ranks:
        ranks.start(body)
        check(ranks.wait(ranks=[0]))
        found = lambda: re.findall(r"\[Rank \d\] .*WorkNCCL.*$", ranks.output(0), re.M)  # noqa: E731
        if started_with:
            assert wait_for(found, 20)
            (line,) = found()
            assert re.match(rf"\[Rank 0\] {words}", line), line
        else:
            # One text: a death is in the exception alone, which repeats a verdict.
            verdict = lambda: "torchcomms_pg: verdict on" in ranks.output(0)  # noqa: E731
            assert body is one_dies or wait_for(verdict, 20)
            assert not found()
        assert "WorkNCCL" not in ranks.output(1)


def one_dies_on_an_accelerator():
    tensor = torch.ones(3, device="sim:0")
    dist.all_reduce(tensor)
    torch.accelerator.synchronize()
    if dist.get_rank() == 1:
        os._exit(3)
    with pytest.raises(torchcomms_pg.CommError):
        dist.broadcast(tensor, 1, async_op=True).wait(datetime.timedelta(seconds=20))


def test_on_an_accelerator_readers_of_logs_find_the_words_of_nccl():
    simulated_group = pytest.importorskip("harness.simulated_group")
    with Ranks(2, init=simulated_group.start) as ranks:
        ranks.start(one_dies_on_an_accelerator)
        check(ranks.wait(ranks=[0]))
        found = lambda: re.findall(r"^\[Rank \d\] .*WorkNCCL.*$", ranks.output(0), re.M)  # noqa: E731
        assert wait_for(found, 20)
        assert re.match(rf"\[Rank 0\] {DIED}", found()[0]), found()
        assert "WorkNCCL" not in ranks.output(1)


def algorithms_of_a_group(port, prefix, deterministic):
    torch.use_deterministic_algorithms(deterministic)
    init_default_group(port, prefix, 0, 1, 30)
    return os.environ["NCCL_ALGO"]


@pytest.mark.parametrize("deterministic, set_to, told", [
    (False, "", ""), (True, "", "^NVLS"), (True, "Tree", "Tree")
])  # fmt: skip
def test_a_deterministic_group_excludes_nvls(deterministic, set_to, told):
    with Ranks(1, init=False, env={"NCCL_ALGO": set_to}) as rank:
        arguments = *rank.store_args(), deterministic
        assert rank.run(algorithms_of_a_group, *arguments) == [told]


@pytest.mark.torch_version
@pytest.mark.ranks(2)
def test_enable_timing_has_works_know_how_long_they_took(world):
    group = new_group_with("TORCH_NCCL_ENABLE_TIMING")
    work = dist.all_reduce(torch.ones(1000), group=group, async_op=True)
    work.wait()
    assert work._get_duration() > 0
    dist.destroy_process_group(group)
    work = dist.all_reduce(torch.ones(1000), async_op=True)
    work.wait()
    with pytest.raises(RuntimeError, match="no duration was taken"):
        work._get_duration()


def debugged(how):
    """A new group, with TORCH_NCCL_DESYNC_DEBUG or what implies that."""
    if how == "variable":
        return new_group_with("TORCH_NCCL_DESYNC_DEBUG")
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        return dist.new_group()
    finally:
        dist.set_debug_level(level)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", ["variable", "level"])
def test_desync_debug_takes_times_and_has_a_failure_handled(world, how):
    plain, group = dist.new_group(), debugged(how)
    # TORCH_NCCL_ASYNC_ERROR_HANDLING is 0 here.
    ends = [
        unwrapped(which._get_backend(CPU)).options.accelerator_ends_process
        for which in (plain, group)
    ]
    assert ends == [False, True]
    work = dist.all_reduce(torch.ones(1000), group=group, async_op=True)
    work.wait()
    assert work._get_duration() > 0
    dist.destroy_process_group(group)
    dist.destroy_process_group(plain)


@pytest.mark.ranks(2)
def test_nan_check_refuses_what_this_rank_would_send(world):
    group = new_group_with("TORCH_NCCL_NAN_CHECK")
    backend, rank = group._get_backend(CPU), dist.get_rank()
    nan = torch.tensor([1.0, NAN])
    for dtype in (torch.float32, torch.float16, torch.complex64, torch.float8_e4m3fn):
        with pytest.raises(
            RuntimeError, match=f"on rank {rank}: input 0 of .* holds 1 NaN in [24]"
        ):
            dist.all_gather_into_tensor(torch.empty(4, dtype=dtype), nan.to(dtype), group=group)
    tensor = torch.full((2,), float(rank)) if rank == 0 else nan.clone()
    dist.broadcast(tensor, 0, group=group)  # of which only the root sends
    assert_same(tensor, torch.zeros(2))
    backend._set_enable_nan_check(False)
    dist.all_reduce(gone := nan.clone(), group=group)
    assert gone[1].isnan() and gone[0] == 2
    backend._set_enable_nan_check(True)
    backend._set_enable_nan_check(True)
    with pytest.raises(RuntimeError, match=r"all_reduce \(op_id \d+\) on rank"):
        dist.all_reduce(nan, group=group)
    dist.all_reduce(torch.ones(2, requires_grad=True), group=group)
    dist.destroy_process_group(group)
    dist.all_reduce(nan)  # of another group


@pytest.mark.torch_version
@pytest.mark.ranks(2)
def test_messages_between_group_start_and_group_end_are_launched_together(world):
    group = dist.new_group()
    backend, peer = group._get_backend(CPU), 1 - dist.get_rank()
    got = torch.empty(3)
    backend._group_start()
    works = [
        dist.isend(torch.full((3,), float(peer)), peer, group=group),
        dist.irecv(got, peer, group=group),
    ]
    assert not any(work.is_completed() for work in works)
    backend._group_end()
    for work in works:
        work.wait(datetime.timedelta(seconds=20))
    assert_same(got, torch.full((3,), float(dist.get_rank())))
    dist.destroy_process_group(group)


@pytest.mark.torch_version
def test_the_backend_tells_versions_and_policies():
    backend = torchcomms_pg.Backend
    header = _C.nccl_header_version
    assert backend.get_build_nccl_version() == (header // 10000, header // 100 % 100, header % 100)
    assert backend.get_runtime_nccl_version() == torchcomms_pg.nccl.version()
    policies = ("DEFAULT", "EFFICIENCY", "ZERO")
    assert [getattr(backend, f"NCCL_CTA_POLICY_{name}") for name in policies] == [0, 1, 2]
