"""Groups whose tensors are on the CPU and on accelerators."""

from __future__ import annotations

from torchcomms_pg.trace.analysis import Analysis
from torchcomms_pg.trace.dumps import Entry
from torchcomms_pg.trace.hazards.hazard import Hazard, named


def two_devices(analysis: Analysis) -> list[Hazard]:
    """Returns groups with tensors on the CPU and on another device.

    The backend ``nccl`` takes no CPU tensors. A group of ``cpu:gloo,cuda:nccl`` takes both, so the
    program may intend this.
    """
    devices: dict[tuple[str, tuple[int, ...]], dict[str, Entry]] = {}
    for entry in analysis.entries():
        if entry.device:
            of_group = devices.setdefault((entry.group.name, entry.group.ranks), {})
            of_group.setdefault(entry.device, entry)
    found = []
    for firsts in devices.values():
        if "cpu" in firsts and len(firsts) > 1:
            entries = list(firsts.values())
            group = analysis.group_name(entries[0].group)
            lines = [f"{group} has tensors on {' and '.join(firsts)}; nccl takes none of the CPU"]
            lines += [
                f"  rank {entry.rank}, on {device}: {named(analysis, [entry])}"
                for device, entry in firsts.items()
            ]
            ranks = sorted({entry.rank for entry in entries})
            found.append(Hazard("device", ranks, lines, entries))
    return found
