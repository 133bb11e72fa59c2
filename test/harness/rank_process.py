"""What tests call in a rank beside torchcomms_pg.testing.rank, which serves it: see ranks.py."""

import ctypes
import faulthandler
import os
import signal

from torchcomms_pg.testing import rank
from torchcomms_pg.testing.rank import receive, report
from torchcomms_pg.testing.zygote import die_with_parent

__all__ = ["BACKEND", "die_with_parent", "keep_the_gil", "receive", "report", "serve"]

BACKEND = os.environ.get("TEST_BACKEND", "torchcomms")


def keep_the_gil(pipe):
    """Called in a rank: keeps the GIL until a reader has read the whole content of the pipe.

    A reader that can read a byte knows that the GIL is held.
    """
    # More than a pipe holds. CDLL would release the GIL.
    libc, more = ctypes.PyDLL(None), 1 << 20
    libc.fopen.restype = ctypes.c_void_p
    file = ctypes.c_void_p(libc.fopen(os.fsencode(pipe), b"w"))
    libc.fwrite(bytes(more), 1, more, file)  # continues after a stop, which cuts write() short
    libc.fclose(file)


def serve(connection):
    """Is the work of a rank that no zygote has forked: does what `rank.serve` does."""
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    return rank.serve(connection)
