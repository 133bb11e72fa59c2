"""All checks, in the order in which they are made; should the time not do, the last are not."""

from __future__ import annotations

from gpu.check import Check


def on(body: str, *ranks: int, name: str = "") -> list[Check]:
    """Returns a check for each number of ranks on one GPU, and one with two real ranks."""
    name = name or body.rpartition(":")[2]
    shared = [Check(name, f"gpu.{body}", count, seconds=90) for count in ranks]
    return [*shared, Check(name, f"gpu.{body}", 2, gpus=2, seconds=90)]


def alone(body: str, name: str = "") -> Check:
    """Returns a check of one rank that needs CUDA."""
    return Check(name or body.rpartition(":")[2], f"gpu.{body}", cuda=True)


_ALL = [
    alone("groups:library"),
    *on("operations:check", 1, 2, 3, name="operations"),
    *on("torchcomm:check", 1, 2, 3, name="torchcomm"),
    *on("types:reductions", 1, 2, 3),
    *on("types:moves", 1, 2, 3),
    *on("groups:check", 1, 2, 3, name="groups"),
    *on("streams:check", 1, 2, name="streams"),
    *on("models:ddp", 1, 2),
    *on("models:fsdp2", 1, 2),
    alone("memory:pool", name="memory_pool"),
    alone("memory:of_the_group", name="group_memory"),
    alone("memory:suspend", name="suspend"),
    Check("suspend", "gpu.memory:suspend", 2, cuda=True),
    *on("windows:check", 1, 2, name="windows"),
    *on("graphs:capture", 1, 2, name="graph_capture"),
    Check("graphs_in_turn", "gpu.graphs:several"),
    Check("graph_ends_first", "gpu.graphs:graph_ends_first"),
    Check("group_ends_first", "gpu.graphs:group_ends_first"),
    *on("failures:timeout", 2),
    *on("failures:abort", 2),
    Check("devices", "gpu.groups:devices", gpus=2),
    Check("overhead", "gpu.overhead:eager"),
    alone("overhead:in_graph", name="overhead_in_graph"),
]

# One rank, then several on one GPU, then several GPUs.
CHECKS = sorted(_ALL, key=lambda check: (check.gpus, check.ranks))
