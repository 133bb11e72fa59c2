"""The parts of a run: each measures something, stores it and prints its table."""

from __future__ import annotations

import argparse
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import Any

from harness.ranks import RankFailure

from . import deepspeed, gpus, hosts, mpi, native, plan, programs, scale, sharing, steps, table
from .results import OPERATIONS, Contender, Results
from .rounds import Arena, torch_team
from .team import Team
from .timing import slowest


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


def of_torch(args: argparse.Namespace) -> tuple[str, ...]:
    """Returns the backends whose groups are torch's."""
    return tuple(backend for backend in args.backends if backend != "mpi")


def measure_floor(args: argparse.Namespace, results: Results) -> None:
    """What the machine allows."""
    program = str(native.program("floor"))
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
    program = str(native.program("library", "host", "nccl", "shm"))
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
    backends = of_torch(args)
    with torch_team(2, backends) as team:
        for bytes_ in (plan.MB, 16 * plan.MB, 64 * plan.MB):
            for backend in backends:
                contender = Contender("all_reduce", bytes_, backend, 2, mode="async")
                answers = team.call("overlap", contender, 30 if bytes_ <= plan.MB else 7)
                record = slowest(answers)
                apart = record["collective"] + record["product"]
                hidden = (apart - record["together"]) / record["product"]
                record["overlap"] = hidden  # below zero where together takes longer than apart
                records.append({"backend": backend, "bytes": bytes_, **record})
    results.sections["overlap"] = records
    show(table.overlap(records))


def measure_programs(args: argparse.Namespace, results: Results) -> None:
    """What programs call on their CPU groups."""
    backends = (*of_torch(args), "fake")
    rounds = 1 if args.quick else programs.ROUNDS
    calls = [call for call in programs.CALLS if call.ranks == 2 or not args.quick]
    measured: dict[str, dict[str, float]] = {}
    for ranks in sorted({call.ranks for call in calls}):
        with contextlib.ExitStack() as stack:
            teams = [stack.enter_context(torch_team(ranks, backends))]
            try:
                if "mpi" in args.backends:
                    teams.append(stack.enter_context(mpi.MpiTeam(ranks)))
            except RankFailure as error:
                without_mpi(results, ranks, error)
            for call in calls:
                if call.ranks != ranks:
                    continue
                note(f"programs: {call.name}")
                try:
                    measured[call.name] = in_turns(call, teams, rounds)
                except RankFailure as error:
                    if teams[0].closed:
                        raise
                    without_mpi(results, ranks, error)
                    del teams[1]
                    measured[call.name] = in_turns(call, teams, rounds)
    found = {call.name: measured[call.name] for call in calls}
    results.sections["programs"] = found
    show(table.programs(found))


def in_turns(call: programs.Call, teams: Sequence[Team], rounds: int) -> dict[str, float]:
    """Returns the microseconds of a call by backend. A team that has no such call does nothing."""
    for team in teams:
        team.call("prepare_program", call.name)
    for turn in range(rounds + 1):
        for team in teams:
            team.call("program_round", turn > 0)  # the first round warms up
    found: dict[str, float] = {}
    for team in teams:
        found |= slowest(team.call("program_times"))
    return found


def without_mpi(results: Results, ranks: int, error: RankFailure) -> None:
    """Notes that what programs call is measured without Open MPI from now on."""
    results.failures.append(f"programs over Open MPI, {ranks} ranks: {error}")
    complain(f"failed: programs over Open MPI, {ranks} ranks: {error}")


def measure_sharing(args: argparse.Namespace, results: Results) -> None:
    """Ranks that share cores with each other, and with other programs."""
    backends = of_torch(args)
    many = []
    for ranks in (2,) if args.quick else (2, 4, 8):
        with torch_team(ranks, (*backends, "fake")) as team:
            answers = team.call("shared_cores", (*backends, "fake"))
        for name in answers[0]:
            many.append({"ranks": ranks, "backend": name, **mean_of(answers, name)})
    busy = []
    for pinned in (True,) if args.quick else (True, False):
        with torch_team(2, backends) as team, sharing.other_programs():
            answers = team.call("busy_cores", backends, pinned, timeout=300)
        for name in answers[0]:
            busy.append({"pinned": pinned, "backend": name, **mean_of(answers, name)})
    results.sections["sharing"] = {"ranks": many, "programs": busy}
    show(table.sharing(many, busy))


def mean_of(answers: list[dict[str, dict[str, float]]], name: str) -> dict[str, float]:
    """Returns the mean over the ranks of what was measured of a backend."""
    return {what: fmean(answer[name][what] for answer in answers) for what in answers[0][name]}


