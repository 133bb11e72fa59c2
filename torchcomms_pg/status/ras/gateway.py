"""The process that answers clients of NCCL's RAS for the jobs of this user on this host.

A user starts it with ``python -m torchcomms_pg.status --ras ADDRESS``. If TORCHCOMMS_PG_RAS_ADDR
names an address, each process of a job starts it for its job when its status begins
(csrc/diagnosis/status/Gateway.hpp); all but the first of a host end at once.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from torchcomms_pg.status.jobs import Job, NoAnswerError, StatusError, known_jobs
from torchcomms_pg.status.ras.formats import merged
from torchcomms_pg.status.ras.server import Server

# Seconds after which an operation in flight counts as waited for.
_LATE = 10.0

# Seconds between checks whether a process of the job is left, and attempts to get the address.
_LOOK = 1.0

_BACKLOG = 16
_WANTED = "wanted 127.0.0.1:PORT, localhost:PORT or [::1]:PORT"


class AddressError(Exception):
    """The address cannot be used; the text says why."""


def parse_address(text: str) -> tuple[str, int]:
    """Returns the host's number and the port of a loopback address.

    Raises:
        AddressError: `text` is no address, or one that other hosts may reach.
    """
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise AddressError(f"its port is no number from 1 to 65535; {_WANTED}")
    host = "127.0.0.1" if host == "localhost" else host
    if host == "[::1]":
        return "::1", int(port)
    with contextlib.suppress(ValueError):
        if ipaddress.IPv4Address(host).is_loopback:
            return host, int(port)
    raise AddressError(f"it is not of this host alone, where anybody might ask; {_WANTED}")


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket that listens at the address.

    Raises:
        AddressError: the address is in use, or this host has no such address.
    """
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
        made.listen(_BACKLOG)
    except OSError as error:
        made.close()
        raise AddressError(
            "another user or program has it; name another port"
            if error.errno == errno.EADDRINUSE
            else os.strerror(error.errno or 0)
        ) from None
    return made


class Jobs:
    """The jobs that a gateway answers for.

    Args:
        folders: folders with the sockets of processes.
        answers_for: returns whether the gateway answers for a job.
        is_meant: returns the same for a status.
    """

    def __init__(
        self,
        folders: list[str],
        answers_for: Callable[[Job], bool],
        is_meant: Callable[[dict[str, Any]], bool] = lambda _: True,
    ) -> None:
        self._folders = folders
        self._answers_for = answers_for
        self._is_meant = is_meant
        self._asked: dict[int, int] = {}  # the pid that answered last, by each pid of its job

    def ask(self, wait: float) -> dict[str, Any]:
        """Returns the status of the jobs, as far as `formats` shows it.

        Args:
            wait: seconds to wait for answers of processes and hosts.

        Raises:
            StatusError: there is no such job.
            NoAnswerError: none of its processes on this host answers.
        """
        statuses, reasons = [], []
        asked, self._asked = self._asked, {}
        for job in filter(self._answers_for, known_jobs(self._folders)):
            # A process that does not answer is not asked again and again: each question takes a
            # place among the connections that wait for it.
            last = next((asked[pid] for pid in job.pids if pid in asked), None)
            try:
                status = job.ask(_LATE, wait, last)
            except NoAnswerError as error:
                reasons.append(str(error))
                continue
            self._asked.update(dict.fromkeys(job.pids, status["asked"]["pid"]))
            if self._is_meant(status):
                statuses.append(status)
        if statuses:
            return merged(statuses)
        if reasons:
            raise NoAnswerError(f"no rank of this host answers: {'; '.join(reasons)}")
        raise StatusError("there is no such job on this host")


def serve(address: str, jobs: Jobs) -> None:
    """Answers clients at the address until the process is ended.

    Raises:
        AddressError: the address cannot be used.
    """
    server = Server(listen(*parse_address(address)), jobs.ask)
    with contextlib.closing(server):
        while True:
            server.step(_LOOK)


