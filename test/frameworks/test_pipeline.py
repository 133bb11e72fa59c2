"""Every pipeline schedule of torch trains over torchcomms what it trains over Gloo."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    SplitPoint,
    pipeline,
)

from harness.parity import like_gloo
from harness.values import data

pytestmark = pytest.mark.torch_version

CPU = torch.device("cpu")
PARTS, BATCH, WIDTH = 4, 8, 6


def layer(number):
    torch.manual_seed(20 + number)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def train(schedule, stages, steps=2):
    """The losses on the last rank, and all gradients of this rank's stages."""
    losses = []
    me = dist.get_rank()
    first = any(stage.is_first for stage in stages)
    last = any(stage.is_last for stage in stages)
    for step in range(steps):
        inputs = (data(0, (BATCH, WIDTH), salt=step),) if first else ()
        targets = dict(target=data(1, (BATCH, WIDTH), salt=step)) if last else {}
        found = []
        schedule.step(*inputs, losses=found if last else None, **targets)
        losses.append([loss.detach() for loss in found])
    gradients = [p.grad for stage in stages for p in stage.submod.parameters()]
    return me, losses, gradients


def mse(got, want):
    return nn.functional.mse_loss(got, want)


@like_gloo(2, 3)
@pytest.mark.parametrize("kind", [ScheduleGPipe, Schedule1F1B], ids=["GPipe", "1F1B"])
def test_schedules_of_one_stage_a_rank(kind, world):
    """With the shapes of what is sent inferred by messages between the stages."""
    stage = PipelineStage(layer(dist.get_rank()), dist.get_rank(), world, CPU)
    schedule = kind(stage, n_microbatches=PARTS, loss_fn=mse)
    return train(schedule, [stage])


INTERLEAVED = {
    "looped BFS": ScheduleLoopedBFS,
    "interleaved 1F1B": ScheduleInterleaved1F1B,
    "interleaved zero bubble": ScheduleInterleavedZeroBubble,
    "V zero bubble": ScheduleZBVZeroBubble,
}
over_itself = pytest.mark.skipif(
    torch.__version__ < "2.12",
    reason="torch 2.11 sends from a stage to the next also on one rank, which Gloo cannot",
)
SEVERAL = [
    pytest.param(name, marks=over_itself if name == "V zero bubble" else ()) for name in INTERLEAVED
]


@like_gloo(2)
@pytest.mark.parametrize("name", SEVERAL)
def test_schedules_of_several_stages_a_rank(name, world):
    me, count = dist.get_rank(), 2 * world
    mine = [me, count - 1 - me] if name == "V zero bubble" else [me, me + world]
    stages = [PipelineStage(layer(number), number, count, CPU) for number in mine]
    schedule = INTERLEAVED[name](stages, n_microbatches=PARTS, loss_fn=mse)
    return train(schedule, stages)


@pytest.mark.ranks(2)
def test_the_v_schedule_trains_what_one_process_trains(world):
    """Where Gloo cannot, too: two neighbouring stages are on one rank, which sends to itself."""
    me, count = dist.get_rank(), 2 * world
    mine = [me, count - 1 - me]
    stages = [PipelineStage(layer(number), number, count, CPU) for number in mine]
    schedule = ScheduleZBVZeroBubble(stages, n_microbatches=PARTS, loss_fn=mse)
    _, losses, gradients = train(schedule, stages, steps=1)
    alone = nn.Sequential(*map(layer, range(count)))
    loss = mse(alone(data(0, (BATCH, WIDTH), salt=0)), data(1, (BATCH, WIDTH), salt=0))
    loss.backward()
    if me == 0:  # which has the last stage as well
        torch.testing.assert_close(torch.stack(losses[0]).mean(), loss.detach())
    want = [parameter.grad for number in mine for parameter in alone[number].parameters()]
    torch.testing.assert_close(gradients, want)


class Whole(nn.Module):
    """Two layers that `pipeline` splits."""

    def __init__(self):
        super().__init__()
        self.a, self.b = layer(0), layer(1)

    def forward(self, x):
        return self.b(self.a(x))


@like_gloo(2)
def test_a_traced_pipeline_in_a_subgroup(world):
    """And inference without a loss."""
    group = dist.new_group()
    example = data(0, (BATCH // PARTS, WIDTH))
    parts = pipeline(Whole(), (example,), split_spec={"b": SplitPoint.BEGINNING})
    stage = parts.build_stage(dist.get_rank(), CPU, group)
    schedule = ScheduleGPipe(stage, n_microbatches=PARTS)
    with torch.no_grad():
        inputs = [data(0, (BATCH, WIDTH))] if dist.get_rank() == 0 else []
        return schedule.eval(*inputs) if hasattr(schedule, "eval") else schedule.step(*inputs)
