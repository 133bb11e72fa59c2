"""Start and end of groups and processes: torchrun, data loader workers, debug modes."""

import os
import subprocess
import sys
import textwrap
import threading

import pytest
import torch
import torch.distributed as dist

import torchcomms_pg
from harness import ROOT, limits
from harness.parity import like_gloo, raised
from harness.programs import end_tree, run_program
from harness.ranks import Ranks, init_default_group, wait_for
from harness.values import data

pytestmark = pytest.mark.beyond_gloo
CPU = torch.device("cpu")
DEBUG = dict(TORCH_DISTRIBUTED_DEBUG="DETAIL")


def run_together(stores, world, backends):
    """Default groups of several backends after one another, each with what the last left."""
    results = []
    for store, backend in zip(stores, backends):
        init_default_group(*store, int(os.environ["RANK"]), world, 30, backend)
        tensor = data(dist.get_rank(), 1000)
        dist.all_reduce(tensor)
        group = dist.new_group()
        dist.broadcast(tensor, 0, group=group)
        results.append((tensor, dist.get_backend(), dist.get_world_size(group)))
        dist.barrier()
        dist.destroy_process_group(group if len(results) % 2 else None)
        if dist.is_initialized():
            dist.destroy_process_group()
    threads = [thread.name for thread in threading.enumerate()]
    return results, threads


@pytest.mark.torch_version
def test_default_groups_of_several_backends_over_time():
    backends = ["torchcomms", "gloo", "torchcomms", "cpu:torchcomms", "cpu:gloo", "torchcomms"]
    with Ranks(3, init=False) as ranks:
        stores = [ranks.store_args() for _ in backends]
        for results, threads in ranks.run(run_together, stores, 3, backends):
            for tensor, name, size in results:
                torch.testing.assert_close(tensor, results[0][0], msg=name)
                assert size == 3, name
            assert threads == ["MainThread"], threads


def in_detail(store, world, backend):
    """What DETAIL makes of good calls and of mismatched ones."""
    init_default_group(*store, int(os.environ["RANK"]), world, 20, backend)
    me = dist.get_rank()
    tensor = torch.arange(6.0) + me
    dist.all_reduce(tensor)
    rows = torch.empty(6 * world)
    dist.all_gather_into_tensor(rows, tensor)
    group = dist.new_group()
    work = dist.all_reduce(tensor, group=group, async_op=True)
    work.wait()
    dist.all_gather_object(names := [None] * world, f"rank {me}")
    if backend != "gloo":  # torch 2.15 itself crashes here with Gloo
        net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
        net(torch.full((1, 3), float(me))).sum().backward()
        assert net.module.weight.grad.unique().tolist() == [0.5]
    for wrong in (
        lambda: dist.all_reduce(torch.ones(3 + me)),
        lambda: dist.all_reduce(tensor) if me else dist.broadcast(tensor, 0),
    ):
        with pytest.raises(RuntimeError, match="Detected mismatch between collectives on ranks"):
            wrong()
    return tensor, rows, names


@pytest.mark.torch_version
def test_debug_detail_is_the_same_as_over_gloo():
    results = {}
    for backend in ("gloo", "torchcomms"):
        with Ranks(2, init=False, env=DEBUG) as ranks:
            results[backend] = ranks.run(in_detail, ranks.store_args(), 2, backend)
    for got, want in zip(results["torchcomms"], results["gloo"]):
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
        assert got[2] == want[2]


