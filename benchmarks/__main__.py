"""The command line of tools/bench."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import torchcomms_pg

from . import budgets, compare, gpus, hosts, mpi, plan, plot, scale
from .front_ends import FRONT_ENDS
from .parts import FULL_RUN, measure
from .results import ELEMENT_BYTES, OPERATIONS, Results

FORMAT = 1
BACKENDS = ("torchcomms", "gloo", "mpi")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmarks and returns the exit code."""
    args = parse(arguments)
    old = None
    if args.compare:
        try:
            old = compare.load(args.compare)
        except (OSError, ValueError) as error:
            return wrong(f"--compare: {error}")
    if args.plot and plot.missing():
        return wrong(f"--plot needs matplotlib: {plot.missing()}")
    if args.gpus and (why := gpus.missing(args.gpus)):
        return wrong(f"--gpus {args.gpus}: {why}")
    if args.hosts and (why := hosts.missing()):
        return wrong(f"--hosts: {why}")
    if args.scale is not None and (why := scale.missing()):
        return wrong(f"--scale: {why}")
    if "mpi" in args.backends and (command := mpi.missing()):
        print(f"Open MPI or mpi4py is not installed. To compare with it too:\n  {command}")
        args.backends.remove("mpi")
    results = Results()
    describe(results)
    start = time.monotonic()
    try:
        measure(args, results)
    except KeyboardInterrupt:
        results.failures.append("run: interrupted")
    results.sections["load_at_end"] = os.getloadavg()
    results.sections["seconds"] = round(time.monotonic() - start, 1)
    judge = budgets.of_hosts if args.hosts else budgets.all_of
    judged = judge(results) if args.budgets else []
    if judged:
        print(f"\nBudgets\n{budgets.as_text(judged)}")
    if old is not None:
        print(f"\n{compare.as_text(results, old, args.compare.name)}")
    if args.json:
        args.json.write_text(json.dumps(as_json(results, judged), indent=1) + "\n")
    if args.plot:
        plot.draw(results, args.plot)
    load = ", ".join(f"{value:.1f}" for value in results.sections["load_at_end"])
    print(f"\n{results.sections['seconds']} s; load averages at the end: {load}")
    for failure in results.failures:
        name, _, text = failure.partition(": ")
        print(f"failed: {name}: {text.splitlines()[-1]}", file=sys.stderr)
    return 1 if results.failures else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="tools/bench",
        description="Measures torchcomms beside Gloo and Open MPI. Without options: everything, "
        "in about five minutes. --op, --sizes, --ranks, --dtypes, --modes or --frontends "
        "measure every combination of what they name, and nothing else.",
    )

    def listed(values: Sequence[str]) -> Callable[[str], list[str]]:
        def read(text: str) -> list[str]:
            items = list(values) if text == "all" else text.split(",")
            if unknown := [item for item in items if item not in values]:
                message = f"{unknown[0]!r} is not one of all, {', '.join(values)}"
                raise argparse.ArgumentTypeError(message)
            return items

        return read

    def option(name: str, values: Sequence[str], help: str) -> None:
        parser.add_argument(name, type=listed(values), metavar="LIST", help=help)

    option("--op", OPERATIONS, f"operations, of {', '.join(OPERATIONS)}")
    parser.add_argument("--sizes", type=sizes, metavar="LIST", help="such as 4,64K,16M")
    parser.add_argument("--ranks", type=ranks, metavar="LIST", help="such as 2,4,8")
    option("--dtypes", list(ELEMENT_BYTES), "float32, bfloat16")
    option("--modes", ["sync", "async"], "sync, async")
    option("--frontends", list(FRONT_ENDS), ", ".join(FRONT_ENDS))
    option("--backends", BACKENDS, "default: all that are installed")
    option("--only", list(FULL_RUN), f"parts of a full run, of {', '.join(FULL_RUN)}")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--gpus", choices=("cuda", "emulated"), help="beside nccl on such GPUs, and nothing else"
    )
    kind.add_argument(
        "--hosts",
        action="store_true",
        help="groups of ranks on hosts, network namespaces of this machine, and nothing else",
    )
    kind.add_argument(
        "--scale",
        nargs="*",
        type=scale.placement,
        metavar="HOSTSxRANKS",
        help="counts what groups of many ranks cost, and nothing else; takes root",
    )
    parser.add_argument("--quick", action="store_true", help="a few sizes on 2 ranks, in seconds")
    parser.add_argument(
        "--seconds", type=float, default=0.2, help="of calls for each number (default: 0.2)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results to FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the results")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="an earlier --json to compare")
    parser.add_argument("--budgets", action=argparse.BooleanOptionalAction, default=None)
    args = parser.parse_args(arguments)
    grid = [args.op, args.sizes, args.ranks, args.dtypes, args.modes, args.frontends]
    args.grid = any(value is not None for value in grid)
    if args.budgets is None:
        chosen = args.grid or args.quick or args.gpus or args.scale is not None
        args.budgets = not chosen and args.only is None
    if args.scale is not None:
        args.only = ["scale"]
        args.scale = args.scale or [scale.placement(text) for text in scale.PLACEMENTS]
    elif args.gpus:
        args.only = ["gpus"]
    elif args.hosts:
        if args.ranks:
            parser.error("--ranks: with --hosts they are those of its placements")
        args.only = ["hosts"]
        if not (args.grid or args.quick):
            args.op = list(plan.HOSTS_OPERATIONS)
    elif args.only is None:
        args.only = ["operations"] if args.grid or args.quick else list(FULL_RUN)
    args.op = args.op or ["all_reduce"]
    if args.quick:
        args.sizes = args.sizes or [4, 1 << 20]
    elif not args.hosts:  # where each operation has its own
        args.sizes = args.sizes or list(plan.SIZES)
    args.ranks = args.ranks or [2]
    args.dtypes = args.dtypes or ["float32"]
    args.modes = args.modes or ["sync"]
    args.frontends = args.frontends or ["dist"]
    args.backends = args.backends or list(BACKENDS)
    if args.quick:
        args.seconds = min(args.seconds, 0.05)
    return args


