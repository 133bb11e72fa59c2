"""What ``import torch`` calls: serves groups of the name ``gloo`` where the environment says so.

Apart from ``torchcomms_pg``, whose import takes the extension, since every ``import torch`` of an
environment in which torchcomms_pg is installed comes by here.
"""

import os
import sys


def load() -> None:
    """Imports torchcomms_pg where TORCHCOMMS_PG_AS_GLOO is set; torch calls it at its import.

    The import does the rest. Whatever is wrong with it is one line on the stderr of rank 0, and
    the program goes on over Gloo.
    """
    if not os.environ.get("TORCHCOMMS_PG_AS_GLOO"):
        return
    try:
        import torchcomms_pg  # noqa: F401
    except Exception as error:
        if os.environ.get("RANK", "0") == "0":
            print(
                "torchcomms_pg: TORCHCOMMS_PG_AS_GLOO is set, and groups of the name gloo run over "
                f"Gloo all the same: {error}",
                file=sys.stderr,
            )
