"""Trains the same model on the CPU over torchcomms and over Gloo, and compares them.

python -m torchcomms_pg.demo --ranks 2 --epochs 10 --json figures.json
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

import torchcomms_pg
from torchcomms_pg.demo import data
from torchcomms_pg.demo.train import Job, Result, data_file, result_file, run_rank

SECONDS_TO_STOP = 5
"""How long the other ranks may take to end once one has failed, before they are killed."""


def main() -> int:
    """Runs both trainings, prints the table and returns the exit code."""
    args = parse_arguments()
    training, test = data.load(seed=0)
    steps = data.steps_per_epoch(len(training), size=Job.batch, ranks=args.ranks)
    if steps == 0:
        most = len(training) // Job.batch
        print(f"error: --ranks {args.ranks}: there are images for {most} at most", file=sys.stderr)
        return 2
    backends = [args.backend, "gloo"]
    print(
        f"torch {torch.__version__}, torchcomms_pg {torchcomms_pg.__version__}: "
        f"{args.ranks} ranks, {args.epochs} epochs of {len(training)} "
        f"training images, {len(test)} test images"
    )
    results: list[Result] = []
    for backend in backends:
        job = Job(backend=backend, ranks=args.ranks, epochs=args.epochs)
        start = time.perf_counter()
        try:
            results.append(run(job, training, test))
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            print(f"error: training over {backend} failed.{error}", file=sys.stderr)
            return 1
        print(f"{backend}: trained and tested in {time.perf_counter() - start:.1f} s")
    difference = (results[0].parameters - results[1].parameters).abs().max().item()
    print()
    print(table(backends, results, difference))
    if args.json:
        figures = {
            "torch": torch.__version__,
            "torchcomms_pg": torchcomms_pg.__version__,
            "ranks": args.ranks,
            "epochs": args.epochs,
            "training_images": len(training),
            "test_images": len(test),
            "runs": [to_json(*run_) for run_ in zip(backends, results, strict=True)],
            "largest_parameter_difference": difference,
        }
        args.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


def parse_arguments() -> argparse.Namespace:
    """Returns the options of the command line."""
    parser = argparse.ArgumentParser(prog="tools/demo", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=positive, default=2, help="processes (default: 2)")
    parser.add_argument("--epochs", type=positive, default=10, help="default: 10")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    parser.add_argument("--backend", default="torchcomms", help="default: torchcomms")
    return parser.parse_args()


def positive(text: str) -> int:
    """Returns the whole number in `text`. Raises an error of argparse unless it is above 0."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not above 0")
    return number


def run(job: Job, training: data.Split, test: data.Split) -> Result:
    """Runs one training in a process for each rank and returns its result.

    All processes have ended when this returns or raises.
    """
    with tempfile.TemporaryDirectory(prefix="torchcomms_pg-demo-") as folder:
        tensors = (training.images, training.digits, test.images, test.digits)
        torch.save(tensors, data_file(folder))
        context = mp.spawn(run_rank, args=(job, folder), nprocs=job.ranks, join=False, daemon=True)
        try:
            while not context.join(grace_period=SECONDS_TO_STOP):
                pass
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
                process.join()
        return Result(**torch.load(result_file(folder), weights_only=True))


def to_json(backend: str, result: Result) -> dict[str, Any]:
    """Returns the figures of one training, by name."""
    return {
        "backend": backend,
        "test_accuracy": result.accuracy,
        "images_per_second": result.images_per_second,
        "last_epoch_loss": result.loss,
    }


def table(backends: list[str], results: list[Result], difference: float) -> str:
    """Returns a table with a line for each backend."""
    header = ("backend", "test accuracy", "images/s", "loss", "largest parameter difference")
    notes = (f"{difference:.3g}", "(reference)")
    rows = [header] + [
        (name, f"{r.accuracy:.2%}", f"{r.images_per_second:,.0f}", f"{r.loss:.4f}", note)
        for name, r, note in zip(backends, results, notes, strict=True)
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in lines)


if __name__ == "__main__":
    sys.exit(main())
