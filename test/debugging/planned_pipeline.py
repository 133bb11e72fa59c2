"""A step of torch's interleaved schedule whose messages are received as late as they may be.

With two ranks of two stages each, both then send to the other before either receives, as
pytorch/pytorch issue 172668 reports: rank 0 has 0SEND_F1 before 2RECV_F0, and rank 1 has 1SEND_F0
before 1RECV_F1. With ``early``, messages are received where torch does.
"""

import re
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B


def late(actions):
    """Returns a rank's actions with each message received before the step that uses it."""
    received, order = {}, []
    for action in actions:
        kind = re.fullmatch(r"\d+([A-Z_]+?)\d*", str(action))[1]
        key = (action.stage_index, action.microbatch_index)
        if kind.startswith("RECV_"):
            received[key, kind[-1]] = action
            continue
        waits = received.pop((key, kind), None)
        order += [action] if waits is None else [waits, action]
    return order


dist.init_process_group("nccl")
rank, device = dist.get_rank(), torch.device("meta")
stages = [
    PipelineStage(nn.Linear(8, 8, device=device), number, 4, device) for number in (rank, rank + 2)
]
schedule = ScheduleInterleaved1F1B(stages, 4, loss_fn=lambda output, _: output.sum())
if sys.argv[1] == "late":
    orders = schedule.pipeline_order_with_comms
    schedule.pipeline_order_with_comms = {each: late(orders[each]) for each in orders}
step = schedule.step
batch = torch.zeros(4, 8, device=device)
if rank == 0:
    step(batch)
else:
    step(target=batch)