def attached_in_detail(store, world):
    """What reaches the communicator of a group that torch has wrapped."""
    init_default_group(*store, int(os.environ["RANK"]), world, 30, "torchcomms")
    comm = torchcomms_pg.get_comm()
    told = []
    comm.register_pre_hook(lambda args: told.append(args.name.name))
    recorder = torchcomms_pg.hooks.FlightRecorderHook()
    recorder.register_with_comm(comm)
    nan_check = torchcomms_pg.hooks.NanCheckHook()
    nan_check.register_with_comm(comm)
    with comm.relaxed_timeout(60):
        dist.all_reduce(torch.ones(2))
    everyone = comm.split(range(world))
    group = torchcomms_pg.get_process_group(everyone)
    dist.all_reduce(tensor := torch.ones(3), group=group)
    mesh = torchcomms_pg.device_mesh.init_device_mesh((everyone,), ("dp",))
    dist.all_reduce(tensor, group=mesh.get_group())
    behind = torchcomms_pg.get_comm(group).get_name() == everyone.get_name()
    dist.barrier()
    nan = raised(dist.all_reduce, torch.full((2,), float("nan")))
    entries = recorder.size()
    dist.destroy_process_group()
    everyone.finalize()
    return told, entries, tensor.tolist(), behind, nan


@pytest.mark.torch_version
def test_get_comm_sees_through_debug_detail():
    with Ranks(2, init=False, env=DEBUG) as ranks:
        for told, entries, tensor, behind, nan in ranks.run(
            attached_in_detail, ranks.store_args(), 2
        ):
            # torch 2.11's wrapper does not hand on that its group is destroyed.
            ended = ["finalize"] if torch.__version__ >= "2.12" else []
            assert told == ["all_reduce", "split", "barrier", "all_reduce", *ended]
            assert entries >= 2
            assert tensor == [4.0] * 3
            assert behind
            assert nan == ["RuntimeError"]


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.full((5,), float(index)), os.getpid()


@pytest.mark.torch_version
@like_gloo(2)
@pytest.mark.parametrize("persistent", [False, True])
def test_forked_data_loader_workers_beside_a_live_group(world, persistent):
    """Workers fork while asynchronous operations are in flight, and end before the group."""
    from torch.utils.data import DataLoader, DistributedSampler

    sampler = DistributedSampler(Samples(), shuffle=True, seed=2)
    loader = DataLoader(
        Samples(),
        batch_size=2,
        sampler=sampler,
        num_workers=2,
        persistent_workers=persistent,
        multiprocessing_context="fork",
    )
    results = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        before = dist.all_reduce(tensor := torch.ones(1000), async_op=True)
        for values, pids in loader:
            assert os.getpid() not in pids.tolist()
            total = values.sum(0)
            dist.all_reduce(total)
            results.append(total)
        before.wait()
        results.append(tensor)
    return results


ELASTIC = """
    import os, signal, pathlib
    import torch, torch.distributed as dist
    import torchcomms_pg

    dist.init_process_group("torchcomms")
    rank, world = dist.get_rank(), dist.get_world_size()
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    dist.all_reduce(tensor := torch.ones(100))
    assert tensor[0] == world
    written = pathlib.Path({folder!r}) / f"{{world}}-{{attempt}}-{{rank}}"
    written.with_suffix(".new").write_text(f"{{os.getpid()}} {{os.getppid()}}")
    written.with_suffix(".new").rename(written)
    dist.barrier()
    {middle}
    dist.barrier()
    if rank == 0:
        print("the world of", world, "is done")
"""
ENVIRONMENT = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))


def training_script(folder, middle):
    script = folder / "train.py"
    body = textwrap.dedent(ELASTIC).replace("{middle}", textwrap.dedent(middle).strip())
    script.write_text(body.format(folder=str(folder)))
    return script


DIES = """
    if attempt == "0":
        if rank == 1:
            os._exit(3)  # without a word to its peers
        dist.all_reduce(tensor)  # they wait for it
"""


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_torchrun_restarts_workers_after_one_has_died(tmp_path):
    """And the workers may end without destroy_process_group."""
    done = run_program(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=3",
            "--max-restarts=1",
            "--monitor-interval=0.1",
            str(training_script(tmp_path, DIES)),
        ],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    output = done.stdout
    assert done.returncode == 0 and "the world of 3 is done" in output, output
    attempts = sorted(path.name for path in tmp_path.glob("3-*"))
    assert attempts == [f"3-{attempt}-{rank}" for attempt in (0, 1) for rank in range(3)]


