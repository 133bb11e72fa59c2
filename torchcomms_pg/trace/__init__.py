"""Reads the flight recorders' dumps of all ranks and says who held up whom.

``python -m torchcomms_pg.trace FOLDER`` prints the verdict; see `torchcomms_pg.trace.__main__`.
"""

from torchcomms_pg.trace.analysis import Analysis, Verdict
from torchcomms_pg.trace.dumps import Dump, DumpError, Entry, load

__all__ = ["Analysis", "Dump", "DumpError", "Entry", "Verdict", "load"]
