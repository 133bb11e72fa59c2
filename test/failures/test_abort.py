"""Abort, shutdown and destroy: blocked callers are released, later calls say why they fail."""

import contextlib
import re
import threading
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
import torch
import torch.distributed as dist

from harness.comms import each_backend, make
from harness.ranks import connect_store, pool, time_limit

pytestmark = pytest.mark.beyond_gloo
CPU = torch.device("cpu")
SOON = 15.0

LATER_CALLS = {
    "all_reduce": lambda g, w: dist.all_reduce(torch.ones(4), group=g),
    "broadcast": lambda g, w: dist.broadcast(torch.ones(4), 0, group=g),
    "reduce": lambda g, w: dist.reduce(torch.ones(4), 0, group=g),
    "all_gather": lambda g, w: dist.all_gather_into_tensor(torch.ones(w), torch.ones(1), group=g),
    "reduce_scatter": lambda g, w: dist.reduce_scatter_tensor(
        torch.ones(1), torch.ones(w), group=g
    ),
    "all_to_all": lambda g, w: dist.all_to_all_single(torch.ones(w), torch.ones(w), group=g),
    "send": lambda g, w: dist.send(torch.ones(4), (dist.get_rank() + 1) % w, group=g),
    "recv": lambda g, w: dist.recv(torch.ones(4), (dist.get_rank() + 1) % w, group=g),
    "barrier": lambda g, w: dist.barrier(g),
    "async all_reduce": lambda g, w: dist.all_reduce(torch.ones(4), group=g, async_op=True).wait(),
}


def comm_error():
    import torchcomms_pg

    return torchcomms_pg.CommError


def warm_group():
    group = dist.new_group()
    dist.barrier(group)
    return group, group._get_backend(CPU)


def every_later_call_fails(group, world, word):
    """In bounded time, on every operation, with one and the same reason."""
    for name, call in LATER_CALLS.items():
        if world == 1 and name in ("send", "recv"):
            continue  # torch itself refuses a message to oneself
        with time_limit(0, SOON, name):
            with pytest.raises(RuntimeError, match=f"(?i){word}"):
                call(group, world)


def blocked_caller(args, how):
    """Rank 0's thread blocks in all_reduce; its main thread aborts; rank 1 never calls."""
    store = connect_store(*args)
    group, backend = warm_group()
    if dist.get_rank() == 0:

        def block():
            if how == "sync":
                dist.all_reduce(torch.ones(300_001), group=group)
            else:
                dist.all_reduce(torch.ones(300_001), group=group, async_op=True).wait()

        with ThreadPoolExecutor(1) as thread:
            blocked = thread.submit(block)
            wait([blocked], 0.3)  # gives it time to block; it is right whenever it comes
            with time_limit(0, SOON, "abort"):
                backend.abort()
            error = blocked.exception(SOON)
        assert isinstance(error, comm_error()), repr(error)
        assert "abort" in str(error).lower()
        assert error.op.replace("_", "").startswith("allreduce")
        store.set("done", "1")
    else:
        store.wait(["done"])
        backend.abort()


@pytest.mark.parametrize("how", ["sync", "async"])
def test_abort_releases_a_blocked_caller(how):
    pool(2).run(blocked_caller, pool(2).store_args(), how)


def peers_told(args):
    """Ranks 0 and 1 wait for rank 2, which never calls. Rank 0 gives up."""
    store = connect_store(*args)
    group, backend = warm_group()
    rank = dist.get_rank()
    if rank < 2:
        work = dist.all_reduce(torch.ones(1000), group=group, async_op=True)
        if rank == 0:
            store.wait(["waiting"])
            backend.abort()
        else:
            store.set("waiting", "1")
        with time_limit(0, SOON, "the peers' release"):
            with pytest.raises(comm_error(), match="(?i)abort") as error:
                work.wait()
        if rank == 1:
            assert re.search(r"rank[^.]*\b0\b", str(error.value)), str(error.value)
            assert error.value.ranks == [0]
        store.set(f"released{rank}", "1")
    else:
        store.wait(["released0", "released1"])
        with time_limit(0, SOON, "the third rank's call"):
            with pytest.raises(comm_error(), match="(?i)abort"):
                dist.all_reduce(torch.ones(1000), group=group)


def test_abort_releases_the_peers_and_names_the_rank():
    pool(3).run(peers_told, pool(3).store_args())


@each_backend
@pytest.mark.ranks(2)
def test_a_long_reason_is_cut_between_two_letters(world, backend):
    """Other ranks have little room for it. A letter of this name takes three bytes."""
    for shift in range(3):
        comm = make("x" * shift + "\N{EURO SIGN}" * 500, backend)
        comm.barrier(False)
        dist.barrier()
        if dist.get_rank() == 0:
            comm.abort()
        with pytest.raises(comm_error()) as error:
            comm.barrier(False)
        assert "\N{REPLACEMENT CHARACTER}" not in str(error.value)
        assert error.value.ranks == [0]
        comm.finalize()


