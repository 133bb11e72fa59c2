"""Calls and bytes on links, inside a host and between hosts, for each dimension.

Volumes follow NCCL's ring algorithm (nccl-tests, doc/PERFORMANCE.md, "Bus bandwidth"): of n
ranks each sends 2 (n-1)/n of a tensor for an all-reduce, (n-1)/n of the whole for an all-gather, a
reduce-scatter or an all-to-all, and all but one send the whole for a broadcast or a reduction. A
tree (Sanders, Speck, Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and
scan", 2009, as NCCL has it between hosts) moves the same sum, of which between h hosts 2 (h-1)
tensors for an all-reduce.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from torchcomms_pg.trace.dumps import Dumps
from torchcomms_pg.trace.groups import Group

BYTES = {
    "Byte": 1,
    "Char": 1,
    "Bool": 1,
    "Float8_e4m3fn": 1,
    "Float8_e5m2": 1,
    "Short": 2,
    "UInt16": 2,
    "Half": 2,
    "BFloat16": 2,
    "Int": 4,
    "UInt32": 4,
    "Float": 4,
    "Long": 8,
    "UInt64": 8,
    "Double": 8,
    "ComplexFloat": 8,
    "ComplexDouble": 16,
}


@dataclass
class Volume:
    """Operations of one kind in the groups of one dimension.

    ``calls`` counts operations of a group once for each of its groups. Bytes are sums over all
    ranks: ``inside`` the hosts and ``between`` them by rings, and ``tree_between`` by trees.
    """

    dimension: str
    op: str
    size: int
    calls: int = 0
    inside: float = 0.0
    between: float = 0.0
    tree_between: float = 0.0


@dataclass(frozen=True)
class _Links:
    """The links of a group: fractions of its ring's links, and of its pairs, between hosts."""

    ring: float
    pairs: float
    hosts: int


def volumes(dumps: Dumps, per_host: int) -> list[Volume]:
    """Returns the volumes by dimension, operation and size of the groups."""
    found: dict[tuple[str, str, int], Volume] = {}
    links: dict[Group, _Links] = {}
    sums: dict[tuple[Group, str, object, object, str], int] = defaultdict(int)
    for dump in dumps.values():
        for entry in dump.entries:
            if entry.p2p:
                if entry.op == "send" and entry.receiver is not None:
                    volume = _volume(found, entry.group, "send")
                    volume.calls += 1
                    moved = math.prod((entry.numel_in, BYTES.get(entry.dtype, 0)))
                    if entry.rank // per_host == entry.receiver // per_host:
                        volume.inside += moved
                    else:
                        volume.between += moved
                        volume.tree_between += moved
            elif entry.rank == entry.group.ranks[0]:
                key = (entry.group, entry.op, entry.input_sizes, entry.output_sizes, entry.dtype)
                sums[key] += 1
    for (group, op, inputs, outputs, dtype), count in sums.items():
        if group not in links:
            links[group] = _links(group.ranks, per_host)
        assert isinstance(inputs, tuple) and isinstance(outputs, tuple)
        whole = max(_numel(inputs), _numel(outputs)) * BYTES.get(dtype, 0)
        _add(_volume(found, group, op), count, whole, links[group])
    return sorted(found.values(), key=lambda each: (each.dimension, each.op, each.size))


def _numel(sizes: tuple[tuple[int, ...], ...]) -> int:
    return sum(map(math.prod, sizes))


def _volume(found: dict[tuple[str, str, int], Volume], group: Group, op: str) -> Volume:
    known = group.description not in ("", "undefined")
    name = group.description.removeprefix("mesh_") if known else "other groups"
    key = (name, op, len(group.ranks))
    if key not in found:
        found[key] = Volume(*key)
    return found[key]


def _links(ranks: tuple[int, ...], per_host: int) -> _Links:
    hosts = [rank // per_host for rank in ranks]
    size = len(hosts)
    ring = sum(a != b for a, b in zip(hosts, (*hosts[1:], hosts[0]), strict=True)) / size
    same = sum(hosts.count(host) for host in set(hosts) for _ in range(hosts.count(host)))
    pairs = 1 - (same - size) / (size * (size - 1)) if size > 1 else 0.0
    return _Links(ring, pairs, len(set(hosts)))


def _add(volume: Volume, count: int, whole: int, links: _Links) -> None:
    """Adds `count` operations whose larger side has ``whole`` bytes on a rank."""
    size = volume.size
    volume.calls += count
    if size < 2:
        return
    edges = links.hosts - 1
    if volume.op == "all_to_all":
        moved, between = whole * (size - 1), links.pairs
        tree = moved * between
    elif volume.op == "all_reduce":
        moved, between, tree = 2 * whole * (size - 1), links.ring, 2.0 * whole * edges
    elif volume.op in ("broadcast", "reduce", "gather", "scatter"):
        moved, between, tree = whole * (size - 1), links.ring, float(whole * edges)
    elif "gather" in volume.op or "scatter" in volume.op:
        moved, between = whole * (size - 1), links.ring
        tree = moved * between
    else:  # a barrier
        moved, between, tree = 0, 0.0, 0.0
    volume.inside += count * moved * (1 - between)
    volume.between += count * moved * between
    volume.tree_between += count * tree
