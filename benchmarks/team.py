"""Ranks as processes that do what this process asks of them, and nothing meanwhile."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from types import TracebackType
from typing import Any

CALL_SECONDS = 90.0
GRACE_SECONDS = 2.0
"""How long the others may take once one rank has failed: they may wait for it for ever."""
INTERRUPTS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


class TeamFailed(Exception):  # noqa: N818
    """A rank raised, died or did not answer in time. The team is gone."""


class Team:
    """Processes that each serve an object; a context manager, at whose end they are gone."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.connections: list[Connection] = []
        # Not the name of a shared memory file: short, since a socket's path lies in it.
        self._folder = tempfile.TemporaryDirectory(prefix="bench")
        self.folder = Path(self._folder.name)
        self.closed = False

    def call(self, method: str, *args: Any, timeout: float = CALL_SECONDS) -> list[Any]:
        """Calls a method of every rank's object, and returns what each returned."""
        for connection in self.connections:
            with contextlib.suppress(OSError):  # whose end has come: _answers finds it
                connection.send((method, args))
        return self._answers(timeout)

    def _answers(self, timeout: float) -> list[Any]:
        deadline = time.monotonic() + timeout
        answers: dict[int, Any] = {}
        problems: dict[int, str] = {}
        waiting = {connection: rank for rank, connection in enumerate(self.connections)}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for ready in wait(list(waiting), left):
                assert isinstance(ready, Connection)
                rank = waiting.pop(ready)
                try:
                    kind, value = ready.recv()
                except (EOFError, OSError):
                    kind, value = "error", "its process died"
                if kind == "ok":
                    answers[rank] = value
                else:
                    problems[rank] = value
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if not problems and waiting:
            problems = dict.fromkeys(waiting.values(), f"no answer in {timeout:.0f} s")
        if problems:
            log = self.log()
            self.close(kill=True)
            raise TeamFailed((f"its log ends:\n{log}\n" if log else "") + describe(problems))
        return [answers[rank] for rank in range(self.ranks)]

    def log(self) -> str:
        """Returns the end of what the ranks have printed."""
        texts = [file.read_text(errors="replace") for file in self.folder.glob("log*")]
        return "\n".join(text for text in texts if text)[-1500:].strip()

    def close(self, *, kill: bool = False) -> None:
        """Ends every process, at once if `kill`."""
        if self.closed:
            return
        self.closed = True
        for connection in self.connections:
            with contextlib.suppress(OSError):
                if not kill:
                    connection.send(None)
        self._end(kill)
        for connection in self.connections:
            connection.close()
        self._folder.cleanup()

    def _end(self, kill: bool) -> None:
        raise NotImplementedError

    def __enter__(self) -> Team:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(kill=error is not None)


class ForkedTeam(Team):
    """Forks of this process, which must have no threads; cheap, as torch is loaded already."""

    def __init__(self, ranks: int, make: Callable[[int, int, Path], object]) -> None:
        super().__init__(ranks)
        self._pids: list[int] = []
        sys.stdout.flush()
        try:
            for rank in range(ranks):
                with undisturbed():  # a fork swallows what is raised in it, and a pid has no owner
                    self._fork(rank, make)
            self._answers(CALL_SECONDS)
        except BaseException:
            self.close(kill=True)
            raise

    def _fork(self, rank: int, make: Callable[[int, int, Path], object]) -> None:
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            try:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, INTERRUPTS)
                ours.close()
                die_with_parent()
                log = os.open(self.folder / f"log{rank}", os.O_CREAT | os.O_WRONLY)
                os.dup2(log, 1)
                os.dup2(log, 2)
                target = partial(make, rank, self.ranks, self.folder)
                serve(Connection(theirs.detach()), target)
            finally:
                os._exit(0)
        theirs.close()
        self._pids.append(pid)
        self.connections.append(Connection(ours.detach()))

    def _end(self, kill: bool) -> None:
        deadline = time.monotonic() + (0 if kill else 5)
        for pid in self._pids:
            while os.waitpid(pid, os.WNOHANG)[0] == 0:
                if time.monotonic() > deadline:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    break
                time.sleep(0.005)


class LaunchedTeam(Team):
    """Processes that a launcher, such as mpirun, starts with `command`.

    They find the path of a socket in BENCH_SOCKET and call `serve_launched`.
    """

    def __init__(self, ranks: int, command: Sequence[str], env: dict[str, str]) -> None:
        super().__init__(ranks)
        path = str(self.folder / "s")
        with Listener(path, "AF_UNIX", backlog=ranks) as listener:
            listener._listener._socket.settimeout(1.0)  # type: ignore[attr-defined]
            with open(self.folder / "log", "wb") as log:
                self._process = subprocess.Popen(
                    command,
                    env={**os.environ, **env, "BENCH_SOCKET": path},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    preexec_fn=die_with_parent,
                )
            deadline = time.monotonic() + 30
            found: dict[int, Connection] = {}
            while len(found) < ranks:
                try:
                    connection = listener.accept()
                    found[connection.recv()] = connection
                except TimeoutError:
                    if self._process.poll() is None and time.monotonic() < deadline:
                        continue
                    text = self.log()
                    self.close(kill=True)
                    raise TeamFailed(f"{command[0]} did not start {ranks} ranks: {text}") from None
            self.connections = [found[rank] for rank in range(ranks)]
        self._answers(CALL_SECONDS)

    def _end(self, kill: bool) -> None:
        # The launcher ends its processes when told to; they also end with it.
        if kill:
            self._process.terminate()
        for send in (self._process.terminate, self._process.kill):
            try:
                self._process.wait(5)
                return
            except subprocess.TimeoutExpired:
                send()
        self._process.wait()


def serve_launched(rank: int, make: Callable[[], object]) -> bool:
    """What a process of a LaunchedTeam does. Returns whether it ended as it should."""
    die_with_parent()
    connection = Client(os.environ["BENCH_SOCKET"], "AF_UNIX")
    connection.send(rank)
    return serve(connection, make)


def serve(connection: Connection, make: Callable[[], object]) -> bool:
    """Makes this rank's object and does with it what the parent asks, until it says the end.

    Returns whether it came to that.
    """
    try:
        target = make()
        connection.send(("ok", None))
        while (request := connection.recv()) is not None:
            method, args = request
            connection.send(("ok", getattr(target, method)(*args)))
        return True
    except EOFError:
        pass
    except BaseException:
        with contextlib.suppress(OSError):
            connection.send(("error", traceback.format_exc(limit=-6, chain=False)))
    return False


def describe(problems: dict[int, str]) -> str:
    """Writes what went wrong on which ranks; once what went wrong on several."""
    ranks: dict[str, list[str]] = {}
    for rank, text in sorted(problems.items()):
        ranks.setdefault(text.strip(), []).append(str(rank))
    return "\n".join(f"rank {', '.join(who)}: {text}" for text, who in ranks.items())


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Has an interrupt wait until what must not be left half done is done."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPTS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def die_with_parent() -> None:
    """Has the kernel kill this process when its parent ends, however that ends."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
