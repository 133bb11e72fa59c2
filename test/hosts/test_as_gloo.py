"""Programs that say gloo and import nothing of torchcomms_pg run over it where they are told."""

import datetime
import importlib.metadata
import os
import re
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.profiler import ProfilerActivity, profile

import torchcomms_pg
from harness import gpus
from harness.programs import run_program, run_python
from harness.ranks import connect_store, init_default_group, on_own_ranks
from harness.values import all_data, assert_reduced, assert_same
from torchcomms_pg import as_gloo, env, run

pytestmark = pytest.mark.beyond_gloo
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
MARK = "groups of the name gloo run over"


# ---------------------------------------------------------------- whole programs

PROGRAM = """
import multiprocessing, os, sys, torch
import torch.distributed as dist

def over(group=None):
    return type((group or dist.group.WORLD)._get_backend(torch.device("cpu"))).__module__

def child(rank, port, told):
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    told.put((over(), tensor.item()))

def children(how):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context(how)
    told = context.Queue()
    started = [context.Process(target=child, args=(r, server.port, told)) for r in range(2)]
    for process in started:
        process.start()
    answers = [told.get(timeout=60) for _ in started]  # a child that has failed tells nothing
    for process in started:
        process.join()
    return answers

if __name__ == "__main__":
    assert "torchcomms_pg" in sys.modules
    rank = int(os.environ["RANK"])
    # Forked before this process has threads.
    answers = [a for how in ("fork", "spawn") for a in children(how)] if rank == 0 else []
    assert all(answer == ("torchcomms_pg._C", 2) for answer in answers), answers
    dist.init_process_group()
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert (tensor == 2).all()
    assert over() == over(dist.new_group(backend="gloo")) == "torchcomms_pg._C"
    dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_an_unchanged_program_and_its_children_run_over_torchcomms(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = run_program(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
            *("-m", "torchcomms_pg.run", program),
        ],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout
    # Rank 0's, and those of the two groups that its children make.
    assert done.stdout.count(f"{MARK} torchcomms, since torchcomms_pg.run runs the program") == 3


ALONE = """
import sys, torch
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
print(type(dist.group.WORLD._get_backend(torch.device("cpu"))).__name__)
print([name for name in sys.modules if name.startswith("torchcomms_pg.")])
"""


@pytest.mark.torch_version
@pytest.mark.parametrize(
    "variable, printed, said",
    [
        ("1", "Backend", f"{MARK} torchcomms, since"),
        ("maybe", "ProcessGroupGloo", f"{MARK} Gloo all the same: TORCHCOMMS_PG_AS_GLOO='maybe'"),
        ("", "ProcessGroupGloo\n[]\n", ""),
    ],
    ids=["told to", "not rightly", "not told to"],
)
def test_the_variable_says_whether_groups_of_gloo_are_ours(variable, printed, said):
    done = run_python("-c", ALONE, TORCHCOMMS_PG_AS_GLOO=variable)
    assert done.stdout.startswith(printed) and said in done.stderr, done.stdout + done.stderr
    assert (MARK in done.stderr) == bool(said)


@pytest.mark.parametrize("flags", [[], ["-W", "ignore"]])
def test_the_command_becomes_the_program(monkeypatch, flags):
    became = []
    monkeypatch.setattr(os, "execv", lambda path, arguments: became.append((path, arguments)))
    monkeypatch.setenv("TORCHCOMMS_PG_AS_GLOO", "0")
    monkeypatch.setattr(sys, "argv", ["run.py", "program.py", "-m", "1"])
    own = ["python", *flags, "-m", "torchcomms_pg.run", "program.py", "-m", "1"]
    monkeypatch.setattr(sys, "orig_argv", own)
    run.main()
    path = sys.executable
    assert became == [(path, [path, *flags, "program.py", "-m", "1"])]
    assert env.as_gloo() and env.as_gloo_by_run()


@pytest.mark.parametrize(
    "arguments, autoload, installed, words",
    [
        ([], "1", True, r"usage: python -m torchcomms_pg.run \[.*\] PROGRAM"),
        (["program.py"], "0", True, "TORCH_DEVICE_BACKEND_AUTOLOAD is 0"),
        (["program.py"], "1", False, "imported from a folder"),
    ],
)
def test_the_command_says_what_keeps_it_from_its_work(
    monkeypatch, arguments, autoload, installed, words
):
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", autoload)
    if not installed:
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: ())
    with pytest.raises(SystemExit, match=words):
        run.main()


# ---------------------------------------------------------------- groups


def init(port, prefix, world, timeout):
    """The name is Gloo's, the group is ours."""
    as_gloo.install()
    init_default_group(port, prefix, int(os.environ["RANK"]), world, timeout, "gloo")


