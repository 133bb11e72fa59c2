"""Graphs with collectives in them: captured, replayed, and ended in any order."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
import torch.distributed as dist
from values import all_data, assert_reduced, assert_same

from gpu.devices import Graph
from gpu.here import Here, finish, within

LENGTH = 1000
BOUND = 20.0  # seconds for what must not hang


def capture(here: Here) -> str:
    """Graphs of synchronous and asynchronous operations, replayed with new inputs."""
    _start(here)
    replays = 0
    for name, body in _BODIES.items():
        inputs = [all_data(here.ranks, (here.ranks, LENGTH), salt=salt) for salt in range(3)]
        tensor = here.place(inputs[0][here.rank])
        with here.kind.capture() as graph:
            result = body(tensor)
        for values in inputs:
            tensor.copy_(values[here.rank])
            graph.replay()
            try:
                _EXPECTED[name](here, result.cpu(), values)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error
            replays += 1
        here.synchronize()
        del graph, result
    _finish(here)
    return f"{len(_BODIES)} graphs, {replays} replays"


def several(here: Here) -> str:
    """Two graphs of one group replayed in turn, with operations outside of them between."""
    _start(here)
    tensors = [torch.zeros(LENGTH, device=here.device) for _ in range(3)]
    graphs = []
    for tensor in tensors[:2]:
        with here.kind.capture() as graph:
            dist.all_reduce(tensor.add_(1))
        graphs.append(graph)
    counts = [0.0, 0.0, 0.0]
    for turn in (0, 1, 1, 2, 0, 2, 1, 0):
        if turn < 2:
            graphs[turn].replay()
        else:
            finish(dist.all_reduce(tensors[2].add_(1), async_op=True))
        counts[turn] = (counts[turn] + 1) * here.ranks
    for tensor, count in zip(tensors, counts, strict=True):
        assert (tensor.cpu() == count).all(), f"got {tensor[:4].cpu()}, expected {count}"
    del graphs, graph
    gc.collect()
    _finish(here)
    return "2 graphs and eager operations in turn"


def group_ends_first(here: Here) -> str:
    """The group is destroyed while a graph of it lives."""
    graph = _one_graph(here)
    with within(BOUND, "destroying the group before its graph"):
        here.stop()
    with within(BOUND, "destroying the graph after its group"):
        del graph
        gc.collect()
        here.synchronize()
    return "destroyed the group, then the graph"


def graph_ends_first(here: Here) -> str:
    """The usual order."""
    graph = _one_graph(here)
    with within(BOUND, "destroying the graph before its group"):
        del graph
        gc.collect()
        here.synchronize()
    with within(BOUND, "destroying the group after its graph"):
        here.stop()
    return "destroyed the graph, then the group"


def _start(here: Here) -> None:
    here.start(eager=True)
    dist.all_reduce(torch.ones(1, device=here.device))  # NCCL connects at the first operation
    here.synchronize()


def _finish(here: Here) -> None:
    with within(BOUND, "destroying the group"):
        here.stop()


def _one_graph(here: Here) -> Graph:
    _start(here)
    tensor = torch.ones(LENGTH, device=here.device)
    with here.kind.capture() as graph:
        dist.all_reduce(tensor)
    graph.replay()
    assert (tensor.cpu() == here.ranks).all(), tensor[:4].cpu()
    here.meet("replayed")
    return graph


def _all_reduce(tensor: torch.Tensor) -> torch.Tensor:
    result = tensor * 2
    dist.all_reduce(result)
    return result + 1


def _async_all_reduce(tensor: torch.Tensor) -> torch.Tensor:
    result = tensor * 2
    work = dist.all_reduce(result, async_op=True)
    beside = tensor + 1
    finish(work)
    return result + beside


def _all_gather(tensor: torch.Tensor) -> torch.Tensor:
    result = tensor.new_empty(dist.get_world_size() * len(tensor), LENGTH)
    dist.all_gather_into_tensor(result, tensor)
    return result


def _reduce_scatter(tensor: torch.Tensor) -> torch.Tensor:
    result = tensor.new_empty(1, LENGTH)
    dist.reduce_scatter_tensor(result, tensor)
    return result


def _all_to_all(tensor: torch.Tensor) -> torch.Tensor:
    result = torch.empty_like(tensor)
    finish(dist.all_to_all_single(result, tensor, async_op=True))
    return result


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    result = torch.empty(tensor.shape[::-1], device=tensor.device).t().copy_(tensor)
    dist.all_reduce(result)
    return result


_BODIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "all_reduce": _all_reduce,
    "asynchronous all_reduce": _async_all_reduce,
    "all_gather_into_tensor": _all_gather,
    "reduce_scatter_tensor": _reduce_scatter,
    "asynchronous all_to_all_single": _all_to_all,
    "all_reduce with a temporary buffer": _strided,
}


def _close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def _total(inputs: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(inputs).sum(0)


_EXPECTED: dict[str, Callable[[Here, torch.Tensor, list[torch.Tensor]], None]] = {
    "all_reduce": lambda here, got, x: _close(got, 2 * _total(x) + 1),
    "asynchronous all_reduce": lambda here, got, x: _close(got, 2 * _total(x) + x[here.rank] + 1),
    "all_gather_into_tensor": lambda here, got, x: assert_same(got, torch.cat(x)),
    "reduce_scatter_tensor": lambda here, got, x: assert_reduced(
        got, [y[here.rank : here.rank + 1] for y in x]
    ),
    "asynchronous all_to_all_single": lambda here, got, x: assert_same(
        got, torch.stack([y[here.rank] for y in x])
    ),
    "all_reduce with a temporary buffer": lambda here, got, x: assert_reduced(got, x),
}
