"""Orders of operations in which ranks would wait for each other, as threads do for locks."""

from __future__ import annotations

from torchcomms_pg.trace.analysis import Analysis, rank_names
from torchcomms_pg.trace.groups import Group
from torchcomms_pg.trace.hazards.hazard import GUIDE, LAZY, Collector, Hazard, named
from torchcomms_pg.trace.hazards.replay import Call, Circle, Replay, programs

_ORDER = f'{GUIDE}, "Using multiple NCCL communicators concurrently": one order on all devices'
_MERGE = f'{GUIDE}, "Point-to-point communication": merge calls that need to progress concurrently'


def orders(analysis: Analysis) -> tuple[list[Hazard], bool]:
    """Returns the circles of ranks that would wait for each other, once for each set of lines.

    The second value is True if the list is complete, and False if there are too many circles.
    """
    found, replay = Collector(), Replay(programs(analysis))
    for circle in replay.run():
        found.add(_hazard(analysis, circle))
    return found.hazards, replay.ended


def _hazard(analysis: Analysis, circle: Circle) -> Hazard:
    calls = circle.now + circle.later
    ranks = sorted(call.rank for call in circle.now)
    who = rank_names(ranks)
    of = " and ".join(analysis.group_name(group) for group in _groups(circle))
    threads = [
        now.rank for now, later in zip(circle.now, circle.later, strict=True) if _apart(now, later)
    ]
    messages = [call for call in calls if call.message]
    if len(messages) == len(calls):
        kind = "messages"
        verb = "needs itself" if len(ranks) == 1 else "need each other"
        lines = [f"messages of {who} {verb} crosswise, in {of}"]
        why = "each waits for the next where one stream orders them"
        if all(entry.op == "send" for call in circle.now for entry in call.entries):
            why = "each waits for the next as soon as a message is larger than NCCL's buffer"
            if len(ranks) > 2 and all(call.connects for call in circle.now):
                why = "each waits for the next: a first message connects both ranks on the host"
        do, rule = "put what is sent and received at once into one batch_isend_irecv", _MERGE
    else:
        alone = [call for call in messages if not call.entries[0].batch]
        kind = "first message" if any(call.first for call in alone) else "order"
        what = "messages and collectives" if messages else "operations"
        lines = [f"{who} call {what} of {of} in different orders"]
        why = "each waits for the next where a stream or NCCL's implicit launch order orders them, "
        why += "or the GPU has no room for all"
        do, rule = "call them in one order on all ranks", _ORDER
    if threads:
        kind = "threads"
        lines.append(f"  {rank_names(threads)} called them from two threads")
        do = "issue all operations of a device from one thread"
    for now, later in zip(circle.now, circle.later, strict=True):
        me = f"rank {now.rank}: "
        lines.append(f"  {me}{named(analysis, now.entries)}")
        lines.append(f"  {' ' * len(me)}then {named(analysis, later.entries)}")
    lines.append(f"  over NCCL: {why}")
    if all(call.first for call in calls):
        lines.append(f"  {LAZY}: each makes a communicator, in which the host waits for the others")
    lines += [f"  instead: {do}", f"  rule: {rule}"]
    entries = [call.entries[0] for call in calls]
    return Hazard(kind, ranks, lines, entries)


def _groups(circle: Circle) -> list[Group]:
    return list(dict.fromkeys(call.entries[0].group for call in circle.now + circle.later))


def _apart(now: Call, later: Call) -> bool:
    return now.entries[0].thread != later.entries[0].thread