def sizes(text: str) -> list[int]:
    """Parses sizes such as 4,64K,16M."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    found = []
    for item in text.upper().removesuffix("B").replace("B,", ",").split(","):
        number, factor = (item[:-1], units[item[-1]]) if item[-1:] in units else (item, 1)
        if not number.isdigit() or int(number) == 0:
            raise argparse.ArgumentTypeError(f"{item!r} is not a size such as 4, 64K or 16M")
        found.append(int(number) * factor)
    return found


def ranks(text: str) -> list[int]:
    """Parses numbers of ranks."""
    found = [int(item) for item in text.split(",") if item.isdigit() and 2 <= int(item) <= 64]
    if len(found) != len(text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list such as 2,4 of 2 to 64")
    return found


def wrong(message: str) -> int:
    """Says why nothing is measured."""
    print(f"error: {message}", file=sys.stderr)
    return 2


def describe(results: Results) -> None:
    """Notes where and on what this run takes place."""
    model = platform.machine()
    with open("/proc/cpuinfo") as file:
        model = next((line.split(":")[1].strip() for line in file if "model name" in line), model)
    results.sections |= {
        "torch": torch.__version__,
        "torchcomms_pg": torchcomms_pg.__version__,
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "cpu": model,
        "cores": plan.cores(),
        "load_at_start": os.getloadavg(),
    }
    print(
        f"torch {torch.__version__}, torchcomms_pg {torchcomms_pg.__version__}, {plan.cores()} "
        f"cores ({model}), load average {os.getloadavg()[0]:.1f}"
    )
    if os.getloadavg()[0] > 0.7:
        print("The machine is busy: compare the columns with each other, not with another run.")


def as_json(results: Results, judged: list[budgets.Budget]) -> dict[str, Any]:
    """Returns all results as plain values."""
    return {
        "format": FORMAT,
        **results.sections,
        "rows": [row.as_json() for row in results.rows],
        "budgets": budgets.as_json(judged),
        "failures": results.failures,
    }


if __name__ == "__main__":
    sys.exit(main())
