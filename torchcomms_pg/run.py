"""``python -m torchcomms_pg.run PROGRAM ARGS``: runs its groups of the name gloo over torchcomms.

Does the same as ``TORCHCOMMS_PG_AS_GLOO=1 python PROGRAM ARGS``, for users who can give a command
more easily than a variable. PROGRAM may also be ``-m MODULE``. Under torchrun the command is
``torchrun -m torchcomms_pg.run PROGRAM ARGS``. With ``--check-nccl`` the command reports at the end
what would go wrong over NCCL, with ``--check-async`` which tensors of asynchronous operations are
used too early. With ``--watch`` it does the same as ``TORCHCOMMS_PG_WATCH=1`` instead, and leaves
the groups unchanged.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import os
import sys

from torchcomms_pg import _compat, checked_run, env

USAGE = (
    "python -m torchcomms_pg.run [--check-nccl | --check-async | --watch] PROGRAM [ARGS], "
    "or -m MODULE [ARGS]"
)


def main() -> None:
    """Replaces this process by the program; with a check, runs it and exits with its code."""
    arguments = sys.argv[1:]
    options = _parser().parse_args([*itertools.takewhile(_is_option, arguments)])
    program = [*itertools.dropwhile(_is_option, arguments)]
    if not program:
        raise SystemExit(f"usage: {USAGE}")
    if env.read("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        raise SystemExit(
            "torchcomms_pg.run: TORCH_DEVICE_BACKEND_AUTOLOAD is 0, which keeps torch from loading "
            "torchcomms_pg in the program; unset it"
        )
    if not importlib.metadata.entry_points(group="torch.backends", name="torchcomms_pg"):
        raise SystemExit(
            "torchcomms_pg.run: torchcomms_pg is imported from a folder, and in the program torch "
            "finds only what is installed; see docs/install.md"
        )
    try:
        _compat.extension(importlib.metadata.version("torch"))
    except importlib.metadata.PackageNotFoundError:
        pass  # without torch the program says so; a torch on PYTHONPATH may have no metadata
    except ImportError as error:
        raise SystemExit(f"torchcomms_pg.run: {error}") from None
    (env.set_watch if options.watch else env.set_as_gloo)()
    flags = sys.orig_argv[1 : -len(arguments) - 2]  # the interpreter's flags, before "-m MODULE"
    command = [sys.executable, *flags, *program]
    if options.check_nccl or options.check_async:
        check = checked_run.NCCL if options.check_nccl else checked_run.ASYNC
        raise SystemExit(checked_run.run(command, check))
    os.execv(sys.executable, command)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torchcomms_pg.run", usage=USAGE, description=(__doc__ or "").split("\n")[0]
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--watch",
        action="store_true",
        help="say which rank holds up the others, over any backend. See docs/watch.md",
    )
    what.add_argument(
        "--check-nccl",
        action="store_true",
        help="record every operation, and print at the end what would hang, be refused or give "
        "other data over NCCL; the code is then 1. See docs/nccl_hazards.md",
    )
    what.add_argument(
        "--check-async",
        action="store_true",
        help="end asynchronous operations late, and print at the end which tensors are used too "
        "early; the code is then 1. See docs/check_async.md",
    )
    return parser


def _is_option(argument: str) -> bool:
    return argument.startswith("--") or argument == "-h"


if __name__ == "__main__":
    main()
