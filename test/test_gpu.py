"""The checks of tools/gpu_check on GPUs, each a test. Skipped without, or failed on request."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "tools"))

from gpu.catalogue import CHECKS
from gpu.devices import Cuda
from gpu.run import Runner


def as_parameter(check):
    limit = check.seconds + 60  # its own comes first
    marks = [pytest.mark.needs_gpu(check.gpus), pytest.mark.timeout(limit)]
    return pytest.param(check, id=check.id, marks=marks)


@pytest.mark.parametrize("check", [as_parameter(check) for check in CHECKS])
def test_on_gpus(check, tmp_path):
    outcome = Runner(Cuda(), "gpu.catalogue", tmp_path).run(check, check.seconds)
    if outcome.result == "skipped":
        pytest.skip(outcome.detail)
    assert outcome.result == "ok", outcome.report
