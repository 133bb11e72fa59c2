"""`python -m torchcomms_pg.run --check-nccl PROGRAM` tells at the end what NCCL would not bear."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile

import pytest
import torch.distributed as dist

from debugging.test_trace import recorders
from harness import ROOT, limits
from harness.programs import run_program
from harness.ranks import wait_for
from torchcomms_pg import checked_run, env

pytestmark = pytest.mark.timeout(120)

PROGRAM = """
import sys, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, how = dist.get_rank(), sys.argv[1]
metrics = dist.new_group()
works = [
    dist.all_reduce(torch.ones(4), async_op=True, group=group)
    for group in ((None, metrics) if rank == 0 or how == "fine" else (metrics, None))
]
for work in works:
    work.wait()
dist.destroy_process_group()
if how == "fails" and rank == 0:
    sys.exit(7)
"""

SPAWNS = """
import os, sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

def rank(number, port, how):
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=number, world_size=2)
    tensor = torch.ones(3)
    if number == 0:
        dist.send(tensor, 1)
    else:
        dist.recv(tensor)
    dist.destroy_process_group()

if __name__ == "__main__":
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.start_processes(rank, (server.port, None), nprocs=2, start_method=sys.argv[1])
"""


def run(tmp_path, program, *arguments, ranks=0, name="program.py"):
    """The code, and what was printed; under torchrun for a number of ranks."""
    (tmp_path / name).write_text(program)
    torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    command = ("-m", "torchcomms_pg.run", "--check-nccl", name, *arguments)
    done = run_program(
        [sys.executable, *(torchrun if ranks else ()), *command],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return done.returncode, done.stdout


@pytest.mark.slow
def test_ranks_of_torchrun_get_one_report_and_its_code_as_documented(tmp_path):
    text = (ROOT / "docs" / "nccl_hazards.md").read_text()
    program = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    report = re.search(r"--check-nccl train\.py\n(.*?)```", text, re.DOTALL)[1]
    code, text = run(tmp_path, program, ranks=2, name="train.py")
    text = text.replace(f"{tmp_path}/", "")
    assert code == 1 and text.count(report) == 1, text
    # The line is the report's last; torchrun's follows. No variable is spoken of that is not set.
    assert report.endswith(
        "1 hazard: exit code 1 (torchrun prints a ChildFailedError for it below)\n"
    )
    assert (
        "ChildFailedError" in text.partition(report)[2] and "since torchcomms_pg.run runs" in text
    )
    ours = text[text.index("torchcomms_pg: ") :].split("Traceback")[0]  # before it torchrun speaks
    assert not re.findall(r"[A-Z]+(?:_[A-Z]+){2,}", ours), text


@pytest.mark.slow
def test_a_program_without_hazards_ends_well(tmp_path):
    code, text = run(tmp_path, PROGRAM, "fine", ranks=2)
    assert code == 0 and "No hazard for NCCL found." in text, text
    assert "no hazards: exit code 0\n" in text


@pytest.mark.slow
def test_a_program_that_fails_keeps_its_code(tmp_path):
    """Torchrun's own is 1."""
    code, text = run(tmp_path, PROGRAM, "fails", ranks=2)
    assert code == 1 and "The program ended with code 7" in text, text
    assert "1 hazard: exit code 7, the program's own (torchrun prints" in text
    assert "different orders" in text


