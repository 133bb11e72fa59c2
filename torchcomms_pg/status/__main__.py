"""``python -m torchcomms_pg.status``: shows what a running job does, and who waits for whom."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import time

from torchcomms_pg import env
from torchcomms_pg.status.jobs import LONGEST_WAIT, Job, NoAnswerError, StatusError, find_jobs
from torchcomms_pg.status.report import text

CODES = """\
The code is
  0 if every rank answers, and nobody waits for longer than --late,
  1 if somebody does, or a group has failed, or a rank is stopped, dead or does not answer,
  2 if there is no such job.
With --watch it is that of the last status.
"""


def main(arguments: list[str] | None = None) -> int:
    """Prints what the command line asks for, and returns the exit code."""
    options = _parser().parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # characters that the locale lacks
    try:
        return _watch(options) if options.watch else _once(options)
    except StatusError as error:
        print(f"torchcomms_pg.status: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torchcomms_pg.status",
        description="Says of a job that runs, or hangs, on this host what each group does, which "
        "ranks the others wait for, and where their Python is. Asks the job's processes.",
        epilog=CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "job",
        nargs="?",
        metavar="PID | HOST:PORT",
        help="a process of the job, or where its store is; not needed where there is one job",
    )
    parser.add_argument("--json", action="store_true", help="print it as JSON, see docs/status.md")
    parser.add_argument(
        "--watch", type=_seconds, metavar="SECONDS", help="print it again and again, until it ends"
    )
    parser.add_argument(
        "--late",
        type=_seconds,
        default=10.0,
        metavar="SECONDS",
        help="after how long an operation in flight counts as waited for (10)",
    )
    parser.add_argument(
        "--wait",
        type=_seconds_of_wait,
        default=0.8,
        metavar="SECONDS",
        help="how long to wait for ranks that do not answer (0.8; at most 60)",
    )
    return parser


def _seconds(given: str, most: float = 86400) -> float:
    seconds = float(given)
    if not 0 < seconds <= most:
        raise argparse.ArgumentTypeError(f"{given}: wanted more than 0, at most {most:g} seconds")
    return seconds


def _seconds_of_wait(given: str) -> float:
    return _seconds(given, LONGEST_WAIT)


def _once(options: argparse.Namespace) -> int:
    job, pid = _choose(options)
    try:
        status = job.ask(options.late, options.wait, pid)
    except NoAnswerError as error:
        print(f"torchcomms_pg.status: no rank of this host answers: {error}", file=sys.stderr)
        return 1
    print(json.dumps(status) if options.json else text(status), flush=True)
    return 0 if status["healthy"] else 1


def _watch(options: argparse.Namespace) -> int:
    code = _once(options)
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            time.sleep(options.watch)
            if not options.json and sys.stdout.isatty():
                print("\x1b[H\x1b[2J", end="")  # clears the screen
            try:
                code = _once(options)
            except StatusError:
                print("the job has ended", file=sys.stderr)
                break
    return code


def _choose(options: argparse.Namespace) -> tuple[Job, int | None]:
    """Returns the job that the options name, and the pid if they name one.

    Raises:
        StatusError: no such job exists, or none is named and several exist.
    """
    folders = env.status_folders()
    if not folders:
        raise StatusError("TORCHCOMMS_PG_STATUS turns it off; unset it, also for the job")
    jobs = find_jobs(folders)
    if options.job is None:
        return _only(jobs, folders), None
    if options.job.isdecimal():
        pid = int(options.job)
        for job in jobs:
            if pid in job.pids:
                return job, pid
        raise StatusError(_why_not(pid, folders))
    for job in jobs:
        with contextlib.suppress(NoAnswerError):
            if _same(job.ask(options.late, options.wait)["store"], options.job):
                return job, None
    raise StatusError(f"no job of yours on this host has its store at {options.job}")


def _only(jobs: list[Job], folders: list[str]) -> Job:
    if not jobs:
        raise StatusError(
            "no job of yours on this host; its processes would have sockets in "
            + " or ".join(folders)
        )
    if len(jobs) > 1:
        lines = [f"  {job.pids[0]}: {len(job.pids)} processes, {_command(job)}" for job in jobs]
        raise StatusError(
            "there are several jobs; name one by a process of it:\n" + "\n".join(lines)
        )
    return jobs[0]


def _why_not(pid: int, folders: list[str]) -> str:
    try:
        owner = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return f"there is no process {pid}"
    if owner != os.geteuid():
        return f"process {pid} is another user's (number {owner}); run this as that user"
    return (
        f"process {pid} has no status: it has no group of torchcomms_pg, and watches none "
        f"(docs/status.md), or TORCHCOMMS_PG_STATUS differs; looked in {' and '.join(folders)}"
    )


def _command(job: Job) -> str:
    with contextlib.suppress(OSError), open(f"/proc/{job.pids[0]}/cmdline", "rb") as file:
        return " ".join(
            ascii(word.decode(errors="replace"))[1:-1] for word in file.read().split(b"\0")
        )[:80]
    return "a process of another namespace"


def _same(store: str, wanted: str) -> bool:
    """Returns whether two texts HOST:PORT are one address; a host may have several names."""
    host, _, port = store.rpartition(":")
    asked, _, number = wanted.rpartition(":")
    return store == wanted or (port == number and _addresses(host) & _addresses(asked) != set())


def _addresses(host: str) -> set[str]:
    import socket

    try:
        return {str(each[4][0]) for each in socket.getaddrinfo(host, None)}
    except OSError:
        return {host}


if __name__ == "__main__":
    sys.exit(main())
