"""Tests of distributed programs: ranks in pytest, and functions on ranks outside of it.

`run_ranks` calls a function on warm ranks. In pytest the mark ``@pytest.mark.ranks(4)`` runs a test
in four of them, and in a notebook ``%load_ext torchcomms_pg.testing`` brings the cell magic
``%%ranks 4``. docs/testing.md has the rest.
"""

from __future__ import annotations

from typing import Any

from torchcomms_pg.testing.calls import RanksError, run_ranks

__all__ = ["RanksError", "load_ipython_extension", "run_ranks"]


def load_ipython_extension(shell: Any) -> None:
    """Makes the cell magic ``%%ranks`` known; ``%load_ext torchcomms_pg.testing`` calls it.

    Args:
        shell: IPython's shell.
    """
    from torchcomms_pg.testing.notebook import ranks

    shell.register_magic_function(ranks, "cell", "ranks")