@pytest.mark.ranks((1, 2))
def test_every_call_after_abort_gives_the_same_clear_error(world):
    group, backend = warm_group()
    backend.abort()
    every_later_call_fails(group, world, "abort")


@pytest.mark.ranks((1, 2))
def test_every_call_after_shutdown_gives_the_same_clear_error(world):
    group, backend = warm_group()
    backend.shutdown()
    every_later_call_fails(group, world, "shut ?down|destroyed|destroy_process_group")


@pytest.mark.ranks(2)
def test_a_backend_kept_after_destroy_process_group_says_it_is_destroyed(world):
    group, backend = warm_group()
    dist.destroy_process_group(group)
    with pytest.raises(RuntimeError, match="(?i)shut ?down|destroy"):
        backend.allreduce([torch.ones(4)]).wait()


@pytest.mark.ranks(2)
def test_abort_and_shutdown_are_idempotent_in_any_order(world):
    for calls in (
        ("abort", "abort"),
        ("shutdown", "shutdown"),
        ("abort", "shutdown"),
        ("shutdown", "abort"),
    ):
        group, backend = warm_group()
        with time_limit(0, SOON, " then ".join(calls)):
            for call in calls:
                getattr(backend, call)()
        dist.barrier()


@pytest.mark.ranks(2)
def test_abort_of_a_group_that_was_never_used(world):
    group = dist.new_group()
    backend = group._get_backend(CPU)
    backend.abort()
    with pytest.raises(RuntimeError, match="(?i)abort"):
        dist.all_reduce(torch.ones(3), group=group)


@pytest.mark.ranks(2)
def test_abort_from_many_threads_at_once(world):
    group, backend = warm_group()
    together = threading.Barrier(8)
    with time_limit(0, SOON, "eight aborts"), ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: (together.wait(), backend.abort()), range(8)))
    every_later_call_fails(group, world, "abort")


@pytest.mark.ranks(2)
def test_abort_fails_all_operations_in_flight_and_none_looks_like_a_success(world):
    group, backend = warm_group()
    if dist.get_rank() == 0:
        tensors = [torch.ones(100_001) for _ in range(4)]
        works = [dist.all_reduce(x, group=group, async_op=True) for x in tensors]
        backend.abort()
        for work in works:
            with pytest.raises(comm_error(), match="(?i)abort"):
                work.wait()
            with contextlib.suppress(TypeError):  # torch before 2.13 cannot convert it
                assert work.exception() is not None
            with pytest.raises(RuntimeError):
                work.get_future().wait()
    dist.barrier()
    backend.abort()


@pytest.mark.ranks(2)
def test_shutdown_lets_operations_in_flight_finish(world):
    group, backend = warm_group()
    tensor = torch.ones(300_001)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    backend.shutdown()
    work.wait()
    assert tensor[-1] == 2


@pytest.mark.ranks(2)
def test_aborting_one_group_leaves_the_others_alone(world):
    group, backend = warm_group()
    other, _ = warm_group()
    backend.abort()
    for usable in (other, None):
        dist.all_reduce(tensor := torch.ones(1000), group=usable)
        assert tensor[0] == 2
    dist.destroy_process_group(other)


@pytest.mark.ranks(2)
def test_get_error_tells_success_from_failure(world):
    group, backend = warm_group()
    error_type = type(backend.get_error())
    assert backend.get_error() == error_type.SUCCESS
    dist.barrier()  # none aborts before all have looked
    if dist.get_rank() == 0:
        backend.abort()
    else:
        with pytest.raises(comm_error()):
            dist.all_reduce(torch.ones(4), group=group)
        assert backend.get_error() in (error_type.REMOTE_ERROR, error_type.COMM_ERROR)
    dist.barrier()


@pytest.mark.ranks(2)
def test_coalescing_survives_abort(world):
    """torch 2.15 aborts all groups inside start and end of coalescing."""
    group, backend = warm_group()
    backend._start_coalescing()
    backend.abort()
    with time_limit(0, SOON, "endCoalescing"):
        work = backend._end_coalescing()
    if work is not None:
        with pytest.raises(RuntimeError, match="(?i)abort"):
            work.wait()


@pytest.mark.ranks(2)
def test_abort_hook_runs_once_when_the_backend_supports_hooks(world):
    group, backend = warm_group()
    if not getattr(backend, "supports_abort_hooks", False):
        pytest.skip("torch 2.15 and later")
    ran = []
    backend.register_abort_hook(7, lambda *_: ran.append(1))
    backend.abort()
    backend.abort()
    assert ran == [1]