@pytest.mark.parametrize("how", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_ranks_that_the_program_starts_are_in_the_report(tmp_path, how):
    code, text = run(tmp_path, SPAWNS, how)
    assert code == 1, text
    assert "torch's nccl refuses a receive from any rank: rank 1" in text
    assert re.search(r"recv 0->1 .* at .*program\.py:14 in rank", text), text


@pytest.fixture
def alone(monkeypatch):
    """As without torchrun; the environment is restored."""
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE", "TORCH_FR_BUFFER_SIZE"):
        monkeypatch.setenv(name, "")
    for name in ("TORCHCOMMS_PG_DUMP_AT_EXIT", "TORCHCOMM_FR_DUMP_TEMP_FILE"):
        monkeypatch.setenv(name, "")
    return monkeypatch


def be_rank_0_of(size, alone):
    """Makes this process rank 0 of a job under torchrun; returns the store of torchrun."""
    store = dist.HashStore()
    alone.setenv("RANK", "0")
    alone.setenv("WORLD_SIZE", str(size))
    alone.setattr(env, "torchrun_store", lambda: ("host", 1, 0))
    alone.setattr(checked_run, "_connect", lambda host, port, attempt: store)
    return store


@pytest.mark.parametrize("code", [0, 7])
def test_a_program_that_records_nothing_is_no_success(alone, capfd, code):
    command = [sys.executable, "-c", f"import sys; sys.exit({code})"]
    assert checked_run.run(command, checked_run.NCCL) == (code or 2)
    assert "No operation of a group of gloo or torchcomms was recorded." in capfd.readouterr().out
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_ranks_without_a_store_of_torchrun_get_an_error_with_what_to_do(alone):
    alone.setenv("RANK", "0")
    alone.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match="TORCHCOMMS_PG_DUMP_AT_EXIT=1"):
        checked_run.run([sys.executable, "-c", ""], checked_run.NCCL)


def test_ranks_that_give_nothing_are_named(alone, capfd):
    """Here rank 1 has given two parts, and rank 2 has been killed."""
    store = be_rank_0_of(3, alone)
    alone.setattr(checked_run, "_PART", 100)
    alone.setattr(checked_run, "_PATIENCE", 0.2)
    ranks = recorders(3)
    with tempfile.TemporaryDirectory() as folder:
        ranks[1].call("all_reduce").write(pathlib.Path(folder))
        pathlib.Path(folder, "dump_1").rename(pathlib.Path(folder, "rank_1"))
        checked_run._give(store, 1, pathlib.Path(folder))
    assert int(store.get("1")) > 1
    assert checked_run.run([sys.executable, "-c", ""], checked_run.NCCL) == 0
    text = capfd.readouterr().out
    assert "No word of ranks 2." in text and "ranks 0, 2: no dump" in text, text


WAITS = """
import os, pathlib, signal
pathlib.Path("pid").write_text(str(os.getpid()))
signal.pause()
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_program_ends_with_the_command(tmp_path, number):
    (tmp_path / "program.py").write_text(WAITS)
    command = [sys.executable, "-m", "torchcomms_pg.run", "--check-nccl", "program.py"]
    env = {**os.environ, "TMPDIR": str(tmp_path)}  # SIGKILL leaves the command's folder
    with subprocess.Popen(
        command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True
    ) as process:
        pid = tmp_path / "pid"
        assert wait_for(lambda: pid.is_file() and pid.read_text(), 60)
        child = int(pid.read_text())
        process.send_signal(number)
        out, _ = process.communicate(timeout=limits.grown(30))
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
    assert not out
    assert wait_for(lambda: not os.path.exists(f"/proc/{child}"), 30)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_rank_that_is_told_to_end_reports_what_there_is_unless_by_ctrl_c(alone, capfd, number):
    """torchrun sends SIGTERM when another rank has failed, here rank 1, which has given nothing."""
    be_rank_0_of(2, alone)
    alone.setattr(checked_run, "_HURRY", 0.2)
    program = f"""if True:
        import os, signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which is passed on
        os.kill(os.getppid(), {int(number)})
        os.kill(os.getpid(), signal.SIGKILL)
    """
    command = [sys.executable, "-c", program]
    assert checked_run.run(command, checked_run.NCCL) == 128 + signal.SIGKILL
    out = capfd.readouterr().out
    if number == signal.SIGINT:
        assert not out
    else:
        assert "The program ended with code 137" in out and "No word of ranks 1." in out, out


def test_a_ring_is_as_large_as_the_user_says(alone):
    env.set_dump_at_exit("/x/rank_")
    assert (env.recorder_size(), env.dump_at_exit()) == (100_000, True)
    assert env.dump_prefix() == "/x/rank_"
    alone.setenv("TORCH_FR_BUFFER_SIZE", "")
    alone.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "7")
    env.set_dump_at_exit("/x/rank_")
    assert env.recorder_size() == 7
