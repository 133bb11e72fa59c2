"""The latest operations of the ranks, for the diagnosis of a hang."""

from __future__ import annotations

import os
import sys
import weakref
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING

from torchcomms_pg import _C, env

if TYPE_CHECKING:
    from torchcomms_pg.comm import TorchComm


class FlightRecorder:
    """A ring of the latest operations, made by `FlightRecorderHook` and `process_recorder`.

    An operation is recorded when it is issued. Its entry then shows its state: ``scheduled``,
    ``started``, ``completed``. The dumps have c10d's schema: JSON, and the pickle that
    ``torchfrtrace`` reads. Every method may be called while operations are in flight, from any
    thread.
    """

    def __init__(self, recorder: _C.Recorder) -> None:
        self._recorder = recorder

    def __len__(self) -> int:
        return self.size()

    def is_enabled(self) -> bool:
        """Returns whether the recorder records: its ring has room for one entry or more."""
        return self._recorder.enabled

    def size(self) -> int:
        """Returns the number of entries, at most the ring's capacity."""
        return self._recorder.size

    def reset(self) -> None:
        """Drops all entries, and keeps the recorded groups."""
        self._recorder.reset()

    def dump_json(self, include_completed: bool = True, include_collectives: bool = True) -> str:
        """Returns the record as a JSON document, without stacks.

        Args:
            include_completed: whether to include the operations that have completed.
            include_collectives: whether to include the operations; without them the document has
                only the groups, and the numbers of their latest operations.
        """
        return self._recorder.json(include_completed, include_collectives)

    def dump_file(
        self,
        rank: int | None = None,
        include_completed: bool = True,
        include_collectives: bool = True,
        include_stack_traces: bool = True,
    ) -> str:
        """Writes the record as a pickle, and returns the path of the file.

        The path is a prefix, followed by `rank`. The prefix is the value of
        TORCHCOMM_FR_DUMP_TEMP_FILE, of torch's variables if that is not set, or else
        ``~/.cache/torch/comm_lib_trace_rank_``.

        Args:
            rank: None takes this process's global rank in the first recorded group, or 0 if no
                group has been recorded.
            include_completed, include_collectives: as for `dump_json`.
            include_stack_traces: whether to include the Python stacks that issued the operations.

        Raises:
            RuntimeError: the file cannot be written.
        """
        path = f"{env.dump_prefix()}{max(self._recorder.rank, 0) if rank is None else rank}"
        self._recorder.write(path, include_completed, include_collectives, include_stack_traces)
        return path


class FlightRecorderHook(FlightRecorder):
    """A ring of the latest operations of the communicators that the hook is registered with.

    Process groups need no hook: they are recorded in the process's ring, see `process_recorder`
    and docs/recorder.md.

    Args:
        max_entries: the number of operations that the ring keeps; with 0 it records nothing.
        isolated: whether operations go into this ring only, and not also into the process's ring.

    Raises:
        ValueError: `max_entries` is negative.

    Example:
        >>> from torchcomms_pg.hooks import FlightRecorderHook
        >>> recorder = FlightRecorderHook(max_entries=10)
        >>> recorder.register_with_comm(comm)
        >>> work = comm.barrier()
        >>> len(recorder)
        1
        >>> recorder.unregister()
    """

    def __init__(self, max_entries: int = 2048, isolated: bool = False) -> None:
        if max_entries < 0:
            raise ValueError(f"FlightRecorderHook: max_entries is {max_entries}, wanted 0 or more")
        super().__init__(_C.Recorder(max_entries, env.recorder_cpp_stacks()))
        self._isolated = isolated
        self._comms: list[tuple[_C.Communicator, _C.Recorder]] = []
        self._parents: weakref.WeakSet[TorchComm] = weakref.WeakSet()

    def register_with_comm(self, comm: TorchComm) -> None:
        """Records the operations of `comm` from the next one on. Has an effect once.

        Communicators that are split from `comm` afterwards are recorded, too. Unless this hook is
        isolated, operations also go into the process's ring. The debug server shows that ring, and
        it is written to a file when a communicator fails.
        """
        native = comm._native("register_with_comm")
        recorders: list[_C.Recorder | None] = [self._recorder]
        if not self._isolated:
            configure()
            recorders.append(_C.process_recorder())
        for recorder in recorders:
            # False for a process group's communicator and the process's ring, which records it
            # anyway; unregister() must not end that.
            if recorder is not None and native.record(recorder):
                self._comms.append((native, recorder))
        comm._recorded_by.add(self)
        self._parents.add(comm)

    def unregister(self) -> None:
        """Stops recording, on all communicators; keeps the entries. Idempotent."""
        for parent in self._parents:
            parent._recorded_by.discard(self)
        self._parents.clear()
        while self._comms:
            comm, recorder = self._comms.pop()
            comm.stop_recording(recorder)


def process_recorder() -> FlightRecorder | None:
    """Returns the ring of this process, in which all its process groups are recorded.

    Returns None before the first process group or registered `FlightRecorderHook`, and if
    TORCH_FR_BUFFER_SIZE is 0. A failure, the pipe and the debug server dump this ring.
    """
    recorder = _C.process_recorder()
    return None if recorder is None else FlightRecorder(recorder)


def configure() -> None:
    """Makes this process's recorder as the environment says, on the first call.

    Later calls change when, where and how the recorder is dumped.

    Raises:
        ValueError: a variable has an invalid value.
    """
    _C.configure_recorder(
        max_entries=env.recorder_size(),
        cpp_stacks=env.recorder_cpp_stacks(),
        prefix=env.dump_prefix(),
        on_failure=env.dump_on_failure(),
        patience=env.dump_patience(),
        stacks=env.dump_stacks(),
        completed=not env.dump_only_active(),
        pipe=env.dump_pipe(),
    )
    if env.dump_at_exit() and os.getpid() not in _dumped_at_exit:
        _dumped_at_exit.add(os.getpid())
        # multiprocessing's children run these finalizers, but no atexit functions.
        Finalize(None, _dump_at_exit, exitpriority=0)


_dumped_at_exit: set[int] = set()  # ids of processes with the finalizer; a fork inherits the set


def _dump_at_exit() -> None:
    recorder = _C.process_recorder()
    try:
        # No rank is known before a group's first operation. A launcher, which imports torch and has
        # no group, would replace rank 0's file.
        if recorder is not None and recorder.rank >= 0:
            FlightRecorder(recorder).dump_file()
    except (OSError, RuntimeError) as error:
        print(f"torchcomms_pg: the flight recorder is not dumped: {error}", file=sys.stderr)
