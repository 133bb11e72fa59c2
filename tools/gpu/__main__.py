"""The command line of tools/gpu_check."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import torchcomms_pg
from gpu import table
from gpu.check import Check
from gpu.devices import DEVICES, Device
from gpu.run import FOLDERS, Outcome, Runner

SECONDS = 480.0
LOGS = Path(__file__).resolve().parents[2] / "build" / "logs" / "gpu_check"


def main(arguments: Sequence[str] | None = None) -> int:
    """Makes the checks and prints the table. Returns 1 if one failed, 2 if none can be made."""
    args = parse(arguments)
    checks: list[Check] = importlib.import_module(args.catalogue).CHECKS
    try:
        checks = select(checks, args.only)
    except ValueError as error:
        return wrong(str(error))
    if args.list:
        print("\n".join(check.id for check in checks))
        return 0
    sys.path += map(str, FOLDERS)  # the simulated accelerator is there
    device = DEVICES[args.device]()
    if reason := device.missing():
        return wrong(reason)
    print(describe(device), flush=True)
    args.logs.mkdir(parents=True, exist_ok=True)
    outcomes = run(Runner(device, args.catalogue, args.logs), checks, args.seconds)
    for outcome in outcomes:
        if outcome.report:
            print(f"\n{outcome.report}")
    print(f"\n{table.summary(outcomes)}")
    if device.type != "cuda" or "Emulated" in device.describe():
        print("Nothing here ran on a GPU.")
    if args.json:
        args.json.write_text(json.dumps(as_json(device, outcomes), indent=1) + "\n")
    return 1 if any(outcome.result == "FAILED" for outcome in outcomes) else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="tools/gpu_check",
        description="Runs everything that one GPU can show, and more where there are several.",
    )
    parser.add_argument(
        "--device", choices=DEVICES, default="cuda", help="sim: a simulated accelerator"
    )
    parser.add_argument(
        "--only", metavar="LIST", help="names such as operations, ddp-2; --list has them"
    )
    parser.add_argument("--list", action="store_true", help="print the names and do nothing")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="for all checks (default: %(default).0f)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE")
    parser.add_argument("--logs", type=Path, default=LOGS, help="folder for what the ranks print")
    # Tests have checks of their own.
    parser.add_argument("--catalogue", default="gpu.catalogue", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def select(checks: Sequence[Check], only: str | None) -> list[Check]:
    """Returns the checks of these names or ids, all without any.

    Raises:
        ValueError: there is none of a name.
    """
    if only is None:
        return list(checks)
    wanted = only.split(",")
    for name in wanted:
        if not any(name in (check.name, check.id) for check in checks):
            names = ", ".join(dict.fromkeys(check.name for check in checks))
            raise ValueError(f"--only: there is no check {name!r}; there are {names}")
    return [check for check in checks if check.name in wanted or check.id in wanted]


def wrong(message: str) -> int:
    """Says why nothing is checked."""
    print(f"error: {message}", file=sys.stderr)
    return 2


def describe(device: Device) -> str:
    """Writes what is checked, and on what."""
    text = f"torch {torch.__version__}, torchcomms_pg {torchcomms_pg.__version__}"
    return f"{text}: {device.describe()}"


def run(runner: Runner, checks: Sequence[Check], seconds: float) -> list[Outcome]:
    """Makes the checks one after another, and prints a line for each."""
    deadline = time.monotonic() + seconds
    width = table.width(checks)
    print(f"\n{table.header(width)}", flush=True)
    outcomes = []
    for check in checks:
        outcomes.append(runner.run(check, deadline - time.monotonic()))
        print(table.row(outcomes[-1], width), flush=True)
    return outcomes


def as_json(device: Device, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Returns the results as plain values."""
    return {
        "torch": torch.__version__,
        "torchcomms_pg": torchcomms_pg.__version__,
        "device": device.describe(),
        "checks": [
            {
                "id": outcome.check.id,
                "result": outcome.result,
                "seconds": round(outcome.seconds, 1),
                "detail": outcome.detail,
            }
            for outcome in outcomes
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
