"""DTensor, tensor, sequence and context parallelism give what they give over Gloo."""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
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
from torch.distributed.tensor.experimental._attention import (
    context_parallel_unshard,
    set_rotate_method,
)
from torch.distributed.tensor.experimental._context_parallel import (
    _attention as context_attention,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

from harness.parity import like_gloo, raised
from harness.values import all_data, assert_same, data

pytestmark = pytest.mark.torch_version

REDUCTIONS = ("sum", "avg", "max", "min")


@like_gloo(1, 2, 3, 4, rounding=True)
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
        total = sum(all_data(world, shape, torch.int64))
        for end in placements:
            mine = data(dist.get_rank(), shape, torch.int64)
            moved = DTensor.from_local(mine, mesh, [Partial()]).redistribute(mesh, [end])
            assert_same(moved.full_tensor(), total, f"{shape} Partial {end}")
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


SEQUENCE = 2  # the dimension of query, key and value that is spread


def attention(causal):
    """Query, key and value; and what one process makes of them: output and their gradients."""
    whole = [x.requires_grad_() for x in all_data(3, (2, 4, 12, 8))]
    output = F.scaled_dot_product_attention(*whole, is_causal=causal)
    (output * data(9, output.shape)).sum().backward()
    return [x.detach() for x in whole], [output.detach(), *(x.grad for x in whole)]


@like_gloo(2, rounding=True)
def test_context_parallel():
    """With the one kernel that torch can spread on CPUs, and not with a causal mask."""
    mesh = init_device_mesh("cpu", (2,))

    def spread(causal):
        whole, want = attention(causal)
        *parts, weights = buffers = [*(x.clone() for x in whole), data(9, want[0].shape)]
        dims = [SEQUENCE] * 4
        with (
            sdpa_kernel(SDPBackend.MATH),
            context_parallel(mesh, buffers=buffers, buffer_seq_dims=dims),
        ):
            for part in parts:
                part.requires_grad_()
            try:
                output = F.scaled_dot_product_attention(*parts, is_causal=causal)
                (output * weights).sum().backward()
                found = [output.detach(), *(part.grad for part in parts)]
            finally:
                for part in parts:
                    part.requires_grad_(False)
        got = context_parallel_unshard(mesh, found, dims)
        torch.testing.assert_close(got, want)
        return got

    # Before, torch does not put its own attention back after an error.
    return spread(causal=False), torch.__version__ >= "2.14" and raised(spread, causal=True)


@like_gloo(2, 3, rounding=True)
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("rotation", ["allgather", "alltoall"])
def test_the_ring_of_context_parallel(rotation, causal, world):
    """What a GPU's kernels go through: keys and values go round the ranks, and their gradients."""
    options = context_attention._cp_options
    kept = options.enable_load_balance, options.rotate_method
    options.enable_load_balance = False
    set_rotate_method(rotation)
    try:
        whole, want = attention(causal)
        me, group = dist.get_rank(), dist.group.WORLD
        parts = [x.chunk(world, SEQUENCE)[me] for x in whole]
        aten = torch.ops.aten
        output, weights = context_attention._templated_ring_attention(
            group,
            SEQUENCE,
            aten._scaled_dot_product_flash_attention_for_cpu.default,
            *parts,
            is_causal=causal,
            dropout_p=0.0,
        )
        gradients = context_attention._templated_ring_attention_backward(
            group,
            SEQUENCE,
            aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
            grad_out=data(9, want[0].shape).chunk(world, SEQUENCE)[me],
            grad_out_name="grad_out",
            query=parts[0],
            key=parts[1],
            value=parts[2],
            out=output,
            logsumexp=weights,
            is_causal=causal,
            dropout_p=0.0,
        )
    finally:
        options.enable_load_balance, options.rotate_method = kept
    got = [output, *gradients]
    torch.testing.assert_close(got, [x.chunk(world, SEQUENCE)[me] for x in want])
    return got
