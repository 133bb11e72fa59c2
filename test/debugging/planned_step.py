"""A step of stages, data and tensor parallelism on 16 ranks, with the fault that an argument names.

A comment names the faults in which a line is one of those that the report has to show.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

fault = sys.argv[1]
dist.init_process_group("nccl")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (4, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
stage, data, part = (mesh.get_local_rank(name) for name in ("pp", "dp", "tp"))
pp, dp, tp = (mesh.get_group(name) for name in ("pp", "dp", "tp"))
activation = torch.zeros(64, 32, device="meta")
gradient = torch.zeros(1000, device="meta")
loss = torch.zeros(1, device="meta")

pairs = [[n, n + 1] for n in range(0, 16, 2)]
if fault == "off mesh":
    pairs = [[n + 1, n + 2] for n in range(0, 14, 2)]
if fault == "order of groups" and stage == 3:
    pairs.reverse()
groups = [dist.new_group(pair) for pair in pairs]  # off mesh, order of groups


def one_more_send():
    if fault == "one more send" and stage == 1:
        dist.send(activation, group_dst=2, group=pp)  # one more send


def forward():
    if stage > 0:
        received = activation[:32] if fault == "size of a message" and stage == 2 else activation
        dist.recv(received, group_src=stage - 1, group=pp)  # size of a message, one more send
    dist.all_reduce(activation, group=tp)
    if stage < 3:
        dist.send(activation, group_dst=stage + 1, group=pp)  # size of a message
    one_more_send()


def reduce_gradient():
    dist.all_reduce(gradient, group=dp)  # crossed


def reduce_loss():
    dist.all_reduce(loss, group=tp)  # crossed


def in_a_ring():
    """Sends to the next stage and receives from the one before, outside of a batch."""
    if fault == "ring":
        dist.send(activation, group_dst=(stage + 1) % 4, group=pp)  # ring
        dist.recv(activation, group_src=(stage - 1) % 4, group=pp)  # ring


def backward():
    if fault == "conditional" and rank == 6:
        dist.all_reduce(loss, group=dp)  # conditional
    if fault == "crossed" and stage == 3 and part != data:
        reduce_loss()
        reduce_gradient()
    else:
        reduce_gradient()
        reduce_loss()
    shard = 33 if fault == "uneven" and data == 1 else 34
    whole = torch.zeros(2 * shard, device="meta")
    dist.all_gather_into_tensor(whole, gradient[:shard], group=dp)  # uneven
    narrow = fault == "dtype" and part == 1
    dist.all_reduce(loss.bfloat16() if narrow else loss, group=tp)  # dtype
    root = part if fault == "root" else 0
    dist.broadcast(loss, group_src=root, group=tp)  # root
    op = dist.ReduceOp.MAX if fault == "reduction" and stage == 3 else dist.ReduceOp.SUM
    dist.all_reduce(loss, op=op, group=pp)  # reduction
    if fault == "skipped" and stage == 2:
        return
    dist.all_reduce(loss)  # skipped


forward()
in_a_ring()
backward()
dist.barrier()
