"""Environment settings of a process's reports: compilations, late ranks, the status."""

from __future__ import annotations

import os
import sys

from torchcomms_pg import _C, _compat, env
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
    gateway, environment = _gateway(folder)
    _C.set_status(folder=folder, gateway=gateway, environment=environment, run=env.run_id())


def _gateway(folder: str) -> tuple[list[str], list[bytes]]:
    """Returns the command that answers NCCL's client of RAS, and its environment; or nothing."""
    address = env.ras_address()
    if not address:
        return [], []
    # -P, -S: the command imports the standard library and this package only, wherever this package
    # and the program are.
    command = [sys.executable, "-P", "-S", "-m", "torchcomms_pg.status", "--ras", address]
    environment = env.of_command(PYTHONPATH=str(_compat.FOLDER.parent), TORCHCOMMS_PG_STATUS=folder)
    return command, environment