def serve_job(address: str, folder: str, name: str) -> None:
    """Answers clients for a job's processes, until none of them has a status; then returns.

    Returns at once if another gateway of this user has the address: that one learns of this
    process. Says on stderr if the address cannot be used; if it is in use, tries again meanwhile.

    Args:
        address: as in TORCHCOMMS_PG_RAS_ADDR.
        folder: where the process's socket is.
        name: name of the process's files there, without their extensions.
    """
    os.chdir("/")
    try:
        host, port = parse_address(address)
        members = Members(folder, f"{host}:{port}")
        members.add(name)
        jobs = Jobs([folder], members.are_in)
        # A process that is added while a gateway ends, and finds the place taken, is seen here
        # after the place has been left.
        while members.any() and members.take_place():
            try:
                _serve_while(members.any, address, host, port, jobs)
            finally:
                members.leave_place()
    except (AddressError, OSError) as error:
        _tell(address, str(error))


def _serve_while(
    goes_on: Callable[[], bool], address: str, host: str, port: int, jobs: Jobs
) -> None:
    with contextlib.ExitStack() as stack:
        server = None
        while goes_on():
            if server is None:
                try:
                    server = stack.enter_context(
                        contextlib.closing(Server(listen(host, port), jobs.ask))
                    )
                except (AddressError, RuntimeError) as error:
                    _tell(address, str(error))
                # Whoever reads the job's output waits for all who may write it.
                _be_silent()
            if server is None:
                time.sleep(_LOOK)
            else:
                server.step(_LOOK)


def _tell(address: str, why: str) -> None:
    with contextlib.suppress(OSError):
        print(
            f"torchcomms_pg: nothing answers ncclras at TORCHCOMMS_PG_RAS_ADDR={address}: {why}",
            file=sys.stderr,
            flush=True,
        )


def _be_silent() -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)


class Members:
    """The processes that have named one address, by files in the folder of their sockets.

    The file of a process is NAME.ADDRESS.ras. The lock on the file ADDRESS.ras is the gateway's
    place, which one process can have.
    """

    def __init__(self, folder: str, address: str) -> None:
        self._folder = folder
        self._end = f".{address}.ras"
        self._place = os.path.join(folder, f"{address}.ras")
        self._lock: int | None = None

    def add(self, name: str) -> None:
        """Adds a process by the name of its files."""
        made = os.open(self._path(name + self._end), os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.close(made)

    def names(self) -> set[str]:
        """Returns the names of the members' files; removes members that have no status."""
        found = set()
        for file in os.listdir(self._folder):
            name = file.removesuffix(self._end)
            if name == file:
                continue
            if self._has_status(name):
                found.add(name)
                continue
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path(file))
            # It may have got a socket, and have been added again, meanwhile.
            if self._has_status(name):
                self.add(name)
                found.add(name)
        return found

    def any(self) -> bool:
        """Returns whether a member has a status."""
        with contextlib.suppress(FileNotFoundError):  # the folder has been removed
            return bool(self.names())
        return False

    def are_in(self, job: Job) -> bool:
        """Returns whether a member is in the job."""
        names = self.names()
        return any(process.name in names for process in job.processes)

    def take_place(self) -> bool:
        """Takes the gateway's place; returns False if another process has it."""
        while True:
            lock = os.open(self._place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.stat(self._place), os.fstat(lock)):
                        self._lock = lock
                        return True
            except BlockingIOError:
                os.close(lock)
                return False
            os.close(lock)  # of a file that its gateway has removed meanwhile

    def leave_place(self) -> None:
        """Has another process take the place."""
        assert self._lock is not None
        with contextlib.suppress(OSError):
            os.unlink(self._place)
        os.close(self._lock)
        self._lock = None

    def _has_status(self, name: str) -> bool:
        """Returns whether the process has a socket, and has not been killed.

        A process of another pid namespace counts as living.
        """
        if not os.path.exists(self._path(f"{name}.socket")):
            return False
        pid, _, space = name.partition("-")
        if space != str(os.stat("/proc/self/ns/pid").st_ino & 0xFFFFFFFF):
            return True
        try:
            with open(f"/proc/{pid}/stat") as file:
                return file.read().rpartition(")")[2].split()[0] not in "ZX"
        except OSError:
            return False

    def _path(self, file: str) -> str:
        return os.path.join(self._folder, file)
