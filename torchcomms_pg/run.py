"""``python -m torchcomms_pg.run PROGRAM ARGS``: runs its groups of the name gloo over torchcomms.

The same as ``TORCHCOMMS_PG_AS_GLOO=1 python PROGRAM ARGS``, where it is easier to say: PROGRAM may
also be ``-m MODULE``, and under torchrun it is ``torchrun -m torchcomms_pg.run PROGRAM ARGS``.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys

from torchcomms_pg import env

USAGE = "usage: python -m torchcomms_pg.run PROGRAM [ARGS], or -m MODULE [ARGS]"


def main() -> None:
    """Replaces this process by the program's; does not return."""
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        raise SystemExit(USAGE)
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
    env.set_as_gloo()
    arguments = sys.argv[1:]
    flags = sys.orig_argv[1 : -len(arguments) - 2]  # of the interpreter; without this module
    os.execv(sys.executable, [sys.executable, *flags, *arguments])


if __name__ == "__main__":
    main()
