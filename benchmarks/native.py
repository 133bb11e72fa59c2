"""Compiles and runs the C++ parts: what Python would be too slow to measure."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from setuptools.errors import CompileError, SetupError

import setup

HERE = Path(__file__).parent
ROOT = HERE.parent
BUILD = ROOT / "build" / "bench"


class NativeFailed(Exception):  # noqa: N818
    """A program could not be compiled or did not end well."""


def program(name: str, *folders: str) -> Path:
    """Compiles a source of this folder and folders of csrc/, without torch, as setup.py does."""
    try:
        build = setup.Build()
        objects = build.objects(*folders) if folders else []
    except (SetupError, CompileError) as error:
        raise NativeFailed(str(error)) from None
    BUILD.mkdir(parents=True, exist_ok=True)
    flags = build.flags()["plain"]
    run([build.cxx, *flags, str(HERE / f"{name}.cpp"), *objects, "-o", str(BUILD / name)], 300)
    return BUILD / name


def run(command: Sequence[str], seconds: float) -> str:
    """Runs a program and returns what it printed."""
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=seconds,
            stdin=subprocess.DEVNULL,
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
