"""Finds in the dumps of a run what would hang, be refused or give other data over NCCL.

The run has ended well over another backend, for example on machines without GPUs.
docs/nccl_hazards.md lists the rules and their sources.
"""

from __future__ import annotations

from torchcomms_pg.trace.analysis import Analysis
from torchcomms_pg.trace.dumps import Dumps
from torchcomms_pg.trace.hazards.agreement import disagreements
from torchcomms_pg.trace.hazards.coverage import not_covered
from torchcomms_pg.trace.hazards.devices import two_devices
from torchcomms_pg.trace.hazards.first_batch import first_batches
from torchcomms_pg.trace.hazards.hazard import Hazard, Hazards
from torchcomms_pg.trace.hazards.lines import crossed_lines
from torchcomms_pg.trace.hazards.messages import messages
from torchcomms_pg.trace.hazards.on_cpu import without_cpu
from torchcomms_pg.trace.hazards.orders import orders
from torchcomms_pg.trace.hazards.refused import refused

__all__ = ["Hazard", "Hazards", "nccl_hazards"]


def nccl_hazards(dumps: Dumps) -> Hazards:
    """Returns the hazards for NCCL in the dumps of all ranks of a run.

    Args:
        dumps: from `torchcomms_pg.trace.load`. The result says what the dumps do not show.
    """
    judged, kept = without_cpu(dumps)
    analysis = Analysis(judged)
    lines = crossed_lines(analysis)
    circles, all_of_them = orders(analysis)
    skipped, doubtful = first_batches(analysis)
    found = [
        *circles,
        *messages(analysis),
        *skipped,
        *disagreements(analysis),
        *(hazard for hazard in lines if hazard.kind == "threads"),
        *refused(analysis),
    ]
    doubts = [hazard for hazard in lines if hazard.kind != "threads"]
    left = [] if all_of_them else ["orders of later operations: there are too many hazards before"]
    return Hazards(
        found, doubtful + doubts + two_devices(analysis), kept + left + not_covered(analysis)
    )
