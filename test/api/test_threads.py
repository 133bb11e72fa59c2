"""Ranks as threads of one process over a HashStore, each with a backend object of its own."""

import datetime
from concurrent.futures import ThreadPoolExecutor, as_completed

import pytest
import torch
import torch.distributed as dist

from harness.ranks import BACKEND, Ranks
from harness.values import SIZES, all_data, assert_reduced, assert_same, data

LIMIT = datetime.timedelta(seconds=20)


def make_backend(store, rank, world, name="threads"):
    if BACKEND == "gloo":
        return dist.ProcessGroupGloo(store, rank, world, LIMIT)
    import torchcomms_pg

    options = torchcomms_pg.Backend.Options()
    options._timeout = LIMIT
    options.group_name = name
    options.global_ranks_in_group = list(range(world))
    return torchcomms_pg.Backend(store, rank, world, options)


def in_threads(world, function, *args):
    """function(backend, rank, world, *args) on one thread per rank; raises the first error."""
    store = dist.HashStore()

    def run(rank):
        backend = make_backend(dist.PrefixStore("ranks", store), rank, world)
        function(backend, rank, world, *args)
        backend.shutdown()

    with ThreadPoolExecutor(world) as threads:
        for done in as_completed([threads.submit(run, rank) for rank in range(world)]):
            done.result()


def collectives(backend, rank, world):
    assert (backend.rank(), backend.size()) == (rank, world)
    for size in SIZES:
        inputs = all_data(world, size)
        tensor = inputs[rank].clone()
        backend.allreduce([tensor]).wait()
        assert_reduced(tensor, inputs)
        tensor = inputs[rank].clone()
        backend.broadcast([tensor], dist.BroadcastOptions()).wait()
        assert_same(tensor, inputs[0])
        outputs = [torch.empty(size) for _ in range(world)]
        backend.allgather([outputs], [inputs[rank]]).wait()
        for output, x in zip(outputs, inputs):
            assert_same(output, x)
    backend.barrier().wait()


def messages(backend, rank, world):
    right, left = (rank + 1) % world, (rank - 1) % world
    for size in SIZES:
        received = torch.empty(size)
        calls = [
            lambda: backend.send([data(rank, size)], right, 0).wait(),
            lambda: backend.recv([received], left, 0).wait(),
        ]
        for call in calls if rank == 0 else calls[::-1]:
            call()
        assert_same(received, data(left, size))


def two_groups(backend, rank, world, store):
    other = make_backend(dist.PrefixStore("other", store), rank, world, "other")
    first, second = torch.ones(5000), torch.full((5000,), 2.0)
    works = [backend.allreduce([first]), other.allreduce([second])]
    for work in reversed(works):
        work.wait()
    assert first[0] == world and second[0] == 2 * world
    other.shutdown()


def run_collectives(world):
    in_threads(world, collectives)


def run_messages(world):
    in_threads(world, messages)


def run_two_groups(world):
    in_threads(world, two_groups, dist.HashStore())


def run_repeatedly(world):
    for _ in range(5):
        in_threads(world, lambda backend, rank, world: backend.barrier().wait())


def make_many(backends):
    """Each thread makes objects that Python knows, while others do."""

    def run(_):
        for _ in range(backends):
            backend = make_backend(dist.HashStore(), 0, 1)
            others = [dist.BarrierOptions() for _ in range(20)]
            backend.shutdown()
            del backend, others

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(run, range(8)))


def test_many_threads_make_groups_at_once():
    with Ranks(1, init=False) as process:  # a crash stays out of pytest's process
        process.run(make_many, 1000)


BODIES = [run_collectives, run_two_groups, run_repeatedly, run_messages]


@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.parametrize("body", BODIES, ids=[body.__name__ for body in BODIES])
def test_ranks_may_be_threads_of_one_process(body, world):
    if body is run_messages and world == 1:
        pytest.skip("a rank alone sends to itself in a batch only")
    with Ranks(1, init=False) as process:  # a crash or hang stays out of pytest's process
        process.run(body, world)
