"""The tools on other machines: which torch they choose, and what they say if they cannot run.

The package index is a folder of empty wheels named torch, so nothing is downloaded.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import textwrap
import venv
import zipfile

import pip
import pytest
import torch

from harness import ROOT, TESTS, gpu_check
from harness.programs import run_program, run_python

# Each run of a tool may take 110 s.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
VERSIONS = ("2.10.0", "2.11.0", "2.13.0", "2.14.1", "2.15.0", "2.16.0")


def write_wheel(folder, name, version):
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{name}/__init__.py", "")
        file.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/RECORD", "")


@pytest.fixture
def checkout(tmp_path):
    """A checkout with what tools/_env reads, and a tool that installs only torch and NCCL."""
    for name in ("tools", "requirements"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "tools/try").write_text(
        'source "$(dirname "${BASH_SOURCE[0]}")/_env"\n'
        "extra() { [[ $1 != nccl ]] || echo nvidia-nccl-cu12; }\n"
        'packages none\necho "torch $TORCH_VERSION in ${VENV##*/}"\n'
    )
    (tmp_path / "index").mkdir()
    for version in VERSIONS:
        write_wheel(tmp_path / "index", "torch", version)
    write_wheel(tmp_path / "index", "nvidia_nccl_cu12", "2.29.7")
    return tmp_path


def make_environment(checkout, name):
    """Makes an environment that links to this Python's pip, as venv takes seconds to unpack one."""
    venv.create(checkout / name, symlinks=True)
    (packages,) = (checkout / name).glob("lib/python3*/site-packages")
    (packages / "pip").symlink_to(pathlib.Path(pip.__file__).parent)


def run(checkout, constraint=None, index="index", **env):
    if constraint is not None:
        (checkout / "limits.txt").write_text(constraint + "\n")
        env["PIP_CONSTRAINT"] = str(checkout / "limits.txt")
    env = {
        "PATH": os.environ["PATH"],
        "PYTHON": sys.executable,
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(checkout / index),
        **env,
    }
    return subprocess.run(
        ["bash", checkout / "tools/try"], env=env, capture_output=True, text=True, timeout=110
    )


def last_line(done):
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


