"""Asks the processes of a running job what they do, and which ranks wait for which.

``python -m torchcomms_pg.status`` prints the answer, see `torchcomms_pg.status.__main__`. This
package needs no torch: it asks through the processes' sockets in a folder of the user
(docs/status.md).
"""

from torchcomms_pg.status.jobs import Job, NoAnswerError, StatusError, find_jobs
from torchcomms_pg.status.report import text

__all__ = ["Job", "NoAnswerError", "StatusError", "find_jobs", "text"]
