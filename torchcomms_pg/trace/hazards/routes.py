"""Messages of which enough is known to judge them by NCCL's rules."""

from __future__ import annotations

from torchcomms_pg.trace.analysis import Analysis
from torchcomms_pg.trace.dumps import Entry
from torchcomms_pg.trace.groups import Group


def pair_of(entry: Entry) -> frozenset[int | None]:
    """Returns the two ranks of a message."""
    return frozenset((entry.sender, entry.receiver))


def judged_messages(analysis: Analysis) -> set[Entry]:
    """Returns the messages of which the number, the batch if any, and the group's ranks are known.

    Leaves out all messages from one rank to another if one of them met a receive from any rank.
    Such receives are numbered at their end, so the messages that NCCL would match are unknown.
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