def test_without_a_wish_the_newest_torch_of_the_range_is_taken_and_kept(checkout):
    assert last_line(run(checkout)) == "torch 2.15.0 in .venv"
    # An environment that exists keeps its torch, even if the index has no torch any more.
    with (checkout / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    assert last_line(run(checkout, index="nothing")) == "torch 2.15.0 in .venv"


def test_a_constraint_is_obeyed_and_a_version_wished_for_has_its_own_environment(checkout):
    make_environment(checkout, ".venv")
    make_environment(checkout, ".venv-2.13")
    assert last_line(run(checkout, "torch<=2.14.1")) == "torch 2.14.1 in .venv"
    assert last_line(run(checkout, TORCH="2.13")) == "torch 2.13.0 in .venv-2.13"
    # .venv has this torch, so no second environment is made.
    assert last_line(run(checkout, TORCH="2.14")) == "torch 2.14.1 in .venv"


def test_a_constraint_in_the_way_of_the_torch_wished_for_is_named_with_the_command_that_works(
    checkout,
):
    make_environment(checkout, ".venv-2.15")
    done = run(checkout, "torch<=2.14.1", TORCH="2.15")
    assert done.returncode == 1
    assert "error: torch==2.15.0 could not be installed: pip has been told torch<=2.14.1 in " in (
        done.stderr
    )
    assert f"{checkout}/limits.txt" in done.stderr
    assert "TORCH=2.14.1 tools/try" in done.stderr


def test_a_constraint_that_leaves_nothing_is_named(checkout):
    make_environment(checkout, ".venv")
    done = run(checkout, "torch<2.11")
    assert done.returncode == 1
    assert "pip has been told torch<2.11 in " in done.stderr
    assert "leaves no torch of the range >=2.11,<2.16" in done.stderr
    assert "PIP_CONSTRAINT=/dev/null tools/try" in done.stderr


@pytest.mark.parametrize("wish", ["1.0", "2.10", "2.16.0", "newest", "2.15.0+cpu"])
def test_a_torch_outside_of_the_range_is_refused_before_anything_is_made(checkout, wish):
    done = run(checkout, TORCH=wish)
    assert done.returncode == 1
    assert f"error: TORCH={wish}: wanted a torch of the range >=2.11,<2.16" in done.stderr
    assert "2.11, 2.12, 2.13, 2.14, 2.15" in done.stderr
    assert not list(checkout.glob(".venv*"))


def test_an_index_without_torch_and_one_that_cannot_be_reached_are_told_apart(checkout):
    make_environment(checkout, ".venv")
    done = run(checkout, index="nothing")
    assert "error: torch>=2.11,<2.16 could not be installed: pip finds no torch" in done.stderr
    nowhere = {"PIP_NO_INDEX": "0", "PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_RETRIES": "1"}
    done = run(checkout, index="nothing", **nowhere)
    assert "pip cannot reach its package index" in done.stderr
    assert "then again: tools/try" in done.stderr


def test_a_python_that_is_asked_for_has_an_environment_of_its_own(checkout):
    for folder in (".venv", ".venv-2.13"):
        (checkout / folder / "lib/python3.99/site-packages").mkdir(parents=True)
    python = f"python{sys.version_info[0]}.{sys.version_info[1]}"

    def name(**variables):
        env = {key: value for key, value in os.environ.items() if key not in ("TORCH", "PYTHON")}
        done = run_python(checkout / "tools/_torch.py", "name", env=env, **variables)
        return done.stdout.split()[0]

    assert name() == ".venv"  # keeps its Python
    assert name(PYTHON=sys.executable) == f".venv-{python}"
    assert name(PYTHON=sys.executable, TORCH="2.13") == f".venv-2.13-{python}"
    assert name(PYTHON=sys.executable, TORCH="2.14") == ".venv-2.14"  # does not exist yet
    packages = checkout / f".venv-{python}/lib/{python}/site-packages"
    (packages / "torch-2.13.0+cpu.dist-info").mkdir(parents=True)
    assert name(PYTHON=sys.executable, TORCH="2.13") == f".venv-{python}"


def test_a_torch_that_no_index_is_asked_for_is_no_matter_of_the_python(checkout):
    make_environment(checkout, ".venv-2.13.1")
    done = run(checkout, TORCH="2.13.1")
    assert done.returncode == 1
    assert (
        f"pip finds no torch==2.13.1 in the folders that it has been told ({checkout}/index)"
        in (done.stderr)
    )
    assert "PIP_NO_INDEX=0 tools/try" in done.stderr and "for Python" not in done.stderr


def test_logs_are_no_hidden_files(checkout):
    make_environment(checkout, ".venv")
    last_line(run(checkout))
    logs = [log.name for log in (checkout / "build/logs").iterdir()]
    assert logs and all(name.startswith("venv-") for name in logs)


def test_a_python_without_headers_is_told_before_anything_is_downloaded(checkout, tmp_path):
    python = tmp_path / "python-without-headers"
    python.write_text(
        f'#!/bin/sh\ncase "$*" in *Python.h*) exit 1 ;; esac\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    (checkout / "tools/try").write_text(
        'source "$(dirname "${BASH_SOURCE[0]}")/_env"\nsetup none\n'
    )
    done = run(checkout, PYTHON=str(python))
    assert done.returncode == 1
    assert "has no headers (Python.h)" in done.stderr and "python3-dev" in done.stderr
    assert not list(checkout.glob(".venv*"))


TOOLS = [file.name for file in (ROOT / "tools").iterdir() if not file.name.startswith("_")]


@pytest.mark.parametrize("tool", sorted(TOOLS))
def test_each_tool_has_help_before_anything_is_installed(checkout, tool):
    env = {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [checkout / "tools" / tool, "--help"], env=env, capture_output=True, text=True, timeout=20
    )
    assert done.returncode == 0, done.stderr
    assert f"  tools/{tool}" in done.stdout and "#" not in done.stdout
    assert not list(checkout.glob(".venv*"))


def test_the_wheels_tool_says_what_it_does_and_how_long_each_build_took(checkout):
    stub = """
        set -euo pipefail
        cd "$(dirname "${BASH_SOURCE[0]}")/.."
        VENV=. PY=true
        setup() { SECONDS=$((SECONDS + 125)); }
        step() { mkdir -p build/wheels/repaired wheels && touch build/wheels/repaired/one.whl; }
        """
    (checkout / "tools/_env").write_text(textwrap.dedent(stub))
    done = run_program(
        ["bash", checkout / "tools/wheel", "2.13", "2.15"], stdout=subprocess.PIPE, timeout=20
    )
    assert done.returncode == 0
    first, *rest = done.stdout.splitlines()
    assert first.startswith("makes one wheel for torch 2.13 2.15: ") and "a build for each" in first
    times = [re.sub(r"2:0[5-9]|4:1\d", "TIME", line) for line in rest]
    assert times == ["torch 2.13: TIME min", "torch 2.15: TIME min", "all: TIME min"] + [
        "pip install wheels/one.whl"
    ]


def test_the_sources_have_what_their_tools_need(tmp_path):
    copy = tmp_path / "copy"
    folders = (".venv*", ".git", "build", "wheels", "*.so", "*.egg-info", "__pycache__", ".*_cache")
    being_written = ".*.so.*"  # by a build for another torch
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*folders, being_written))
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "sdist", "--dist-dir", tmp_path],
        cwd=copy,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.glob("*.tar.gz")
    shutil.unpack_archive(archive, tmp_path / "sources")
    (sources,) = (tmp_path / "sources").iterdir()
    made = {"PKG-INFO", "setup.cfg", "torchcomms_pg.egg-info"}
    missing = {
        str(file.relative_to(copy))
        for file in copy.rglob("*")
        if file.is_file() and not (sources / file.relative_to(copy)).exists()
    }
    assert missing - {".gitignore", "compile_commands.json"} == set(), missing
    assert {entry.name for entry in sources.iterdir()} - made <= {e.name for e in copy.iterdir()}