def measure_deepspeed(args: argparse.Namespace, results: Results) -> None:
    """DeepSpeed's all-reduce for CPUs, where its sources are installed."""
    if not deepspeed.sources():
        return print(
            "DeepSpeed is not installed. To compare with its all-reduce: pip install deepspeed"
        )
    with torch_team(2, ("torchcomms",)) as team:
        answers = team.call("deepspeed", native.BUILD / "deepspeed", timeout=300)
    records = [slowest(records) for records in zip(*answers, strict=True)]
    results.sections["deepspeed"] = records
    show(table.deepspeed(records))


def measure_steps(args: argparse.Namespace, results: Results) -> None:
    """Training steps."""
    records: list[dict[str, Any]] = []
    results.sections["steps"] = records
    backends = of_torch(args)
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
    for backend in of_torch(args):
        with torch_team(2, [backend]) as team:
            counts = [1, 2, 4, 8, 16, 32, 64]
            answers = team.call("many_groups", backend, counts, timeout=120)
        section[backend] = [slowest(records) for records in zip(*answers, strict=True)]
    results.sections["groups"] = section
    show(table.groups(section))


def measure_init(args: argparse.Namespace, results: Results) -> None:
    """What the default group costs, in fresh processes."""
    records = []
    for count in (2, 4):
        times: dict[str, list[dict[str, float]]] = {}
        for _ in range(3):
            for backend in of_torch(args):
                with torch_team(count, []) as team:
                    answers = team.call("init_and_first", backend)
                times.setdefault(backend, []).append(slowest(answers))
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
    show(
        "Hosts are network namespaces of this machine. "
        "H x R: H hosts of R ranks; 3 + 1: a host of 3 ranks and one of 1."
    )
    for site in hosts.sites(quick=args.quick):
        try:
            measure_site(args, results, site)
        except (RankFailure, subprocess.SubprocessError) as error:
            results.failures.append(f"{site.name}: {error}")
            complain(f"failed: {site.name}: {error}")
        show(table.operations(row for row in results.rows if row.contender.network == site.name))
    if not args.quick:
        measure_imperfect(args, results)


def measure_imperfect(args: argparse.Namespace, results: Results) -> None:
    """Links that delay, lose or reorder packets: a group's making, and all-reduces."""
    records = []
    for name in hosts.IMPERFECT:
        for backend in of_torch(args):
            note(f"{name}: {backend}")
            with hosts.joined_imperfectly(name) as network:
                with torch_team(len(hosts.SCATTERED), (), network, hosts.SCATTERED) as team:
                    answers = team.call("over_link", backend)
            records.append({"link": name, "backend": backend, **slowest(answers)})
    results.sections["imperfect"] = records
    show(table.imperfect(records))


def measure_scale(args: argparse.Namespace, results: Results) -> None:
    """What many ranks on many hosts cost, counted."""
    section = results.sections["scale"] = []
    for rows in scale.measure(args.scale):
        show(scale.as_text(rows))
        section += [row.as_json() for row in rows]


def measure_site(args: argparse.Namespace, results: Results, site: hosts.Site) -> None:
    """Every operation that is asked for."""
    backends = of_torch(args)
    meetings: list[plan.Meeting] = []
    for op in args.op:
        sizes = args.sizes or plan.hosts_sizes(op)
        how = (args.dtypes, args.modes, args.frontends, backends, site.name)
        meetings += plan.grid([op], sizes, [site.ranks], *how)
    with site.joined() as network:
        arena = Arena(results, complain, args.seconds, lambda _: site.team(network, backends))
        try:
            hold(meetings, arena)
        finally:
            arena.close()


Part = Callable[[argparse.Namespace, Results], None]
FULL_RUN: dict[str, Part] = {
    "floor": measure_floor,
    "library": measure_library,
    "operations": measure_operations,
    "overlap": measure_overlap,
    "programs": measure_programs,
    "sharing": measure_sharing,
    "deepspeed": measure_deepspeed,
    "steps": measure_steps,
    "groups": measure_groups,
    "init": measure_init,
}
ALONE: dict[str, Part] = {"gpus": measure_gpus, "hosts": measure_hosts, "scale": measure_scale}
"""Parts that nothing else is measured with."""


def measure(args: argparse.Namespace, results: Results) -> None:
    """Runs the parts that were asked for, and prints each when it is done."""
    for name in args.only:
        note(f"measuring: {name}")
        start = time.monotonic()
        try:
            (FULL_RUN | ALONE)[name](args, results)
        except (RankFailure, native.NativeFailed, subprocess.SubprocessError) as error:
            results.failures.append(f"{name}: {error}")
            print(f"failed: {name}: {error}", file=sys.stderr)
        taken = results.sections.setdefault("seconds_of_parts", {})
        taken[name] = round(time.monotonic() - start, 1)
