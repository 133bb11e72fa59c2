"""Ranks in which no Python thread can run."""

import contextlib
import ctypes
import os

from harness.ranks import check
from torchcomms_pg.testing.rank import receive, report


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


def _joins_and_keeps_it(join, args, world, pipes):
    join(args, world)
    report("ready")
    receive()
    keep_the_gil(pipes[int(os.environ["RANK"])])


@contextlib.contextmanager
def all_keep_the_gil(ranks, join, folder):
    """The ranks call `join`, and then keep the GIL until the block ends; then they return."""
    pipes = [str(folder / f"pipe{rank}") for rank in range(ranks.world)]
    for pipe in pipes:
        os.mkfifo(pipe)
    ranks.start(_joins_and_keeps_it, join, ranks.store_args(), ranks.world, pipes)
    for rank in range(ranks.world):
        ranks.wait_report(rank)
        ranks.tell(rank, "go")
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(open(pipe, "rb")) for pipe in pipes]
        yield
        for each in held:
            each.read()
    check(ranks.wait())
