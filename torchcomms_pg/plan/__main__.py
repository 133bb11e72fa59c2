"""Runs the command of torchcomms_pg.plan."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from torchcomms_pg.plan import chakra
from torchcomms_pg.plan.answer import Answer, plan
from torchcomms_pg.plan.chakra_schema import MissingPackageError
from torchcomms_pg.plan.page import html
from torchcomms_pg.plan.ranges import from_ranges
from torchcomms_pg.plan.report import as_dict, as_text, last_line
from torchcomms_pg.plan.runners import Job, PlanError

USAGE = "python -m torchcomms_pg.plan --world-size N [options] PROGRAM [ARGS], or -m MODULE [ARGS]"


def main() -> None:
    """Prints the report, and exits with its code."""
    options = _parser().parse_args()
    job, ranks = _job(options)
    try:
        if options.chakra:
            chakra.check(options.chakra)
        answer = plan(job, ranks, each=options.ranks is not None)
    except (MissingPackageError, PlanError, ValueError) as error:
        raise SystemExit(f"torchcomms_pg.plan: {error}") from None
    if options.json:
        Path(options.json).write_text(json.dumps(as_dict(answer), indent=1) + "\n")
    print("torchcomms_pg.plan:")
    print(as_text(answer), end="\n\n")
    if options.chakra:
        print(_chakra(answer, options), end="\n\n")
    if options.html:
        _html(answer, options)
    print(last_line(answer), flush=True)
    raise SystemExit(answer.exit_code)


def _chakra(answer: Answer, options: argparse.Namespace) -> str:
    ranks = options.chakra_ranks
    try:
        if ranks is not None:
            ranks = list(answer.dumps) if ranks == "all" else from_ranges(ranks)
        return str(chakra.write(answer, options.chakra, options.step, ranks))
    except ValueError as error:
        raise SystemExit(f"torchcomms_pg.plan: {error}") from None


def _html(answer: Answer, options: argparse.Namespace) -> None:
    try:
        options.html.write_text(html(answer, options.step), encoding="utf-8")
    except (OSError, ValueError) as error:
        raise SystemExit(f"torchcomms_pg.plan: --html: {error}") from None


def _job(options: argparse.Namespace) -> tuple[Job, list[int] | None]:
    size, per_host = options.world_size, options.hosts
    if per_host is None:
        each = min(size, 8)
    else:
        hosts, _, count = per_host.partition("x")
        if not (hosts.isdecimal() and count.isdecimal() and int(hosts) * int(count) == size):
            raise SystemExit(
                f"torchcomms_pg.plan: --hosts is {per_host!r}, wanted HOSTSxRANKS with {size} "
                f"ranks in all, such as {max(1, size // 8)}x{min(size, 8)}"
            )
        each = int(count)
    ranks = None
    if options.ranks is not None and options.ranks != "all":
        try:
            ranks = from_ranges(options.ranks)
        except ValueError as error:
            raise SystemExit(f"torchcomms_pg.plan: --ranks: {error}, or all") from None
    command = (options.program, *options.arguments)
    if options.module:
        command = ("-m", *command)
    beside = options.beside or len(os.sched_getaffinity(0))
    return Job(command, size, each, beside, options.limit), ranks


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torchcomms_pg.plan",
        usage=USAGE,
        description="Runs the ranks of a job that differ, over groups that move nothing, and says "
        "for all ranks what would hang, be refused or give other data. See docs/plan.md.",
    )
    parser.add_argument("--world-size", type=_count, required=True, help="number of ranks")
    parser.add_argument("--hosts", help="hosts and ranks on each, such as 512x8; 8 if unset")
    parser.add_argument(
        "--ranks",
        help="all, or ranks such as 0-7,64: runs each of these and answers for them; if unset, two "
        "of each role are run, and the answer is for all",
    )
    parser.add_argument("--json", metavar="FILE", help="writes the answer to this file, too")
    parser.add_argument("--html", metavar="FILE", type=Path, help="writes a page about the answer")
    parser.add_argument(
        "--chakra",
        metavar="FOLDER",
        type=Path,
        help="writes a Chakra execution trace of each rank into this new folder",
    )
    parser.add_argument(
        "--chakra-ranks",
        metavar="RANKS",
        help="ranks that have a trace, or all; if unset, all, or those run if all were many",
    )
    parser.add_argument(
        "--step",
        type=_count,
        help="the step of the optimizers that is written, from 1 on; the last if unset",
    )
    parser.add_argument("--beside", type=_count, help="ranks that run at once; one a core if unset")
    parser.add_argument(
        "--limit", type=float, default=600.0, help="most seconds of one rank, 600 if unset"
    )
    parser.add_argument("-m", dest="module", action="store_true", help="PROGRAM is a module")
    parser.add_argument("program", metavar="PROGRAM")
    parser.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER)
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}, wanted a whole number from 1 on")
    return int(text)


if __name__ == "__main__":
    main()
