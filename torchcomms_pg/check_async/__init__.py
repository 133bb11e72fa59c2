"""Checks that a program waits for its asynchronous operations before it uses their tensors.

While the check runs, each asynchronous operation on CPU tensors works on copies. Its outputs hold
NaN, or an unlikely integer, until the program learns of the operation's end. So a use that comes
too early shows in every run. docs/check_async.md lists what is checked. The command
``python -m torchcomms_pg.run --check-async`` checks all ranks of a program; `start` and `finish`
check one process, or a part of its run.
"""

from __future__ import annotations

import json
import os
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TYPE_CHECKING

from torchcomms_pg import env
from torchcomms_pg.check_async.findings import Finding, Findings, merged

if TYPE_CHECKING:  # imports torch, which a report of findings can do without
    from torchcomms_pg.check_async.checker import Checker

__all__ = ["Finding", "Findings", "finish", "merged", "start", "start_as_told"]

_running: Checker | None = None


def start() -> None:
    """Begins the check in this process: in the calling thread, and in threads that start later.

    Operations that are in flight already are not checked.

    Raises:
        RuntimeError: the check runs already.
    """
    from torchcomms_pg.check_async.checker import Checker

    _start(Checker())


def finish() -> Findings:
    """Ends the check, and returns what it has found on this rank.

    Call it in the thread that called `start`. The works of operations in flight stay valid.

    Raises:
        RuntimeError: the check does not run.
    """
    global _running
    if _running is None:
        raise RuntimeError("finish: the check does not run; call start() first")
    checker, _running = _running, None
    return checker.stop()


def start_as_told() -> None:
    """Begins the check if ``python -m torchcomms_pg.run --check-async`` has started the program.

    This process then writes its findings into a file when it has some, and when it ends.
    """
    prefix = env.check_async()
    if prefix is not None and _running is None:
        from torchcomms_pg.check_async.checker import Checker

        written = _Written(prefix)
        written.checker = Checker(lambda finding: written.write())
        _start(written.checker)
        written.begin()
        os.register_at_fork(after_in_child=written.begin_in_child)


class _Written:
    """The file with this process's findings."""

    checker: Checker

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def begin(self) -> None:
        Finalize(None, self.write, exitpriority=0)

    def begin_in_child(self) -> None:
        self.checker.forget()
        self.begin()

    def write(self) -> None:
        path = Path(f"{self._prefix}{os.getpid()}.json")
        part = path.with_suffix(".part")
        part.write_text(json.dumps(self.checker.findings().as_dict()))
        part.replace(path)


def _start(checker: Checker) -> None:
    global _running
    if _running is not None:
        raise RuntimeError("start: the check runs already; call finish() first")
    _running = checker
    checker.start()
