"""Compiles and runs the C++ parts: what Python would be too slow to measure."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
BUILD = ROOT / "build" / "bench"
# As setup.py compiles the extension.
FLAGS = ["-std=c++20", "-O3", "-g", "-fvisibility=hidden", "-pthread"]


class NativeFailed(Exception):  # noqa: N818
    """A program could not be compiled or did not end well."""


def program(name: str, sources: Sequence[Path], flags: Sequence[str] = ()) -> Path:
    """Compiles what has changed since the last time, and returns the program."""
    folder = BUILD / name
    folder.mkdir(parents=True, exist_ok=True)
    compiler = [os.environ.get("CXX", "g++"), *FLAGS, *flags]
    headers = [
        file
        for folder_ in (HERE, ROOT / "csrc")
        for file in folder_.rglob("*")
        if file.suffix in (".hpp", ".inl", ".h")
    ]
    newest_header = max(file.stat().st_mtime for file in headers)

    def compile_one(source: Path) -> str:
        unit = "-".join(source.relative_to(ROOT).with_suffix("").parts)  # stems occur twice
        target = folder / f"{unit}.o"
        stale = max(source.stat().st_mtime, newest_header, Path(__file__).stat().st_mtime)
        if not target.exists() or target.stat().st_mtime < stale:
            run([*compiler, "-c", str(source), "-o", str(target)], 300)
        return str(target)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        objects = list(pool.map(compile_one, sources))
    run([*compiler, *objects, "-o", str(folder / name)], 120)
    return folder / name


def floor_program() -> Path:
    """Compiles floor.cpp."""
    return program("floor", [HERE / "floor.cpp"])


def library_program() -> Path:
    """Compiles library.cpp with the shared-memory library, without torch."""
    sources = [HERE / "library.cpp"]
    for room in ("host", "nccl", "shm"):
        sources += sorted((ROOT / "csrc" / room).rglob("*.cpp"))
    include = ["-I", str(ROOT / "csrc"), "-isystem", str(ROOT / "csrc/nccl/cuda_stub")]
    return program("library", sources, [*include, "-isystem", nccl_include()])


def nccl_include() -> str:
    """Returns the folder of nccl.h."""
    if given := os.environ.get("TORCHCOMMS_PG_NCCL_INCLUDE"):
        return given
    spec = importlib.util.find_spec("nvidia.nccl")
    if spec is None or not spec.submodule_search_locations:
        raise NativeFailed("nccl.h was not found: pip install 'nvidia-nccl-cu12>=2.28.7,<3'")
    return str(Path(spec.submodule_search_locations[0]) / "include")


def run(command: Sequence[str], seconds: float) -> str:
    """Runs a program and returns what it printed."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeFailed(f"{command[0]}: {error}") from None
    if done.returncode:
        end = done.stderr[-3000:]
        raise NativeFailed(f"{' '.join(command)}: exit code {done.returncode}\n{end}")
    return done.stdout


def records(output: str) -> list[dict[str, Any]]:
    """Reads lines of JSON."""
    return [json.loads(line) for line in output.splitlines()]
