"""Functional collectives, eager and compiled, and torch.distributed.nn, against Gloo."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
import torch.distributed.nn.functional as dnn

from harness.parity import like_gloo
from harness.values import all_data, assert_same, data

pytestmark = pytest.mark.torch_version

WORLD = 2


def all_reduce_several(tensors, op, group):
    """all_reduce_coalesced; over Gloo one by one.

    Gloo's crashes about once in 10,000 calls on loaded cores, where its thread lets go of tensors.
    """
    if dist.get_backend(group) == "gloo":
        return [fc.all_reduce(tensor, op, group) for tensor in tensors]
    return fc.all_reduce_coalesced(tensors, op, group)


def mixture(x, world):
    """One of each functional collective."""
    group = dist.group.WORLD
    total = fc.all_reduce(x, "sum", group)
    gathered = fc.all_gather_tensor(x, 0, group)
    # torch 2.11 and 2.12 cannot trace their own copy of the gathered parts side by side.
    columns = fc.all_gather_tensor(x, 0 if torch.__version__ < "2.13" else 1, group)
    part = fc.reduce_scatter_tensor(gathered, "sum", 0, group)
    sent = fc.all_to_all_single(gathered, None, None, group)
    spread = fc.broadcast(x * 2, 0, group)
    several = all_reduce_several([x, x + 1], "max", group)
    pieces = fc.all_gather_into_tensor_coalesced([x, x * 3], group)
    return [total, gathered, columns, part, sent, spread, *several, *pieces]


def with_gradients(x, world):
    """One of each that autograd flows through."""
    group = dist.group.WORLD
    gathered = fc.all_gather_tensor_autograd(x, 0, group)
    part = fc.reduce_scatter_tensor_autograd(gathered * gathered, "sum", 0, group)
    splits = [x.shape[0]] * world
    sent = fc.all_to_all_single_autograd(gathered, splits, splits, group)
    return (part.sin() * x).sum() + (sent * sent).sum()


def both(function, x, world):
    value = function(x, world)
    (gradient,) = torch.autograd.grad(value, x)
    return value, gradient


def moving(x, world):
    """all_to_all_single with uneven splits and permute_tensor; the eager path alone has them."""
    me = dist.get_rank()
    splits = [1 + (me + peer) % 2 for peer in range(world)]
    rows = torch.arange(float(sum(splits) * 3)).reshape(-1, 3) + 100 * me
    sent = fc.all_to_all_single(rows, splits, splits, dist.group.WORLD)
    around = fc.permute_tensor(
        x.flatten(), [(rank + 1) % world for rank in range(world)], dist.group.WORLD
    )
    return fc.wait_tensor(sent), fc.wait_tensor(around)


@pytest.mark.beyond_gloo
@pytest.mark.ranks((1, 2, 3, 4))
def test_each_gives_what_plain_pytorch_gives(world):
    me, group = dist.get_rank(), dist.group.WORLD
    for size in (1, 1025, 100_001):
        inputs = all_data(world, (world, size))
        x = inputs[me].clone()
        total = sum(inputs[1:], inputs[0])
        torch.testing.assert_close(fc.all_reduce(x, "sum", group) + 0, total)
        torch.testing.assert_close(fc.all_reduce(x, "avg", group) + 0, total / world)
        assert_same(x, inputs[me], "the input of a functional collective")
        assert_same(fc.all_gather_tensor(x, 0, group) + 0, torch.cat(inputs) + 0)
        assert_same(fc.all_gather_tensor(x, 1, group) + 0, torch.cat(inputs, 1) + 0)
        scattered = fc.reduce_scatter_tensor(x, "sum", 0, group) + 0
        torch.testing.assert_close(scattered, total[me : me + 1])
        swapped = fc.all_to_all_single(x, None, None, group) + 0
        assert_same(swapped, torch.stack([y[me] for y in inputs]) + 0)
        assert_same(fc.broadcast(x, world - 1, group) + 0, inputs[world - 1] + 0)
        ring = [(rank + 1) % world for rank in range(world)]
        if world > 1:
            moved = fc.permute_tensor(x.flatten(), ring, group) + 0
            assert_same(moved, inputs[(me - 1) % world].flatten() + 0)
    both = fc.all_reduce_coalesced([x, 2 * x], "sum", group)
    torch.testing.assert_close(fc.wait_tensor(both[1]), 2 * total)
    parts = fc.all_gather_into_tensor_coalesced([x, 2 * x], group)
    assert_same(fc.wait_tensor(parts[1]), 2 * torch.cat(inputs))
    parts = fc.reduce_scatter_tensor_coalesced([x.clone(), 2 * x], "sum", [0, 0], group)
    torch.testing.assert_close(fc.wait_tensor(parts[1]), 2 * total[me : me + 1])


@like_gloo(2, 3, rounding=True)
def test_eager(world):
    x = data(dist.get_rank(), (4, 6))
    results = [fc.wait_tensor(y) for y in mixture(x, world)]
    return results, both(with_gradients, x.requires_grad_(), world), moving(x.detach(), world)


@pytest.mark.slow
@like_gloo(2, rounding=True, timeout=60)
@pytest.mark.timeout(100)
def test_compiled_as_one_graph_with_gradients(world):
    x = data(dist.get_rank(), (4, 6))
    torch._dynamo.reset()
    compiled = torch.compile(mixture, fullgraph=True, backend="aot_eager")
    results = [y + 0 for y in compiled(x, world)]
    graph = torch.compile(with_gradients, fullgraph=True, backend="aot_eager")
    return results, both(graph, x.clone().requires_grad_(), world)


def without_kernels(x):
    """Collectives and matrix products: Inductor needs no C++ compiler for them, which is slow."""
    group = dist.group.WORLD
    total = fc.all_reduce(x @ x.t(), "sum", group)
    gathered = fc.all_gather_tensor(total @ x, 0, group)
    part = fc.reduce_scatter_tensor(gathered @ x.t(), "sum", 0, group)
    sent = fc.all_to_all_single(part @ x, None, None, group)
    return total @ sent


@like_gloo(2, rounding=True, timeout=60)
@pytest.mark.timeout(100)
def test_compiled_by_inductor(world):
    """In whose code collectives are nodes of their own, some of them in place."""
    x = data(dist.get_rank(), (4, 4))
    torch._dynamo.reset()
    return torch.compile(without_kernels, fullgraph=True)(x), without_kernels(x)


def in_place(x):
    """What Dynamo rewrites to functional collectives."""
    y, rows = x * 2, x.new_empty(x.shape[0] * dist.get_world_size(), *x.shape[1:])
    dist.all_reduce(y)
    dist.all_gather_into_tensor(rows, y + 1)
    part = torch.empty_like(x)
    dist.reduce_scatter_tensor(part, rows)
    return y.sin(), rows, part


@like_gloo(2, rounding=True, timeout=60)
@pytest.mark.timeout(100)
def test_compiled_calls_of_torch_distributed(world):
    torch._dynamo.reset()
    x = data(dist.get_rank(), (3, 5))
    return torch.compile(in_place, fullgraph=True, backend="aot_eager")(x), in_place(x)


def nn_functions(x, world):
    """name -> output, for each function of torch.distributed.nn."""
    me = dist.get_rank()
    parts = [x * (rank + 1) for rank in range(world)]
    return {
        "broadcast": dnn.broadcast(x, 1),
        "gather": torch.cat(list(dnn.gather(x, 0))) * (me == 0),
        "scatter": dnn.scatter(parts, 0),
        "reduce": dnn.reduce(x, 0) * (me == 0),
        "reduce_scatter": dnn.reduce_scatter(torch.empty_like(x), parts),
        "all_gather": torch.cat(dnn.all_gather(x)),
        "all_to_all": torch.cat(dnn.all_to_all([torch.empty_like(x) for _ in parts], parts)),
        "all_to_all_single": dnn.all_to_all_single(torch.empty_like(x), x),
        "all_reduce": dnn.all_reduce(x),
    }


@like_gloo(2, rounding=True)
def test_torch_distributed_nn(world):
    results = {}
    for name in nn_functions(data(0, (4, 6)), world):
        x = data(dist.get_rank(), (4, 6)).requires_grad_()
        y = nn_functions(x, world)[name]
        weight = data(50, y.shape)
        (gradient,) = torch.autograd.grad((y * weight).sum(), x)
        results[name] = y, gradient
    return results


@like_gloo(2, rounding=True)
def test_all_gather_base_of_torch_distributed_nn_has_gradients(world):
    """As over NCCL; torch refuses other backends by name, Gloo among them."""
    x = data(dist.get_rank(), (2, 3)).requires_grad_()
    y = dnn._all_gather_base(torch.empty(2 * world, 3), x)
    weight = data(dist.get_rank() + 7, y.shape)
    if dist.get_backend() == "gloo":
        with pytest.raises(RuntimeError, match="Backend not supported"):
            (y * weight).sum().backward()
        z = torch.cat(dnn.all_gather(x))
        (z * weight).sum().backward()
    else:
        (y * weight).sum().backward()
    return y, x.grad
