"""The programs of examples/: each prints what its first lines say."""

import re
import runpy
import shlex
import socket

import pytest
import torch

from harness import ROOT
from harness.programs import run_python

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PICTURES = runpy.run_path(str(ROOT / "tools/_pictures.py"), run_name="pictures")
PORT = "28100"  # the programs' own; a test takes a free one


def shown(program):
    """Returns the command of an example and the lines that it prints, by its docstring."""
    text = program.read_text().split('"""')[1]
    command, *lines = text[text.index("\n$ ") + 3 :].strip().splitlines()
    return shlex.split(command), lines


def pictured(program):
    """Returns the lines of README's picture of a hang, if it shows this example."""
    lines = [line for _, line in PICTURES["lines_of"](PICTURES["HANG"].read_text())]
    assert lines[0] == f"$ {PICTURES['COMMAND']}"
    return lines[1:] if lines[0].endswith(f"/{program.name}") else []


def comparable(text):
    """Leaves out how long something took, where the checkout is, and which rank prints."""
    text = re.sub(r"\d+(\.\d+)? s\b", "N s", text).replace(f"{ROOT}/", "")
    return re.sub(r"(\[| on )rank \d", r"\1rank N", text).strip()


@pytest.fixture
def free_port():
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return str(one.getsockname()[1])


@pytest.mark.slow
@pytest.mark.parametrize("program", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_prints_what_its_first_lines_say(program, free_port):
    command, lines = shown(program)
    lines += pictured(program)
    variables = {}
    while "=" in command[0]:
        name, _, value = command.pop(0).partition("=")
        variables[name] = value.replace(PORT, free_port)
    if "TORCHCOMMS_PG_WATCH" in variables and torch.__version__ < "2.14":
        pytest.skip("groups of other backends are watched from torch 2.14 on")
    starter = command.pop(0)
    assert starter in ("torchrun", "python")
    start = ("-m", "torch.distributed.run") if starter == "torchrun" else ()
    for _ in range(3):  # a rank that gets no core in time is not waited for
        run = run_python(*start, *command, **variables)
        said = [comparable(line) for line in (run.stdout + run.stderr).splitlines()]
        missing = [line for line in lines if not any(comparable(line) in each for each in said)]
        if not missing:
            break
    assert not missing, run.stdout + run.stderr


def test_the_pictures_are_what_their_tool_draws():
    hang = PICTURES["HANG"].read_text()
    assert PICTURES["draw_hang"](PICTURES["lines_of"](hang)) == hang
    table = PICTURES["read_table"]((ROOT / "README.md").read_text())
    assert PICTURES["draw_speed"](*table) == PICTURES["SPEED"].read_text(), "tools/pictures speed"


def test_the_picture_of_a_hang_shows_the_whole_verdict_of_one_rank():
    whole = ["[rank 2] torchcomms_pg: verdict on group '0'", "  rank 1: in line 3"]
    other = ["[rank 0] torchcomms_pg: verdict on group '0' (rank 2 prints the rest)"]
    over = ["[rank 0] torchcomms_pg: the verdict is over", "[rank 2] torchcomms_pg: it is over"]
    told = [(0.0, line) for line in ["$ torchrun", "W1129 torch", *other, *whole, *over]]
    assert [line for _, line in PICTURES["select"](told)] == ["$ torchrun", *whole, over[1]]
