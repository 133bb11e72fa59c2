"""Checks a library that has been linked for torch, before anything loads it. Imports no torch.

``_linked.py LIBRARY TORCH/LIB [COMPILER]``: exits with 1, says what is wrong and how to build. It
prints one line if it is right: how new a system the library needs. COMPILER: one for another
processor, whose libraries this Python cannot load.

Exceptions, locales and type information cross from the extension into torch and back, so the two
have to use one libstdc++ and one unwinder (libgcc_s): those that torch loads.
"""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_elf: dict[str, Any] = runpy.run_path(str(ROOT / "torchcomms_pg" / "_elf.py"))
Elf, OF_CXX = _elf["Elf"], _elf["OF_CXX"]

BUILD = (
    "Build with the compiler of this machine, in an environment without LDFLAGS and CXX of another "
    "(conda sets both):\n"
    "    env -u LDFLAGS CXX=/usr/bin/g++ pip install --no-build-isolation ."
)
# What C++ libraries define and no other library: mangled names, exceptions, the unwinder.
OF_CXX_SYMBOLS = ("_Z", "__cxa_", "__gxx_", "_Unwind_")
# Every process has these.
OF_C = r"ld-linux.*|lib(c|dl|m|pthread|rt)\.so\.\d+"


def loaded_with_torch(torch: Path) -> dict[str, Path]:
    """Returns the libraries that this Python loads with torch's smallest, by name.

    Which libstdc++ that is depends on the Python (conda's has its own), torch's run path, and
    LD_LIBRARY_PATH.
    """
    program = "import ctypes, sys; ctypes.CDLL(sys.argv[1]); print(open('/proc/self/maps').read())"
    command = [sys.executable, "-c", program, str(torch / "libc10.so")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"error: {torch}/libc10.so of this torch cannot be loaded:\n{done.stderr}")
    paths = {Path(path) for path in re.findall(r" (/\S*\.so\S*)$", done.stdout, re.M)}
    return {path.name: path for path in paths} | {
        name: path for name in OF_CXX for path in paths if path.name.startswith(name)
    }


def beside(compiler: str) -> dict[str, Path]:
    """Returns the C++ libraries that a compiler for another processor links with, by name."""
    found = {}
    for name in OF_CXX:
        command = [compiler, f"-print-file-name={name}"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found[name] = Path(done.stdout.strip())
    return found


def newest(versions: set[str], prefix: str) -> tuple[int, ...]:
    """Returns the newest version of a series, such as (3, 4, 30), or () if there is none."""
    numbers = (re.fullmatch(rf"{prefix}_([\d.]+)", version) for version in versions)
    return max((tuple(map(int, found[1].split("."))) for found in numbers if found), default=())


def all_needed(library: Any) -> set[str]:
    return set().union(*library.needed_versions().values())


def wrong(library: Any, loaded: dict[str, Path]) -> list[str]:
    """Returns a sentence for each thing for which the library must not be loaded with torch."""
    found = []
    needed = library.needed()
    if missing := [name for name in OF_CXX if name not in needed]:
        found.append(
            f"it does not need {' and '.join(missing)}, so it has a copy (-static-libstdc++, "
            "-static-libgcc), and torch has another: exceptions that cross end the process"
        )
    if other := [name for name in needed if name.startswith("libc++")]:
        found.append(f"it needs {', '.join(other)}, and torch is built with libstdc++")
    if copied := [name for name in library.exported() if name.startswith(OF_CXX_SYMBOLS)]:
        found.append(
            f"it exports {len(copied)} functions of C++, such as {copied[0]}: a library is linked "
            "into it, and other libraries of the process would use this copy"
        )
    for name, versions in library.needed_versions().items():
        if name not in loaded:
            continue
        has = Elf(loaded[name]).defined_versions()
        if lacking := sorted(versions - has):
            found.append(
                f"it needs {', '.join(lacking)} of {name}, which {loaded[name]} lacks, the one "
                "that torch loads: the compiler is newer than this machine's libraries"
            )
    return found


def notes(library: Any, torch: Path) -> list[str]:
    """Returns what a builder may want to know of a library that is right."""
    own = [Elf(path) for path in torch.glob("lib*.so") if path.name in library.needed()]
    torchs = set().union(*map(all_needed, own))
    text = []
    for prefix, what in (("GLIBC", "glibc"), ("GLIBCXX", "GLIBCXX")):
        ours, theirs = newest(all_needed(library), prefix), newest(torchs, prefix)
        if ours > theirs:
            text.append(
                f"needs {what} {'.'.join(map(str, ours))} (torch: {'.'.join(map(str, theirs))})"
            )
    known = {name for each in own for name in each.needed()}
    known |= {path.name for path in torch.iterdir()}
    other = [n for n in library.needed() if n not in known and not re.fullmatch(OF_C, n)]
    if other:
        text.append(f"needs {', '.join(other)}, which torch does not")
    return text


def main() -> None:
    """Checks the library that setup.py has linked."""
    path, torch = Path(sys.argv[1]), Path(sys.argv[2])
    library = Elf(path)
    loaded = beside(sys.argv[3]) if len(sys.argv) > 3 else loaded_with_torch(torch)
    if found := wrong(library, loaded):
        lines = "".join(f"  - {sentence}.\n" for sentence in found)
        sys.exit(f"error: {path.name} must not be loaded with torch:\n{lines}{BUILD}")
    if text := notes(library, torch):
        print(f"{path.name} {'; '.join(text)}")


if __name__ == "__main__":
    main()
