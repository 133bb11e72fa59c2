"""The options that check each test with ranks: --check-async, --check-nccl and --emulated-gpus.

A `Watch` goes around the test on each rank. The session that tests joins what the ranks have found:
`async_report` and `nccl_report`.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torchcomms_pg import _C, _compat, check_async
from torchcomms_pg.trace import DumpError, load, nccl_hazards
from torchcomms_pg.trace.plain_pickle import unpickle

_PREFIX = "rank_"
_RING = "20000"  # operations of one test on one rank
_GPUS = (1, 2)  # as many as the emulated CUDA has


class NoGpusError(ValueError):
    """The emulated GPUs that an option asks for cannot be had; the text says what to do."""


class Watch:
    """The checks of one test on one rank, for the time of a ``with`` block.

    Args:
        uses: whether the uses of asynchronous operations' tensors are checked.
        dumps: the folder for the record of the rank's operations, or None.
        rank: the rank.

    Attributes:
        uses: after the block the early uses as values of JSON, or None if they are not checked.
    """

    uses: dict[str, Any] | None = None

    def __init__(self, uses: bool, dumps: str | None, rank: int) -> None:
        self._uses, self._dumps, self._rank = uses, dumps, rank

    def __enter__(self) -> None:
        self._ended_groups: set[str] = set()
        if self._dumps is not None and (recorder := _C.process_recorder()) is not None:
            recorder.reset()  # drops the operations of earlier tests, and keeps their groups
            self._ended_groups = set(json.loads(recorder.json())["pg_status"])
        if self._uses:
            check_async.start()

    def __exit__(self, *_: object) -> None:
        if self._dumps is not None:
            self._write(Path(self._dumps) / f"{_PREFIX}{self._rank}")
        if self._uses:
            self.uses = check_async.finish().as_dict()

    def _write(self, path: Path) -> None:
        recorder = _C.process_recorder()
        if recorder is None or recorder.rank < 0:
            return  # this process has had no group
        recorder.write(str(path))
        record = unpickle(path.read_bytes())
        # Groups of earlier tests have the names of this test's groups.
        for group in self._ended_groups:
            record["pg_status"].pop(group, None)
        path.write_text(json.dumps(record))


def environment(uses: bool, nccl: bool, gpus: int | None) -> dict[str, str]:
    """Returns the environment variables that the ranks need for their checks.

    Args:
        uses: whether each test's uses of asynchronous operations' tensors are checked.
        nccl: whether each test's operations are checked for what NCCL would not bear.
        gpus: the number of emulated GPUs, or None.

    Raises:
        NoGpusError: this torch has no emulated GPUs.
    """
    variables = {}
    if uses:
        variables["TORCHCOMMS_PG_CHECK_ASYNC"] = ""  # would check a rank's tests all in one
    if nccl:
        # Gloo's own groups have no record.
        variables["TORCHCOMMS_PG_AS_GLOO"] = "1"
        variables["TORCH_FR_BUFFER_SIZE"] = os.environ.get("TORCH_FR_BUFFER_SIZE", _RING)
    if gpus is not None:
        variables.update(_emulator(gpus).environment(), EMULATED_DEVICES=str(gpus))
    return variables


def _emulator(gpus: int) -> Any:
    """Returns the module of the emulated CUDA, which only a checkout of this project has."""
    if gpus not in _GPUS:
        raise NoGpusError(f"--emulated-gpus {gpus}: wanted 1 or 2, as the emulated CUDA has two")
    path = Path(_compat.FOLDER).parent / "test" / "emulated" / "__init__.py"
    if not path.is_file():
        raise NoGpusError(
            f"--emulated-gpus {gpus}: torchcomms_pg is installed without its sources, and the "
            "emulated CUDA is built from them: clone the project, and run pip install -e . and "
            "python test/emulated/build.py in the clone"
        )
    spec = importlib.util.spec_from_file_location("torchcomms_pg_emulated", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if reason := module.available():
        raise NoGpusError(f"--emulated-gpus {gpus}: there is no emulated CUDA here: {reason}")
    return module


def async_report(parts: Iterable[dict[str, Any]]) -> tuple[str, int]:
    """Returns the text of the ranks' early uses, empty without any, and the number of operations.

    Args:
        parts: `Watch.uses` of each rank.
    """
    findings = check_async.merged(map(check_async.Findings.from_dict, parts))
    return str(findings) if findings.found else "", findings.operations


def nccl_report(folder: Path) -> tuple[str, int]:
    """Returns the text of the hazards for NCCL, empty without any, and the number of operations.

    Args:
        folder: with the records that a `Watch` has written on each rank.
    """
    try:
        dumps = load(folder, _PREFIX)
    except DumpError:  # no rank has issued an operation
        return "", 0
    hazards = nccl_hazards(dumps)
    operations = sum(len(dump.entries) for dump in dumps.values())
    # pytest names files from the current folder, too.
    text = str(hazards).replace(f"  at {os.getcwd()}{os.sep}", "  at ")
    return text if hazards.found else "", operations
