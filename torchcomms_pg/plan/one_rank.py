"""Runs the program as one rank, in this process."""

from __future__ import annotations

import os
import runpy
import sys
import traceback

from torchcomms_pg.plan import fsdp, functional, memory, rounds, values, waits, world
from torchcomms_pg.plan.program import Program
from torchcomms_pg.plan.recorder import current

# Parts of the errors of a torch without CUDA, or on a machine without a GPU.
_CUDA = ("not compiled with CUDA", "NVIDIA", "No CUDA GPUs", "CUDA driver")


def run(rank: int, size: int, per_host: int, command: list[str]) -> Program:
    """Runs ``command``, a program or ``-m`` and a module with arguments; returns its calls.

    Changes this process, which is not to be used otherwise.
    """
    world.enter(rank, size, per_host)
    values.install()
    memory.Meter()
    rounds.Rounds()
    fsdp.install()
    functional.install()
    waits.install()
    program = current().program
    try:
        _start(command)
    except SystemExit as exit:
        if isinstance(exit.code, str):
            program.error, program.code = exit.code, 1
        else:
            program.code = exit.code or 0
    except BaseException as error:
        program.code = 1
        program.error = "".join(traceback.format_exception(error))
        if any(word in str(error) for word in _CUDA):
            program.error += world.NO_CUDA.format(what="CUDA")
    return program


def _start(command: list[str]) -> None:
    if command[0] == "-m":
        sys.argv = command[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        sys.path.insert(0, os.path.dirname(os.path.abspath(command[0])))
        runpy.run_path(command[0], run_name="__main__")
