"""What ``import torch`` calls: serves groups of the name ``gloo``, or watches those of any backend.

Apart from ``torchcomms_pg``, whose import takes the extension, since every ``import torch`` of an
environment in which torchcomms_pg is installed comes by here.
"""

import os
import sys

# What does not happen where the import fails, by the variable that asks for it.
WANTED = {
    "TORCHCOMMS_PG_AS_GLOO": "groups of the name gloo run over Gloo all the same",
    "TORCHCOMMS_PG_WATCH": "no group is watched",
}


def load() -> None:
    """Imports torchcomms_pg where one of the variables is set; torch calls it at its import.

    The import does the rest. Whatever is wrong with it is one line on the stderr of rank 0, and
    the program goes on without.
    """
    wanted = [name for name in WANTED if os.environ.get(name)]
    if not wanted:
        return
    try:
        import torchcomms_pg  # noqa: F401
    except Exception as error:
        if os.environ.get("RANK", "0") == "0":
            for name in wanted:
                print(f"torchcomms_pg: {name} is set, and {WANTED[name]}: {error}", file=sys.stderr)
