"""Environment settings of a process's reports: compilations, late ranks, the status."""

from __future__ import annotations

import os

from torchcomms_pg import _C, env
from torchcomms_pg.diagnosis import compile_watch


def configure() -> None:
    """Applies the environment's settings to groups that are made from now on.

    Raises:
        ValueError: TORCHCOMM_COMPILE_TIMEOUT_SECONDS, TORCHCOMMS_PG_LATE_WARNING,
            TORCHCOMMS_PG_SIGTERM or TORCHCOMMS_PG_VERDICT_AFTER has an invalid value.
    """
    compile_watch.configure()
    _C.set_late_warning(env.late_warning())
    _C.set_error_file(env.error_file())
    _C.set_last_words(env.last_words())
    _C.set_verdict_after(env.verdict_after())
    folders = env.status_folders()
    # The first folder whose parent exists: a session's folder may have been removed, or never made.
    folder = next((each for each in folders if os.path.isdir(os.path.dirname(each))), "")
    _C.set_status(folder=folder, ras=env.ras_address(), run=env.run_id())
