"""Asks the processes of a running job what they do, and who waits for whom.

``python -m torchcomms_pg.status`` prints it; see `torchcomms_pg.status.__main__`. It needs no
torch: the processes answer themselves, on sockets in a folder of the user's (docs/status.md).
"""

from torchcomms_pg.status.jobs import Job, NoAnswerError, StatusError, find_jobs
from torchcomms_pg.status.report import text

__all__ = ["Job", "NoAnswerError", "StatusError", "find_jobs", "text"]
