"""Ranks in which memory runs out in a thread that tells a failure: all hear of it all the same."""

import datetime
import time

import pytest
import torch
import torch.distributed as dist

import torchcomms_pg
from harness.comms import each_backend, make
from harness.limits import grown
from harness.ranks import connect_store, meet, pool
from harness.scarcity import failing_allocation, short_of_memory

pytestmark = [pytest.mark.beyond_gloo, pytest.mark.timeout(240)]

SOON = 12  # seconds; an operation's own deadline is later
LIMIT = 200.0  # of all scenes of a test, of which each takes 0.3 s, or 3 s if a rank is stopped


def call(comm):
    comm.all_reduce(torch.ones(1), torchcomms_pg.ReduceOp.SUM, False)


def fails(comm):
    """Returns how often an abort hook has run when two calls have raised: the second must know."""
    hooks = []
    comm.register_abort_hook(lambda: hooks.append("ran"))
    begun = time.monotonic()
    with pytest.raises((torchcomms_pg.CommError, MemoryError)):
        call(comm)
    with pytest.raises(torchcomms_pg.CommError, match="abort|timed out"):
        call(comm)
    assert time.monotonic() - begun < grown(SOON)
    return len(hooks)


def walk(args, scene, backend, threads, numbers):
    """In rank 0 one allocation fails, for each of the numbers; rank 1 aborts, or is late.

    Returns for each number how many allocations there were, and how often a hook ran.
    """
    store = connect_store(*args)  # a wait in the groups' store would keep them from it
    counts = []
    for number in numbers:
        comm = make(f"{threads} {number}", backend)
        call(comm)
        if scene == "late":
            comm.set_timeout(datetime.timedelta(seconds=0.1))
        meet(store, f"ready {number}", 2)
        if dist.get_rank() == 1 and scene == "abort":
            comm.abort()
        elif dist.get_rank() == 0:
            with failing_allocation(threads, number) as allocations:
                ran = fails(comm)
            counts.append((number, allocations.seen, ran))
        meet(store, f"over {number}", 2)
        comm.finalize()
    return counts


def on_ranks(*args):
    """Returns how many allocations there were before the failures were known, for each number."""
    ranks = pool(2, started_with=short_of_memory)
    counts, _ = ranks.run(walk, ranks.store_args(), *args, timeout=LIMIT)
    assert all(ran == 1 for *_, ran in counts), counts
    return {number: seen for number, seen, _ in counts}


@each_backend
def test_an_abort_is_known_though_an_allocation_fails_in_a_thread_that_tells_it(backend):
    seen = on_ranks("abort", backend, "tcpg_apart", range(1, 36))
    assert all(seen[number] >= number for number in range(1, 11)), seen


def test_a_timeout_is_known_though_an_allocation_fails_in_the_monitor():
    most = on_ranks("late", "shm", "tcpg_monitor", [0])[0]
    last = most - 20  # the failure is set, and the library fails
    on_ranks("late", "shm", "tcpg_monitor", [*range(1, last, 16), *range(last, most + 1)])
