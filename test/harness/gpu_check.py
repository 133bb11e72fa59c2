"""Runs the steps of tools/gpu_check one after another, and writes one report of them all.

After a step that fails or takes too long, the next step runs all the same.
"""

import argparse
import datetime
import os
import pathlib
import platform
import re
import shutil
import signal
import subprocess
import sys

from harness import ROOT, TESTS

# Seconds that each step may take on GPUs. The files of QUICK take ten minutes together.
QUICK = {"groups": 130, "graphs": 130, "streams": 70, "memory": 60, "profiler": 40, "models": 100}
REST = {"work": 70, "torchcomm": 160, "collectives": 320, "dtypes": 320}
SPEED, SUITE, MEMCHECK = 120, 2400, 180
GRACE = 20  # seconds that a step over its limit has for printing its table


class Report:
    """Prints lines, and writes them to a file."""

    def __init__(self, path):
        self.file = open(path, "w")

    def line(self, text=""):
        print(text, flush=True)
        print(text, file=self.file, flush=True)


def driver():
    """Returns the version of the GPUs' driver."""
    if shutil.which("nvidia-smi") is None:
        return "unknown: there is no nvidia-smi"
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=60)
    return (done.stdout or done.stderr).strip().partition("\n")[0]


def built_by(library):
    """Returns the compilers that a shared library names, and the C++ library that it uses."""
    command = ["readelf", "-d", "-p", ".comment", library]
    output = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    compilers = re.findall(r"^ +\[ *[0-9a-f]+\] +(\S.*)", output, re.MULTILINE)
    shared = re.search(r"\(NEEDED\).*\[(lib(?:std)?c\+\+\S*)\]", output)
    return f"{', '.join(compilers)}; {shared[1] if shared else 'the C++ library is inside'}"


def facts(device):
    """Yields the report's first lines: card, driver, versions, date, compilers and machine."""
    import torch

    import torchcomms_pg
    from torchcomms_pg import _C, nccl

    if device == "emulated":
        yield "card: an emulated CUDA. Nothing here runs on a GPU"
    else:
        names = map(torch.cuda.get_device_name, range(torch.cuda.device_count()))
        yield "card: " + ", ".join(names)
        yield f"driver: {driver()}"
        try:
            library = nccl.load()
            yield f"NCCL: {nccl.version_text(library.version)}, {library.path}"
        except RuntimeError as error:
            yield f"NCCL: {error}"
    yield f"date: {datetime.datetime.now().astimezone().isoformat(timespec='minutes')}"
    yield f"torch {torch.__version__}, torchcomms_pg {torchcomms_pg.__version__}"
    yield f"built by {built_by(_C.__file__)}"
    cores = len(os.sched_getaffinity(0))
    yield f"Python {platform.python_version()}, {cores} cores, Linux {platform.release()}"


def run(report, name, command, limit):
    """Runs a step and reports its output. Returns whether the step succeeded within its limit."""
    begun = datetime.datetime.now()
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        stdin=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    late = False
    try:
        output = process.communicate(timeout=limit)[0]
    except subprocess.TimeoutExpired:
        late = True
        process.send_signal(signal.SIGINT)  # pytest prints what it has
        try:
            output = process.communicate(timeout=GRACE)[0]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output = process.communicate()[0]
    took = (datetime.datetime.now() - begun).total_seconds()
    # pytest exits with 5 if its arguments choose no test of the file.
    chosen = process.returncode != 5
    well = process.returncode in (0, 5) and not late
    state = "ok" if well else f"not ended after {limit:.0f} s" if late else "FAILED"
    report.line(f"--- {name}: {state if chosen else 'nothing chosen'}, {took:.0f} s")
    _, _, table = output.partition("what GPUs have shown")
    for line in table.splitlines()[1:] if table else output.splitlines()[-40:]:
        report.line(line)
    return well


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cuda", "emulated"), required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--report", type=pathlib.Path, required=True)
    options, chosen = parser.parse_known_args()
    report = Report(options.report)
    for line in facts(options.device):
        report.line(line)
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "harness.gpu_table", "--device"]
    steps = {}
    slower = 4 if options.device == "emulated" else 1  # emulated GPUs run on the tests' cores
    for file, limit in (QUICK if options.quick else QUICK | REST).items():
        path = TESTS / "gpu" / f"test_gpu_{file}.py"
        steps[file] = [*pytest, options.device, str(path), *chosen], limit * slower
    if not options.quick and not chosen:
        speed = [sys.executable, "-m", "benchmarks", "--gpus", options.device]
        steps["speed beside nccl"] = speed, SPEED
        suite = str(TESTS / "frameworks" / "torch_suite.py"), "nccl", "--device", options.device
        steps["torch's own tests"] = [sys.executable, *suite], SUITE
        if options.device == "cuda" and (sanitizer := shutil.which("compute-sanitizer")):
            tests = str(TESTS / "gpu" / "test_gpu_streams.py")
            body = [*pytest, "cuda", tests, "-k", "1ranks", "--timeout", str(MEMCHECK)]
            check = [sanitizer, "--tool", "memcheck", "--leak-check", "no", *body]
            steps["memcheck of compute-sanitizer"] = check, MEMCHECK
    failed = [name for name, step in steps.items() if not run(report, name, *step)]
    report.line("all is well" if not failed else "FAILED: " + ", ".join(failed))
    print(f"this report: {options.report}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