def is_ours(group=None, device=CPU):
    return isinstance((group or dist.group.WORLD)._get_backend(device), torchcomms_pg.Backend)


@pytest.mark.torch_version
@on_own_ranks(3, init=init)
def test_groups_of_every_way_of_saying_gloo_are_ours(world):
    me, everyone = dist.get_rank(), list(range(world))
    inputs = all_data(world, (7, 3))
    groups = [None, dist.new_group(everyone), dist.new_group(everyone, backend="gloo")]
    groups += [dist.new_group(everyone, pg_options=dist.ProcessGroupGloo._Options())]
    groups += [dist.new_group(everyone, backend="cpu:gloo", group_desc="described")]
    for group in groups:
        assert is_ours(group)
        tensor = inputs[me].clone()
        dist.all_reduce(tensor, group=group)
        assert_reduced(tensor, inputs)
        work = dist.broadcast(tensor, world - 1, group=group, async_op=True)
        work.get_future().wait()
        dist.barrier(group=group)
        told = [None] * world
        dist.all_gather_object(told, me, group=group)
        assert told == everyone
    assert dist.get_backend() == dist.get_backend(groups[1]) == "gloo"
    dist.monitored_barrier()
    alone = dist.new_group([world - 1])
    if me == world - 1:
        assert is_ours(alone) and dist.get_process_group_ranks(alone) == [world - 1]
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=alone)
    shape = torch.distributed.init_device_mesh("cpu", (world,), mesh_dim_names=("all",))
    assert is_ours(shape.get_group("all"))


@on_own_ranks(2, init=init)
def test_a_batch_of_messages_gives_a_work_for_each():
    peer = 1 - dist.get_rank()
    got = [torch.empty(3), torch.empty(3)]
    ops = [dist.P2POp(dist.isend, torch.full((3,), i + peer), peer) for i in (0.0, 1.0)]
    works = dist.batch_isend_irecv(ops + [dist.P2POp(dist.irecv, t, peer) for t in got])
    [work.wait() for work in works]
    assert [tensor.tolist() for tensor in got] == [[i + 1 - peer] * 3 for i in (0, 1)]
    assert len(works) == 4


@pytest.mark.torch_version
@on_own_ranks(2, init=init, env=dict(TORCH_DISTRIBUTED_DEBUG="DETAIL"))
def test_with_debug_detail_calls_are_compared_and_run_over_ours():
    wrapper = dist.group.WORLD._get_backend(CPU)
    assert isinstance(wrapper.wrapped_pg, torchcomms_pg.Backend)
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert (tensor == 2).all()
    with pytest.raises(RuntimeError, match="Detected mismatch between collectives"):
        dist.all_reduce(torch.ones(2 + dist.get_rank()))


