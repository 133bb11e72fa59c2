"""`--check-async` ends operations late, and tells what uses their tensors too early."""

import inspect
import json
import os
import re
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from debugging import early_uses
from harness import ROOT
from harness.comms import torchcomms
from harness.programs import run_program
from torchcomms_pg import _C, check_async
from torchcomms_pg.check_async import checker

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module", autouse=True)
def group():
    torchcomms()
    dist.init_process_group("torchcomms", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def checked(program, *arguments):
    """Returns the findings of a program."""
    check_async.start()
    try:
        program(*arguments)
    finally:
        findings = check_async.finish()
    return findings


def lines(program, mark):
    """Returns where the lines with a mark are, as findings name them."""
    source, first = inspect.getsourcelines(program)
    return {first + at for at, line in enumerate(source) if line.rstrip().endswith(f"# {mark}")}


def line_of(what):
    return int(re.search(r"early_uses\.py:(\d+) in", what[1])[1])


SLOW = {"pytorch issue 180614"}  # it compiles C++


@pytest.mark.parametrize(
    ("kind", "program"),
    [
        *(pytest.param(*each, id=name) for name, each in early_uses.faults.items()),
        *(
            pytest.param(*each, id=where, marks=[pytest.mark.slow] if where in SLOW else [])
            for where, each in early_uses.threads.items()
        ),
    ],
)
def test_a_use_that_is_too_early_is_found_in_the_first_run(kind, program):
    findings = checked(program)
    assert {finding.kind for finding in findings.found} == {kind}, f"{findings}"
    finding = findings.found[0]
    assert line_of(finding.issue) in lines(program, "issue"), f"{finding}"
    assert line_of(finding.then) in lines(program, "then"), f"{finding}"


@pytest.mark.parametrize("program", early_uses.fine.values(), ids=early_uses.fine)
def test_a_program_that_waits_is_not_accused_and_gets_its_results(program):
    findings = checked(program)
    assert not findings.found, f"{findings}"
    assert findings.operations


def test_nine_public_threads_have_a_program():
    assert len(early_uses.threads) == 9


def test_an_operation_of_torchcomm_is_checked():
    comm = torchcomms().new_comm("shm", "cpu", "c", rank=0, size=1, store=dist.HashStore())

    def program():
        for issue in (
            lambda tensor: comm.all_reduce(tensor, torchcomms().ReduceOp.SUM, True),
            lambda tensor: comm.broadcast(tensor, 0, True),
        ):
            tensor = torch.ones(3)
            work = issue(tensor)
            tensor + 1
            work.wait()
            assert work.result()[0] is tensor and tensor.tolist() == [1, 1, 1]
        batch, output = comm.batch_op_create(), torch.zeros(3)
        batch.send(tensor, 0)
        batch.recv(output, 0)
        work = batch.issue(async_op=True)
        tensor.add_(1)
        work.wait_blocking()
        assert output.tolist() == [1, 1, 1]

    findings = checked(program).found
    comm.finalize()
    assert [each.kind for each in findings] == ["read", "input"], list(map(str, findings))
    assert findings[0].issue[0] == "all_reduce (3 x float32) of group 'c'"
    assert findings[1].issue[0] == "send (3 x float32) of group 'c'"


def test_a_group_launch_that_is_cancelled_has_no_early_uses():
    comm = torchcomms().new_comm("shm", "cpu", "g", rank=0, size=1, store=dist.HashStore())

    def program():
        tensor = torch.ones(3)
        with pytest.raises(KeyError), comm.group():
            comm.send(tensor, 0, True)
            raise KeyError
        tensor.add_(1)

    findings = checked(program)
    comm.finalize()
    assert findings.operations == 1 and not findings.found, f"{findings}"


def test_an_error_of_the_operation_is_raised_as_without_the_check():
    def program():
        with pytest.raises((RuntimeError, ValueError)):
            dist.all_gather([torch.empty(3)], torch.ones(4), async_op=True)
        tensor = torch.ones(4)
        tensor + 1

    assert not checked(program).found


def test_a_finding_is_in_the_report_once_with_its_number():
    def program():
        for _ in range(5):
            early_uses.an_output_is_read()

    (finding,) = checked(program).found
    assert finding.times == 5
    text = str(finding).replace(f"{ROOT}/", "")
    issue, then = (lines(early_uses.an_output_is_read, mark).pop() for mark in ("issue", "then"))
    assert text == (
        "rank 0 reads the output of an all_reduce before its end\n"
        "  rank 0: all_reduce (4 x float32) of group 0 (default_pg)"
        f"  at test/debugging/early_uses.py:{issue} in an_output_is_read\n"
        "          then aten.add.Tensor reads it"
        f"  at test/debugging/early_uses.py:{then} in an_output_is_read\n"
        "  without the check: the operation's result, what was there before, or both mixed\n"
        "  instead: wait first, for the work of each operation whose output is read\n"
        "  rule: torch.distributed's documentation, "
        '"Synchronous and asynchronous collective operations": the output is to be used after '
        "wait()\n"
        "  4 more times at these lines"
    )


def test_findings_of_ranks_become_one():
    def of(rank):
        found = check_async.Finding("read", [rank], ("all_reduce", "a.py:1"), ("add", "a.py:2"))
        return check_async.Findings([found], 3)

    parts = [
        check_async.Findings.from_dict(json.loads(json.dumps(of(n).as_dict()))) for n in (1, 0)
    ]
    whole = check_async.merged(parts)
    (finding,) = whole.found
    assert (finding.ranks, finding.times, whole.operations) == ([1, 0], 2, 6)
    assert str(finding).startswith("ranks 0, 1 read the output of an all_reduce")


def test_operators_that_touch_no_operation_in_flight_do_not_pass_python(monkeypatch):
    shown, seen = checker._Mode.__torch_dispatch__, []

    def noting(mode, operator, *args):
        seen.append(str(operator))
        return shown(mode, operator, *args)

    monkeypatch.setattr(checker._Mode, "__torch_dispatch__", noting)

    def program():
        tensor, other = torch.ones(4), torch.ones(4, requires_grad=True)

        def tiny_operators():
            for _ in range(10):
                (torch.empty(4).fill_(1) + other).view(2, 2).sum().backward()

        tiny_operators()
        assert not seen
        work = dist.all_reduce(tensor, async_op=True)
        seen.clear()
        tiny_operators()
        assert not seen
        tensor + 1
        assert seen == ["aten.add.Tensor"]
        work.wait()
        seen.clear()
        tensor + 1
        assert not seen

    assert [finding.kind for finding in checked(program).found] == ["read"]


def calls_of_python(program):
    """Returns how many functions of Python a program calls."""
    calls = []
    program()  # fills caches
    sys.setprofile(lambda frame, event, argument: calls.append(event) if event == "call" else None)
    try:
        program()
    finally:
        sys.setprofile(None)
    return len(calls)


@pytest.mark.parametrize("name", ("all_reduce", "all_gather_into_tensor", "TorchComm"))
def test_an_operation_and_its_wait_call_six_functions_of_python_more_than_without(name):
    def program():
        if name == "TorchComm":
            comm.all_reduce(tensors[0], dist.ReduceOp.SUM, True).wait()
        else:
            getattr(dist, name)(*tensors, async_op=True).wait()

    def compare():
        with_check.append(calls_of_python(program))

    comm = torchcomms().new_comm("shm", "cpu", "t", rank=0, size=1, store=dist.HashStore())
    tensors, with_check = [torch.ones(1000) for _ in range(1 + (name != "all_reduce"))], []
    without = calls_of_python(program)
    findings = checked(compare)
    assert findings.operations == 2 and not findings.found
    assert with_check[0] - without <= 6
    comm.finalize()


def test_an_operation_that_has_ended_leaves_nothing():
    def program():
        for _ in range(3):
            dist.all_reduce(tensor, async_op=True).wait()
        left.append(_C.any_flights())
        works.append(dist.all_reduce(tensor, async_op=True))
        left.append(_C.any_flights())
        works.pop().wait()
        left.append(_C.any_flights())

    tensor, left, works = torch.ones(4), [], []
    checked(program)
    assert left == [False, True, False]


def test_an_early_use_is_found_below_other_modes():
    class Passing(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            passed.append(str(operator))
            return operator(*args, **(kwargs or {}))

    def program():
        tensor = torch.ones(4)
        with Passing(), Passing():
            work = dist.all_reduce(tensor, async_op=True)
            passed.clear()
            tensor + 1
        work.wait()

    passed = []
    assert [finding.kind for finding in checked(program).found] == ["read"]
    assert passed == ["aten.add.Tensor"] * 2


def test_nothing_is_left_after_the_end():
    thread, future = vars(torch.Tensor).get("tolist"), torch._C.Future.wait
    checked(early_uses.a_wait)
    assert vars(torch.Tensor).get("tolist") is thread and torch._C.Future.wait is future
    with pytest.raises(RuntimeError, match=r"call start\(\) first"):
        check_async.finish()
    check_async.start()
    with pytest.raises(RuntimeError, match=r"call finish\(\) first"):
        check_async.start()
    check_async.finish()
    tensor = torch.ones(3)
    dist.all_reduce(tensor, async_op=True)
    assert (tensor + 1).tolist() == [2, 2, 2]


def test_a_work_that_is_in_flight_at_the_end_of_the_check_stays_valid():
    tensor, works = torch.ones(3), []
    checked(lambda: works.append(dist.all_reduce(tensor, async_op=True)))
    works[0].wait()
    assert tensor.tolist() == [1, 1, 1]


def test_waiting_for_a_parents_work_is_found():
    def program():
        work = dist.all_reduce(torch.ones(3), async_op=True)
        work.wait()
        work.deliveries[0].flight.process += 1  # as in a forked child
        work.wait()

    assert [each.kind for each in checked(program).found] == ["process"]


def test_a_lost_result_of_compiled_code_is_found(monkeypatch):
    monkeypatch.setattr(checker, "in_compiled_code", lambda: True)
    tensor, group = torch.ones(3), dist.group.WORLD.group_name
    lost = checked(torch.ops._c10d_functional.all_reduce, tensor, "sum", group)
    assert [each.kind for each in lost.found] == ["lost"]


PROGRAM = """
import os, sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, how = dist.get_rank(), sys.argv[1]
tensor = torch.full((4,), rank + 1.0)
work = dist.all_reduce(tensor, async_op=True)
if how == "early":
    tensor.sum()
work.wait()
assert tensor.tolist() == [3.0] * 4
if how == "killed":
    tensor.sum()
    dist.all_reduce(tensor, async_op=True)
    tensor.sum()
    os.kill(os.getpid(), 9)
dist.destroy_process_group()
"""


def run(tmp_path, *command, ranks=2):
    (tmp_path / "train.py").write_text(PROGRAM)
    torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    done = run_program(
        [sys.executable, *torchrun, "-m", "torchcomms_pg.run", "--check-async", *command],
        cwd=tmp_path,
        env={**os.environ, "TORCHCOMMS_PG_STATUS": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return done.returncode, done.stdout


@pytest.mark.slow
def test_ranks_of_torchrun_get_one_report_and_its_code(tmp_path):
    code, text = run(tmp_path, "train.py", "early")
    assert code == 1, text
    assert text.count("torchcomms_pg.run --check-async:") == 1, text
    assert "1. ranks 0, 1 read the output of an all_reduce before its end" in text, text
    assert "then aten.sum.default reads it  at train.py:11 in <module>" in text, text
    assert "1 more times at these lines" in text, text


@pytest.mark.slow
def test_a_program_without_findings_ends_well(tmp_path):
    code, text = run(tmp_path, "train.py", "fine")
    assert code == 0 and "No early use in 2 asynchronous operations found." in text, text


@pytest.mark.slow
def test_a_killed_program_has_reported_its_findings(tmp_path):
    code, text = run(tmp_path, "train.py", "killed")
    assert code == 1 and "The program ended with code 137" in text, text
    assert "read the output of an all_reduce before its end" in text, text


@pytest.mark.slow
def test_a_folder_of_findings_has_the_same_report(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.replace("[3.0]", "[1.0]"))
    prefix = tmp_path / "rank_"
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    chosen = {"TORCHCOMMS_PG_AS_GLOO": "1", "TORCHCOMMS_PG_CHECK_ASYNC": str(prefix)}
    run_program([sys.executable, str(program), "early"], env={**os.environ, **place, **chosen})
    report = [sys.executable, "-m", "torchcomms_pg.check_async", str(tmp_path)]
    done = run_program(report, stdout=subprocess.PIPE)
    assert done.returncode == 1 and "rank 0 reads the output of an all_reduce" in done.stdout
