"""Backend "gloo" of new_comm: what it has to do beyond what test_torchcomm.py asks of both."""

import datetime
import os

import pytest
import torch
import torch.distributed as dist

from harness.comms import make, torchcomms
from harness.leaks import descriptors
from harness.ranks import Ranks, check, connect_store, thread_names, time_limit, wait_for
from harness.values import all_data, assert_reduced, assert_same, data
from torchcomms_pg import gloo_connections

pytestmark = pytest.mark.beyond_gloo
SECOND = datetime.timedelta(seconds=1)


@pytest.mark.ranks((2, 3))
def test_large_tensors_are_reduced_in_parts_to_the_same_bits_as_over_shm(world):
    rank, op = dist.get_rank(), torchcomms().ReduceOp
    gloo, shm = make("large", "gloo"), make("large", "shm")
    for dtype, reduce in (
        (torch.float32, op.SUM), (torch.bfloat16, op.AVG), (torch.float16, op.PREMUL_SUM(0.5)),
        (torch.int64, op.MAX), (torch.complex64, op.SUM), (torch.float8_e5m2, op.SUM),
    ):  # fmt: skip
        inputs = all_data(world, 100_003, dtype)
        results = [inputs[rank].clone() for _ in range(2)]
        gloo.all_reduce(results[0], reduce, False)
        shm.all_reduce(results[1], reduce, False)
        assert_same(*results, f"{dtype} {reduce}")
        if reduce.type == "SUM":
            assert_reduced(results[0], inputs)
    gloo.finalize()
    shm.finalize()


@pytest.mark.ranks((2, 3))
def test_messages_of_any_size_overtake_each_other_only_by_tag(world):
    comm, rank = make("sizes", "gloo"), dist.get_rank()
    right, left = (rank + 1) % world, (rank - 1) % world
    sizes = (0, 1, 100, 500_000, 3, 200_000)
    works = [comm.send(data(rank, n), right, True) for n in sizes]
    got = [torch.empty(n) for n in sizes]
    works += [comm.recv(t, left, True) for t in got]
    [work.wait() for work in works]
    for n, t in zip(sizes, got):
        assert_same(t, data(left, n))
    batch, own = comm.batch_op_create(), torch.empty(1000)
    batch.recv(own, rank)
    batch.send(data(rank, 1000), rank)
    batch.issue(True).wait()
    assert_same(own, data(rank, 1000))
    comm.barrier(False)
    comm.finalize()


@pytest.mark.ranks(2)
def test_the_address_is_chosen_for_the_jobs_store(world, monkeypatch):
    """Python cannot ask a store of this project for its host."""
    stores, connect = [], gloo_connections.connect

    def noting(store, *rest):
        stores.append(store)
        return connect(store, *rest)

    monkeypatch.setattr(gloo_connections, "connect", noting)
    make("towards", "gloo").finalize()
    (store,) = stores
    assert type(store) not in (dist.Store, dist.PrefixStore)


@pytest.mark.ranks(2)
def test_a_mismatch_is_an_error_on_both_ranks(world):
    for first, second, words in (
        (lambda c: c.all_reduce(torch.ones(4), torchcomms().ReduceOp.SUM, False),
         lambda c: c.all_reduce(torch.ones(5), torchcomms().ReduceOp.SUM, False),
         ("count=4", "count=5")),
        (lambda c: c.send(torch.ones(4), 1, False), lambda c: c.recv(torch.ones(8), 0, False),
         ("sent a message of 4 x float32", "recv for a message of 8")),
    ):  # fmt: skip
        comm = make("differ", "gloo")
        with time_limit(0, 15, "the mismatch"):  # the deadline is after 20 s
            # A sender need not wait for its receiver: the next operation tells it.
            with pytest.raises(torchcomms().CommError) as caught:
                (first, second)[dist.get_rank()](comm)
                comm.barrier(False)
        for word in words:
            assert word in str(caught.value)
        comm.finalize()


