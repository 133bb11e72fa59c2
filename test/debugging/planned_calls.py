"""Programs whose calls are the same in a plan and in a run of 8 ranks, one after another."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch import nn
from torch.distributed.device_mesh import init_device_mesh


def collectives(mesh):
    rank, group = dist.get_rank(), mesh["tp"].get_group()
    value, parts = torch.ones(6), [torch.ones(6) for _ in range(4)]
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    dist.broadcast(value, group_src=1, group=group)
    dist.reduce(value, group_dst=3, group=group)
    dist.all_gather(parts, value, group=group)
    dist.all_gather_into_tensor(torch.ones(24), value, group=group)
    dist.reduce_scatter(value, parts, group=group)
    dist.reduce_scatter_tensor(value, torch.ones(24), group=group)
    dist.all_to_all_single(torch.ones(8), torch.ones(8), group=group)
    first = dist.get_rank(group) == 0
    dist.gather(value, parts if first else None, group_dst=0, group=group)
    dist.scatter(value, parts if first else None, group_src=0, group=group)
    dist.barrier(group)
    gathered = [None] * 8
    dist.all_gather_object(gathered, rank)
    dist.broadcast_object_list([rank], src=0)


def messages(mesh):
    rank, value = dist.get_rank(), torch.ones(5)
    after, before = (rank + 1) % 8, (rank - 1) % 8
    ring = [dist.P2POp(dist.isend, value, after), dist.P2POp(dist.irecv, torch.ones(5), before)]
    for work in dist.batch_isend_irecv(ring):
        work.wait()
    if rank % 2 == 0:
        dist.send(value, after, tag=3)
    else:
        dist.recv(value, before, tag=3)


def functional(mesh):
    value = torch.ones(8, 4)
    for each in (
        fc.all_reduce(value, "sum", mesh["dp"]),
        fc.all_gather_tensor(value, 0, mesh["tp"]),
        fc.reduce_scatter_tensor(value, "sum", 0, mesh["tp"]),
        fc.all_to_all_single(value, None, None, mesh["tp"]),
        fc.broadcast(value, 0, mesh["tp"]),
    ):
        fc.wait_tensor(each)


def ddp(mesh):
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()


def fsdp(mesh):
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for layer in model:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    model(torch.ones(2, 8)).sum().backward()


def pipeline(mesh):
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, group = dist.get_rank(), dist.group.WORLD
    stage = PipelineStage(nn.Linear(4, 4), rank, 8, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, 8, loss_fn=lambda output, _: output.sum())
    inputs = (torch.ones(8, 4),) if rank == 0 else ()
    schedule.step(*inputs, target=torch.ones(8, 4) if rank == 7 else None)


PROGRAMS = (collectives, messages, functional, ddp, fsdp, pipeline)

if __name__ == "__main__":
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    for program in PROGRAMS:
        program(mesh)
    dist.destroy_process_group()
