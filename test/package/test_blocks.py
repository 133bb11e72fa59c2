"""The blocks of code and of commands in README and docs: each runs as written, or says why not."""

import os
import re
import shlex
import subprocess
import sys

import pytest

from harness import ROOT
from harness.programs import run_program, run_python

PAGES = ("README.md", "CONTRIBUTING.md", *sorted(f"docs/{p.name}" for p in ROOT.glob("docs/*.md")))


def blocks():
    """Returns {(page, first line): (language, text)} of blocks of Python and of commands."""
    found = {}
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        for _, language, code in re.findall(r"^( *)```(\w*)\n(.*?)^ *```", text, re.M | re.S):
            if language in ("python", "console"):
                start, number = code.splitlines()[0], 2
                while (page, start) in found:  # blocks that begin alike
                    start, number = f"{code.splitlines()[0]} ({number})", number + 1
                found[page, start] = (language, code)
    return found


BLOCKS = blocks()
LIMIT = 270  # seconds for a program: torchrun and two ranks import torch
GROUP = "import torch.distributed as dist\ndist.init_process_group('torchcomms')\n"
END = "dist.destroy_process_group()\n"
COMM = "import torch, torchcomms_pg\ncomm = torchcomms_pg.new_comm('shm', 'cpu')\n"
FINALIZE = "comm.finalize()\n"
SPLIT = (
    "dp_comm = comm.split(list(range(comm.get_size())), 'dp')\n"
    "tp_comm = comm.split([comm.get_rank()], 'tp')\n"
)
OPTIONS = "options = torchcomms_pg.Backend.Options()"

# What stands before and after a block of Python that runs on two ranks of torchrun, in this order.
ON_RANKS = {
    ("README.md", "import torch"): ("", ""),
    (
        "README.md",
        'comm = torchcomms_pg.new_comm("shm", "cpu")  # rank, size and store from torchrun, '
        "or arguments",
    ): ("import torch, torchcomms_pg\n", ""),
    ("docs/api.md", "import torch"): ("", ""),
    ("docs/api.md", "mesh = torchcomms_pg.device_mesh.init_device_mesh("): (
        COMM + "import torchcomms_pg.device_mesh\n" + SPLIT,
        "import torch.distributed\ntorch.distributed.destroy_process_group()\n"  # the mesh's
        "dp_comm.finalize()\ntp_comm.finalize()\n" + FINALIZE,
    ),
    ("docs/api.md", "buffer = torch.zeros(1024)"): (COMM, FINALIZE),
    ("docs/api.md", f"{OPTIONS} (2)"): (
        "import torchcomms_pg, torch.distributed as dist\n",
        END,
    ),
    ("docs/failures.md", 'steps = torchcomms_pg.agree(len(batches), name="micro-batches")'): (
        GROUP + "import torchcomms_pg\nbatches = [1, 2]\n",
        "assert steps == 2\n" + END,
    ),
    (
        "docs/lateness.md",
        "for each in torchcomms_pg.lateness():  # or comm.lateness(); of another group: "
        "lateness(group)",
    ): (GROUP + "import torchcomms_pg\n", END),
    (
        "docs/recorder.md",
        "ring = torchcomms_pg.hooks.process_recorder()  # None: no group yet, or "
        "TORCH_FR_BUFFER_SIZE=0",
    ): (GROUP + "import torchcomms_pg.hooks\n", END),
    ("docs/recorder.md", "from torchcomms_pg.hooks import FlightRecorderHook"): (
        COMM + "tensor = torch.ones(4)\n",
        FINALIZE,
    ),
}

