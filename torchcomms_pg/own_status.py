"""Has this process answer ``python -m torchcomms_pg.status``; the C++ part is csrc/status."""

from __future__ import annotations

import os

from torchcomms_pg import _C, env


def configure() -> None:
    """Reads the environment, for groups that are made from now on."""
    folders = env.status_folders()
    # The first whose place is there: the folder of a session may be gone, or have never been.
    folder = next((each for each in folders if os.path.isdir(os.path.dirname(each))), "")
    _C.set_status(folder=folder, run=env.run_id())