@pytest.mark.torch_version
@on_own_ranks(2, init=init)
def test_names_and_words_are_those_of_gloo():
    """What a group tells of itself, in profiles, logs and errors."""
    me = dist.get_rank()
    assert dist.group.WORLD.name() == dist.group.WORLD._get_backend(CPU).name() == "gloo"
    with profile(activities=[ProfilerActivity.CPU]) as run:
        dist.all_gather_into_tensor(torch.empty(2), torch.ones(1))
    assert "gloo:all_gather" in {event.name for event in run.events()}
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
    model(torch.ones(1, 3)).sum().backward()
    assert model._get_ddp_logging_data()["backend_name"] == "gloo"
    assert dist.group.WORLD.name() == "gloo"
    store = c10d._get_default_store()
    if me == 1:
        return store.wait(["told"])
    with pytest.raises(RuntimeError) as raised:
        dist.monitored_barrier(timeout=datetime.timedelta(seconds=1))
    store.set("told", "")
    text = str(raised.value)
    assert text.startswith("Rank 1 failed to pass monitoredBarrier. monitored_barrier #"), text


def registered_by_hand(store, *timeout, **options):
    """A group of all ranks, made and registered as vLLM's engines do."""
    me, world = dist.get_rank(), dist.get_world_size()
    pg = dist.ProcessGroup(store, me, world)
    pg._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    backend = c10d.ProcessGroupGloo(store, me, world, *timeout, **options)
    backend._set_sequence_number_for_group()
    pg._register_backend(CPU, dist.ProcessGroup.BackendType.GLOO, backend)
    return pg


@pytest.mark.torch_version
@on_own_ranks(2, init=init)
def test_a_group_that_a_program_makes_of_c10ds_class_is_ours(world):
    limit, store = datetime.timedelta(seconds=20), c10d._get_default_store()
    names = set()
    for number, (timeout, options) in enumerate([((), {"timeout": limit}), ((limit,), {})]):
        pg = registered_by_hand(dist.PrefixStore(f"engine {number}", store), *timeout, **options)
        assert is_ours(pg) and isinstance(pg._get_backend(CPU), c10d.ProcessGroupGloo)
        tensor = torch.ones(4, dtype=torch.int32)
        dist.all_reduce(tensor, group=pg)
        assert (tensor == world).all()
        ranks = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
        dist.all_gather(ranks, torch.tensor([dist.get_rank()]), group=pg)
        assert torch.cat(ranks).tolist() == list(range(world))
        with profile(activities=[ProfilerActivity.CPU]) as run:
            dist.barrier(group=pg)
        assert "gloo:barrier" in {event.name for event in run.events()}
        names.add(torchcomms_pg.get_comm(pg).get_name())
        model = torch.nn.Linear(3, 2)
        replica = torch.nn.parallel.DistributedDataParallel(model, process_group=pg)
        replica(torch.ones(1, 3)).sum().backward()
        assert replica._get_ddp_logging_data()["backend_name"] == pg.name() == "gloo"
        pg.shutdown()
    told = [None] * world
    dist.all_gather_object(told, names)
    assert len(names) == 2 and told == [names] * world


@pytest.mark.torch_version
@on_own_ranks(2, init=init)
def test_a_call_that_chooses_how_gloo_connects_stays_gloos(world):
    """One with options, which name network devices, and that of a group for another device."""
    store, options = c10d._get_default_store(), dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_default_device()]
    pg = registered_by_hand(dist.PrefixStore("own devices", store), options)
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=pg)
    assert tensor == world and type(pg._get_backend(CPU)) is dist.ProcessGroupGloo


@pytest.mark.torch_version
@on_own_ranks(2, init=False)
def test_gloo_by_its_own_name_and_other_backends_are_as_they_were(port, prefix, world):
    """Gloo under its own name, and groups of other backends."""
    as_gloo.install()
    me = int(os.environ["RANK"])
    own = dist.ProcessGroupGloo(connect_store(port, prefix + "/own"), me, world)
    tensor = torch.ones(1)
    own.allreduce([tensor]).wait()
    assert tensor == world and not isinstance(own, torchcomms_pg.Backend)
    assert isinstance(own, c10d.ProcessGroupGloo) and c10d.ProcessGroupGloo._Options
    init_default_group(port, prefix, me, world, 20, "torchcomms")
    assert is_ours() and dist.get_backend() == "torchcomms"
    dist.barrier()


