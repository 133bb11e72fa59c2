"""Lines of Python for the report."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

from torchcomms_pg.diagnosis import python_stacks

_PACKAGE = str(Path(__file__).parents[1])


def here() -> str:
    """Returns the calling thread's line of the program, or of a library and of the program."""
    return python_stacks.place(sys._getframe(1))


def in_compiled_code() -> bool:
    """Returns whether the innermost code outside torch is what torch.compile has made."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if "torchinductor_" in name or name.startswith("<eval_with_key>"):
            return True
        if not name.startswith(_PACKAGE) and "/torch/" not in name:
            return False
        frame = frame.f_back
    return False
