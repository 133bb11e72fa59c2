"""The library can be linked and used without csrc/diagnosis."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from harness import ROOT
from torchcomms_pg import _C

TORCH = Path(torch.__file__).parent / "lib"


def objects():
    """Returns the folder of this checkout's build, and the objects of its library."""
    module = Path(_C.__file__).name.split(".")[0]
    tag = f"torch-{torch.__version__}-{sys.implementation.cache_tag}"
    folder = ROOT / "build" / tag / module
    if not Path(_C.__file__).is_relative_to(ROOT) or not folder.is_dir():
        pytest.skip("the extension was not built in this checkout")
    compiled = re.findall(r"^build (\S+): compile ", (folder / "build.ninja").read_text(), re.M)
    library = [
        ROOT / each
        for each in compiled
        if not Path(each).name.startswith(("diagnosis-", "bindings-", "judge-"))
    ]
    assert len(library) < len(compiled)
    return folder, library


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_without_the_diagnosis_a_timeout_ends_an_operation_without_a_verdict(tmp_path):
    folder, library = objects()
    compiler = os.environ.get("CXX", "g++").split()[-1]
    if not shutil.which(compiler):
        pytest.skip(f"no {compiler}")
    program = tmp_path / "ranks"
    command = [compiler, f"@{folder}/torch.flags", "-O0", "-c", "test/library/ranks.cpp"]
    subprocess.run([*command, "-o", f"{program}.o"], cwd=ROOT, check=True)
    link = [f"-L{TORCH}", f"-Wl,-rpath,{TORCH}", "-ltorch_cpu", "-ltorch", "-lc10"]
    link += ["-Wl,--allow-shlib-undefined", "-ldl", "-lrt", "-pthread"]
    subprocess.run([compiler, f"{program}.o", *library, "-o", program, *link], check=True)
    done = subprocess.run([program], text=True, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "all_reduce #2 (7 x Float, SUM) of group 'both' on rank 0: timed out after 0.3 s: rank 1 "
        "did not arrive"
    ]
