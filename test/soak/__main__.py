"""``tools/soak``: rounds of random work until the time is over; ends with 1 if one went wrong."""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from collections import Counter

from harness.ranks import Outcome, Ranks

from .rank import FATAL, HARMLESS, TIMEOUT, Report, Round, main

# After the fault: its deadline, then the abort of what the other threads do, then the end of
# the groups.
PATIENCE = 3 * TIMEOUT + 20
STANDSTILL = 90.0  # seconds without an operation on any rank: they hang
DEATHS = {"kill": -signal.SIGKILL, "exit": 3}
GROWTH = 24.0  # MiB a process may grow after its second life, over all others


def draw_round(seed: int, backend: str, ranks: int, threads: int) -> Round:
    """A fault in half of the rounds; over a watched backend none that ends one."""
    generator = random.Random(seed)
    steps = generator.choice((30, 100, 200))
    fatal = generator.random() < 0.5 and backend == "torchcomms"
    fault = generator.choice(FATAL if fatal else HARMLESS)
    size = generator.randint(2, ranks)
    return Round(
        backend=backend,
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
    with tempfile.TemporaryDirectory() as folder, Ranks(plan.size, init=False) as ranks:
        ranks.start(main, plan, f"{folder}/store")
        outcomes = ranks.wait(STANDSTILL, prolong=True)  # a busy machine may need minutes
        code = ranks.exit_code(plan.victim) if plan.fault in DEATHS else None
        printed = [ranks.output(rank) for rank in range(plan.size)]
    reports = [outcome.value for outcome in outcomes if outcome.ok]
    wrong = _judge(plan, outcomes, code)
    if plan.backend != "torchcomms":  # watched, and nothing hangs
        wrong += [f"a verdict: {text}" for text in printed if "verdict on group" in text]
    return wrong, sum(report.operations for report in reports), reports


def _judge(plan: Round, outcomes: list[Outcome], code: int | None) -> list[str]:
    wrong = []
    dies = DEATHS.get(plan.fault)
    faulted = next((o.value.faulted_at for o in outcomes if o.ok and o.value.faulted_at), 0.0)
    for outcome in outcomes:
        rank, report = outcome.rank, outcome.value
        if outcome.hung:
            wrong.append(f"rank {rank} hangs: {outcome.hung}")
            continue
        if dies is not None and rank == plan.victim:
            if code != dies:
                wrong.append(f"rank {rank} ended with {code}, expected {dies}")
            continue
        if not outcome.ok:
            wrong.append(f"rank {rank}: {outcome.died or outcome.error}")
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
    parser.add_argument(
        "--backend", choices=("torchcomms", "gloo"), default="torchcomms", help="gloo is watched"
    )
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
        plan = draw_round(seed, options.backend, options.ranks, options.threads)
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
