"""Healthy programs of many kinds, of which no verdict, no parting and no wait is told."""

import datetime
import json
import os
import re
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.checkpoint import load, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import torchcomms_pg
from harness import catalogue, limits
from harness.ranks import Ranks, connect_store, meet, wait_for
from torchcomms_pg.status.__main__ import main

pytestmark = pytest.mark.beyond_gloo
WORLD = 4
# The time after which a verdict comes. A rank may stop for three seconds.
AFTER = 10.0
SOON = 20.0
CPU = torch.device("cpu")
PROGRAMS = []


def program(function):
    PROGRAMS.append(function)
    return function


def model():
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))


def batch():
    return torch.ones(4, 6) * (1 + dist.get_rank())


@program
def every_collective(rank, folder):
    for name, operation in catalogue.OPERATIONS.items():
        if name.endswith("_v"):
            continue  # Gloo lacks it
        catalogue.run(operation, catalogue.Case(WORLD, 3).over(("sync", "async")))


@program
def ddp_accumulates_with_no_sync(rank, folder):
    net = DistributedDataParallel(model())
    for step in range(4):
        if step % 2:
            net(batch()).sum().backward()
        else:
            with net.no_sync():
                net(batch()).sum().backward()


@program
def ddp_skips_unused_parameters(rank, folder):
    class Skips(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(6, 4) for _ in range(WORLD)])

        def forward(self, x, part):
            return self.parts[part](x)

    net = DistributedDataParallel(Skips(), find_unused_parameters=True)
    for step in range(3):
        net(batch(), (rank + step) % WORLD).sum().backward()


@program
def fsdp2_trains(rank, folder):
    net = model()
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=init_device_mesh("cpu", (WORLD,)))
    fully_shard(net, mesh=init_device_mesh("cpu", (WORLD,)))
    for _ in range(2):
        net(batch()).sum().backward()


@program
def a_pipeline_of_four_stages(rank, folder):
    stage = PipelineStage(nn.Linear(6, 6), rank, WORLD, CPU)
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    for _ in range(2):
        inputs = (torch.ones(8, 6),) if rank == 0 else ()
        schedule.step(*inputs, **(dict(target=torch.ones(8, 6)) if rank == WORLD - 1 else {}))


@program
def uneven_data_with_join(rank, folder):
    net = DistributedDataParallel(model())
    with Join([net]):
        for _ in range(2 + 2 * rank):
            net(batch()).sum().backward()


@program
def object_collectives(rank, folder):
    everything = [None] * WORLD
    dist.all_gather_object(everything, {"rank": rank})
    dist.broadcast_object_list(["from 1" if rank == 1 else None], src=1)
    dist.gather_object(rank, [None] * WORLD if rank == 2 else None, dst=2)
    dist.scatter_object_list([None], list(range(WORLD)) if rank == 0 else None, src=0)


