"""DTensor, tensor, sequence and context parallelism give what they give over Gloo."""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from parity import like_gloo
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from values import all_data, assert_same, data

REDUCTIONS = ("sum", "avg", "max", "min")


@like_gloo(2, 3, rounding=True)
def test_redistribution_between_all_placements(world):
    """Sizes that do not divide by the number of ranks included."""
    mesh = init_device_mesh("cpu", (world,))
    results = []
    for shape in ((8, 12), (7, 5), (1, 3), (world, 0)):
        whole = data(0, shape)
        placements = [Shard(0), Shard(1), Replicate()]
        for start, end in itertools.product(placements, placements):
            moved = distribute_tensor(whole, mesh, [start]).redistribute(mesh, [end])
            assert_same(moved.full_tensor(), whole, f"{shape} {start} {end}")
            results.append(moved.to_local())
        for kind, end in itertools.product(REDUCTIONS, placements):
            partial = DTensor.from_local(data(dist.get_rank(), shape), mesh, [Partial(kind)])
            results.append(partial.redistribute(mesh, [end]).to_local())
    return results


@like_gloo(4, rounding=True)
def test_redistribution_on_a_plane():
    mesh = init_device_mesh("cpu", (2, 2))
    whole, results = data(0, (7, 6)), []
    one = [Shard(0), Shard(1), Replicate()]
    layouts = list(itertools.product(one, one))
    for start, end in itertools.product(layouts, layouts):
        moved = distribute_tensor(whole, mesh, start).redistribute(mesh, end)
        assert_same(moved.full_tensor(), whole, f"{start} {end}")
        results.append(moved.to_local())
    partial = DTensor.from_local(data(dist.get_rank(), (7, 6)), mesh, [Partial(), Partial()])
    return results, partial.redistribute(mesh, [Shard(0), Replicate()]).to_local()


@like_gloo(2, rounding=True)
def test_operators_and_their_gradients():
    mesh = init_device_mesh("cpu", (2,))
    a = distribute_tensor(data(0, (6, 8)), mesh, [Shard(1)]).requires_grad_()
    b = distribute_tensor(data(1, (8, 5)), mesh, [Shard(0)]).requires_grad_()
    product = (a @ b).redistribute(mesh, [Shard(0)])
    rows = torch.distributed.tensor.full((4, 6), 2.5, device_mesh=mesh, placements=[Shard(0)])
    loss = (product.softmax(0) * product).sum() + product.std()
    # torch 2.11 cannot add it: "Redistribution from one partial type to another is unsupported".
    loss = loss + (product.norm() if torch.__version__ >= "2.12" else 0)
    loss.backward()
    table = distribute_module(nn.Embedding(10, 6), mesh)
    words = distribute_tensor(torch.arange(8) % 10, mesh, [Shard(0)])
    stacked = torch.cat([rows, rows]).sort(0).values
    shape = [list(x.shape) for x in (product, rows, table(words))]
    return loss, a.grad, b.grad, stacked.full_tensor().shape[0], shape


class Block(nn.Module):
    """A norm and a feed-forward layer around a residual."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


def transformer():
    torch.manual_seed(1)
    return nn.ModuleDict({"words": nn.Embedding(12, 8), "block": Block(), "out": nn.Linear(8, 12)})


def run(net, words):
    return net["out"](net["block"](net["words"](words)))


PLANS = {
    "tensor": {
        "words": RowwiseParallel(input_layouts=Replicate()),
        "block.up": ColwiseParallel(),
        "block.down": RowwiseParallel(),
        "out": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    },
    "sequence": {
        "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "block.norm": SequenceParallel(),
        "block.up": PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        ),
        "block.down": RowwiseParallel(output_layouts=Shard(1)),
        "out": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
    },
}


@like_gloo(2, rounding=True)
@pytest.mark.parametrize("plan", PLANS)
def test_tensor_and_sequence_parallel(plan):
    """Trained with a loss that is parallel too; the same as one process alone."""
    mesh = init_device_mesh("cpu", (2,))
    words = data(0, (3, 6), torch.int64).abs() + 3
    alone, split = transformer(), transformer()
    parallelize_module(split, mesh, PLANS[plan])
    if plan == "sequence":
        parallelize_module(split, mesh, {"block.up": ColwiseParallel()})
    results = []
    with loss_parallel():
        loss = F.cross_entropy(run(split, words).flatten(0, 1), words.flatten())
        loss.backward()
    expected = F.cross_entropy(run(alone, words).flatten(0, 1), words.flatten())
    expected.backward()
    torch.testing.assert_close(loss.full_tensor(), expected)
    for name, parameter in split.named_parameters():
        gradient = parameter.grad
        gradient = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        results.append(gradient)
        want = alone.get_parameter(name).grad
        torch.testing.assert_close(gradient, want, msg=lambda text: f"{name}: {text}")
    return loss.full_tensor(), results


@like_gloo(2, rounding=True)
@pytest.mark.parametrize("causal", [False, True])
def test_context_parallel(causal):
    """Attention over a sequence that is spread over the ranks, forward and backward."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mesh = init_device_mesh("cpu", (2,))
    q, k, v = (x.requires_grad_() for x in all_data(3, (2, 4, 16, 8)))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    expected.sum().backward()
    parts = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    try:
        with (
            sdpa_kernel(SDPBackend.FLASH_ATTENTION),
            context_parallel(mesh, buffers=parts, buffer_seq_dims=[2, 2, 2]),
        ):
            output = F.scaled_dot_product_attention(*parts, is_causal=causal)
            output.sum().backward()
            return output, [x.grad for x in parts]
    except Exception as error:  # what torch itself cannot do on CPUs, it cannot over any backend
        return f"{type(error).__name__}: {error}"