def why(checkout, log):
    (checkout / "log").write_text(log)
    command = [checkout / "tools/_torch.py", "why", checkout / "log", "torch==2.15.0", "tools/demo"]
    env = {name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"}
    return run_python(*command, env=env, PIP_CONFIG_FILE=os.devnull).stderr


def test_a_full_disk_is_told_as_one(checkout):
    said = why(checkout, "ERROR: Could not install packages: [Errno 28] No space left on device\n")
    assert said.startswith("error: torch==2.15.0 could not be installed: the disk is full.\n")
    assert "TMPDIR" in said and "tools/demo" in said
    assert re.search(rf"Free are \d+\.\d GB in {checkout} here and \d+\.\d GB in /", said)


def test_a_disk_that_filled_while_an_environment_was_made_is_told(checkout, tmp_path):
    """venv does not print why the command failed."""
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\ncase "$*" in *"-m venv"*) exit 1 ;; esac\nexec {sys.executable} "$@"\n'
    )
    df = tmp_path / "bin/df"
    df.parent.mkdir()
    df.write_text("#!/bin/sh\necho Filesystem\necho /dev/sda 100000 99000 1000 99% /\n")
    for program in (python, df):
        program.chmod(0o755)
    done = run(checkout, PYTHON=str(python), PATH=f"{df.parent}:{os.environ['PATH']}")
    assert done.returncode == 1
    assert done.stderr.endswith(
        "error: 'virtual environment' failed (exit code 1): the disk of "
        f"{checkout} is full.\n"
        "Make room (an environment with CUDA takes 6 GB, and TMPDIR as much meanwhile),\n"
        "then again: tools/try\n"
    )


def test_a_failure_of_another_kind_points_to_pips_own_words(checkout):
    said = why(checkout, "ERROR: something else\n")
    assert said == (
        "error: torch==2.15.0 could not be installed: see pip's output above.\nAgain: tools/demo\n"
    )


