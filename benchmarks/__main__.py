"""The command line of tools/bench."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

import torchcomms_pg
from harness.ranks import RankFailure

from . import (
    budgets,
    compare,
    deepspeed,
    gpus,
    groups,
    hosts,
    mpi,
    native,
    plan,
    plot,
    programs,
    scale,
    steps,
    table,
)
from .operations import FRONT_ENDS
from .results import ELEMENT_BYTES, OPERATIONS, Contender, Results
from .rounds import Arena, torch_team

FORMAT = 1
PARTS = (
    *("floor", "library", "operations", "overlap"),
    *("programs", "deepspeed", "steps", "groups", "init"),
)
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
        return wrong(f"--hosts {args.hosts}: {why}")
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
    option("--only", PARTS, f"parts of a full run, of {', '.join(PARTS)}")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--gpus", choices=("cuda", "emulated"), help="beside nccl on such GPUs, and nothing else"
    )
    kind.add_argument(
        "--hosts",
        type=int,
        choices=tuple(hosts.PLACEMENTS),
        help="groups of ranks on so many network namespaces of this machine, and nothing else",
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
        args.only = ["operations"] if args.grid or args.quick else list(PARTS)
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


def measure(args: argparse.Namespace, results: Results) -> None:
    """Runs the parts that were asked for, and prints each when it is done."""
    parts: dict[str, Callable[[argparse.Namespace, Results], None]] = {
        "floor": measure_floor,
        "library": measure_library,
        "operations": measure_operations,
        "overlap": measure_overlap,
        "programs": measure_programs,
        "deepspeed": measure_deepspeed,
        "steps": measure_steps,
        "groups": measure_groups,
        "init": measure_init,
        "gpus": measure_gpus,
        "hosts": measure_hosts,
        "scale": measure_scale,
    }
    for name in args.only:
        note(f"measuring: {name}")
        start = time.monotonic()
        try:
            parts[name](args, results)
        except (RankFailure, native.NativeFailed, subprocess.SubprocessError) as error:
            results.failures.append(f"{name}: {error}")
            print(f"failed: {name}: {error}", file=sys.stderr)
        taken = results.sections.setdefault("seconds_of_parts", {})
        taken[name] = round(time.monotonic() - start, 1)


def note(text: str) -> None:
    """Says on a terminal what is happening; it is gone when there is something to say."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text[:78]}", end="", file=sys.stderr, flush=True)


def show(text: str) -> None:
    """Prints a table."""
    note("")
    print(f"\n{text}", flush=True)


def complain(text: str) -> None:
    """Says what has failed."""
    print(text, file=sys.stderr)


def hold(meetings: list[plan.Meeting], arena: Arena) -> None:
    """Measures the contenders of every meeting."""
    for number, contenders in enumerate(meetings, 1):
        note(f"{number} of {len(meetings)}: {contenders[0].key}" if contenders else "")
        if contenders:
            arena.compare(contenders)


def measure_floor(args: argparse.Namespace, results: Results) -> None:
    """What the machine allows."""
    program = str(native.floor_program())
    flags = native.records(native.run([program, "flag"], 60))
    copies = []
    for bytes_ in (plan.IN_CACHE, *plan.LARGE):
        for copiers in sorted({min(plan.cores(), count) for count in (1, *plan.RANKS)}):
            output = native.run([program, "copy", str(bytes_), str(copiers)], 60)
            copies += native.records(output)
    results.sections["floor"] = {"flags": flags, "copies": copies}
    show(table.floor(results.sections["floor"]))


def measure_library(args: argparse.Namespace, results: Results) -> None:
    """The shared-memory library without torch."""
    program = str(native.library_program())
    records = []
    for count in plan.RANKS:
        all_reduce = [s for s in plan.SIZES if s <= 64 * plan.MB]
        cases = [f"all_reduce:{size}" for size in all_reduce]
        for op in OPERATIONS[1:-1]:
            cases += [f"{op}:{size}" for size in (4, 64 * plan.KB, *plan.LARGE)]
        seconds = str(args.seconds / 2)
        records += native.records(native.run([program, seconds, str(count), *cases], 120))
    results.sections["library"] = records
    show(table.library(records))