# Which test, part of .ci/run or check by hand runs each other block; or why nothing does.
ELSEWHERE = {
    ("README.md", "$ pip install torch 'setuptools>=77' ninja"): "hand: docs/support.md",
    ("README.md", "$ tools/wheel 2.13 2.15"): "ci: tools/wheel",
    ("README.md", "$ tools/demo"): "ci: tools/demo",
    ("CONTRIBUTING.md", "$ tools/test --setup"): "ci: tools/test --setup",
    ("docs/api.md", OPTIONS): "test: test_options_of_a_process_group_reach_the_library",
    ("docs/bench.md", "$ tools/bench --only floor,library"): "test: "
    "test_every_operation_is_measured_checked_stored_and_compared",
    ("docs/check_async.md", "import torch"): "test: test_the_page_of_async_checks_shows_a_run",
    (
        "docs/check_async.md",
        "$ torchrun --nproc-per-node 2 -m torchcomms_pg.run --check-async train.py",
    ): "test: test_the_page_of_async_checks_shows_a_run",
    (
        "docs/check_async.md",
        "$ TORCHCOMMS_PG_AS_GLOO=1 TORCHCOMMS_PG_CHECK_ASYNC=/shared/found/rank_ mpirun -n 8 "
        "python train.py",
    ): "test: test_a_folder_of_findings_has_the_same_report",
    ("docs/develop.md", "$ pip install --no-build-isolation -e '.[suite]'"): "ci: tools/test",
    ("docs/develop.md", "$ grep -rlw barrier csrc torchcomms_pg"): "test: "
    "test_the_place_of_a_barrier_is_found",
    (
        "docs/failures.md",
        "from vllm.distributed.device_communicators.shm_broadcast import MessageQueue",
    ): "test: test_a_librarys_own_wait_is_in_status_and_verdict",
    (
        "docs/gloo.md",
        "$ TORCHCOMMS_PG_AS_GLOO=1 torchrun --nproc-per-node 2 program.py",
    ): "test: test_an_unchanged_program_and_its_children_run_over_torchcomms",
    (
        "docs/gloo.md",
        'torch.distributed.init_process_group("torchcomms")  # before the Accelerator',
    ): "test: test_accelerate",
    (
        "docs/gloo.md",
        'torch.distributed.init_process_group("torchcomms")  # before from_pretrained',
    ): "test: test_transformers",
    ("docs/gloo.md", "trainer = Trainer("): "test: test_lightning",
    (
        "docs/gloo.md",
        'deepspeed.init_distributed(dist_backend="torchcomms")  # before deepspeed.initialize',
    ): "test: test_deepspeed_zero_has_no_early_use",
    (
        "docs/gloo.md",
        "class ProcessGroupTorchComms(torchft.process_group.ProcessGroupWrapper):",
    ): "test: test_torchft_managed_groups",
    ("docs/gpu.md", 'backend = dist.group.WORLD._get_backend(torch.device("cuda"))'): "test: "
    "test_tensors_of_a_registered_pool_are_reduced",
    (
        "docs/hosts.md",
        "$ torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint "
        "host0:29400 train.py",
    ): "why: needs two hosts; tests start ranks of hosts without torchrun",
    ("docs/install.md", "import datetime"): "test: "
    "test_ranks_of_a_notebook_are_threads_of_its_process",
    (
        "docs/install.md",
        '$ export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) '
        "MASTER_PORT=29500",
    ): "why: needs Slurm",
    (
        "docs/install.md",
        "$ CXX=$CONDA_PREFIX/bin/x86_64-conda-linux-gnu-g++ "
        "TORCHCOMMS_PG_NCCL_INCLUDE=$CONDA_PREFIX/include \\",
    ): "why: needs conda",
    (
        "docs/metrics.md",
        "$ pip install 'torchcomms_pg[metrics]'  # prometheus_client, which writes it",
    ): "test: test_each_operation_is_counted_with_its_bytes_and_its_time",
    ("docs/nccl_hazards.md", "import torch"): "test: "
    "test_ranks_of_torchrun_get_one_report_and_its_code_as_documented",
    (
        "docs/nccl_hazards.md",
        "$ torchrun --nproc-per-node 2 -m torchcomms_pg.run --check-nccl train.py",
    ): "test: test_ranks_of_torchrun_get_one_report_and_its_code_as_documented",
    (
        "docs/nccl_hazards.md",
        "$ TORCHCOMMS_PG_DUMP_AT_EXIT=1 TORCH_FR_DUMP_TEMP_FILE=/shared/dumps/rank_ mpirun -n 8 "
        "python train.py",
    ): "why: needs mpirun; test_check_nccl.py reads such dumps",
    ("docs/plan.md", "import torch"): "test: test_the_page_of_plans_shows_a_run",
    (
        "docs/plan.md",
        "$ python -m torchcomms_pg.plan --world-size 4096 --hosts 512x8 train.py",
    ): "test: test_the_page_of_plans_shows_a_run",
    (
        "docs/plan.md",
        "$ python -m torchcomms_pg.plan --world-size 4096 --hosts 512x8 --chakra traces train.py",
    ): "test: test_a_step_of_a_program_is_written_by_the_command",
    ("docs/recorder.md", "$ echo > /tmp/job_1.pipe"): "test: "
    "test_writing_into_the_pipe_of_a_rank_has_it_dump",
    ("docs/recorder.md", "$ torchfrtrace /tmp/dumps"): "test: "
    "test_a_hang_is_dumped_on_all_ranks_and_names_the_missing_rank",
    ("docs/status.md", "$ python -m torchcomms_pg.status"): "test: "
    "test_a_program_under_torchrun_is_asked_by_the_command_line",
    (
        "docs/status.md",
        "$ TORCHCOMMS_PG_RAS_ADDR=localhost:28100 TORCHCOMMS_PG_WATCH=1 torchrun "
        "--nproc-per-node 3 train.py",
    ): "test: test_an_unchanged_program_under_torchrun_is_shown",
    ("docs/status.md", "$ python -m torchcomms_pg.status --ras localhost:28100"): "test: "
    "test_a_user_can_start_a_gateway_for_a_job_that_names_no_address",
    (
        "docs/support.md",
        "from torch.distributed.distributed_c10d import _get_reconfigure_handle, _reconfigure",
    ): "test: test_a_new_process_joins_two",
    ("docs/testing.md", "import pytest, torch, torch.distributed as dist"): "ci: clean_install.py",
    ("docs/testing.md", "$ pip install torchcomms_pg[test]"): "ci: clean_install.py",
    ("docs/testing.md", "from torchcomms_pg.testing import run_ranks"): "test: "
    "test_the_page_of_tests_shows_a_run",
    ("docs/watch.md", "$ TORCHCOMMS_PG_WATCH=1 torchrun --nproc-per-node 3 train.py"): "test: "
    "test_an_unchanged_program_is_watched",
}


