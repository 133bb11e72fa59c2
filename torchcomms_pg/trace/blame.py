"""Asks the rule of blame (csrc/diagnosis/hang/Blame.hpp) who holds up the operations of dumps.

A dump does not distinguish a rank that waits in an operation from a rank that has only called it
with ``async_op``. So every rank with an unfinished operation counts as waiting.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from torchcomms_pg import _rule
from torchcomms_pg.trace.groups import Group

if TYPE_CHECKING:
    from torchcomms_pg.trace.dumps import Entry

# Operations that wait for a message, and what ``AwaitedMessage::Kind`` calls them.
_AWAITED = {"send": 0, "recv": 1, "wait_signal": 2}
# Operations that peers wait for, in the order of ``PeerCounts``.
_COUNTED = ("send", "recv", "signal")
_ANY_RANK = -1
_UNKNOWN_GROUP = 0
_NEVER = 1 << 62  # stands for the number of a message that the peer's dump does not have


class Blame(NamedTuple):
    """Who holds up an operation.

    ``guilty`` are the ranks at which the waits end, ``missing`` those that have not arrived at the
    operation, and ``circle`` the operations of ranks that wait for each other.
    """

    guilty: frozenset[int]
    missing: frozenset[int]
    circle: tuple[Entry, ...]


@dataclass
class _Counts:
    """How many operations of a group a rank has called."""

    collectives: int = 0
    from_any: int = 0
    received: int = 0  # of the receives from any rank, those that have ended
    peers: dict[int, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0, 0]))


def blame(
    entries: Iterable[Entry],
    unfinished: Mapping[int, list[Entry]],
    met: Callable[[Entry], Entry | None],
) -> list[tuple[Entry, Blame]]:
    """Returns the blame of each unfinished operation, in the order in which they were called.

    Args:
        entries: all operations of all ranks.
        unfinished: the unfinished ones, by each rank that has a dump.
        met: returns the other side of a message, or None if it is not recorded.
    """
    counts: dict[int, dict[Group, _Counts]] = {rank: defaultdict(_Counts) for rank in unfinished}
    groups: dict[Group, int] = {}
    ranks = set(unfinished)
    for entry in entries:
        groups.setdefault(entry.group, len(groups) + 1)
        ranks.update(entry.group.ranks)
        ranks.update(side for side in (entry.sender, entry.receiver) if side is not None)
        _count(entry, counts[entry.rank][entry.group])
    number = {rank: at for at, rank in enumerate(sorted(ranks))}
    members = {group: _runs([number[rank] for rank in group.ranks]) for group in groups}
    waits: list[list[Entry]] = []
    records: list[object] = []
    for rank, own in unfinished.items():
        first = len(waits)
        waits += _waits(own, met)
        records.append(
            (
                number[rank],
                [
                    _wait(first + at, wait, groups, members, number, counts[rank], met)
                    for at, wait in enumerate(waits[first:])
                ],
                [
                    _record(counts[rank][group], at, number)
                    for group, at in groups.items()
                    if rank in group.ranks
                ],
            )
        )
    told = _rule.blame(_text((len(ranks), records)).encode())
    names = sorted(ranks)
    found = []
    for wait, each in zip(waits, told, strict=True):
        late, silent, missing = (
            frozenset(names[at] for at in each[key]) for key in ("late", "silent", "missing")
        )
        circle = tuple(waits[at][0] for at in each["circle"])
        found += [(entry, Blame(late | silent, missing, circle)) for entry in wait]
    return sorted(found, key=lambda each: each[0].created)


def _count(entry: Entry, counts: _Counts) -> None:
    if not entry.p2p:
        counts.collectives = max(counts.collectives, entry.seq)
    elif entry.op == "recv" and entry.sender is None:
        counts.from_any += 1
        counts.received += entry.finished
    elif entry.op in _COUNTED:
        peer = entry.receiver if entry.rank == entry.sender else entry.sender
        if peer is not None:
            kinds, at = counts.peers[peer], _COUNTED.index(entry.op)
            kinds[at] = kinds[at] + 1 if entry.number is None else max(kinds[at], entry.number)


def _waits(unfinished: list[Entry], met: Callable[[Entry], Entry | None]) -> list[list[Entry]]:
    """Returns the operations in which a rank may wait, the latest first, as it most likely is.

    The messages of a batch are together: it ends when all have met. If their batch is unknown,
    those that have met may have ended, and are left out if the rank has other operations.
    """
    found: dict[object, list[Entry]] = {}
    for entry in unfinished:
        found.setdefault((entry.group, entry.batch) if entry.batch else entry, []).append(entry)
    open_ones = [wait for wait in found.values() if not (_is_loose(wait[0]) and met(wait[0]))]
    return (open_ones or list(found.values()))[::-1]


def _is_loose(entry: Entry) -> bool:
    return entry.batched and not entry.batch and entry.op in _AWAITED


def _wait(
    text: int,
    wait: list[Entry],
    groups: dict[Group, int],
    members: dict[Group, list[tuple[int, int, int]]],
    number: dict[int, int],
    counts: dict[Group, _Counts],
    met: Callable[[Entry], Entry | None],
) -> object:
    """Returns a ``Wait``."""
    group = wait[0].group
    collectives = [] if wait[0].p2p else [(wait[0].seq, -1)]
    messages = []
    for entry in wait:
        if entry.p2p and entry.op in _AWAITED:
            peer = entry.receiver if entry.op == "send" else entry.sender
            at = counts[group].received + 1 if peer is None else entry.number
            if at is None:
                at = 0 if met(entry) else _NEVER
            messages.append((_AWAITED[entry.op], _ANY_RANK if peer is None else number[peer], at))
    if not group.ranks:
        return (str(text), _UNKNOWN_GROUP, [], [], [], False, 0, "")
    return (str(text), groups[group], members[group], collectives, messages, False, 0, "")


def _runs(ranks: list[int]) -> list[tuple[int, int, int]]:
    """Returns ranks as a list of ``Run``: first, step and count."""
    runs: list[tuple[int, int, int]] = []
    for rank in ranks:
        first, step, count = runs[-1] if runs else (0, 0, 0)
        if count == 1 or (count and rank == first + step * count):
            runs[-1] = (first, rank - first if count == 1 else step, count + 1)
        else:
            runs.append((rank, 0, 1))
    return runs


def _record(counts: _Counts, group: int, number: dict[int, int]) -> object:
    """Returns a ``GroupCounts``."""
    peers = [(number[peer], *kinds) for peer, kinds in counts.peers.items()]
    return (group, counts.collectives, counts.from_any, peers, 0, 0, 0)


def _text(value: object) -> str:
    """Writes a record as csrc/diagnosis/rank/Fields.hpp does."""
    if isinstance(value, str):
        return f'"{value}" '  # has no quotes
    if isinstance(value, list):
        return f"{len(value)} " + "".join(map(_text, value))
    if isinstance(value, tuple):
        return "".join(map(_text, value))
    assert isinstance(value, int)
    return f"{max(int(value), -1)} "