def measure_operations(args: argparse.Namespace, results: Results) -> None:
    """Every operation over every backend, side by side."""
    if args.grid or args.quick:
        meetings = plan.grid(
            args.op, args.sizes, args.ranks, args.dtypes, args.modes, args.frontends, args.backends
        )
    else:
        meetings = plan.full(args.backends)
    arena = Arena(results, complain, args.seconds)
    try:
        hold(meetings, arena)
    finally:
        arena.close()
    show(table.operations(results.rows))
    if bounded := table.bounds_table(results, plan.LARGE):
        show(bounded)
    if grown := table.growth(results):
        show(grown)


def measure_overlap(args: argparse.Namespace, results: Results) -> None:
    """How much of a matrix product runs while a collective does."""
    records = []
    backends = [backend for backend in args.backends if backend != "mpi"]
    with torch_team(2, backends) as team:
        for bytes_ in (plan.MB, 16 * plan.MB, 64 * plan.MB):
            for backend in backends:
                contender = Contender("all_reduce", bytes_, backend, 2, mode="async")
                answers = team.call("overlap", contender, 30 if bytes_ <= plan.MB else 7)
                record = {name: max(answer[name] for answer in answers) for name in answers[0]}
                apart = record["collective"] + record["product"]
                hidden = (apart - record["together"]) / record["product"]
                record["overlap"] = hidden  # below zero where together takes longer than apart
                records.append({"backend": backend, "bytes": bytes_, **record})
    results.sections["overlap"] = records
    show(table.overlap(records))


def measure_programs(args: argparse.Namespace, results: Results) -> None:
    """What programs call on their CPU groups."""
    backends = (*(backend for backend in args.backends if backend != "mpi"), "fake")
    with torch_team(2, backends) as team:
        found = programs.slowest(team.call("programs", backends))
    results.sections["programs"] = found
    show(table.programs(found))


def measure_deepspeed(args: argparse.Namespace, results: Results) -> None:
    """DeepSpeed's all-reduce for CPUs, where its sources are installed."""
    if not deepspeed.sources():
        return print(
            "DeepSpeed is not installed. To compare with its all-reduce: pip install deepspeed"
        )
    with torch_team(2, ("torchcomms",)) as team:
        records = deepspeed.slowest(team.call("deepspeed", native.BUILD / "deepspeed", timeout=300))
    results.sections["deepspeed"] = records
    show(table.deepspeed(records))


def measure_steps(args: argparse.Namespace, results: Results) -> None:
    """Training steps."""
    records: list[dict[str, Any]] = []
    results.sections["steps"] = records
    backends = tuple(backend for backend in args.backends if backend != "mpi")
    for millions, count in ((10, 15), (100, 4)):
        # Parameters, gradients, the gathered copies, and some room, for each backend and rank.
        need = millions * 4e6 * 4 * len(backends) * 2
        if available_memory() < need:
            print(f"left out: {millions} million parameters need {need / 1e9:.0f} GB of memory")
            continue
        for kind in ("ddp", "fsdp2"):
            note(f"training steps: {kind}, {millions} million parameters")
            job = steps.Job(kind, millions, backends, count)
            with torch_team(2, backends) as team:
                records.append(steps.summarise(job, team.call("train", job, timeout=120)))
    if records:
        show(table.steps(records))


def available_memory() -> float:
    """Returns the bytes that programs can still have."""
    with open("/proc/meminfo") as file:
        return next(float(line.split()[1]) * 1024 for line in file if "MemAvailable" in line)


def measure_groups(args: argparse.Namespace, results: Results) -> None:
    """What groups cost."""
    section: dict[str, Any] = {}
    for backend in (backend for backend in args.backends if backend != "mpi"):
        with torch_team(2, [backend]) as team:
            counts = [1, 2, 4, 8, 16, 32, 64]
            answers = team.call("many_groups", backend, counts, timeout=120)
        section[backend] = groups.slowest(answers)
    results.sections["groups"] = section
    show(table.groups(section))