@program
def two_groups_in_two_threads(rank, folder):
    groups = [dist.new_group() for _ in range(2)]

    def use(group):
        for _ in range(20):
            dist.all_reduce(torch.ones(5), group=group)

    threads = [threading.Thread(target=use, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for group in groups:
        dist.destroy_process_group(group)


@program
def rank_0_alone_writes_a_checkpoint_before_a_barrier(rank, folder):
    if rank == 0:
        torch.save(model().state_dict(), f"{folder}/alone")
        time.sleep(0.5)
    dist.barrier()


@program
def a_slow_rank_comes_before_the_verdict(rank, folder):
    for slow in range(WORLD):
        if rank == slow:
            time.sleep(0.3)
        dist.all_reduce(torch.ones(9))


@program
def asynchronous_operations_are_waited_for_in_another_order(rank, folder):
    works = [dist.all_reduce(torch.ones(n), async_op=True) for n in range(1, 9)]
    for work in works[::-1] if rank % 2 else works:
        work.wait()


@program
def a_ring_of_batches(rank, folder):
    for _ in range(3):
        sends = dist.P2POp(dist.isend, torch.ones(7), (rank + 1) % WORLD)
        receives = dist.P2POp(dist.irecv, torch.empty(7), (rank - 1) % WORLD)
        for work in dist.batch_isend_irecv([sends, receives]):
            work.wait()


@program
def a_receive_from_any_rank(rank, folder):
    if rank == 0:
        for _ in range(WORLD - 1):
            dist.recv(torch.empty(3))
    else:
        dist.send(torch.ones(3), 0)
    dist.barrier()


@program
def a_receive_is_posted_long_before_its_message(rank, folder):
    if rank == 0:
        work = dist.irecv(torch.empty(3), 1, tag=7)
    for _ in range(5):
        dist.all_reduce(torch.ones(3))
    if rank == 1:
        dist.send(torch.ones(3), 0, tag=7)
    if rank == 0:
        work.wait()


@program
def groups_of_some_ranks(rank, folder):
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    dist.all_reduce(torch.ones(2), group=halves[rank // 2])
    own = dist.new_group([rank, rank ^ 1], use_local_synchronization=True)
    dist.all_reduce(torch.ones(2), group=own)
    dist.destroy_process_group(own)
    mine, _ = dist.new_subgroups(2)
    dist.barrier(group=mine)


@program
def a_group_is_destroyed_and_made_again(rank, folder):
    for _ in range(3):
        group = dist.new_group(group_desc="again")
        dist.all_reduce(torch.ones(2), group=group)
        dist.destroy_process_group(group)


@program
def keys_of_the_store(rank, folder):
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        time.sleep(0.3)
        store.set("healthy", "yes")
    assert store.get("healthy") == b"yes"
    store.wait(["healthy"], datetime.timedelta(seconds=60))


@program
def tensors_are_sharded_and_gathered(rank, folder):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    tensor = distribute_tensor(torch.ones(8, 8), mesh, [Shard(0), Shard(1)])
    (tensor @ tensor).redistribute(placements=[Replicate(), Replicate()]).to_local()


@program
def functional_collectives(rank, folder):
    results = [functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD) for _ in range(3)]
    for result in results:
        functional.wait_tensor(result) if rank % 2 else result.sum().item()


@program
def parameters_are_averaged_now_and_then(rank, folder):
    net, averager = model(), PeriodicModelAverager(period=2)
    for _ in range(5):
        net(batch()).sum().backward()
        averager.average_parameters(net.parameters())


@program
def a_sharded_optimizer(rank, folder):
    net = DistributedDataParallel(model())
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
    net(batch()).sum().backward()
    optimizer.step()


@program
def ranks_agree_to_skip_a_step_in_which_one_has_failed(rank, folder):
    for step in range(4):
        try:
            if rank == step:
                raise ValueError("a broken sample")
            fine = 1
        except ValueError:
            fine = 0
        all_fine = torch.tensor(fine)
        dist.all_reduce(all_fine, dist.ReduceOp.MIN)
        if all_fine:
            dist.all_reduce(torch.ones(3))


@program
def ranks_stop_early_together(rank, folder):
    for step in range(10):
        stop = torch.tensor(int(rank == 2 and step == 3))
        dist.all_reduce(stop, dist.ReduceOp.MAX)
        if stop:
            break
        dist.all_reduce(torch.ones(3))


@program
def one_rank_only_logs(rank, folder):
    for step in range(6):
        loss = torch.ones(1)
        dist.reduce(loss, 0)
        if rank == 0 and step % 3 == 0:
            f"step {step}: {loss.item():.3f}"


@program
def the_root_is_another_rank_each_time(rank, folder):
    for root in range(2 * WORLD):
        dist.broadcast(torch.ones(3), root % WORLD)


@program
def callbacks_of_futures(rank, folder):
    ended = []
    work = dist.all_reduce(torch.ones(3), async_op=True)
    work.get_future().then(ended.append).wait()
    assert ended


@program
def a_distributed_checkpoint(rank, folder):
    state = {"weight": torch.full((3,), float(rank)), "step": 1}
    save(state, checkpoint_id=f"{folder}/checkpoint")
    load(state, checkpoint_id=f"{folder}/checkpoint")


@program
def values_that_the_ranks_agree_about(rank, folder):
    for step in range(5):
        torchcomms_pg.agree(step, name="step")
    dist.barrier()


@program
def a_librarys_own_wait(rank, folder):
    with torchcomms_pg.waiting("queue", for_ranks=[(rank + 1) % WORLD]):
        time.sleep(0.2)


def begin(args, backend, after):
    store = connect_store(*args)
    if backend == "gloo":
        torchcomms_pg.watch(timeout=datetime.timedelta(seconds=after))
    rank = int(os.environ["RANK"])
    dist.init_process_group(backend, store=store, rank=rank, world_size=WORLD)


def run(number, folder):
    PROGRAMS[number](dist.get_rank(), folder)


def end(args):
    dist.destroy_process_group()
    meet(connect_store(*args), "ended", WORLD)


@pytest.mark.parametrize(
    "backend",
    [
        "torchcomms",
        pytest.param(
            "gloo",
            marks=pytest.mark.skipif(
                torch.__version__ < "2.14", reason="c10d has hooks from 2.14 on"
            ),
        ),
    ],
)
def test_of_healthy_programs_nothing_is_told_and_nothing_stays_in_flight(
    tmp_path, monkeypatch, capsys, backend
):
    folder = str(tmp_path / "status")
    monkeypatch.setenv("TORCHCOMMS_PG_STATUS", folder)
    after = limits.grown(AFTER)
    settings = {
        "TORCHCOMMS_PG_STATUS": folder,
        "TORCHCOMMS_PG_VERDICT_AFTER": str(after),
        "TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "dump_"),
    }
    assert len(PROGRAMS) >= 25
    with Ranks(WORLD, init=False, env=settings) as ranks:
        ranks.run(begin, ranks.store_args(), backend, after)
        for number, each in enumerate(PROGRAMS):
            try:
                ranks.run(run, number, str(tmp_path))
            except Exception as error:
                raise AssertionError(each.__name__) from error
            for rank in range(WORLD):
                said = re.findall(r"torchcomms_pg: .*", ranks.output(rank))
                assert not said, f"{each.__name__}, rank {rank}: {said}"

        def nothing_is_in_flight():
            capsys.readouterr()
            code = main(["--json", "--late", "0.1"])
            told = json.loads(capsys.readouterr().out)
            found[:] = [code, told]
            groups = [group for group in told["groups"] if group["waits"]]
            return code == 0 and not groups and not told["waits"]

        found = []
        assert wait_for(nothing_is_in_flight, SOON), found
        ranks.run(end, ranks.store_args())
