"""Finds the ranks that held up others, from the flight recorders' dumps of all ranks.

``python -m torchcomms_pg.trace FOLDER`` prints the verdict, see `torchcomms_pg.trace.__main__`.
With ``--nccl`` it prints what would go wrong over NCCL in a run that ended well: `nccl_hazards`.
"""

from torchcomms_pg.trace.analysis import Analysis, Verdict
from torchcomms_pg.trace.dumps import Dump, DumpError, Entry, load
from torchcomms_pg.trace.hazards import Hazard, Hazards, nccl_hazards

__all__ = [
    "Analysis",
    "Dump",
    "DumpError",
    "Entry",
    "Hazard",
    "Hazards",
    "Verdict",
    "load",
    "nccl_hazards",
]
