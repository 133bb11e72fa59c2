"""One process of a check: ``python -m gpu.rank``, started by gpu.run."""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import sys
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

from benchmark.team import die_with_parent

from gpu.check import Check, Skip
from gpu.devices import DEVICES
from gpu.here import Here


def find(catalogue: str, id: str) -> Check:
    """Returns a check by its id."""
    checks: list[Check] = importlib.import_module(catalogue).CHECKS
    return next(check for check in checks if check.id == id)


def main() -> int:
    """Runs the check on this rank and sends what became of it: a word and a text."""
    die_with_parent()
    parser = argparse.ArgumentParser()
    parser.add_argument("catalogue")
    parser.add_argument("id")
    parser.add_argument("device", choices=DEVICES)
    parser.add_argument("rank", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("deadline", type=float)  # of time.monotonic(), which all processes share
    parser.add_argument("answer", type=int)
    args = parser.parse_args()
    # Shortly before the process is killed: the log then says where it hung.
    faulthandler.dump_traceback_later(max(0.1, args.deadline - 1.0 - time.monotonic()))
    answer = Connection(args.answer, readable=False)
    try:
        check = find(args.catalogue, args.id)
        kind = DEVICES[args.device]()
        kind.prepare(args.rank, check.ranks)
        here = Here(check, args.rank, kind, args.folder)
        import torch

        import torchcomms_pg  # noqa: F401  (registers the backend)

        torch.set_num_threads(1)
        torch.get_device_module(kind.type).set_device(here.device)
        answer.send(("ok", check.resolve()(here)))
    except Skip as skip:
        answer.send(("skipped", str(skip)))
    except BaseException as error:
        traceback.print_exc()  # into the log
        sys.stderr.flush()
        answer.send(("FAILED", f"{type(error).__name__}: {' '.join(str(error).split())}"))
        return 1
    finally:
        answer.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