def measure_init(args: argparse.Namespace, results: Results) -> None:
    """What the default group costs, in fresh processes."""
    records = []
    for count in (2, 4):
        times: dict[str, list[dict[str, float]]] = {}
        for _ in range(3):
            for backend in (backend for backend in args.backends if backend != "mpi"):
                with torch_team(count, []) as team:
                    answers = team.call("init_and_first", backend)
                slowest = {name: max(answer[name] for answer in answers) for name in answers[0]}
                times.setdefault(backend, []).append(slowest)
        for backend, found in times.items():
            record: dict[str, Any] = {"backend": backend, "ranks": count}
            for name in ("init", "first"):
                record[f"{name}_ms"] = round(median(value[name] for value in found) * 1e3, 2)
            records.append(record)
    results.sections["init"] = records
    show(table.init(records))


def measure_gpus(args: argparse.Namespace, results: Results) -> None:
    """What the caller of an operation on a GPU pays, beside torch's nccl."""
    results.sections["gpus"] = gpus.measure(args.gpus)
    show(gpus.as_text(results.sections["gpus"]))


def measure_hosts(args: argparse.Namespace, results: Results) -> None:
    """Groups of ranks on several hosts, over links of several speeds."""
    for number in (signal.SIGTERM, signal.SIGHUP):  # they would leave the namespaces behind
        signal.signal(number, signal.default_int_handler)
    section: dict[str, Any] = {"count": args.hosts, "steps": [], "sent": []}
    results.sections["hosts"] = section
    show(
        "Hosts are network namespaces of this machine. "
        "H x R: H hosts of R ranks; 3 + 1: a host of 3 ranks and one of 1."
    )
    for site in hosts.sites(args.hosts, quick=args.quick):
        try:
            measure_site(args, results, site)
        except (RankFailure, subprocess.SubprocessError) as error:
            results.failures.append(f"{site.name}: {error}")
            complain(f"failed: {site.name}: {error}")
        show(table.operations(row for row in results.rows if row.contender.network == site.name))
    if section["steps"]:
        show(table.steps(section["steps"]))
    if section["sent"]:
        show(table.sent(section["sent"]))


def measure_scale(args: argparse.Namespace, results: Results) -> None:
    """What many ranks on many hosts cost, counted."""
    section = results.sections["scale"] = []
    for rows in scale.measure(args.scale):
        show(scale.as_text(rows))
        section += [row.as_json() for row in rows]


def measure_site(args: argparse.Namespace, results: Results, site: hosts.Site) -> None:
    """Every operation, a training step, and what crosses the wire."""
    backends = tuple(backend for backend in args.backends if backend != "mpi")
    section = results.sections["hosts"]
    meetings: list[plan.Meeting] = []
    for op in args.op:
        sizes = args.sizes or plan.hosts_sizes(op)
        how = (args.dtypes, args.modes, args.frontends, backends, site.name)
        meetings += plan.grid([op], sizes, [site.ranks], *how)
    with site.joined() as network:
        arena = Arena(results, complain, args.seconds, lambda _: site.team(network, backends))
        try:
            hold(meetings, arena)
            if not args.grid:
                note(f"training steps: {site.name}")
                job = steps.Job("ddp", 1, backends, 5 if args.quick else 15, network=site.name)
                answers = arena.torch(site.ranks).call("train", job, timeout=120)
                section["steps"].append(steps.summarise(job, answers))
        finally:
            arena.close()
    if site.gigabits is None and "all_reduce" in args.op:  # the speed changes no byte
        note(f"bytes on the wire: {site.placement}")
        sizes = args.sizes or plan.hosts_sizes("all_reduce")
        large = [bytes_ for bytes_ in sizes if bytes_ >= plan.MB]
        section["sent"] += hosts.sent(site, large, backends) if large else []


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
