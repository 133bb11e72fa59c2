"""A pipe of each rank: whoever writes into it has the rank dump its flight recorder."""

import os
import pickle
import re
import tempfile

import pytest
import torch
import torch.distributed as dist

from harness.programs import run_python
from harness.ranks import check, thread_names, wait_for
from harness.recorders import SOON, dumped_without_the_gil
from harness.stuck import keep_the_gil
from torchcomms_pg.testing.rank import receive, report

pytestmark = [pytest.mark.beyond_gloo, pytest.mark.torch_version]
VARIABLE = "TORCH_FR_DEBUG_INFO_PIPE_FILE"


def write_into(pipe):
    """As ``echo > PIPE``, which would wait where nobody reads: that raises here."""
    file = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    os.write(file, b"\n")
    os.close(file)


def operate_then_destroy():
    extra = dist.new_group()
    dist.all_reduce(torch.ones(5))
    report("operated")
    receive()
    dist.destroy_process_group(extra)
    assert os.path.exists(f"{os.environ['TEST_PIPE']}{dist.get_rank()}.pipe")
    dist.destroy_process_group()


def test_writing_into_the_pipe_of_a_rank_has_it_dump(recording, tmp_path):
    prefix = str(tmp_path / "pipe_")
    os.mkfifo(f"{prefix}1.pipe")  # left of a process that was killed
    ranks = recording(2, **{VARIABLE: prefix, "TEST_PIPE": prefix})
    ranks.start(operate_then_destroy)
    for rank in range(2):
        ranks.wait_report(rank)
    for _ in range(2):  # a writer that leaves is not the end of it
        write_into(f"{prefix}1.pipe")
        assert wait_for(lambda: os.path.exists(tmp_path / "trace_1"), SOON)
        with open(tmp_path / "trace_1", "rb") as file:
            entry = pickle.load(file)["entries"][-1]
        assert entry["profiling_name"] == "nccl:all_reduce" and entry["frames"]
        os.unlink(tmp_path / "trace_1")
    assert sorted(os.listdir(tmp_path)) == ["pipe_0.pipe", "pipe_1.pipe"]
    for rank in range(2):
        ranks.tell(rank, "go on")
    check(ranks.wait())
    assert os.listdir(tmp_path) == []


def keep_the_gil_until_dumped(pipe):
    dist.all_reduce(torch.ones(5))
    keep_the_gil(pipe)


def test_the_pipe_does_not_wait_for_the_gil(recording, tmp_path, pipe):
    env = {VARIABLE: str(tmp_path / "pipe_"), "TORCH_FR_WAIT_TIMEOUT_DUMP_MILSEC": "200"}
    ranks = recording(1, **env)
    ranks.start(keep_the_gil_until_dumped, pipe)
    with open(pipe, "rb") as holder:
        holder.read(1)  # it is held
        write_into(tmp_path / "pipe_0.pipe")
        dumped_without_the_gil(ranks, holder, tmp_path / "trace_0")


def test_the_pipe_is_gone_after_a_program_that_destroys_no_group(tmp_path):
    program = """
        import os, sys, torch, torch.distributed as dist
        import torchcomms_pg
        dist.init_process_group("torchcomms", store=dist.HashStore(), rank=0, world_size=1)
        assert os.listdir(sys.argv[1]) == ["0.pipe"]
    """
    done = run_python("-c", program, tmp_path, **{VARIABLE: f"{tmp_path}/"})
    assert done.returncode == 0, done.stderr
    assert os.listdir(tmp_path) == []


def test_a_forked_child_with_groups_of_its_own_leaves_its_parents_pipe(tmp_path):
    program = """
        import os, sys, torch, torch.distributed as dist
        import torchcomms_pg
        make = dict(backend="torchcomms", rank=0, world_size=1)
        dist.init_process_group(store=dist.HashStore(), **make)
        before = os.stat(sys.argv[1] + "/0.pipe")
        child = os.fork()
        if child == 0:
            dist.destroy_process_group()
            dist.init_process_group(store=dist.HashStore(), **make)
            dist.destroy_process_group()
            sys.exit()
        assert os.waitpid(child, 0)[1] == 0
        assert os.stat(sys.argv[1] + "/0.pipe").st_ino == before.st_ino
        print(os.getpid())
    """
    done = run_python(
        "-c", program, tmp_path, **{VARIABLE: f"{tmp_path}/", "OPENBLAS_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert f"process {done.stdout.strip()} reads the one that is there" in done.stderr


def test_without_the_variable_there_is_neither_pipe_nor_thread(recording):
    recording(1).run(no_pipe)


def no_pipe():
    dist.all_reduce(torch.ones(5))
    assert wait_for(lambda: "tcpg_monitor" in thread_names())  # a thread names itself
    assert "tcpg_dump_pipe" not in thread_names()


def test_a_file_in_the_pipes_place_is_left_alone(recording, tmp_path):
    (tmp_path / "0.pipe").write_text("kept")
    ranks = recording(1)
    ranks.run(use_a_group_without_a_pipe, str(tmp_path))
    assert re.search("cannot make the pipe .*something else", ranks.output(0))
    assert (tmp_path / "0.pipe").read_text() == "kept"


def test_a_pipe_in_a_folder_that_does_not_exist_is_a_warning(recording, tmp_path):
    ranks = recording(1)
    ranks.run(use_a_group_without_a_pipe, str(tmp_path / "none"))
    assert re.search("cannot make the pipe .*No such file", ranks.output(0))


def use_a_group_without_a_pipe(folder, user=None):
    os.environ[VARIABLE] = f"{folder}/"
    if user is not None:
        os.seteuid(user)
    try:
        group = dist.new_group()
    finally:
        if user is not None:
            os.seteuid(0)
        del os.environ[VARIABLE]
    dist.all_reduce(torch.ones(1), group=group)


@pytest.mark.skipif(os.geteuid() != 0, reason="takes a second user")
def test_the_pipe_of_another_user_is_left_alone(recording):
    # Not tmp_path, whose parents are for this user alone.
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o1777)
        os.mkfifo(f"{folder}/0.pipe")
        ranks = recording(1)
        ranks.run(use_a_group_without_a_pipe, folder, 65534)
        assert re.search("cannot make the pipe .*0.pipe: Operation not permitted", ranks.output(0))
        assert os.listdir(folder) == ["0.pipe"]
