"""Messages of which the dumps tell enough to judge them by NCCL's rules."""

from __future__ import annotations

from torchcomms_pg.trace.analysis import Analysis
from torchcomms_pg.trace.dumps import Entry
from torchcomms_pg.trace.groups import Group


def pair_of(entry: Entry) -> frozenset[int | None]:
    """Returns the two ranks of a message."""
    return frozenset((entry.sender, entry.receiver))


def judged_messages(analysis: Analysis) -> set[Entry]:
    """Returns messages of which the other side is known, and whether they are in a batch.

    Leaves out messages between two ranks if one of them met a receive from any rank: such receives
    are numbered when they end, so it is not known which messages would match over NCCL.
    """
    messages = [entry for entry in analysis.entries() if entry.op in ("send", "recv")]
    vague = {_way(entry) for entry in messages if entry.from_any}
    return {
        entry
        for entry in messages
        if entry.number is not None and entry.batch is not None and entry.group.ranks
        if _way(entry) not in vague
    }


def _way(entry: Entry) -> tuple[Group, int | None, int | None]:
    return entry.group, entry.sender, entry.receiver
