"""Says what the search for hazards of NCCL could not judge."""

from __future__ import annotations

from collections import Counter

from torchcomms_pg.trace.analysis import Analysis, rank_names
from torchcomms_pg.trace.dumps import Dump, printable
from torchcomms_pg.trace.hazards.hazard import some_ranks
from torchcomms_pg.trace.hazards.routes import judged_messages

_ONE_SIDED = ("put", "signal", "wait_signal")


def not_covered(analysis: Analysis) -> list[str]:
    """Returns lines about the ranks, operations and facts that could not be judged."""
    dumps = analysis.dumps
    lines = [printable(why) for why in dumps.left_out.values()]
    entries = list(analysis.entries())
    members = {rank for entry in entries for rank in entry.group.ranks}
    members |= {
        rank for dump in dumps.values() for _, ranks in dump.groups.values() for rank in ranks
    }
    if missing := sorted(members - dumps.keys() - dumps.left_out.keys()):
        lines.append(f"{some_ranks(missing)}: no dump")
    for rank, dump in sorted(dumps.items()):
        lines += [f"{rank_names([rank])}: {line}" for line in _of_dump(dump)]
    if open_ := sum(map(analysis.holds, entries)):
        lines.append(f"{open_} operations that had not ended: see the dumps without --nccl")
    untold = {analysis.group_name(entry.group) for entry in entries if not entry.group.ranks}
    lines += [f"{name}: no dump tells its ranks" for name in sorted(untold)]
    judged = judged_messages(analysis)
    messages = [entry for entry in entries if entry.op in ("send", "recv")]
    if left := sum(entry not in judged for entry in messages):
        lines.append(f"{left} messages whose other side, or whose batch, is not known")
    if untagged := sum(entry.tag is None for entry in messages if dumps[entry.rank].detailed):
        lines.append(f"tags of {untagged} messages")
    if one_sided := sum(entry.op in _ONE_SIDED for entry in entries):
        lines.append(f"{one_sided} operations on windows")
    if {entry.device for entry in entries} - {""} == {"cpu"}:
        lines.append("tensors: all were on the CPU; that each will be on its GPU")
    lines.append("what the host waits for between operations, such as .item(): orders count alone")
    return lines


def _of_dump(dump: Dump) -> list[str]:
    lines = []
    if dump.lost:
        lines.append(
            f"{dump.lost} operations that its ring has lost; TORCH_FR_BUFFER_SIZE is its size"
        )
    elif not dump.gapless:
        lines.append("operations that its dump leaves out")
    if dump.captured:
        lines.append(f"{dump.captured} operations in graphs, and their replays")
    if dump.library == "gloo":
        lines.append("messages, which Gloo's recorder does not have")
    if dump.entries and not dump.detailed:
        lines.append("tags, reductions and devices, which its recorder does not tell")
    groups = {entry.group for entry in dump.entries}
    threads = Counter(entry.thread for entry in dump.entries if entry.thread)
    if len(threads) > 1 and len(groups) > 1:
        lines.append(
            f"{len(threads)} threads issued in {len(groups)} groups; another run may have "
            "another order, unless the program settles it"
        )
    return lines
