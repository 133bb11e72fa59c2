"""tools/gpu_check on the simulated accelerator: it finds what is right, and what is not."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch

TOOLS = pathlib.Path(__file__).parent.parent / "tools"
sys.path.insert(0, str(TOOLS))

from gpu.__main__ import select  # noqa: E402
from gpu.catalogue import CHECKS  # noqa: E402
from gpu.check import Check  # noqa: E402
from gpu.devices import Cuda, Simulated  # noqa: E402
from gpu.run import Runner  # noqa: E402

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def gpu_check(*arguments, path=(), timeout=280):
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(map(str, (TOOLS, TOOLS.parent, *path))))
    return subprocess.run(
        [sys.executable, "-m", "gpu", *map(str, arguments)],
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def simulated_only():
    if reason := Simulated().missing():
        pytest.skip(reason)


def results(file):
    return {
        row["id"]: (row["result"], row["detail"]) for row in json.loads(file.read_text())["checks"]
    }


@pytest.mark.timeout(300)
def test_what_is_right_is_ok_and_what_needs_cuda_is_skipped_with_the_reason(tmp_path):
    simulated_only()
    done = gpu_check(
        *("--device", "sim", "--only", "library,moves-1,streams-1,ddp-1,abort-2"),
        *("--json", tmp_path / "results.json", "--logs", tmp_path),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = results(tmp_path / "results.json")
    skipped = found.pop("library-1")
    assert skipped[0] == "skipped" and "which only a GPU has" in skipped[1]
    assert {result for result, _ in found.values()} == {"ok"}, done.stdout
    assert found["ddp-1"][1].startswith("largest difference from gloo: one bucket")
    assert "4 ok, 0 FAILED, 1 skipped" in done.stdout
    assert "Nothing here ran on a GPU" in done.stdout


OTHERS = """
import os, signal
import torch
import torch.distributed as dist
from gpu.check import Check, Skip

def total(here):
    here.start()
    tensor = torch.ones(4, device=here.device)
    dist.all_reduce(tensor)
    assert (tensor.cpu() == here.ranks + 1).all(), f"got {tensor[0].item()}"
    return "not to be reached"

def hang(here):
    if here.rank == 1:
        signal.pause()
    return "fine"

def die(here):
    if here.rank == 1:
        os._exit(7)
    signal.pause()

def leave_badly(here):
    import atexit
    atexit.register(os._exit, 9)
    return "fine"

def refused(here):
    raise RuntimeError("Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000")

def unfit(here):
    raise Skip("not here")

CHECKS = [
    Check("total", "others:total", 2),
    Check("hang", "others:hang", 2, seconds=30),
    Check("die", "others:die", 2),
    Check("leave_badly", "others:leave_badly"),
    Check("refused", "others:refused", 2),
    Check("unfit", "others:unfit"),
    Check("many", "others:unfit", gpus=3),
    Check("cuda", "others:unfit", cuda=True),
]
"""


@pytest.mark.timeout(300)
def test_what_is_wrong_hangs_or_dies_has_failed_and_the_rest_goes_on(tmp_path):
    simulated_only()
    (tmp_path / "others.py").write_text(OTHERS)
    done = gpu_check(
        *("--device", "sim", "--catalogue", "others"),
        *("--json", tmp_path / "results.json", "--logs", tmp_path),
        path=[tmp_path],
    )
    assert done.returncode == 1, done.stdout + done.stderr
    found = results(tmp_path / "results.json")
    assert found["total-2"][0] == "FAILED" and "AssertionError: got 2.0" in found["total-2"][1]
    assert found["hang-2"] == ("FAILED", "rank 1: no end in 30 s")
    assert found["die-2"][0] == "FAILED" and "rank 1: its process ended with 7" in found["die-2"][1]
    assert found["leave_badly-1"] == ("FAILED", "rank 0: its process ended with 9 at its exit")
    assert found["refused-2"][0] == "skipped" and "Duplicate GPU detected" in found["refused-2"][1]
    assert found["unfit-1"] == ("skipped", "not here")
    assert found["many-1-on-3"] == ("skipped", "needs 3 GPUs, torch sees 2")
    assert found["cuda-1"][0] == "skipped"
    assert "in hang" in done.stdout, "the stack of what hung"


def test_when_the_time_is_over_the_rest_has_failed(tmp_path):
    runner = Runner(Cuda(), "none", tmp_path)
    outcome = runner.run(Check("late", "none:at_all", gpus=0), seconds=0.5)
    assert (outcome.result, outcome.detail) == (
        "FAILED",
        "not made: the time for all checks was over",
    )


@without_gpu
@pytest.mark.timeout(120)
def test_without_a_gpu_it_says_so():
    env = {name: value for name, value in os.environ.items() if name != "TORCH"}
    done = subprocess.run(
        [TOOLS / "gpu_check"],
        env=dict(env, PYTHON=sys.executable),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "sees no GPU" in done.stderr and "--device sim" in done.stderr


@without_gpu
@pytest.mark.timeout(120)
def test_without_a_gpu_its_tests_are_skipped_or_fail_on_request():
    for fail in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider"]
            + ["test/test_gpu.py", "-k", "moves"],
            cwd=TOOLS.parent,
            env=dict(os.environ, FAIL_WITHOUT_GPU=fail),
            capture_output=True,
            text=True,
            timeout=55,
        )
        assert done.returncode == int(fail), done.stdout
        assert f"4 {'failed' if fail == '1' else 'skipped'}" in done.stdout
        assert "needs 1 GPU, torch sees 0" in done.stdout


def test_checks_are_chosen_by_name_and_by_id():
    assert [check.id for check in select(CHECKS, "ddp,moves-3")] == [
        "ddp-1",
        "ddp-2",
        "moves-3",
        "ddp-2-on-2",
    ]
    with pytest.raises(
        ValueError, match="there is no check 'dpp'; there are library, operations, torchcomm"
    ):
        select(CHECKS, "dpp")


def test_every_check_has_a_name_of_its_own_a_function_and_a_place_in_the_document():
    assert len({check.id for check in CHECKS}) == len(CHECKS)
    document = (TOOLS.parent / "docs" / "gpu.md").read_text()
    for check in CHECKS:
        assert check.resolve().__doc__
        assert f"`{check.name}`" in document