def test_a_python_that_cannot_make_environments_is_told_what_to_install(checkout, tmp_path):
    python = tmp_path / "python-without-venv"
    python.write_text(
        f'#!/bin/sh\ncase "$*" in *ensurepip*) exit 1 ;; esac\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    done = run(checkout, PYTHON=str(python))
    assert done.returncode == 1
    assert "cannot make virtual environments" in done.stderr
    assert "apt-get install python3-venv python3-dev" in done.stderr


def test_the_pins_are_of_the_range(checkout):
    for file in (checkout / "requirements").iterdir():
        minor = file.stem.removeprefix("torch-")
        done = run_python(checkout / "tools/_torch.py", "name", TORCH=minor)
        assert done.stdout.split() == [
            f".venv-{minor}",
            f"torch=={minor}." + done.stdout.strip()[-1],
        ]
    assert len(list((checkout / "requirements").iterdir())) == 5


# ---------------------------------------------------------------- tools/soak


def test_the_soak_starts():
    done = run_python("-m", "soak", "--help", PYTHONPATH=f"{ROOT}:{TESTS}")
    assert done.returncode == 0 and "usage: tools/soak" in done.stdout, done.stderr


# ---------------------------------------------------------------- tools/gpu_check

CASES = """
import pytest

@pytest.mark.parametrize("size", (1, 2, 3))
def test_sums_are_right(size):
    if size == 1:
        pytest.skip("one is too few")
    assert size < 3, f"{size} is not"

def test_all_is_well():
    pass
"""


def test_the_table_has_a_row_for_each_test_function(tmp_path):
    (tmp_path / "test_gpu_sums.py").write_text(CASES)
    done = run_python(
        *("-m", "pytest", "-q", "-p", "harness.gpu_table", "-p", "no:cacheprovider"),
        *("--rootdir", tmp_path, "-c", os.devnull, tmp_path),
        PYTHONPATH=str(TESTS),
    )
    assert done.returncode == 1, done.stdout + done.stderr
    rows = done.stdout[done.stdout.index("what GPUs have shown") :].splitlines()[2:5]
    sums, why, well = (" ".join(row.split()) for row in rows)
    assert sums.startswith("sums: sums are right FAILED ")
    assert sums.endswith("1 skipped, 1 ok, 1 FAILED")
    assert why.startswith("3: AssertionError: 3 is not")
    assert well.startswith("sums: all is well ok ") and well.endswith(" 1 ok")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.timeout(120)
def test_without_a_gpu_it_says_so():
    env = {name: value for name, value in os.environ.items() if name != "TORCH"}
    done = subprocess.run(
        [ROOT / "tools" / "gpu_check"],
        env=dict(env, PYTHON=sys.executable),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "sees no GPU" in done.stderr and "tools/gpu_check --emulated" in done.stderr


def test_a_python_with_torch_is_told_what_it_lacks_and_nothing_is_downloaded(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as util\n"
        "find = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name == 'pytest' else find(name, *rest)\n"
    )
    env = {name: value for name, value in os.environ.items() if name != "TORCH"}
    done = subprocess.run(
        [ROOT / "tools" / "gpu_check", "--emulated"],
        env=dict(env, PYTHON=sys.executable, PYTHONPATH=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "has torch, and lacks pytest." in done.stderr, done.stderr
    assert f"{sys.executable} -m pip install pytest\n" in done.stderr, done.stderr


def test_a_step_that_fails_or_takes_too_long_is_in_the_report_and_keeps_none_from_running(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("PYTHONPATH", str(TESTS))  # as tools/gpu_check does
    path = tmp_path / "report.txt"
    report = gpu_check.Report(path)
    (tmp_path / "test_gpu_sums.py").write_text(CASES)
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "harness.gpu_table", "-c", os.devnull]
    steps = {
        "late": ([sys.executable, "-c", "import time; time.sleep(60)"], 1),
        "tests": ([*tests, "--rootdir", str(tmp_path), str(tmp_path)], 50),
        "none": ([*tests, "--rootdir", str(tmp_path), str(tmp_path), "-k", "nothing"], 50),
        "well": ([sys.executable, "-c", "print('fine')"], 50),
    }
    well = [name for name, step in steps.items() if gpu_check.run(report, name, *step)]
    assert well == ["none", "well"]
    said = path.read_text()
    assert "--- late: not ended after 1 s, " in said and "--- tests: FAILED, " in said
    assert "sums: sums are right" in said and "3: AssertionError: 3 is not" in said
    assert "--- none: nothing chosen, " in said and "--- well: ok, 0 s\nfine\n" in said


def test_a_report_of_gpus_says_what_ran_where():
    said = "\n".join(gpu_check.facts("emulated"))
    assert "card: an emulated CUDA" in said and f"torch {torch.__version__}" in said
    assert re.search(r"date: \d{4}-\d\d-\d\dT\d\d:\d\d", said), said
