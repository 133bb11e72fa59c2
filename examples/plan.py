"""One step of a Llama with data, context, tensor and pipeline parallelism, planned for many ranks.

$ python -m torchcomms_pg.plan --world-size 8 --hosts 2x4 --ranks 0,7 examples/plan.py --pp 2 --dp 2 --cp 1 --tp 2 --layers 1
mesh: pp 2 x dp 2 x cp 1 x tp 2
No hazard found.
no hazards: exit code 0
"""

import argparse

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


class Attention(nn.Module):
    """Causal attention; with context parallelism, keys and values of all parts are gathered."""

    def __init__(self, width, heads, head, cp):
        super().__init__()
        self.head, self.cp = head, cp
        self.wq, self.wk, self.wv = (nn.Linear(width, heads * head, bias=False) for _ in range(3))
        self.wo = nn.Linear(heads * head, width, bias=False)

    def forward(self, x):
        q, k, v = (
            w(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        if self.cp.size() > 1:
            k, v = (
                collectives.all_gather_tensor_autograd(t.contiguous(), 2, self.cp) for t in (k, v)
            )
        scores = (q @ k.transpose(-1, -2)) / self.head**0.5
        return self.wo((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.w1, self.w3 = (nn.Linear(width, 4 * width, bias=False) for _ in range(2))
        self.w2 = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, width, heads, cp):
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, heads, width // heads, cp)
        self.feed_forward = FeedForward(width)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Stage(nn.Module):
    """The layers of one stage of the pipeline."""

    def __init__(self, args, first, last, cp):
        super().__init__()
        self.embeddings = nn.Embedding(args.words, args.width) if first else None
        self.layers = nn.ModuleList(Block(args.width, args.heads, cp) for _ in range(args.layers))
        self.norm = nn.RMSNorm(args.width) if last else None
        self.output = nn.Linear(args.width, args.words, bias=False) if last else None

    def forward(self, x):
        x = self.embeddings(x) if self.embeddings is not None else x
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x)) if self.output is not None else x


def parallelize_tp(stage, tp):
    """Sequence parallel between blocks, column- and row-wise within, as torchtitan's plan."""
    plan = {}
    if stage.embeddings is not None:
        plan["embeddings"] = RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=True
        )
    if stage.output is not None:
        plan["norm"] = SequenceParallel()
        plan["output"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    parallelize_module(stage, tp, plan)
    for layer in stage.layers:
        gathered = PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        )
        plan = {"attention_norm": SequenceParallel(), "ffn_norm": SequenceParallel()}
        plan |= {"attention": gathered, "feed_forward": gathered}
        for name in (
            "attention.wq",
            "attention.wk",
            "attention.wv",
            "feed_forward.w1",
            "feed_forward.w3",
        ):
            plan[name] = ColwiseParallel()
        for name in ("attention.wo", "feed_forward.w2"):
            plan[name] = RowwiseParallel(output_layouts=Shard(1))
        parallelize_module(layer, tp, plan)


def main():
    parser = argparse.ArgumentParser()
    for name, value in {
        "pp": 4,
        "dp": 2,
        "cp": 2,
        "tp": 4,
        "layers": 2,
        "width": 256,
        "heads": 8,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--words", type=int, default=1024)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--schedule", default="1F1B")
    parser.add_argument("--device", default="meta")
    args = parser.parse_args()

    dist.init_process_group("nccl")
    sizes = (args.pp, args.dp, args.cp, args.tp)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "dp", "cp", "tp"))
    sharded = mesh["dp", "cp"]._flatten("dp_cp")
    place, schedule = mesh.get_local_rank("pp"), schedules.get_schedule_class(args.schedule)
    several = issubclass(schedule, schedules.PipelineScheduleMulti)
    numbers = [place]
    if several:
        v_shaped = args.schedule in ("ZBVZeroBubble", "DualPipeV")
        numbers.append(2 * args.pp - 1 - place if v_shaped else place + args.pp)
    count = len(numbers) * args.pp
    device = torch.device(args.device)
    stages, parameters = [], []
    for number in numbers:
        with device:
            stage = Stage(args, number == 0, number == count - 1, mesh["cp"].get_group())
        parallelize_tp(stage, mesh["tp"])
        for layer in stage.layers:
            fully_shard(layer, mesh=sharded)
        fully_shard(stage, mesh=sharded)
        parameters += stage.parameters()
        stages.append(PipelineStage(stage, number, count, device, group=mesh["pp"].get_group()))

    def loss(output, target):
        return nn.functional.cross_entropy(output.flatten(0, 1).float(), target.flatten())

    optimizer = torch.optim.AdamW(parameters, foreach=False)
    step = schedule(stages if several else stages[0], 2 * args.pp, loss_fn=loss)
    words = torch.zeros(2 * args.pp, args.length // args.cp, dtype=torch.int64, device=device)
    begins = (words,) if place == 0 else ()
    ends = words if count - 1 in numbers else None
    step.step(*begins, target=ends)
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    dist.all_reduce(norm, group=mesh["pp"].get_group())
    optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
