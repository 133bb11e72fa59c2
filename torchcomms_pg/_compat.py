"""Picks the extension that was built for the installed torch, before any extension is loaded.

c10d has no stable ABI: under another torch minor an extension either fails to load with a missing
symbol or, worse, loads and crashes. So each minor has its own extension, named after it:
``_C_torch215`` is for torch 2.15. A wheel holds several; a checkout holds those that were built in
it.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import re
import sys
from pathlib import Path

from torchcomms_pg._elf import without_cxx

FOLDER = Path(__file__).resolve().parent


# Modules that `python -m` runs with the standard library alone. A program that `run` starts imports
# torch itself, which takes two seconds.
APART = {f"torchcomms_pg.{name}" for name in ("check_async", "env", "run", "status", "trace")}


def runs_apart() -> bool:
    """Returns whether ``python -m`` is importing this package only to run a module of `APART`.

    Dumps are often read on machines without torch, or with another torch than the job's.
    """
    if sys.argv[:1] != ["-m"]:  # true only while the interpreter looks for the module
        return False
    after = sys.orig_argv[1:]
    named = next((index for index, word in enumerate(after) if word.startswith("-m")), None)
    if named is None:
        return False
    return (after[named][2:] or after[named + 1]) in APART


def minor_of(version: str) -> str:
    """Returns the part of a torch version that the ABI depends on.

    >>> minor_of("2.15.0+cu132")
    '2.15'
    """
    return ".".join(version.split("+")[0].split(".")[:2])


def builds(folder: Path = FOLDER) -> dict[str, str]:
    """Returns the names of the extensions in a folder that this Python can load, by torch minor."""
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    names = sorted(path.name.removesuffix(suffix) for path in folder.glob(f"_C_torch*{suffix}"))
    found = (re.fullmatch(r"_C_torch(\d)(\d+)", name) for name in names)
    return {f"{match[1]}.{match[2]}": match[0] for match in found if match}


def extension(torch_version: str) -> str:
    """Returns the name of the extension for a torch version.

    Raises:
        ImportError: the folder has no such extension; the message has the command that builds it.
    """
    found = builds()
    name = found.get(minor_of(torch_version))
    if name is None:
        what = (
            f"torchcomms_pg was built for torch {', '.join(sorted(found, key=_order))}"
            if found
            else "torchcomms_pg has not been built: its folder has no compiled extension for "
            f"Python {sys.version_info.major}.{sys.version_info.minor}"
        )
        raise ImportError(
            f"{what}, and torch {torch_version} is installed. Build it for that one from its "
            f"source: {build_command()}"
        )
    return name


def load_extension(torch_version: str) -> None:
    """Imports the extension for a torch version as ``torchcomms_pg._C``.

    Raises:
        ImportError: the folder has no such extension, or it must not be loaded with torch; the
            message has the command that builds it.
    """
    name = extension(torch_version)
    refuse_copies(FOLDER / (name + importlib.machinery.EXTENSION_SUFFIXES[0]))
    module = importlib.import_module(f"torchcomms_pg.{name}")
    sys.modules["torchcomms_pg._C"] = module
    sys.modules["torchcomms_pg"]._C = module  # type: ignore[attr-defined]


def refuse_copies(extension: Path) -> None:
    """Raises ImportError for an extension with its own copy of the C++ library or the unwinder.

    torch has loaded another. The process would crash later, when a group is made or an exception
    crosses from one copy to the other. Builds since this version are checked when they are linked.
    """
    if missing := without_cxx(extension):
        raise ImportError(
            f"{extension} was linked with a copy of {' and '.join(missing)} in it "
            "(-static-libstdc++, -static-libgcc), and torch has loaded another: the process would "
            f"crash. Build it again from its source, which uses torch's: {build_command()}"
        )


def build_command() -> str:
    """Returns the command that builds the extension for the installed torch."""
    checkout = FOLDER.parent
    if (checkout / "setup.py").is_file():
        return f"pip install --no-build-isolation --no-deps -e {checkout}"
    return (
        "pip install --no-build-isolation --force-reinstall --no-deps . "
        "(in the source folder of torchcomms_pg)"
    )


def _order(minor: str) -> tuple[int, ...]:
    return tuple(map(int, minor.split(".")))
