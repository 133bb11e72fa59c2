"""Refuses a binary that was built for another torch, before it is loaded.

c10d has no stable ABI: under another torch minor the extension either fails to load with
a missing symbol or, worse, loads and crashes. setup.py leaves beside the extension a module
``_built_for`` that says what it was built for, and this is compared first.
"""

from __future__ import annotations

import importlib
from pathlib import Path


def minor_of(version: str) -> str:
    """Returns the part of a torch version that the ABI depends on.

    >>> minor_of("2.15.0+cu132")
    '2.15'
    """
    return ".".join(version.split("+")[0].split(".")[:2])


def check_torch(installed: str, built_for: str | None = None) -> None:
    """Raises ImportError unless the extension fits the torch that is installed.

    Args:
        installed: ``torch.__version__``.
        built_for: the torch version that the extension was compiled against; by default
            what setup.py wrote down.
    """
    if built_for is None:
        built_for = _built_for()
    if minor_of(installed) != minor_of(built_for):
        raise ImportError(
            f"torchcomms_pg was built for torch {minor_of(built_for)} (it was compiled against "
            f"{built_for}), but torch {installed} is installed. Rebuild it: {rebuild_command()}"
        )


def rebuild_command() -> str:
    """Returns the command that builds the extension for the torch that is installed."""
    checkout = Path(__file__).resolve().parent.parent
    if (checkout / "setup.py").is_file():
        return f"pip install --no-build-isolation --no-deps -e {checkout}"
    return (
        "pip install --no-build-isolation --force-reinstall --no-deps . "
        "(in the source folder of torchcomms_pg)"
    )


def _built_for() -> str:
    try:
        return str(importlib.import_module("torchcomms_pg._built_for").TORCH_VERSION)
    except ModuleNotFoundError:
        raise ImportError(
            "torchcomms_pg has not been built: its folder has the Python sources but no compiled "
            f"extension. Build it: {rebuild_command()}"
        ) from None
