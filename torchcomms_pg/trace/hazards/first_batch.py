"""Batches of messages that are the first call of a group and in which some ranks take no part."""

from __future__ import annotations

from collections import defaultdict

from torchcomms_pg.trace.analysis import Analysis, rank_names
from torchcomms_pg.trace.dumps import Entry
from torchcomms_pg.trace.groups import Group
from torchcomms_pg.trace.hazards.hazard import LAZY, Hazard, named

_RULE = "torch.distributed, batch_isend_irecv: as a group's first call, all of its ranks make it"


def first_batches(analysis: Analysis) -> tuple[list[Hazard], list[Hazard]]:
    """Returns groups whose communicator is made by a batch in which some ranks take no part.

    In the first list some ranks never use the group: the batch waits for them. In the second list
    they come to the group with another operation, which may be one of the CPU.
    """
    firsts: dict[Group, dict[int, Entry]] = defaultdict(dict)
    for entry in analysis.entries():
        if not entry.p2p or entry.batch:
            firsts[entry.group].setdefault(entry.rank, entry)
    found, doubts = [], []
    for group, calls in firsts.items():
        batches = [entry for entry in calls.values() if entry.p2p]
        others = [entry for entry in calls.values() if not entry.p2p]
        absent = [rank for rank in group.ranks if rank not in calls]
        dumps = [analysis.dumps.get(rank) for rank in group.ranks]
        if not (batches and (absent or others) and group.told) or not all(
            dump and dump.whole for dump in dumps
        ):
            continue
        name = analysis.group_name(group)
        told = [f"  rank {entry.rank}: {named(analysis, [entry])}" for entry in batches]
        rule = [
            "  instead: a collective of the group before, or device_id in init_process_group",
            f"  rule: {_RULE}",
        ]
        waits = f"  {LAZY}, and torchcomms: it makes the group's communicator, and waits for all"
        if absent:
            who = f"{rank_names(absent)} never {'comes' if len(absent) == 1 else 'come'}"
            lines = [f"{who} to the first call of {name}, a batch of messages", *told]
            lines += [f"{waits} ranks", *rule]
            found.append(Hazard("first batch", sorted(calls), lines, batches))
        else:
            who = rank_names(sorted(entry.rank for entry in others))
            lines = [f"{who} skipped the first call of {name}, a batch of messages", *told]
            lines += [f"  rank {entry.rank}: {named(analysis, [entry])}" for entry in others]
            lines += [f"{waits} ranks, for ever if these are on the CPU there", *rule]
            doubts.append(Hazard("first batch", sorted(calls), lines, batches + others))
    return found, doubts
