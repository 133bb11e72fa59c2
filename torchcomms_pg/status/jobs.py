"""Finds the jobs of this user on this host by the sockets of their processes, and asks them."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torchcomms_pg import _rule

# Largest time limit, in seconds, that a process accepts in a question
# (csrc/diagnosis/status/Protocol.hpp).
LONGEST_WAIT = 60.0

# Seconds for which the client waits beyond the time limit in its question.
_GRACE = 1.0
_LONGEST = 1 << 28  # most bytes of an answer


class StatusError(Exception):
    """There is no such job, its folder must not be used, or _judge is not built; says which."""


class NoAnswerError(Exception):
    """The job exists, but none of its processes on this host answers; the text says why."""


@dataclass(frozen=True)
class Process:
    """A process that has a socket in a folder.

    Attributes:
        folder: path of the folder.
        pid: pid of the process, in its own namespace.
        name: name of the process's files, without their extensions.
        groups: ids of the groups in which the process is, or was.
    """

    folder: str
    pid: int
    name: str
    groups: frozenset[str]

    def state(self) -> str:
        """Returns "stopped", "dead", or "" if the process may answer."""
        try:
            with self.connect():
                pass
        except (ConnectionRefusedError, FileNotFoundError):
            return "dead"
        except OSError:
            pass  # the backlog is full: the process listens, but does not accept
        with contextlib.suppress(OSError), open(f"/proc/{self.pid}/stat") as file:
            if file.read().rpartition(")")[2].split()[0] in "Tt":
                return "stopped"
        return ""

    def connect(self, timeout: float = 1.0) -> socket.socket:
        """Returns a connection whose every call takes at most `timeout` seconds."""
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # Limits connect(), which blocks while the backlog is full.
            seconds, microseconds = int(timeout), int(timeout % 1 * 1e6)
            limit = struct.pack("ll", seconds, microseconds)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            # Connects by a descriptor: a folder's path may exceed the 107 bytes of an address.
            folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                made.connect(f"/proc/self/fd/{folder}/{self.name}.socket")
            finally:
                os.close(folder)
            made.settimeout(timeout)
        except BaseException:
            made.close()
            raise
        return made

    def remove(self) -> None:
        """Removes the files that a dead process has left."""
        for end in (".socket", ".ranks"):
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self.folder, self.name + end))


@dataclass
class Job:
    """Processes of this host that are connected by shared groups.

    Attributes:
        processes: the processes with a socket, including stopped and dead ones.
    """

    processes: list[Process] = field(default_factory=list)

    @property
    def pids(self) -> list[int]:
        """The pids of the job's processes on this host, in ascending order."""
        return sorted(process.pid for process in self.processes)

    def ask(self, late: float, wait: float, asked: int | None = None) -> dict[str, Any]:
        """Returns the status of the whole job, in the form of docs/status.md.

        Args:
            late: seconds after which an operation in flight counts as waited for.
            wait: seconds to wait for answers of processes and hosts.
            asked: pid of the process to ask first. By default the lowest.

        Raises:
            NoAnswerError: no process of this host answers, or none of this version.
            StatusError: this package has not been built.
        """
        reasons = []
        for process in sorted(self.processes, key=lambda each: (each.pid != asked, each.pid)):
            if state := process.state():
                reasons.append(f"process {process.pid} is {state}")
                continue
            try:
                return _ask(process, late, wait)
            except OSError as error:
                reasons.append(f"process {process.pid} does not answer ({error})")
        raise NoAnswerError("; ".join(reasons))


def find_jobs(folders: list[str]) -> list[Job]:
    """Returns the jobs in these folders, and removes the files of jobs that have ended.

    Raises:
        StatusError: a path is no folder, or the folder is another user's or open to other users.
    """
    jobs = []
    for job in known_jobs(folders):
        if all(process.state() == "dead" for process in job.processes):
            for process in job.processes:
                process.remove()
        else:
            jobs.append(job)
    return jobs


def known_jobs(folders: list[str]) -> list[Job]:
    """Returns the jobs in these folders, also such that have ended. Connects to no process.

    Raises:
        StatusError: as `find_jobs`.
    """
    return [
        Job(processes) for folder in folders for processes in _connected(list(_processes(folder)))
    ]


def _processes(folder: str) -> Iterator[Process]:
    try:
        about = os.lstat(folder)
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(about.st_mode):
        raise StatusError(f"{folder} is no folder")
    if about.st_uid != os.geteuid():
        raise StatusError(
            f"{folder} is another user's (number {about.st_uid}); run this as that user"
        )
    if about.st_mode & 0o077:
        raise StatusError(f"{folder} is open to other users; chmod 700 it")
    for file in sorted(os.listdir(folder)):
        name, end = os.path.splitext(file)
        pid, _, space = name.partition("-")
        if end == ".socket" and pid.isdecimal() and space.isdecimal():
            groups: list[str] = []
            with contextlib.suppress(OSError), open(os.path.join(folder, name + ".ranks")) as lines:
                groups = [line.split()[0] for line in lines if line.strip()]
            yield Process(folder, int(pid), name, frozenset(groups))


def _connected(processes: list[Process]) -> list[list[Process]]:
    """Returns lists of processes that are connected by shared groups, directly or over others."""
    found: list[tuple[set[str], list[Process]]] = []
    for process in processes:
        groups, members = set(process.groups), [process]
        for other in [each for each in found if each[0] & groups]:
            found.remove(other)
            groups |= other[0]
            members = other[1] + members
        found.append((groups, members))
    return [members for _, members in found]


def _ask(process: Process, late: float, wait: float) -> dict[str, Any]:
    limit = time.monotonic() + wait + _GRACE
    with process.connect() as connection:
        connection.sendall(f"job {round(late * 1000)} {round(wait * 1000)}\n".encode())
        parts, length = [], 0
        while length <= _LONGEST:
            connection.settimeout(max(0.01, limit - time.monotonic()))
            part = connection.recv(1 << 16)
            if not part:
                break
            parts.append(part)
            length += len(part)
    line, _, body = b"".join(parts).partition(b"\n")
    word, _, rest = line.decode(errors="replace").partition(" ")
    if word == "no":
        raise OSError(rest)
    if word != "ok" or rest != str(len(body)):
        raise OSError("its answer is cut short")
    try:
        answer: dict[str, Any] = _rule.report(body)
    except ImportError as error:
        raise StatusError(str(error)) from None
    except ValueError:
        raise OSError("its torchcomms_pg has another version, or its answer is damaged") from None
    return answer
