"""``python -m torchcomms_pg.status``: shows what a running job does, and who waits for whom."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import time
from typing import Any

from torchcomms_pg import env
from torchcomms_pg.status.jobs import LONGEST_WAIT, Job, NoAnswerError, StatusError, find_jobs
from torchcomms_pg.status.ras import gateway
from torchcomms_pg.status.report import age, brief, text

CODES = """\
The code is
  0 if every rank answers, and nobody waits for longer than --late,
  1 if somebody does, or a group has failed, or a rank is stopped, dead or does not answer,
  2 if there is no such job.
Of several jobs it is the highest. With --watch it is that of the last status.
"""


def main(arguments: list[str] | None = None) -> int:
    """Prints what the command line asks for, and returns the exit code."""
    options = _parser().parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # characters that the locale lacks
    try:
        if options.ras:
            return _serve(options)
        return _watch(options) if options.watch else _once(options)
    except (StatusError, gateway.AddressError) as error:
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
        help="a process of the job, or where its store is; by default every job of this user",
    )
    parser.add_argument(
        "--all", action="store_true", help="show the whole status of each job, if there are several"
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
    parser.add_argument(
        "--ras",
        metavar="ADDRESS",
        help="answer NCCL's client ncclras at 127.0.0.1:PORT or [::1]:PORT, until this is ended",
    )
    # The name of the process's files that has started this because of TORCHCOMMS_PG_RAS_ADDR.
    parser.add_argument("--of", help=argparse.SUPPRESS)
    return parser


def _seconds(given: str, most: float = 86400) -> float:
    seconds = float(given)
    if not 0 < seconds <= most:
        raise argparse.ArgumentTypeError(f"{given}: wanted more than 0, at most {most:g} seconds")
    return seconds


def _seconds_of_wait(given: str) -> float:
    return _seconds(given, LONGEST_WAIT)


def _once(options: argparse.Namespace) -> int:
    jobs, pid = _choose(options)
    if options.json and len(jobs) > 1 and not options.all:
        lines = [f"  {_about(job)}" for job in jobs]
        raise StatusError(
            "there are several jobs; name one by a process of it, or add --all for a list:\n"
            + "\n".join(lines)
        )
    if len(jobs) == 1 and not (options.json and options.all):
        code, told = _ask(jobs[0], options, pid)
        if isinstance(told, str):
            print(f"torchcomms_pg.status: {told}", file=sys.stderr)
        else:
            print(json.dumps(told) if options.json else text(told), flush=True)
        return code
    answers = [_ask(job, options, None) for job in jobs]
    if options.json:
        print(json.dumps([{"error": t} if isinstance(t, str) else t for _, t in answers]))
    else:
        _print_several(jobs, [told for _, told in answers], whole=options.all)
    return max(code for code, _ in answers)


def _ask(job: Job, options: argparse.Namespace, pid: int | None) -> tuple[int, Any]:
    """Returns the code of a job, and its status, or a text that says why nothing answers."""
    try:
        status = job.ask(options.late, options.wait, pid)
    except NoAnswerError as error:
        return 1, f"no rank of this host answers: {error}"
    return (0 if status["healthy"] else 1), status


def _print_several(jobs: list[Job], told: list[Any], *, whole: bool) -> None:
    show = text if whole else brief
    print(f"{len(jobs)} jobs of yours on this host")
    for job, status in zip(jobs, told, strict=True):
        shown = status if isinstance(status, str) else show(status)
        print(f"\n{_about(job)}\n" + "\n".join(f"  {line}" for line in shown.splitlines()))
    if not whole:
        print("\npython -m torchcomms_pg.status PID or HOST:PORT shows one job, --all shows all")
    sys.stdout.flush()


def _about(job: Job) -> str:
    """Returns the lowest process of a job, how long the job runs, and its command."""
    since = min(filter(None, map(_started, job.pids)), default=None)
    runs = f", runs for {age(time.time() - since)}" if since is not None else ""
    count = f"{len(job.pids)} processes" if len(job.pids) > 1 else "1 process"
    return f"process {job.pids[0]} ({count}{runs}): {_command(job)}"


def _started(pid: int) -> float | None:
    """Returns the time at which a process was started, in seconds since 1970, or None."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        with open("/proc/uptime") as file:
            uptime = float(file.read().split()[0])
    except (OSError, ValueError):
        return None
    return time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")


def _serve(options: argparse.Namespace) -> int:
    folders = _folders()
    if options.of:
        gateway.serve_job(options.ras, folders[0], options.of)
        return 0
    wanted = options.job
    if wanted is None:
        jobs = gateway.Jobs(folders, lambda _: True)
    elif wanted.isdecimal():
        jobs = gateway.Jobs(folders, lambda job: int(wanted) in job.pids)
    else:
        jobs = gateway.Jobs(folders, lambda _: True, lambda status: _same(status["store"], wanted))
    with contextlib.suppress(KeyboardInterrupt):
        gateway.serve(options.ras, jobs)
    return 0


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


def _choose(options: argparse.Namespace) -> tuple[list[Job], int | None]:
    """Returns the jobs that the options name, by default all, and the pid if they name one.

    Raises:
        StatusError: there is no such job.
    """
    folders = _folders()
    jobs = find_jobs(folders)
    if options.job is None:
        if not jobs:
            raise StatusError(_NONE.format(folders=" and ".join(folders)))
        return jobs, None
    if options.job.isdecimal():
        pid = int(options.job)
        for job in jobs:
            if pid in job.pids:
                return [job], pid
        raise StatusError(_why_not(pid, folders))
    for job in jobs:
        with contextlib.suppress(NoAnswerError):
            if _same(job.ask(options.late, options.wait)["store"], options.job):
                return [job], None
    raise StatusError(f"no job of yours on this host has its store at {options.job}")


def _folders() -> list[str]:
    if folders := env.status_folders():
        return folders
    raise StatusError("TORCHCOMMS_PG_STATUS turns it off; unset it, also for the job")


_NONE = """\
no job of yours on this host is seen. Its processes would have sockets in {folders}.
  if a job runs on another host or in a container: run this there
  if it is another user's: run this as that user
  if no process has a group with other ranks, of torchcomms or watched: TORCHCOMMS_PG_WATCH=1
  if its TORCHCOMMS_PG_STATUS or XDG_RUNTIME_DIR is another than here: set it here as there"""


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
