"""Rank processes, seen from the process that tests: fork them, talk to them, learn how they end."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_connections
from pathlib import Path
from typing import Any

from torchcomms_pg._compat import FOLDER
from torchcomms_pg.testing.zygote import ask_no_name_server

_START = (
    "import sys; from torchcomms_pg.testing import zygote; "
    "zygote.main(int(sys.argv[1]), sys.argv[2:])"
)
_ANSWER = 1 << 16
# Threads of libraries that would have as many threads as the host has cores, in every rank.
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class ZygoteError(RuntimeError):
    """The process that forks the ranks could not be started, or has ended."""


class Zygote:
    """The process of zygote.py.

    Args:
        modules: names of what it imports before it forks.
        env: environment variables that it and all ranks are started with.
        path: folders in which it looks for modules first.
    """

    def __init__(
        self, modules: Sequence[str] = (), env: dict[str, str] | None = None, path: str = ""
    ) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        variables = {**os.environ, **dict.fromkeys(_ONE_THREAD, "1"), **(env or {})}
        ask_no_name_server(variables)
        variables["PYTHONPATH"] = os.pathsep.join(
            filter(None, [path, variables.get("PYTHONPATH", "")])
        )
        self._answered = False
        self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
            [sys.executable, "-c", _START, str(theirs.fileno()), *modules],
            pass_fds=[theirs.fileno()],
            env=variables,
            stdin=subprocess.DEVNULL,
            # Ctrl-C must reach this process alone, which needs the zygote to end the ranks.
            start_new_session=True,
        )
        theirs.close()

    def wait_until_ready(self) -> float:
        """Waits for the imports; returns how many seconds ago the process began, measured there."""
        if not self._answered:
            self._age: float = self._receive()[1]
            self._answered = True
        return self._age

    def ask(self, *request: Any, fds: Sequence[int] = ()) -> Any:
        """Sends a request of zygote.py, with descriptors, and returns the answer."""
        self.wait_until_ready()
        try:
            socket.send_fds(self._control, [pickle.dumps(request)], fds)
        except OSError as error:
            raise ZygoteError(f"the process that forks the ranks has ended: {error}") from error
        return self._receive()

    def fork(self, function: str, *args: Any, fds: Sequence[int] = ()) -> int:
        """Forks a process that calls "module:function" with descriptors and arguments.

        Returns its process number.
        """
        pid: int = self.ask("fork", function, args, fds=fds)
        return pid

    def reap(self, pid: int) -> int | None:
        """Returns the exit code of a forked process, or None if the process lives."""
        code: int | None = self.ask("reap", pid)
        return code

    def close(self) -> None:
        """Ends the process, and with it all that it has forked."""
        self._control.close()
        if self._process is not None:
            if not self._answered:
                self._process.kill()  # it would notice only after its imports
            self._process.wait()

    def _receive(self) -> Any:
        message = self._control.recv(_ANSWER)
        if not message:
            raise ZygoteError(
                "the process that forks the ranks has ended; the lines of its stderr above say why"
            )
        return pickle.loads(message)


class Template(Zygote):
    """A zygote that another zygote has forked, with more imported.

    Args:
        zygote: the other zygote.
        function: "module:function", which prepares the process and calls `zygote.serve`.
        args: arguments of the function after the descriptors of its socket and of its output.
    """

    def __init__(self, zygote: Zygote, function: str, *args: Any) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._answered, self._age, self._process = True, 0.0, None
        self._parent, self._output = zygote, tempfile.TemporaryFile()
        self._pid = zygote.fork(function, *args, fds=[theirs.fileno(), self._output.fileno()])
        theirs.close()
        try:
            self.prepared = self._receive()
        except ZygoteError:
            raise ZygoteError(self.output()) from None

    def output(self) -> str:
        """Returns what the process has written."""
        return _tail(self._output)

    def close(self) -> None:
        """Ends the process, and with it all ranks that it has forked."""
        self._control.close()
        with contextlib.suppress(ZygoteError, OSError):
            deadline = time.monotonic() + 5
            while self._parent.reap(self._pid) is None and time.monotonic() < deadline:
                time.sleep(0.005)  # polling a process that is not our child
        self._output.close()


class Store:
    """A TCPStore in a separate process, which no dead rank takes along.

    Attributes:
        port: of the store, on this host's loopback.
    """

    def __init__(self, zygote: Zygote) -> None:
        self._connection, theirs = socket.socketpair()
        zygote.fork("torchcomms_pg.testing.zygote:keep_store", fds=[theirs.fileno()])
        theirs.close()
        self._connection.settimeout(60)
        told = self._connection.recv(16)
        if not told:
            raise ZygoteError("the store that the ranks meet in could not be started on 127.0.0.1")
        self.port = int(told)

    def close(self) -> None:
        """Ends the process."""
        self._connection.close()


@dataclass(frozen=True)
class Death:
    """How a rank's process has ended.

    Attributes:
        code: the exit code, or minus the number of the signal; None if it is not known.
    """

    code: int | None

    def __str__(self) -> str:
        if self.code is None:
            return "closed its connection to the test, and did not end"
        if self.code >= 0:
            return f"ended with exit code {self.code}"
        try:
            name = signal.Signals(-self.code).name
        except ValueError:
            name = f"signal {-self.code}"
        reason = ", as the kernel does when memory runs out" if name == "SIGKILL" else ""
        return f"was killed by {name}{reason}"


def _unchanged(seconds: float) -> float:
    return seconds


class Processes:
    """Processes of rank 0 to world-1; `close` ends them.

    Attributes:
        world: the number of ranks.
        busy: whether a rank may be in a call that does not end, so that `close` kills it.
        pids, connections, outputs: of each rank; outputs are files.
        grown: function that gives the limit for this machine from the limit, both in seconds.
    """

    grown: Callable[[float], float] = staticmethod(_unchanged)

    def __init__(self, world: int) -> None:
        self.world = world
        self.busy = False
        self.pids: list[int] = []
        self.connections: list[Connection[Any, Any]] = []
        self.outputs: list[Any] = []
        self._exit_codes: dict[int, int] = {}  # of reaped ranks: their pids may be others' by now

    def fork(self, zygote: Zygote, function: str, *args: Any, output: int | None = None) -> None:
        """Forks one more rank.

        Args:
            zygote: forks it.
            function: "module:function", called with the descriptors of the rank's connection, of
                the file for its stacks and of its output, the rank, and args.
            args: of the function.
            output: the descriptor for output; by default the file's.
        """
        self._zygote = zygote
        ours, theirs = socket.socketpair()
        file = tempfile.TemporaryFile()
        fds = [theirs.fileno(), file.fileno(), file.fileno() if output is None else output]
        self.pids.append(zygote.fork(function, len(self.pids), *args, fds=fds))
        theirs.close()
        self.connections.append(Connection(ours.detach()))
        self.outputs.append(file)

    def send(self, rank: int, value: Any) -> None:
        """Sends a value to a rank; a rank that has ended gets nothing."""
        with contextlib.suppress(OSError):
            self.connections[rank].send_bytes(pickle.dumps(value))

    def receive(self, ranks: Iterable[int], timeout: float) -> list[tuple[int, Any]]:
        """Waits for the next messages of ranks.

        Args:
            ranks: whose messages to wait for.
            timeout: how long, in seconds.

        Returns:
            For each rank that has sent something (rank, message), or (rank, `Death`) if it ended.
        """
        by_connection = {self.connections[rank]: rank for rank in ranks}
        found: list[tuple[int, Any]] = []
        for connection in wait_connections(list(by_connection), timeout):
            rank = by_connection[connection]  # type: ignore[index]
            try:
                found.append((rank, pickle.loads(self.connections[rank].recv_bytes())))
            except (EOFError, OSError):
                found.append((rank, Death(self.exit_code(rank))))
        if not found:
            # A process that a rank has left behind holds the rank's connection open.
            codes = [(rank, self.exit_code(rank, 0)) for rank in by_connection.values()]
            found = [(rank, Death(code)) for rank, code in codes if code is not None]
        return found

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Sends a signal to a rank that has not been reaped. See `stop` for SIGSTOP."""
        if rank in self._exit_codes:
            return
        with contextlib.suppress(ProcessLookupError):
            if number == signal.SIGSTOP:
                stop(self.pids[rank], self.grown(10.0))
            else:
                os.kill(self.pids[rank], number)

    def exit_code(self, rank: int, timeout: float = 10.0) -> int | None:
        """Waits for the rank's process to end. Returns its exit code, None if it still lives."""
        deadline = time.monotonic() + self.grown(timeout)
        while rank not in self._exit_codes:
            code = self._zygote.reap(self.pids[rank])
            if code is not None:
                self._exit_codes[rank] = code
            elif time.monotonic() > deadline:
                return None
            else:
                time.sleep(0.005)  # polling a process that is not our child: nothing to wait on
        return self._exit_codes[rank]

    def output(self, rank: int) -> str:
        """Returns what the rank has written to its stdout and stderr."""
        return _tail(self.outputs[rank])

    def stacks(self, ranks: Iterable[int]) -> dict[int, str]:
        """Returns the Python stacks of each rank's threads, as its faulthandler writes them."""
        before = {rank: len(_tail(self.outputs[rank])) for rank in ranks}
        if not before:
            return {}
        for rank in before:
            self.kill(rank, signal.SIGUSR1)
        texts = dict.fromkeys(before, "")
        deadline, quiet = time.monotonic() + self.grown(0.4), 0
        while time.monotonic() < deadline and quiet < 3:
            select.select([], [], [], 0.02)  # faulthandler gives no sign when it has written
            now = {rank: _tail(self.outputs[rank])[length:] for rank, length in before.items()}
            quiet = quiet + 1 if now == texts and all(now.values()) else 0
            texts = now
        return texts

    def close(self) -> None:
        """Ends the processes; kills those that are busy, or do not end within 5 s."""
        for rank in range(self.world):
            self.send(rank, None)
            if self.busy:
                self.kill(rank)
        for rank in range(self.world):
            with contextlib.suppress(ChildProcessError, OSError, ZygoteError):
                if self.exit_code(rank, 5.0) is None:
                    self.kill(rank)
                    self.exit_code(rank)
        for connection, output in zip(self.connections, self.outputs, strict=True):
            connection.close()
            output.close()


