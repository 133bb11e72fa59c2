"""One issued operation, from its caller's view."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from datetime import timedelta

import torch
from torch._C._distributed_c10d import Work

from torchcomms_pg import _C
from torchcomms_pg.handle import Handle
from torchcomms_pg.options import check_timeout


class WorkStatus(enum.Enum):
    """The progress of an operation."""

    NOT_STARTED = enum.auto()
    """In a batch that is not launched yet."""
    INPROGRESS = enum.auto()
    """Launched, and not ended."""
    COMPLETED = enum.auto()
    """Ended without an error."""
    TIMEDOUT = enum.auto()
    """Failed, because its time or another operation's has passed."""
    ERROR = enum.auto()
    """Failed otherwise."""


class TorchWork(Handle):
    """The handle that an operation returns.

    Every method reports the operation's state at the time of the call. `wait`, `status`,
    `exception`, `get_future` and `result` all report a failure. Dropping a work object does not
    stop its operation. Thread-safe.
    """

    __slots__ = ("_outputs", "_work")

    def __init__(self, work: Work | None, outputs: Sequence[torch.Tensor] = ()) -> None:
        self._work = work  # None if a synchronous operation finished without an error
        self._outputs = outputs

    def __repr__(self) -> str:
        return "TorchWork(COMPLETED)" if self._work is None else f"Torch{self._work!r}"

    def is_completed(self) -> bool:
        """Returns whether the operation has finished, with or without an error."""
        return self._work is None or self._work.is_completed()

    def wait(self, timeout: timedelta | None = None) -> None:
        """Waits until the operation has finished.

        On an accelerator the current stream waits; the thread waits only if `timeout` is given, or
        for a barrier.

        Args:
            timeout: if the operation has not finished by then, the communicator fails, since an
                operation in flight cannot be undone. By default the operation's own timeout holds.

        Raises:
            CommError: the operation failed.
            RuntimeError: the operation is part of a batch that has not been launched.
        """
        if timeout is not None:
            check_timeout("wait", timeout)
        if self._work is None:
            return
        if timeout is None:
            self._work.wait()
        else:
            self._work.wait(timeout)

    def wait_blocking(self, timeout: timedelta | None = None) -> None:
        """Does the same as `wait`, but the thread waits even on an accelerator."""
        if timeout is not None:
            check_timeout("wait_blocking", timeout)
        if self._work is not None:
            _C.work_wait_blocking(self._work, timeout)

    def status(self) -> WorkStatus:
        """Returns the progress of the operation."""
        if self._work is None:
            return WorkStatus.COMPLETED
        return WorkStatus[_C.work_state(self._work)]

    def exception(self) -> BaseException | None:
        """Returns the operation's error; None while it runs, or if it succeeded."""
        return None if self._work is None else _C.work_error(self._work)

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Returns a future that completes with the output tensors, or with the error."""
        if self._work is not None:
            return self._work.get_future()
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(list(self._outputs))
        return future

    def result(self) -> list[torch.Tensor]:
        """Waits, and returns the output tensors (none for send and barrier).

        Raises:
            CommError: the operation failed.
        """
        if self._work is None:
            return list(self._outputs)
        self._work.wait()
        return list(self._work.get_future().value())

    def duration(self) -> float:
        """Returns the operation's time from its start to its end in milliseconds.

        Raises:
            RuntimeError: timing was off, or the operation has not finished. The communicator's hint
                ``torchcomm::shm::timing`` and end hooks turn timing on.
        """
        if self._work is None:
            raise RuntimeError(
                "duration: no duration was taken; create the communicator with "
                "hints={'torchcomm::shm::timing': 'true'}"
            )
        return self._work._get_duration()
