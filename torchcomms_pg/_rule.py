"""Asks the rule of blame in the module ``_judge``, which is compiled, and needs no torch."""

from __future__ import annotations

import json
from typing import Any

from torchcomms_pg._compat import build_command


def report(answers: bytes) -> Any:
    """Returns a job's status, in the form of docs/status.md.

    Raises:
        ImportError: ``_judge`` has not been built.
        ValueError: ``answers`` are damaged, or of another version.
    """
    return _ask("report", answers)


def blame(records: bytes) -> Any:
    """Returns who holds up each wait of dumps' records (csrc/judge/RecordedWaits.hpp).

    Raises:
        ImportError: ``_judge`` has not been built.
    """
    return _ask("blame", records)


def _ask(what: str, text: bytes) -> Any:
    # Imported late: what needs no rule, such as the check for NCCL, runs without a build.
    try:
        from torchcomms_pg import _judge
    except ImportError as error:
        raise ImportError(
            f"torchcomms_pg._judge cannot be used here ({error}). Build it: {build_command()}"
        ) from None
    return json.loads(getattr(_judge, what)(text))