LOST = """
    met = written.with_name("met")
    if world == 1 and not met.exists():
        signal.pause()  # the second node is late: it makes the agent start this worker anew
    if world == 2:
        met.touch()
        if rank == 1:
            signal.pause()  # until this node is lost
        dist.barrier()  # rank 0 learns it here
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_torchrun_goes_on_with_a_changed_world_size(tmp_path):
    """Two nodes with a worker each; one is lost, and the other goes on alone.

    The worker that hears of it is not ended, though torchrun sets a variable that says so for GPUs.
    """
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=1:2",
        "--nproc-per-node=1",
        "--max-restarts=3",
        "--monitor-interval=0.1",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{server.port}",
        # A node without a core for longer than the last of these would be alone, and never hear it.
        "--rdzv-conf=is_host=0,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=15",
        "--rdzv-id=shrinking",
        str(training_script(tmp_path, LOST)),
    ]
    agents = [
        subprocess.Popen(
            command,
            # Where torch 2.15's agents share a store, they tell it to the nodes of the first
            # round alone: one that comes later waits for it until both fail.
            env={**ENVIRONMENT, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        if not wait_for((tmp_path / "met").exists, 200):
            for agent in agents:
                end_tree(agent.pid)
            outputs = [agent.communicate()[0] for agent in agents]
            pytest.fail("the agents did not meet:\n" + "\n\n".join(outputs))
        assert wait_for(lambda: list(tmp_path.glob("2-*-1")), 20)
        worker, lost = map(int, next(tmp_path.glob("2-*-1")).read_text().split())
        os.kill(lost, 9)
        os.kill(worker, 9)
        (left,) = (agent for agent in agents if agent.pid != lost)
        output, _ = left.communicate(timeout=limits.grown(70))  # of the 300 s that the test has
        assert left.returncode == 0 and "the world of 1 is done" in output, output
        assert f"rank 1 (pid {worker}) died" in output and "CommError" in output, output
        assert "torchcomms_pg ends this process" not in output, output
    finally:
        for agent in agents:
            if agent.poll() is None:
                end_tree(agent.pid)
            agent.wait()
            agent.stdout.close()


def default_of_the_cpu():
    defaults = dist.Backend.default_device_backend_map
    defaults.clear()  # torch's: Gloo for CPUs, NCCL for GPUs
    defaults["cpu"] = "torchcomms"
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(4))
    told = type(dist.group.WORLD._get_backend(CPU)).__name__, dist.get_backend_config()
    dist.new_group().barrier().wait()
    dist.destroy_process_group()
    return told


@pytest.mark.torch_version
def test_backend_none_with_torchcomms_as_the_default_of_the_cpu():
    with Ranks(1, init=False) as ranks:
        assert ranks.run(default_of_the_cpu) == [("Backend", "cpu:torchcomms")]


def use_without_a_gpu(name):
    dist.init_process_group(name, store=dist.HashStore(), rank=0, world_size=1)
    if "cpu" in name:
        dist.all_reduce(tensor := torch.ones(4))
        assert tensor.tolist() == [1, 1, 1, 1]
        dist.barrier()
        assert isinstance(dist.group.WORLD._get_backend(CPU), dist.ProcessGroupGloo)
    else:
        with pytest.raises(RuntimeError, match="device type cpu"):
            dist.all_reduce(torch.ones(4))
    backend = dist.group.WORLD._get_backend(torch.device("cuda"))
    with pytest.raises(ValueError, match="where there is a GPU"):
        backend.allreduce([torch.empty(4, device="meta")]).wait()
    dist.destroy_process_group()


@pytest.mark.torch_version
@pytest.mark.parametrize("name", ["cpu:gloo,cuda:torchcomms", "cuda:torchcomms"])
def test_a_cuda_group_without_a_gpu_fails_when_it_is_used_and_says_why(name):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with Ranks(1, init=False) as ranks:
        ranks.run(use_without_a_gpu, name)
