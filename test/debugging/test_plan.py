"""A plan of many ranks, from some of them: what it finds, and what it does not."""

import json
import re
from pathlib import Path

import pytest
import torch

import emulated
from debugging import plan_scenes, planned_calls
from harness.programs import run_python
from torchcomms_pg.trace import load

FAULTS = {  # the kind of what is found, and some of the words
    "one more send": ("alone", "sends 2 messages to rank 8"),
    "size of a message": ("sizes", "other sizes or dtypes"),
    "off mesh": ("mesh", "ranks 1-2 of group"),
    "order of groups": ("groups", "make different groups"),
    "conditional": ("missing", "rank 6 of group"),
    "crossed": ("order", "in different orders"),
    "uneven": ("mismatch", "called different things"),
    "dtype": ("mismatch", "BFloat16"),
    "root": ("mismatch", "root"),
    "reduction": ("mismatch", "MAX"),
    "ring": ("messages", "need each other crosswise"),
    "skipped": ("missing", "ranks 8-11 of group 0 (default_pg)"),
}
EACH = ("conditional",)  # found only if each rank is run


def lines_of(fault):
    """Returns the numbers of the lines that a report of a fault has to show."""
    lines = Path(plan_scenes.STEP).read_text().splitlines()
    marks = {number: line.rpartition("  # ")[2] for number, line in enumerate(lines, 1)}
    return {number for number, mark in marks.items() if fault in mark.split(", ")}


@pytest.fixture(scope="module")
def answers():
    faults = ["none", *(("+" if fault in EACH else "") + fault for fault in FAULTS)]
    run = run_python(plan_scenes.__file__, *faults)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_a_step_without_a_fault_raises_no_alarm(answers):
    answer = answers["none"]
    assert (answer["found"], answer["doubts"], answer["exit_code"]) == ([], [], 0)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_with_its_lines(answers, fault):
    kind, words = FAULTS[fault]
    answer = answers[fault]
    assert answer["exit_code"] == 1
    assert {each["kind"] for each in answer["found"]} == {kind}, answer["found"]
    text = "\n".join(line for each in answer["found"] for line in each["text"])
    assert words in text
    shown = {int(number) for number in re.findall(r"planned_step\.py:(\d+)", text)}
    assert lines_of(fault) and shown >= lines_of(fault), text


def run_plan(*arguments):
    return run_python("-m", "torchcomms_pg.plan", *arguments)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["early", "late"])
def test_an_interleaved_schedule_hangs_that_receives_as_late_as_it_may(order):
    program = Path(__file__).with_name("planned_pipeline.py")
    run = run_plan("--world-size", "2", program, order)
    if order == "early":
        assert run.returncode == 0 and "No hazard found." in run.stdout, run.stdout + run.stderr
        return
    assert run.returncode == 1, run.stdout + run.stderr
    first = run.stdout.partition("1. ")[2].partition("rule:")[0]
    assert "need each other crosswise" in first, run.stdout
    for side in ("rank 0: send 0->1", "rank 1: send 1->0"):
        assert re.search(rf"{side} .* at .*planned_pipeline\.py:\d+", first), run.stdout


def test_cuda_without_a_device_is_refused_with_the_way_to_say_cpu(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("this torch has a CUDA device")
    program = tmp_path / "train.py"
    program.write_text("import torch\nx = torch.ones(2, device='cuda')\n")
    run = run_plan("--world-size", "8", "--ranks", "0", program)
    assert run.returncode == 1
    assert "give it cpu or meta" in run.stdout, run.stdout + run.stderr


@pytest.mark.skipif(bool(emulated.available()), reason=emulated.available())
def test_cuda_is_planned_where_the_emulated_cuda_is_built(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('nccl')\n"
        "x = torch.ones(6, device='cuda')\n"
        "dist.all_reduce(x)\n"
        "assert x.cpu().tolist() == [1] * 6\n"
    )
    arguments = ("--world-size", "64", "--json", tmp_path / "plan.json", program)
    run = run_python("-m", "torchcomms_pg.plan", *arguments, **emulated.environment())
    assert run.returncode == 0 and "No hazard found." in run.stdout, run.stdout + run.stderr
    (volume,) = json.loads((tmp_path / "plan.json").read_text())["volume"]
    assert (volume["operation"], volume["bytes_in_hosts"]) == ("all_reduce", 2 * 24 * 63 * 7 // 8)


MEMORY = """
import os, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("nccl")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
rank = dist.get_rank()
with torch.device("meta"):
    if rank == 0:
        model = torch.nn.Linear(10, 20)
        optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    elif rank == 1:
        model = torch.nn.Linear(10, 20, dtype=torch.bfloat16)
        model.bias.requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, lr=0.1, foreach=False)
    else:
        model = fully_shard(torch.nn.Linear(8, 16), mesh=mesh["dp"])
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for _ in range(2):
        dtype = torch.bfloat16 if rank == 1 else None
        model(torch.zeros(3, 10 if rank < 2 else 8, dtype=dtype)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.slow
def test_memory_is_that_of_parameters_gradients_and_states_at_the_steps(tmp_path):
    program, answer = tmp_path / "train.py", tmp_path / "plan.json"
    program.write_text(MEMORY)
    run = run_plan("--world-size", "4", "--ranks", "all", "--json", answer, program)
    assert run.returncode == 0, run.stdout + run.stderr
    of = {each.pop("ranks"): each for each in json.loads(answer.read_text())["memory"]}
    linear, weight, shard = 220 * 4, 200 * 2, 72 * 4
    assert {ranks: tuple(each.values()) for ranks, each in of.items()} == {
        "rank 0": (
            linear,
            linear,
            2 * linear + 2 * 4,
        ),  # and 4 bytes of steps for each tensor
        "rank 1": (220 * 2, weight, weight),  # the bias is frozen
        "ranks 2-3": (shard, shard, 2 * shard + 2 * 4),
    }


def test_a_program_without_groups_is_told_apart(tmp_path):
    program = tmp_path / "train.py"
    program.write_text("pass\n")
    run = run_plan("--world-size", "8", program)
    assert run.returncode == 2 and "No operation of a group was called" in run.stdout, run.stderr


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ("GPipe", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"))
def test_a_step_in_four_dimensions_has_no_finding_under_any_schedule(schedule):
    mesh = ("--pp", "2", "--dp", "2", "--cp", "2", "--tp", "2")
    program = ("examples/plan.py", *mesh, "--layers", "1", "--schedule", schedule)
    run = run_plan("--world-size", "16", "--hosts", "2x8", *program)
    assert run.returncode == 0 and "16 were run" in run.stdout, run.stdout + run.stderr
    assert "No hazard found." in run.stdout and "dp_cp" in run.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_plan_of_eight_ranks_has_the_calls_of_a_run(tmp_path):
    run = run_python(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=8"),
        planned_calls.__file__,
        TORCHCOMMS_PG_AS_GLOO="1",
        TORCHCOMMS_PG_DUMP_AT_EXIT="1",
        TORCH_FR_DUMP_TEMP_FILE=str(tmp_path / "rank_"),
    )
    assert run.returncode == 0, run.stderr
    dumps = load(tmp_path, "rank_")
    planned = run_python(plan_scenes.__file__, "--calls", planned_calls.__file__)
    assert planned.returncode == 0, planned.stderr
    for rank, calls in enumerate(json.loads(planned.stdout)):
        assert calls == plan_scenes.calls_of(dumps[rank]), rank
