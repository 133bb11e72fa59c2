"""The programs of examples/: each prints what its first lines say."""

import re
import shlex
import socket

import pytest
import torch

from harness import ROOT
from harness.programs import run_python

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PORT = "28100"  # the programs' own; a test takes a free one


def shown(program):
    """Returns the command of an example and the lines that it prints, by its docstring."""
    text = program.read_text().split('"""')[1]
    command, *lines = text[text.index("\n$ ") + 3 :].strip().splitlines()
    return shlex.split(command), lines


def comparable(text):
    """Leaves out how long something took, and where the checkout is."""
    return re.sub(r"\d+(\.\d+)? s\b", "N s", text).replace(f"{ROOT}/", "").strip()


@pytest.fixture
def free_port():
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return str(one.getsockname()[1])


@pytest.mark.slow
@pytest.mark.parametrize("program", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_prints_what_its_first_lines_say(program, free_port):
    command, lines = shown(program)
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
