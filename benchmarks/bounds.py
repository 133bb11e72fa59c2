"""How fast an operation can be at best: the bytes it has to move, over the speed of copying.

A copied byte is one read and one written; a byte that is only read, or only written, is half a
copy. An operation cannot end before the rank with the most to move has moved it at the speed of
one core, nor before all ranks have moved theirs at the speed of all cores together.

There are two bounds:

- direct: every rank reads its peers' buffers where they lie, so each byte moves once;
- staged: a rank cannot see its peers' memory, so what a peer needs is first copied to pages that
  they share. Staging that stays in cache costs less than this counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

KINDS = ("direct", "staged")


@dataclass(frozen=True)
class Traffic:
    """In copies of the larger buffer."""

    busiest: float
    """What the rank with the most work has to move."""
    total: float
    """What all ranks have to move."""


def traffic(op: str, kind: str, ranks: int) -> Traffic | None:
    """Returns what an operation has to move; None where there are no bytes."""
    block = 1 / ranks
    others = 1 - block
    # Reads and writes of a rank with most to do, then of any other, in buffers.
    direct = {
        "all_reduce": ((1 + others, 1), (1 + others, 1)),
        "reduce_scatter": ((1, block), (1, block)),
        "all_gather": ((1, 1), (1, 1)),
        "all_to_all": ((1, 1), (1, 1)),
        "broadcast": ((1, 1), (1, 1)),  # of a receiver; the root is left out below
        "reduce": ((1, block), (1, block)),
        "gather": ((block, block), (block, block)),
        "scatter": ((block, block), (block, block)),
        "send_recv": ((1, 1), (0, 0)),
    }
    staged = {
        # What peers reduce, then the own part, to the result and to the peers, then theirs.
        "all_reduce": ((1 + 2 * others, 2 * others + 2 * block),) * 2,
        "reduce_scatter": ((1 + others, others + block),) * 2,
        "all_gather": ((1 + block, 1 + block),) * 2,
        "all_to_all": ((1 + others, 1 + others),) * 2,
        "broadcast": ((1, 1), (1, 1)),
        "reduce": ((1 + 2 * others, 1 + others), (1 + others, others + block)),
        "gather": ((1, 1), (block, block)),
        "scatter": ((1, 1), (block, block)),
        "send_recv": ((1, 1), (1, 1)),
    }
    table = direct if kind == "direct" else staged
    if op not in table:
        return None
    most, other = (sum(moved) / 2 for moved in table[op])
    if op == "send_recv":  # all pairs at once
        return Traffic(most, (most + other) * (ranks // 2))
    idle = 1 if op == "broadcast" and kind == "direct" else 0
    return Traffic(most, most + other * (ranks - 1 - idle))


def wire(bytes: int, hosts: int) -> float:
    """Returns the bytes that each host has to send for an all-reduce, however many ranks it has."""
    return 2 * bytes * (hosts - 1) / hosts


def microseconds(
    op: str, kind: str, bytes: int, ranks: int, copies: list[dict[str, Any]]
) -> float | None:
    """Returns the bound for a buffer of so many bytes.

    `copies` is what floor.cpp measured: the size that is nearest counts.
    """
    moved = traffic(op, kind, ranks)
    if moved is None or not copies:
        return None
    nearest: int = min((abs(c["copy_bytes"] - bytes), c["copy_bytes"]) for c in copies)[1]
    speed: dict[int, float] = {
        c["copiers"]: c["shared_gb_s"] for c in copies if c["copy_bytes"] == nearest
    }
    cores = min(ranks, max(speed))
    one, all_ = speed[1], cores * speed[cores]
    return bytes * max(moved.busiest / one, moved.total / max(one, all_)) / 1e3
