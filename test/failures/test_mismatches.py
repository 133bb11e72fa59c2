"""Ranks whose calls do not match: an error with both calls tells each of them, and none crashes."""

import os
import re

import pytest
import torch
import torch.distributed as dist

from harness.comms import each_backend, make, torchcomms
from harness.ranks import Ranks, connect_store, init_default_group, meet

pytestmark = pytest.mark.beyond_gloo
TIMEOUT = 20.0


def messages_that_do_not_fit(port, prefix, sent, received):
    """Issued while the group fails, so that each meets its failure somewhere else."""
    rank = int(os.environ["RANK"])
    for turn in range(5):
        init_default_group(port, f"{prefix}/{turn}", rank, 2, TIMEOUT)
        works = []
        with pytest.raises(torchcomms().CommError) as caught:
            for _ in range(5):
                tensor = torch.ones(received if rank else sent)
                works.append(dist.irecv(tensor, 0) if rank else dist.isend(tensor, 1))
            while True:  # the receives may meet their messages later
                dist.all_reduce(torch.ones(1))
        wanted = f"rank 1 receives {received} float32 from rank 0, which sends {sent} float32"
        assert wanted in str(caught.value)
        for work in works:
            try:
                work.wait()
            except torchcomms().CommError:
                pass
            assert work.is_completed()
        dist.destroy_process_group()


@pytest.mark.parametrize("sent, received", [(4, 5), (5, 4), (0, 4), (4, 0)])
def test_mismatched_messages_fail_the_group_and_end_once(sent, received):
    with Ranks(2, init=False) as ranks:
        ranks.run(messages_that_do_not_fit, *ranks.store_args(), sent, received)


def differ_in_the_first_collective():
    """All ranks call at about the same time, so that each meets the failure somewhere else."""
    rank, told = dist.get_rank(), []
    for _ in range(8):
        group = dist.new_group()
        dist.barrier()
        with pytest.raises(torchcomms().CommError) as caught:
            dist.all_reduce(torch.ones(5 if rank == 1 else 4), group=group)
            dist.barrier(group)  # where a rank has called what the first ones did
        told.append((str(caught.value), caught.value.op))
        dist.destroy_process_group(group)
    return told


def test_a_mismatch_in_a_groups_first_collective_is_that_collectives_error():
    with Ranks(4) as ranks:
        for told in ranks.run(differ_in_the_first_collective):
            for text, op in told:
                assert op != "init" and not text.startswith("init"), text


def tensors(world):
    return [torch.empty(4) for _ in range(world)]


# Each rank takes itself for the root.
ROOTED = {
    "broadcast": lambda rank, world: dist.broadcast(torch.ones(4), rank),
    "scatter": lambda rank, world: dist.scatter(torch.ones(4), tensors(world), rank),
    "gather": lambda rank, world: dist.gather(torch.ones(4), tensors(world), rank),
    "reduce": lambda rank, world: dist.reduce(torch.ones(4), rank),
}


def destroy_after(call, port, prefix, world):
    rank = int(os.environ["RANK"])
    store = connect_store(port, prefix + "/steps")
    init_default_group(port, prefix, rank, world, TIMEOUT)
    told = None
    try:
        ROOTED[call](rank, world)
    except torchcomms().CommError as error:
        told = str(error)
    # Who has gone before the others have called cannot be told.
    meet(store, "called", world)
    if told is None:
        with pytest.raises(torchcomms().CommError) as caught:
            dist.destroy_process_group()
        told = str(caught.value)
    assert len(set(re.findall(rf"calls {call}\([^)]*root=\d", told))) == 2, told
    dist.destroy_process_group()
    init_default_group(port, prefix + "/next", rank, world, TIMEOUT)
    dist.all_reduce(ones := torch.ones(4))
    assert ones.tolist() == [world] * 4
    dist.destroy_process_group()


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("call", ROOTED)
def test_a_mismatch_of_roots_is_an_error_at_the_latest_when_the_group_ends(call, world):
    with Ranks(world, init=False) as ranks:
        ranks.run(destroy_after, call, *ranks.store_args(), world)


@pytest.mark.ranks((2, 3))
def test_a_mismatch_of_roots_is_an_error_at_the_latest_at_the_next_operation(world):
    comm, rank = make("roots"), dist.get_rank()
    with pytest.raises(torchcomms().CommError) as caught:
        comm.broadcast(torch.ones(4), rank, False)
        comm.barrier(False)
    assert len(set(re.findall(r"broadcast\([^)]*root=\d", str(caught.value)))) == 2
    comm.finalize()


@pytest.mark.ranks(2)
def test_finalize_raises_a_mismatch_of_roots_and_frees_all(world):
    comm, rank = make("roots"), dist.get_rank()
    told = []
    for step in (lambda: comm.broadcast(torch.ones(4), rank, False), comm.finalize):
        try:
            step()
        except torchcomms().CommError as error:
            told.append(str(error))
        dist.barrier()
    assert len(told) == 1 and "root=0" in told[0] and "root=1" in told[0], told
    comm.finalize()
    with pytest.raises(RuntimeError, match="has been shut down|finalized|aborted|disagree|match"):
        comm.barrier(False)


@each_backend
@pytest.mark.ranks(2)
def test_a_mismatch_with_a_barrier_names_the_barrier(world, backend):
    comm = make("names", backend)
    comm.barrier(False)
    with pytest.raises(torchcomms().CommError) as caught:
        if dist.get_rank() == 0:
            comm.barrier(False)
        else:
            one = torch.ones(1, dtype=torch.uint8)
            comm.all_reduce(one, torchcomms().ReduceOp.MAX, False)
        comm.barrier(False)
    assert re.search(r"rank 0 call(s|ed) barrier\b", str(caught.value))
    assert re.search(r"rank 1 call(s|ed) all_reduce\(count=1, uint8, max\)", str(caught.value))
    comm.finalize()
