"""Runs a program under a check, and prints one report of all its ranks.

This command runs once for each rank that torchrun starts, and once without torchrun. The program is
its child process. The program, and ranks that it starts, write files for the report into a folder,
at the latest when they end. Under torchrun the commands then send the files to rank 0's command,
through torchrun's own store: that store outlives the program and reaches all hosts.
"""

from __future__ import annotations

import base64
import ctypes
import json
import signal
import subprocess
import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from torchcomms_pg import check_async, env
from torchcomms_pg.trace import DumpError, load, nccl_hazards

if TYPE_CHECKING:  # only under torchrun is torch imported
    import torch.distributed as dist

_PREFIX = "rank_"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PART = 4 << 20  # torch's store takes values of up to 8 MB
# Limits in seconds of the wait for another rank's files: from the end of rank 0's program on, and
# from SIGTERM on. torchrun sends that when a rank has failed, and SIGKILL 30 s later.
_PATIENCE = 600.0
_HURRY = 10.0
_NO_STORE = """\
torchcomms_pg.run: --{option} finds no store of torchrun through which rank {rank} of {size} could
give what it recorded to rank 0. Start the ranks by torchrun, or let them write their files into one
folder: {otherwise}"""


@dataclass(frozen=True)
class Check:
    """One option of the command.

    Attributes:
        option: its name, without the dashes.
        prepare: makes the programs that this process starts write files whose paths have a prefix.
        finding: what it calls a thing that it finds.
        read: returns the report of the files in a folder and the number of findings, or None if
            the folder has no files.
        nothing: what is printed if there are no files.
        otherwise: what to do without torchrun's store.
    """

    option: str
    prepare: Callable[[str], None]
    finding: str
    read: Callable[[Path], tuple[str, int] | None]
    nothing: str
    otherwise: str


def _read_dumps(folder: Path) -> tuple[str, int] | None:
    try:
        hazards = nccl_hazards(load(folder, _PREFIX))
    except DumpError:
        return None
    return str(hazards), len(hazards.found)


def _read_findings(folder: Path) -> tuple[str, int] | None:
    files = sorted(folder.glob(f"{_PREFIX}*.json"))
    parts = [check_async.Findings.from_dict(json.loads(file.read_text())) for file in files]
    findings = check_async.merged(parts)
    if not findings.operations:
        return None
    return str(findings), len(findings.found)


NCCL = Check(
    "check-nccl",
    env.set_dump_at_exit,
    "hazard",
    _read_dumps,
    "No operation of a group of gloo or torchcomms was recorded.",
    "TORCHCOMMS_PG_DUMP_AT_EXIT=1 TORCH_FR_DUMP_TEMP_FILE=FOLDER/rank_; then run\n"
    "python -m torchcomms_pg.trace FOLDER --nccl",
)
ASYNC = Check(
    "check-async",
    env.set_check_async,
    "finding",
    _read_findings,
    "No asynchronous operation on CPU tensors of a process group or TorchComm was issued.",
    "TORCHCOMMS_PG_AS_GLOO=1 TORCHCOMMS_PG_CHECK_ASYNC=FOLDER/rank_; then run\n"
    "python -m torchcomms_pg.check_async FOLDER",
)


def run(command: list[str], check: Check) -> int:
    """Runs `command` and, on rank 0, prints the report. Returns the code to exit with.

    The code is the program's code, unless that is 0. Rank 0 then returns 1 if the check has found
    something, and 2 if nothing was recorded.
    """
    rank, size = env.launcher_ranks() or (0, 1)
    where = env.torchrun_store() if size > 1 else None
    if size > 1 and where is None:
        told = {"option": check.option, "otherwise": check.otherwise}
        raise SystemExit(_NO_STORE.format(rank=rank, size=size, **told))
    with tempfile.TemporaryDirectory(prefix="torchcomms_pg-") as name:
        folder = Path(name)
        check.prepare(str(folder / _PREFIX))
        with _Child(command) as child:
            store = where and _connect(*where)  # while the program starts
            code = child.wait()
            # With several ranks SIGTERM may mean that another one has failed: the report is due.
            if code != 0 and (child.interrupted or (child.told_at is not None and store is None)):
                return code
            if store is not None and rank > 0:
                _give(store, rank, folder)
            elif rank == 0:
                silent = [] if store is None else _take(store, size, folder, child)
                code = _report(check, folder, silent, code)
    return code


