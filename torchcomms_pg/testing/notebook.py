"""The cell magic ``%%ranks``: a notebook's cell runs on ranks, whose output is shown by rank."""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import itertools
import linecache
import shlex
from typing import Any

from torchcomms_pg.testing.calls import RanksError, run_ranks

_names: dict[str, Any] = {"__name__": "__main__"}  # of this rank's cells
_numbers = itertools.count(1)


def ranks(line: str, cell: str) -> None:
    """Runs a cell in processes that are the ranks of one fresh group, and prints their output.

    A cell sees the names of earlier cells with as many ranks, but not the notebook's own names.
    A rank that fails is printed with its traceback; the next cell has new ranks without names.

    Args:
        line: what follows ``%%ranks``: the number of ranks, and the options --backend, --timeout
            and --limit, with the meaning of `run_ranks`.
        cell: the code.
    """
    parser = argparse.ArgumentParser(prog="%%ranks", exit_on_error=False, add_help=False)
    parser.add_argument("n", type=int)
    parser.add_argument("--backend", default="torchcomms")
    parser.add_argument("--timeout", type=float, default=5.0)
    parser.add_argument("--limit", type=float, default=600.0)
    try:
        options = vars(parser.parse_args(shlex.split(line)))
    except (argparse.ArgumentError, SystemExit):
        print(f"%%ranks {line}: wanted %%ranks N, with --backend, --timeout or --limit")
        return
    try:
        outputs = run_ranks(run_cell, options.pop("n"), cell, f"cell-{next(_numbers)}", **options)
    except RanksError as error:
        print(error)
        return
    for rank, output in enumerate(outputs):
        for text in output.splitlines():
            print(f"[rank {rank}] {text}")


def run_cell(source: str, name: str) -> str:
    """Called in a rank: runs a cell, and returns what it has printed and its last value.

    Args:
        source: the code.
        name: stands for the cell's file in tracebacks.
    """
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            module = ast.parse(source, name)
            last = module.body.pop() if module.body else None
            if last is not None and not isinstance(last, ast.Expr):
                module.body.append(last)
            exec(compile(module, name, "exec"), _names)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), name, "eval"), _names)
                if value is not None:
                    print(repr(value))
    except BaseException as error:
        if printed.getvalue():
            error.add_note(f"printed before:\n{printed.getvalue()}")
        raise
    return printed.getvalue()
