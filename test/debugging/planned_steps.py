"""Three steps of an optimizer on 8 ranks, two stages of four; the setup is called before them."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("nccl")
mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("pp", "dp"))
pp, dp = mesh.get_group("pp"), mesh.get_group("dp")
stage = dist.get_rank(pp)
weight = torch.nn.Parameter(torch.zeros(16, device="meta"))
weight.grad = torch.zeros_like(weight)
optimizer = torch.optim.SGD([weight])
activation = torch.zeros(8, device="meta")
loss = torch.zeros(1, device="meta")

dist.broadcast(weight.data, group_src=0, group=dp)
for _ in range(3):
    dist.all_reduce(weight.grad, group=dp)
    if stage == 0:
        dist.send(activation, group_dst=1, group=pp)
        dist.recv(activation, group_src=1, group=pp)
    else:
        dist.recv(activation, group_src=0, group=pp)
        dist.send(activation, group_dst=0, group=pp)
    whole = torch.zeros(16, device="meta")
    gathered = dist.all_gather_into_tensor(whole, weight.data[:4], group=dp, async_op=True)
    dist.all_reduce(loss)
    gathered.wait()
    dist.all_reduce(loss)
    optimizer.step()
dist.barrier()