def _report(check: Check, folder: Path, silent: list[int], code: int) -> int:
    print(f"torchcomms_pg.run --{check.option}:")
    if code != 0:
        print(f"The program ended with code {code}; what follows is of what it had recorded.")
    if silent:
        print(f"No word of ranks {', '.join(map(str, silent))}.")
    result = check.read(folder)
    if result is None:
        print(check.nothing, flush=True)
        return code or 2
    text, found = result
    print(text, end="\n\n")
    print(_end(check.finding, found, code), flush=True)
    return code or int(found > 0)


def _end(finding: str, found: int, code: int) -> str:
    """Returns the last line: how many findings there are, and the code of this process."""
    line = f"{found or 'no'} {finding}{'' if found == 1 else 's'}: exit code "
    line += f"{code}, the program's own" if code else str(int(found > 0))
    if (code or found) and env.torchrun_store() is not None:
        line += " (torchrun prints a ChildFailedError for it below)"
    return line


class _Child:
    """The program's process. It gets the SIGTERM of this process, and ends if this process ends.

    Attributes:
        told_at: when this process got SIGTERM or SIGINT, by `time.monotonic`; else None.
        interrupted: whether it got SIGINT, which raises KeyboardInterrupt after the program's end.
    """

    told_at: float | None = None
    interrupted = False
    _process: subprocess.Popen[bytes] | None = None

    def __init__(self, command: list[str]) -> None:
        prctl = ctypes.CDLL(None).prctl
        # SIGINT is not passed on, since a terminal's Ctrl-C reaches the child, too.
        handlers = {signal.SIGTERM: self._pass_on, signal.SIGINT: self._note}
        self._former = {each: signal.signal(each, handler) for each, handler in handlers.items()}
        self._process = subprocess.Popen(
            command, preexec_fn=lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        )
        if self.told_at is not None:
            self._process.terminate()

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def wait(self) -> int:
        """Waits for the child; returns its exit code, or 128 + the signal that ended it."""
        assert self._process is not None
        code = self._process.wait()
        return 128 - code if code < 0 else code

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.told_at, self.interrupted = time.monotonic(), True
        if self._process is not None and self._process.returncode is not None:
            raise KeyboardInterrupt

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.told_at = time.monotonic()
        if self._process is not None:
            self._process.send_signal(number)


def _connect(host: str, port: int, attempt: int) -> dist.Store:
    import torch.distributed as dist

    store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=_PATIENCE))
    return dist.PrefixStore(f"torchcomms_pg/checked_run/{attempt}", store)


def _give(store: dist.Store, rank: int, folder: Path) -> None:
    dumps = {
        path.name: base64.b64encode(zlib.compress(path.read_bytes(), level=1)).decode()
        for path in folder.iterdir()
    }
    text = json.dumps(dumps)
    parts = range(0, len(text), _PART)
    for number, start in enumerate(parts):
        store.set(f"{rank}/{number}", text[start : start + _PART])
    store.set(str(rank), str(len(parts)))


def _take(store: dist.Store, size: int, folder: Path, child: _Child) -> list[int]:
    """Writes the dumps of the other ranks into `folder`; returns the ranks that have sent none."""
    import torch.distributed as dist

    silent = []
    begun = time.monotonic()
    for rank in range(1, size):
        try:
            while not store.check([str(rank)]):
                told = child.told_at
                limit = begun + _PATIENCE if told is None else told + _HURRY
                if time.monotonic() > limit:
                    raise dist.DistStoreError
                time.sleep(0.05)  # a wait in the store would hold up the handlers of signals
            parts = int(store.get(str(rank)))
            text = b"".join(store.get(f"{rank}/{number}") for number in range(parts))
        except dist.DistStoreError:
            silent.append(rank)
            continue
        for name, content in json.loads(text).items():
            (folder / name).write_bytes(zlib.decompress(base64.b64decode(content)))
    return silent
