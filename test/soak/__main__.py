"""``tools/soak``: rounds of random work until the time is over; ends with 1 if one went wrong."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess

from .rank import FATAL, HARMLESS, TIMEOUT, Report, Round, main

# After the fault: its deadline, then the abort of what the other threads do, then the end of
# the groups.
PATIENCE = 3 * TIMEOUT + 20
STANDSTILL = 90.0  # seconds without an operation on any rank: they hang
GROWTH = 24.0  # MiB a process may grow after its second life, over all others


def draw_round(seed: int, ranks: int, threads: int) -> Round:
    """A fault in half of the rounds."""
    generator = random.Random(seed)
    steps = generator.choice((30, 100, 200))
    fault = generator.choice(FATAL if generator.random() < 0.5 else HARMLESS)
    size = generator.randint(2, ranks)
    return Round(
        seed=seed,
        size=size,
        threads=generator.randint(1, threads),
        lives=generator.choice((1, 5)),
        steps=steps,
        fault=fault,
        victim=generator.randrange(size),
        when=generator.randrange(steps),
    )


def run_round(plan: Round) -> tuple[list[str], int, list[Report]]:
    """Returns what is wrong, the number of operations, and the reports."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "torchcomms_pg"])
    processes: list[tuple[ForkServerProcess, Connection]] = []
    # How many operations each has done. A busy machine may need minutes for a round.
    progress = context.RawArray("q", plan.size)
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(plan.size):
            ours, theirs = context.Pipe(duplex=False)
            arguments = (plan, rank, f"{folder}/store", theirs, progress)
            process = context.Process(target=main, args=arguments)
            process.start()
            theirs.close()
            processes.append((process, ours))
        seen, limit = [-1], 0.0
        stopped_at = 0.0
        while any(process.is_alive() for process, _ in processes):
            if plan.fault == "stop for a while":
                stopped_at = _resume(processes[plan.victim][0], stopped_at)
            if list(progress) != seen:
                seen, limit = list(progress), time.monotonic() + STANDSTILL
            if time.monotonic() > limit:
                break
            time.sleep(0.05)
        wrong = []
        for rank, (process, _) in enumerate(processes):
            if process.is_alive():
                wrong.append(f"rank {rank} hangs; stderr has its stacks")
                _print_stacks(process)
                process.kill()
            process.join()
        reports = [_receive(pipe) for _, pipe in processes]
    codes = [process.exitcode for process, _ in processes]
    wrong += _judge(plan, codes, reports)
    present = [report for report in reports if report is not None]
    return wrong, sum(report.operations for report in present), present


def _print_stacks(process: ForkServerProcess) -> None:
    if process.pid is not None:
        os.kill(process.pid, signal.SIGUSR1)
        process.join(1)  # faulthandler gives no sign when it has written


def _resume(process: ForkServerProcess, stopped_at: float) -> float:
    try:
        with open(f"/proc/{process.pid}/stat") as file:
            stopped = file.read().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return 0.0
    if not stopped or process.pid is None:
        return 0.0
    if stopped_at == 0.0:
        return time.monotonic()
    if time.monotonic() - stopped_at > TIMEOUT / 4:
        os.kill(process.pid, signal.SIGCONT)
    return stopped_at


def _receive(pipe: Connection) -> Report | None:
    try:
        report = pipe.recv() if pipe.poll() else None
    except (EOFError, OSError):
        return None
    return report if isinstance(report, Report) else None


def _judge(plan: Round, codes: list[int | None], reports: list[Report | None]) -> list[str]:
    wrong = []
    dies = {"kill": -signal.SIGKILL, "exit": 3}.get(plan.fault)
    faulted = next((r.faulted_at for r in reports if r and r.faulted_at), 0.0)
    for rank, (code, report) in enumerate(zip(codes, reports, strict=True)):
        if dies is not None and rank == plan.victim:
            if code != dies:
                wrong.append(f"rank {rank} ended with {code}, expected {dies}")
            continue
        if report is None:
            wrong.append(f"rank {rank} died with {code}")
            continue
        if report.wrong:
            wrong.append(f"rank {rank}: {report.wrong}")
        if report.error and plan.fault in HARMLESS:
            wrong.append(f"rank {rank} failed: {report.error}")
        if report.error and dies is not None and not _names(plan.victim, report.error):
            wrong.append(f"rank {rank} does not name rank {plan.victim}: {report.error}")
        if faulted and report.ended_at - faulted > PATIENCE:
            wrong.append(f"rank {rank} ended {report.ended_at - faulted:.1f} s after the fault")
        if _growth(plan, report) > GROWTH:
            wrong.append(f"rank {rank} grew, MiB after each life: {report.memory}")
    return wrong


def _names(victim: int, error: str) -> bool:
    # Who has got its error aborts all its groups, also those that the victim is not in.
    return f"rank {victim}" in error or error.endswith("by abort()")


def _growth(plan: Round, report: Report) -> float:
    # A failure loads what describes it: torch's unwinder, for one.
    healthy = report.memory[:-1] if plan.fault in FATAL else report.memory
    return healthy[-1] - healthy[1] if len(healthy) > 2 else 0.0


def run() -> int:
    """Parses the command line and runs the rounds."""
    parser = argparse.ArgumentParser(prog="tools/soak")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1, help="of the first round")
    parser.add_argument("--rounds", type=int, help="stop after so many")
    parser.add_argument("--ranks", type=int, default=4, help="at most")
    parser.add_argument("--threads", type=int, default=2, help="at most, in each rank")
    options = parser.parse_args()
    start = time.monotonic()
    faults: Counter[str] = Counter()
    failed, total, seed = [], 0, options.seed
    growth = 0.0
    while time.monotonic() - start < options.seconds:
        if options.rounds is not None and seed - options.seed >= options.rounds:
            break
        plan = draw_round(seed, options.ranks, options.threads)
        wrong, operations, reports = run_round(plan)
        faults[plan.fault] += 1
        total += operations
        growth = max([growth, *(_growth(plan, report) for report in reports)])
        if wrong:
            failed.append(seed)
            print(f"round {seed} ({plan}):", *wrong, sep="\n  ", flush=True)
        seed += 1
    print(
        f"{seed - options.seed} rounds, {total} operations checked, "
        f"{time.monotonic() - start:.0f} s; memory grew by {growth:.1f} MiB at most; faults: "
        + ", ".join(f"{name} {count}" for name, count in sorted(faults.items()))
    )
    print(f"failed rounds: {failed}" if failed else "nothing was wrong")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(run())