@pytest.mark.ranks(2)
def test_a_mismatch_of_roots_is_an_error_at_the_timeout_and_nobody_is_called_late(world):
    me, op = dist.get_rank(), torchcomms().ReduceOp
    one, both = torch.ones(4), [torch.ones(4), torch.ones(4)]
    calls = {
        "broadcast": lambda comm: comm.broadcast(one, me, True),
        "scatter": lambda comm: comm.scatter(one, both, me, True),
        "gather": lambda comm: comm.gather(both, one, me, True),
        "reduce": lambda comm: comm.reduce(one, me, op.SUM, True),
    }
    for _ in range(4):
        # Longer than a rank may be held up; all of them at once.
        comms = {name: make(name, "gloo", timeout=6 * SECOND) for name in calls}
        works = {name: call(comms[name]) for name, call in calls.items()}
        said = {}
        for name, work in works.items():
            with pytest.raises(torchcomms().CommError) as raised:
                work.wait()
            said[name] = str(raised.value)
            comms[name].finalize()
        # A rank that is held up at the deadline is not heard, and the verdict says so.
        unheard = torch.tensor([any("did not answer" in text for text in said.values())]).int()
        dist.all_reduce(unheard, dist.ReduceOp.MAX)
        if not unheard:
            break
    for name, text in said.items():
        for words in ("different operations", f"{name} #1", "root 0", "root 1"):
            assert words in text, text
        assert "arrive" not in text


def _lose_a_peer(port, prefix, world):
    rank, store = int(os.environ["RANK"]), connect_store(port, prefix)
    comm = torchcomms().new_comm(
        "gloo", "cpu", store=store, rank=rank, size=world,
        timeout=30 * SECOND, abort_process_on_timeout_or_error=False,
    )  # fmt: skip
    comm.barrier(False)
    store.set(f"left by {rank}", "")
    if rank == 1:
        # A connection that breaks takes along what has not been read from it yet.
        store.wait([f"left by {r}" for r in range(world)])
        os._exit(7)
    with time_limit(0, 20, "finding a dead peer"):
        with pytest.raises(torchcomms().CommError, match="rank 1") as caught:
            comm.all_reduce(torch.ones(100_000), torchcomms().ReduceOp.SUM, False)
        work = None
        with pytest.raises(torchcomms().CommError, match="rank 1"):
            work = comm.barrier(True)
        assert work is None
    assert "rank 1" in str(caught.value) and comm.is_aborted()
    assert caught.value.ranks == [1]
    comm.finalize()


def test_a_dead_peer_ends_every_wait():
    with Ranks(3, init=False) as ranks:
        ranks.start(_lose_a_peer, *ranks.store_args(), 3)
        outcomes = ranks.wait()
        check([outcomes[0], outcomes[2]])
        assert outcomes[1].died


@pytest.mark.ranks(3)
def test_a_rank_that_calls_abort_is_in_the_error_of_all_others(world):
    comm = make("aborted", "gloo")
    comm.barrier(False)
    dist.barrier()  # all have left that one
    if dist.get_rank() == 1:
        comm.abort()
    with pytest.raises(torchcomms().CommError) as caught:
        comm.all_reduce(torch.ones(100_000), torchcomms().ReduceOp.SUM, False)
    assert caught.value.ranks == [1]
    comm.finalize()


@pytest.mark.ranks(2)
def test_threads_and_sockets_end_with_the_communicator(world):
    def held():
        sockets = [link for link in descriptors().values() if link.startswith("socket:")]
        return len(thread_names()), len(sockets)

    def once():
        comm = make("leak", "gloo")
        comm.recv(torch.empty(1), 1 - dist.get_rank(), True)
        comm.send(torch.ones(1), 1 - dist.get_rank(), False)
        comm.barrier(True).wait()
        comm.finalize()

    once()  # Gloo's own thread for all its connections stays
    before = held()
    for _ in range(3):
        once()
    # Of the first, something may still have been ending then.
    fewer = lambda: all(now <= then for now, then in zip(held(), before))  # noqa: E731
    assert wait_for(fewer), (held(), before)
    dist.barrier()


@pytest.mark.ranks(3)
def test_a_group_that_is_closed_at_once_breaks_nobodys_connecting(world):
    """Seen in one of 200 such groups when a rank closed its connections while another connected."""
    for turn in range(60):
        make(f"short {turn}", "gloo").finalize()
