"""Messages that NCCL would match differently, since it has no tags and goes by their order."""

from __future__ import annotations

from torchcomms_pg.trace.analysis import Analysis, rank_names
from torchcomms_pg.trace.dumps import Entry
from torchcomms_pg.trace.hazards.hazard import GUIDE, LAZY, Collector, Hazard, named
from torchcomms_pg.trace.hazards.routes import judged_messages

_TAGS = "torch.distributed, isend and irecv: tag is not supported with the NCCL backend"
_ALIKE = f'{GUIDE}, "Point-to-point communication": the same count and data type on both ranks'
_BATCHES = (
    "torch's nccl: messages of a batch take the group's communicator, others one of their two ranks"
)


def messages(analysis: Analysis) -> list[Hazard]:
    """Returns the sends and receives that NCCL would match, but that do not belong together."""
    found = Collector()
    sides: dict[tuple[object, ...], dict[str, Entry]] = {}
    for entry in sorted(judged_messages(analysis), key=lambda entry: (entry.rank, entry.record)):
        key = (entry.group, entry.sender, entry.receiver, entry.number)
        sides.setdefault(key, {})[entry.op] = entry
    for both in sides.values():
        if len(both) == 2 and (hazard := _judge(analysis, both["send"], both["recv"])):
            found.add(hazard)
    return found.hazards


def _judge(analysis: Analysis, sent: Entry, received: Entry) -> Hazard | None:
    ranks = sorted({sent.rank, received.rank})
    title = f"messages from rank {sent.rank} to rank {received.rank}"
    lines = [
        f"  rank {sent.rank}: {named(analysis, [sent])}",
        f"  rank {received.rank}: {named(analysis, [received])}",
    ]
    if None not in (sent.tag, received.tag) and sent.tag != received.tag:
        lines.insert(0, f"{title} are received in another order than sent, by their tags")
        lines[1] += f", tag {sent.tag}"
        lines[2] += f", tag {received.tag}"
        lines.append("  over NCCL: this receive gets the data of this send, or never ends")
        lines += ["  instead: receive in the order of the sends", f"  rule: {_TAGS}"]
        return Hazard("tags", ranks, lines, [sent, received])
    if (sent.numel, sent.dtype) != (received.numel, received.dtype):
        lines.insert(0, f"{title} have other sizes or dtypes than their receives")
        lines.append("  over NCCL: a hang, an error or other data")
        lines.append(f"  rule: {_ALIKE}")
        return Hazard("sizes", ranks, lines, [sent, received])
    if bool(sent.batch) != bool(received.batch):
        inside = sent if sent.batch else received
        lines.insert(0, f"{title} are in a batch on {rank_names([inside.rank])} alone")
        lines.append(f"  {LAZY}: they wait in two communicators, for ever")
        lines += ["  instead: the same call on both ranks", f"  rule: {_BATCHES}"]
        return Hazard("batch", ranks, lines, [sent, received])
    return None