@pytest.mark.torch_version
@on_own_ranks(2, init=init)
def test_a_message_is_sent_once_it_is_received_as_over_gloo():
    """TorchRL's workers leave when their messages are sent, and are asked for others later.

    Rank 1 receives the first message last.
    """
    first, other = torch.arange(3.0), torch.zeros(1)
    if dist.get_rank() == 1:
        dist.send(other, 0, tag=2)
        dist.recv(other, 0, tag=3)
        received = torch.empty(3)
        dist.recv(received, 0, tag=1)
        assert_same(received, first)
        c10d._get_default_store().set("received", "")
        return dist.recv(other, 0, tag=4)
    work = dist.isend(first, 1, tag=1)
    dist.recv(other, 1, tag=2)
    assert not work.is_completed()
    dist.send(other, 1, tag=3)
    work.wait()
    dist.send(other, 1, tag=4)
    assert c10d._get_default_store().check(["received"])


@pytest.mark.torch_version
@pytest.mark.timeout(50)
@on_own_ranks(2, init=init, group_timeout=100)
@pytest.mark.parametrize("kind", ["isend", "irecv"])
def test_a_group_ends_without_messages_that_nobody_takes(kind):
    """Both ranks wait for each other, in a group whose deadline is later than the test's."""
    peer, tensor = 1 - dist.get_rank(), torch.zeros(4)
    work = getattr(dist, kind)(tensor, peer)
    dist.barrier()
    dist.destroy_process_group()
    with pytest.raises(RuntimeError, match="had not ended when the group ended|destroyed its comm"):
        work.wait()


def skip_a_collective(rank):
    if rank == 1:
        return
    dist.all_reduce(torch.ones(4))


@on_own_ranks(2, init=init)
def test_a_hang_has_a_verdict_with_the_programs_own_lines():
    dist.barrier()
    c10d._set_pg_timeout(datetime.timedelta(seconds=1))
    me = dist.get_rank()
    store = c10d._get_default_store()
    if me == 1:
        skip_a_collective(me)
        return store.wait(["told"])
    with pytest.raises(RuntimeError) as raised:
        skip_a_collective(me)
    store.set("told", "")
    text = str(raised.value)
    assert re.search(r"rank 1 (has not arrived at|did not answer)", text), text
    program = r"rank 0: in all_reduce .*test_as_gloo.py:\d+ in skip_a_collective"
    assert re.search(program, text), text


# ---------------------------------------------------------------- GPUs


def tensors_of_gpus(port, prefix, world):
    as_gloo.install()
    gpus.start("gloo", port, prefix, world, 30)
    rank, inputs = dist.get_rank(), all_data(world, 1000)
    for group in (None, dist.new_group()):
        assert is_ours(group) and not is_ours(group, CUDA)
        for device in (CUDA, CPU, CUDA):
            tensor = inputs[rank].clone().to(device)
            dist.all_reduce(tensor, group=group)
            assert_reduced(tensor.cpu(), inputs)
            work = dist.broadcast(tensor.copy_(inputs[rank]), 0, group=group, async_op=True)
            work.wait()
            assert_same(tensor.cpu(), inputs[0])
    dist.barrier(device_ids=[torch.cuda.current_device()])
    alone = dist.new_group(backend="cuda:gloo")
    dist.all_reduce(torch.ones(1, device=CUDA), group=alone)
    assert type(alone._get_backend(CUDA)) is dist.ProcessGroupGloo
    dist.destroy_process_group()


@pytest.mark.torch_version
@pytest.mark.skipif(bool(gpus.missing()), reason=gpus.missing() or "there are GPUs")
def test_tensors_of_gpus_go_over_gloo():
    gpus.apart(2, tensors_of_gpus)
