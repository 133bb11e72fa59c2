"""Ranks in which no Python thread can run."""

import contextlib
import os

from harness.rank_process import keep_the_gil, receive, report
from harness.ranks import check


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