def test_each_block_of_the_pages_runs_or_says_why_not():
    assert set(BLOCKS) == set(ON_RANKS) | set(ELSEWHERE)
    files = [file.read_text(encoding="utf-8") for file in ROOT.glob("test/**/*.py")]
    ci = (ROOT / ".ci/run").read_text()
    for block, where in ELSEWHERE.items():
        kind, _, name = where.partition(": ")
        assert kind in ("test", "ci", "hand", "why"), block
        if kind == "test":
            assert any(f"def {name}(" in text for text in files), (block, name)
        elif kind == "ci":
            assert name in ci, (block, name)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_blocks_of_python_run_as_written_on_two_ranks(tmp_path):
    parts = [before + BLOCKS[block][1] + after for block, (before, after) in ON_RANKS.items()]
    program = tmp_path / "blocks.py"
    program.write_text(
        "import sys\nfor part in " + repr(parts) + ":\n"
        "    exec(compile(part, part.splitlines()[-1], 'exec'), {})\n"
        "    sys.stdout.flush()\nprint('all have run')\n"
    )
    done = run_program(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            program,
        ],
        timeout=LIMIT,
        cwd=ROOT,
        env={**os.environ, "TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "dump_")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("all have run") == 2, done.stdout
    assert {"dump_0", "dump_1"} <= set(os.listdir(tmp_path))


def program_and_command(page, command):
    """Returns a page's program, its command without `torchrun`, and what it prints."""
    text = BLOCKS[page, command][1]
    words = shlex.split(command.removeprefix("$ "))
    start = ["-m", "torch.distributed.run"] if words[0] == "torchrun" else []
    return BLOCKS[page, "import torch"][1], [*start, *words[1:]], text.split("\n", 1)[1]


def shown(tmp_path, page, command):
    """Runs a page's command over its program as train.py. Returns the output, and the page's."""
    program, arguments, output = program_and_command(page, command)
    (tmp_path / "train.py").write_text(program)
    done = run_program(
        [sys.executable, *arguments],
        timeout=LIMIT,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return done.stdout.replace(f"{tmp_path}/", ""), output


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_page_of_async_checks_shows_a_run(tmp_path):
    said, output = shown(
        tmp_path,
        "docs/check_async.md",
        "$ torchrun --nproc-per-node 2 -m torchcomms_pg.run --check-async train.py",
    )
    assert output in said, said


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_page_of_plans_shows_a_run(tmp_path):
    said, output = shown(
        tmp_path,
        "docs/plan.md",
        "$ python -m torchcomms_pg.plan --world-size 4096 --hosts 512x8 train.py",
    )
    assert output in said, said


@pytest.mark.slow
def test_the_page_of_tests_shows_a_run(tmp_path):
    (tmp_path / "main.py").write_text(
        BLOCKS["docs/testing.md", "from torchcomms_pg.testing import run_ranks"][1]
    )
    done = run_python(tmp_path / "main.py", PYTHONPATH=str(ROOT))
    assert done.stdout.strip() == "[None, None, None, None]", done.stdout + done.stderr


def test_the_place_of_a_barrier_is_found():
    command = "$ grep -rlw barrier csrc torchcomms_pg"
    assert ("docs/develop.md", command) in BLOCKS
    done = run_program(shlex.split(command)[1:], cwd=ROOT, stdout=subprocess.PIPE)
    named = {"operations.py", "_C.pyi", "compile_ops.py", "analysis.py"}
    assert named <= {os.path.basename(line) for line in done.stdout.splitlines()}