def end_of(output: str, most: int = 3000) -> str:
    """Returns the last characters of an output.

    Where the output ends with what Python's fault handler writes, the error's name and the stack of
    the thread that failed are kept: the stacks of other threads follow them. A thread without a
    stack of Python's is not among them.
    """
    fatal = output.rfind("Fatal Python error")
    if fatal < 0 or len(output) - fatal <= most:
        return output[-most:]
    failed = output.find("Current thread", fatal)
    if failed < 0:
        return output[fatal:][:most]
    error = output[fatal:].partition("\n")[0]
    return f"{error}\n[...]\n{output[failed:][:most]}"


def _tail(file: Any, most: int = 1 << 20) -> str:
    """Returns the last bytes of a file that other processes write, as text."""
    size = os.fstat(file.fileno()).st_size
    text = os.pread(file.fileno(), most, max(0, size - most))
    return text.decode(errors="replace")


_HERE = f"{FOLDER}{os.sep}"
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
# Frames of every rank, which say nothing about the test.
_FRAMES_BELOW = ("/_pytest/", "/pluggy/", f"{_HERE}testing{os.sep}", "<")


def place(stacks: str) -> str:
    """Returns where the main thread is, as "file:line in function", from a rank's stacks.

    The place is the innermost frame that is in no installed package and not in this one; empty if
    there is no such frame.
    """
    blocks = re.split(r"(?:Current thread|Thread) 0x", stacks)
    for file, line, function in _FRAME.findall(blocks[-1]):  # the main thread is written last
        others = "site-packages" in file or file.startswith((sys.base_prefix, _HERE, "<"))
        if not others:
            return f"{os.path.relpath(file) if file[0] == '/' else file}:{line} in {function}"
    return ""


def without_bench(stacks: str) -> str:
    """Returns stacks without the frames of pytest and of the code that runs the rank."""
    lines = stacks.splitlines()
    return "\n".join(
        line
        for line in lines
        if not ((frame := _FRAME.match(line)) and any(below in frame[1] for below in _FRAMES_BELOW))
    )


def stop(pid: int, patience: float) -> None:
    """Stops a process, and returns once no thread of it runs, or after so many seconds.

    SIGSTOP alone lets threads run on until they next get a core and see it.

    Raises:
        ProcessLookupError: there is no such process.
    """
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + patience
    while not _is_stopped(pid) and time.monotonic() < deadline:
        time.sleep(0.001)


def _is_stopped(pid: int) -> bool:
    try:
        stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    except OSError:  # a thread has just ended
        return False
    return all(stat.rpartition(") ")[2].startswith(("T", "t", "Z", "X")) for stat in stats)
