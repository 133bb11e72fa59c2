"""Operations that torch's ``nccl`` refuses and CPU backends accept."""

from __future__ import annotations

from torchcomms_pg.trace.analysis import Analysis, rank_names
from torchcomms_pg.trace.dumps import Entry
from torchcomms_pg.trace.hazards.hazard import Hazard, named

# Integer types that torch's nccl does not map to an ncclDataType_t.
_NO_TYPE = ("Short", "UInt16", "UInt32", "UInt64")
_NO_REDUCTION = ("BAND", "BOR", "BXOR")


def refused(analysis: Analysis) -> list[Hazard]:
    """Returns the calls that raise over ``nccl``: one hazard for each line of Python and reason."""
    found: dict[tuple[str, str], Hazard] = {}
    for entry in analysis.entries():
        if (why := _why(entry)) is None:
            continue
        what, rule = why
        key = (what, str(entry.where or entry.what))
        if key not in found:
            lines = [f"  {named(analysis, [entry])}", f"  rule: {rule}"]
            found[key] = Hazard("refused", [], [what, *lines], [entry], 0)
        hazard = found[key]
        if entry.rank not in hazard.ranks:
            hazard.ranks.append(entry.rank)
        hazard.times += entry.rank == hazard.ranks[0]
    for hazard in found.values():
        who = rank_names(sorted(hazard.ranks))
        hazard.lines[0] = f"torch's nccl refuses {hazard.lines[0]}: {who}"
    return list(found.values())


def _why(entry: Entry) -> tuple[str, str] | None:
    """Returns what ``nccl`` refuses and its rule, or None if ``nccl`` accepts the operation."""
    if entry.from_any:
        return "a receive from any rank", "ncclRecv names the rank that it receives from"
    if entry.dtype.startswith("Complex") and entry.op == "gather":
        return "a gather of complex tensors", "torch's nccl gathers them as they are; NCCL has none"
    if entry.dtype in _NO_TYPE:
        return f"tensors of type {entry.dtype}", "ncclDataType_t, as torch's nccl maps dtypes to it"
    if entry.reduce_op in _NO_REDUCTION:
        return f"reductions by {entry.reduce_op}", "ncclRedOp_t has no bitwise operations"
    if any(frame.function == "monitored_barrier" for frame in entry.frames):
        return "monitored_barrier", "torch.distributed implements it for gloo alone"
    return None
