"""Groups of GPUs: how they come and go, what goes through them beside, and what they refuse."""

import concurrent.futures
import contextlib
import ctypes
import datetime
import functools
import os
import re
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

import emulated
import torchcomms_pg
from harness import gpus, ranks, streams
from harness.gpus import on_gpus, on_ours
from torchcomms_pg.testing.rank import report

if reason := gpus.missing():
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.torch_version

BOUND = 20.0  # seconds for what must not hang


def ones(size=1000):
    return torch.ones(size, device="cuda")


def assert_sums(group, members):
    tensor = ones()
    dist.all_reduce(tensor, group=group, async_op=True).wait()
    assert (tensor.cpu() == members).all(), tensor[:4].cpu()


# ---------------------------------------------------------------- how they come


@gpus.on_own_ranks(1, 2, 3)
def test_groups_are_made_lazily_with_a_device_anew_and_by_splitting(port, prefix, world):
    for eager in (False, True):
        gpus.take_device(world)
        device_id = gpus.current_device() if eager else None
        gpus.torchcomms(port, f"{prefix}/{eager}", world, 30, device_id=device_id)
        rank = dist.get_rank()
        assert_sums(None, world)
        members = list(range(1, world)) or [0]
        part = dist.new_group(members)
        if rank in members:
            assert_sums(part, len(members))
            # torch 2.11 names a split by how many groups a rank has, which must be alike on all.
            dist.destroy_process_group(part)
        options = torchcomms_pg.Backend.Options()
        options.is_high_priority_stream = True
        group = dist.new_group(pg_options=options)
        assert_sums(group, world)
        dist.destroy_process_group(group)
        if eager:
            first = list(range((world + 1) // 2))
            rest = list(range(len(first), world))
            part = dist.split_group(split_ranks=[part for part in (first, rest) if part])
            assert_sums(part, len(first if rank in first else rest))
        dist.destroy_process_group()


@on_ours(1, 2)
def test_options_of_torchs_own_nccl_are_taken_over(world):
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    options.config.max_ctas = 4
    group = dist.new_group(pg_options=options)
    assert_sums(group, world)
    taken = group._get_backend(gpus.current_device()).options
    assert taken.is_high_priority_stream and taken.config.max_ctas == 4
    assert taken.config.min_ctas is None
    dist.destroy_process_group(group)


@on_ours(1, 2, 3)
def test_tensors_of_both_devices_and_objects_go_through_one_group(world):
    rank = dist.get_rank()
    on_cpu, on_gpu = torch.ones(100), ones(100)
    for work in [dist.all_reduce(x, async_op=True) for x in (on_gpu, on_cpu, on_gpu)]:
        work.wait()
    assert (on_cpu == world).all() and (on_gpu.cpu() == world**2).all()
    objects = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": rank} for rank in range(world)]
    told = [rank]
    dist.broadcast_object_list(told, world - 1, device=gpus.current_device())
    assert told == [world - 1]


@on_ours(1, 2)  # torch's nccl keeps to the device of the first operation
def test_a_rank_has_several_devices(world):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    rank = dist.get_rank()
    for offset in range(2):
        tensor = torch.full((1000,), rank + 1.0, device=f"cuda:{(rank + offset) % 2}")
        dist.all_reduce(tensor)
        dist.all_reduce(tensor, async_op=True).wait()
        assert (tensor.cpu() == world * world * (world + 1) / 2).all()
    comms = [torchcomms_pg.get_comm(device=f"cuda:{number}") for number in range(2)]
    assert comms[0].get_device() != comms[1].get_device()


def groups_one_after_another(port, prefix, world):
    for i in range(3):
        gpus.torchcomms(port, f"{prefix}/{i}", world, 30)
        tensor = ones()
        dist.all_reduce(tensor)
        assert (tensor.cpu() == world).all()
        dist.destroy_process_group()


@gpus.by_version
def test_a_group_comes_up_where_another_one_was(version):
    gpus.apart(2, groups_one_after_another, env=gpus.nccl_environment(version))


@gpus.on_own_ranks(2)
def test_a_rank_sends_to_itself_without_the_others(port, prefix, world):
    """One rank alone, before the group has connected its GPUs; then with others in one batch."""
    gpus.torchcomms(port, prefix, world, 30)
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    sent, got = ones(7), [torch.zeros(7, device="cuda") for _ in range(2)]

    def batch(*operations):
        for work in dist.batch_isend_irecv([dist.P2POp(*each) for each in operations]):
            work.wait()

    def refused():
        for wrong in (sent.double(), ones(6)):
            with pytest.raises(ValueError, match="to itself"):
                batch((dist.irecv, got[0], rank), (dist.isend, wrong, rank))
        with pytest.raises(ValueError, match="sends 1 messages to itself and receives 0"):
            batch((dist.isend, sent, rank))

    if rank == 0:
        batch((dist.irecv, got[0], 0), (dist.isend, sent, 0))
        assert (got[0].cpu() == 1).all()
        refused()
    for number in range(2):  # the second batch through the communicator that the first makes
        mine, theirs = sent + 10 * rank + number, got[1].zero_()
        batch(
            (dist.isend, mine, rank),
            (dist.isend, mine, other),
            (dist.irecv, got[0].zero_(), rank),
            (dist.irecv, theirs, other),
        )
        assert torch.equal(got[0], mine)
        assert (theirs.cpu() == 1 + 10 * other + number).all()
    refused()  # where NCCL would send it, too
    comm = torchcomms_pg.get_comm(device="cuda")
    with pytest.raises(ValueError, match="to itself"):
        with comm.group():
            comm.send(sent, rank, async_op=True)
            comm.recv(got[0][:3], rank, async_op=True)
    with comm.group():  # which the batch inside of it joins
        comm.send(sent, rank, async_op=True)
        dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, got[1].zero_(), other)]
        )
        comm.recv(got[0].zero_(), rank, async_op=True)
    torch.cuda.synchronize()
    assert torch.equal(got[0], sent) and torch.equal(got[1], sent)
    with contextlib.suppress(InterruptedError):
        with dist._coalescing_manager(device=gpus.current_device()):
            dist.isend(sent, rank)  # which is no part of the next batch
            raise InterruptedError
    batch((dist.irecv, got[0], rank), (dist.isend, sent, rank))
    assert torch.equal(got[0], sent)
    assert_sums(None, world)
    dist.destroy_process_group()


@pytest.mark.parametrize("backend", list(gpus.GROUPS))
@gpus.on_own_ranks(3)
def test_two_ranks_exchange_messages_that_the_third_takes_no_part_in(port, prefix, world, backend):
    """As the group's first operation on GPUs, and between ranks of other numbers than 0 and 1."""
    gpus.GROUPS[backend](port, prefix, world, 30)
    rank, store = dist.get_rank(), ranks.connect_store(port, f"{prefix}/beside")
    tensor = torch.full((1000,), float(rank), device="cuda")

    def message(source, target, times=2):
        for _ in range(times):
            if rank == source:
                dist.send(tensor, target)
            elif rank == target:
                dist.recv(tensor, source)
                assert (tensor.cpu() == source).all()
                tensor.fill_(rank)

    message(1, 2)
    if rank == 0:
        store.wait(["1 to 2"])
    elif rank == 2:
        store.set("1 to 2", "")
    dist.barrier()
    message(2, 1)
    message(0, 1)
    assert_sums(None, world)
    message(1, 2)  # through what they have had
    message(2, 0)  # through the group's
    dist.barrier()
    assert_sums(None, world)


@on_gpus(2)
def test_the_result_of_a_message_is_its_tensor_on_both_sides(world):
    rank, tensor = dist.get_rank(), ones(7)
    dist.all_reduce(tensor)
    work = (dist.isend if rank == 0 else dist.irecv)(tensor, 1 - rank)
    work.wait()
    (result,) = work.result()
    assert result.data_ptr() == tensor.data_ptr()


@gpus.on_own_ranks(3)
def test_messages_all_around_connect_the_whole_group(port, prefix, world):
    """Each rank begins with a send to the next, which begins with another one.

    NCCL connects two ranks for messages in a call of the host that ends when both have come. On
    GPUs the ranks wait for each other there, over torch's nccl, too, and the verdict says so.
    """
    gpus.torchcomms(port, prefix, world, 30 if gpus.EMULATED else 10)
    rank = dist.get_rank()
    sent, got = torch.full((10,), float(rank), device="cuda"), torch.zeros(10, device="cuda")
    if not gpus.EMULATED:
        with pytest.raises(torchcomms_pg.CommError, match="deadlock: rank 0 waits in send #1"):
            dist.isend(sent, (rank + 1) % world)
        return
    works = [dist.isend(sent, (rank + 1) % world), dist.irecv(got, (rank - 1) % world)]
    for work in works:
        work.wait()
    assert (got.cpu() == (rank - 1) % world).all()
    assert torchcomms_pg.get_comm(device="cuda").get_size() == world


def waits_in_vain_for_a_message(port, prefix, world):
    """Rank 1 does not take the second message of rank 2, to which no other rank belongs."""
    gpus.torchcomms(port, prefix, world, 4)
    rank, store = dist.get_rank(), ranks.connect_store(port, f"{prefix}/beside")
    tensor, told = torch.ones(1 << 20, device="cuda"), ""
    if rank == 1:
        dist.recv(tensor, 2)
        torch.cuda.synchronize()
    elif rank == 2:
        dist.send(tensor, 1)
        work = dist.isend(tensor, 1)
        with pytest.raises(torchcomms_pg.CommError) as raised:
            work.wait(datetime.timedelta(seconds=4))
        told = str(raised.value)
        store.set("over", "")
    store.wait(["over"], datetime.timedelta(seconds=30))
    return told


@gpus.emulated_only  # NCCL may end a send before it is received
def test_a_message_in_vain_names_its_peer_by_its_number_in_the_group():
    told = gpus.apart(3, waits_in_vain_for_a_message)[2]
    assert "send #2 to rank 1 (1048576 x Float) of group '0' on rank 2: timed out" in told, told
    assert re.search("verdict on group '0', 3 ranks: rank 1 has not (queued|arrived at) ", told), (
        told
    )
    assert "rank 0" not in told, told


# ---------------------------------------------------------------- the ranks together


def barriers():
    """All ways to one of the group's GPUs, each of which stops the host."""
    device = torch.cuda.current_device()
    for arguments in ({}, {"device_ids": [device]}):
        yield functools.partial(dist.barrier, **arguments)
        begin = functools.partial(dist.barrier, async_op=True, **arguments)
        yield lambda begin=begin: begin().wait()
    if not gpus.over_nccl():
        comm = torchcomms_pg.get_comm(device=f"cuda:{device}")
        yield lambda: comm.barrier(False)
        yield lambda: comm.barrier(True).wait()


# By which the main thread waits for the device.
WAITS = {"cudaEventQuery", "cudaEventSynchronize", "cudaStreamQuery", "cudaStreamSynchronize"}


def pass_held(barrier, release, store, released, go=lambda: None):
    """Passes a barrier in a stream that is held up, which is released once nothing more happens.

    Args:
        released: key that is in the store before `release` is called.
        go: returns when the release is wanted.
    """
    returned = threading.Event()

    def let_go(begun):
        try:
            go()
            if not gpus.EMULATED:
                time.sleep(0.3)  # CUDA tells nobody what a stream waits for
                return
            waits = lambda: WAITS & emulated.calls().get("main", {}).keys() and emulated.settled()  # noqa: E731
            assert ranks.wait_for(lambda: returned.is_set() or waits(), BOUND)
            assert not returned.is_set(), "the barrier did not wait for the stream"
            assert emulated.kernels_begun() == begun, "its kernel did not wait for the stream"
        finally:
            store.set(released, "")
            store.wait([released])  # set() does not wait for the server
            release()

    counting = emulated.counted() if gpus.EMULATED else contextlib.nullcontext()
    with counting, concurrent.futures.ThreadPoolExecutor(1) as thread:
        holder = thread.submit(let_go, emulated.kernels_begun() if gpus.EMULATED else 0)
        barrier()
        returned.set()
        holder.result()


@on_gpus(2)
def test_a_barrier_waits_for_the_streams_of_all_ranks(world):
    dist.all_reduce(ones())
    torch.cuda.synchronize()
    store = dist.distributed_c10d._get_default_store()
    for number, barrier in enumerate(barriers()):
        begun, released = f"{number} begun", f"{number} released"
        if dist.get_rank() == 0:
            store.set(begun, "")
            barrier()
            assert store.check([released])
            continue
        with streams.hold() as release:
            pass_held(barrier, release, store, released, functools.partial(store.wait, [begun]))


@gpus.on_own_ranks(2)
def test_barriers_meet_whatever_device_a_rank_names(port, prefix, world):
    """Before the group has connected its GPUs, and afterwards."""
    gpus.torchcomms(port, prefix, world, 30)
    rank, devices = dist.get_rank(), torch.cuda.device_count()
    named = [{}, {"device_ids": [rank % devices]}, {"device_ids": [(rank + 1) % devices]}]
    for connected in (False, True):
        if connected:
            assert_sums(None, world)
        for first in range(3):
            for async_op in (False, True):
                work = dist.barrier(async_op=async_op, **named[(first + rank) % 3])
                if async_op:
                    work.wait()


@gpus.on_own_ranks(2)
def test_a_barrier_waits_for_the_stream_of_the_device_it_names(port, prefix, world):
    """Also before the group has connected its GPUs, and in a group that has used another one."""
    gpus.torchcomms(port, prefix, world, 30)
    rank, devices = dist.get_rank(), torch.cuda.device_count()
    store = ranks.connect_store(port, f"{prefix}/beside")
    for number, device in enumerate((rank % devices, rank % devices, (rank + 1) % devices)):
        released = f"{number} released"
        if number == 1:
            assert_sums(None, world)
            torch.cuda.synchronize()
        if rank == 0:
            dist.barrier(device_ids=[device])
            assert store.check([released])
            continue
        stream = torch.cuda.current_stream(device)
        with streams.hold(stream) as release:
            barrier = functools.partial(dist.barrier, device_ids=[device])
            pass_held(barrier, release, store, released)


# ---------------------------------------------------------------- failures


def wait_in_vain(work):
    """For a rank that does not come, until the deadline of the group."""
    begun = time.monotonic()
    with pytest.raises(torchcomms_pg.CommError, match="timed out"):
        work.wait(datetime.timedelta(seconds=60))
    assert time.monotonic() - begun < BOUND


def give_up(work):
    """By itself."""
    assert not work.is_completed(), "the operation did not wait for the other ranks"
    dist.group.WORLD._get_backend(gpus.current_device()).abort()
    with pytest.raises(torchcomms_pg.CommError, match="abort|revoke"):
        work.wait()


ENDS = {"timeout": wait_in_vain, "abort": give_up}


@gpus.on_own_ranks(2)
@pytest.mark.parametrize("end", list(ENDS))
def test_a_rank_that_waits_in_vain_is_released_and_can_make_a_new_group(port, prefix, world, end):
    """Rank 0 begins an operation without the other, which can go on as it can."""
    gpus.torchcomms(port, f"{prefix}/first", world, 30)
    store = ranks.connect_store(port, f"{prefix}/beside")
    tensor = ones()
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    # Not by a barrier: a rank that is still in one would be told of what comes.
    store.set(f"here {dist.get_rank()}", "")
    store.wait([f"here {rank}" for rank in range(world)])
    if dist.get_rank() == 0:
        if end == "timeout":
            torchcomms_pg.get_comm(device="cuda").set_timeout(datetime.timedelta(seconds=3))
        ENDS[end](dist.all_reduce(tensor, async_op=True))
        with ranks.time_limit(0, BOUND, "releasing the stream"):
            torch.cuda.synchronize()
        with pytest.raises(torchcomms_pg.CommError):
            dist.all_reduce(tensor)
        store.set("over", "")
    else:
        store.wait(["over"], datetime.timedelta(seconds=60))
    with ranks.time_limit(0, BOUND, "destroying the group"):
        dist.destroy_process_group()
    # The process and its device are as good as before.
    gpus.torchcomms(port, f"{prefix}/second", world, 30)
    assert_sums(None, world)
    dist.destroy_process_group()


@gpus.emulated_only
@gpus.on_own_ranks(2)
def test_a_group_that_fails_makes_no_context_elsewhere(port, prefix, world):
    """Some 500 MB of GPU 0, from each rank of the host."""
    gpus.torchcomms(port, prefix, world, 30)
    store = ranks.connect_store(port, f"{prefix}/beside")
    dist.all_reduce(ones())
    torch.cuda.synchronize()
    ranks.meet(store, "connected", world)
    dist.distributed_c10d._abort_process_group()
    assert set(emulated.contexts()) == {torch.cuda.current_device()}


@pytest.mark.stops_ranks  # a failure does not wait for ever for that thread
@gpus.emulated_only
@gpus.on_own_ranks(1)
def test_a_failure_does_not_meet_the_launch_of_another_thread(port, prefix, world):
    """Which NCCL would let spin for ever."""
    gpus.torchcomms(port, prefix, world, 30)
    tensor = ones()
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    backend = dist.group.WORLD._get_backend(gpus.current_device())
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        with emulated.hold_nccl("launch") as held:
            issuing = thread.submit(lambda: dist.all_reduce(tensor, async_op=True))
            assert ranks.wait_for(held, BOUND)
            backend.abort()
            revokes = emulated.revocations
            assert ranks.wait_for(lambda: revokes() or ranks.asleep("tcpg_apart"), BOUND)
            assert not revokes(), "the failure has not waited for the launch"
        issuing.exception()
    torch.cuda.synchronize()


def waits_for_a_killed_rank(port, prefix, world, connected):
    gpus.torchcomms(port, prefix, world, 30)
    rank, store = dist.get_rank(), ranks.connect_store(port, f"{prefix}/beside")
    tensor = ones()
    if connected:
        dist.all_reduce(tensor)
        torch.cuda.synchronize()
    ranks.meet(store, "here", world)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    with pytest.raises(torchcomms_pg.CommError) as raised:
        dist.all_reduce(tensor, async_op=True).wait(datetime.timedelta(seconds=25))
    assert time.monotonic() - begun < 10, raised.value
    if gpus.EMULATED:
        assert re.search(r"rank 1 \(pid \d+\) died", str(raised.value)), raised.value
        assert raised.value.ranks == [1]


def the_last_is_killed(body, world, *args):
    """And the others return from `body`."""
    with ranks.Ranks(world, init=False, started_with=gpus.environment) as all:
        all.start(body, *all.store_args(), world, *args)
        outcomes = all.wait()
        ranks.check(outcomes[:-1])
        assert "SIGKILL" in outcomes[-1].died


@pytest.mark.parametrize("connected", (True, False), ids=("connected", "new"))
def test_a_dead_rank_is_named_long_before_the_timeout(connected):
    """Inside a host NCCL tells nobody."""
    the_last_is_killed(waits_for_a_killed_rank, 2, connected)


def goes_on_without_the_first(port, prefix, world):
    gpus.torchcomms(port, prefix, world, 30)
    rank, store = dist.get_rank(), ranks.connect_store(port, f"{prefix}/beside")
    store.set(f"handle/{rank}", dist.distributed_c10d._get_reconfigure_handle(None))
    handles = [store.get(f"handle/{peer}").decode() for peer in range(world)]
    ranks.meet(store, "here", world)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(torchcomms_pg.CommError, match=r"rank 0\b"):
        while True:
            dist.all_reduce(torch.ones(1000))
    dist.distributed_c10d._reconfigure(1, handles[1:], None).wait()
    if dist.get_rank() == 0:
        time.sleep(2)  # meanwhile the other one looks at the processes that it knows
    assert_sums(None, world - 1)
    dist.destroy_process_group()


@gpus.emulated_only  # needs a GPU for each rank
@pytest.mark.skipif(torch.__version__ < "2.14", reason="torch 2.14 brings reconfigure")
def test_the_gpus_of_a_reconfigured_group_meet_though_the_former_rank_is_dead():
    with ranks.Ranks(3, init=False, started_with=gpus.environment) as all:
        all.start(goes_on_without_the_first, *all.store_args(), 3)
        outcomes = all.wait()
        ranks.check(outcomes[1:])
        assert "SIGKILL" in outcomes[0].died


def waits_for_two_killed_ranks(port, prefix, world):
    gpus.torchcomms(port, prefix, world, 30)
    store, tensor = ranks.connect_store(port, f"{prefix}/beside"), ones()
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    ranks.meet(store, "here", world)
    if dist.get_rank() > 0:
        signal.pause()
    work = dist.all_reduce(tensor, async_op=True)
    report("waits")
    with pytest.raises(torchcomms_pg.CommError) as raised:
        work.wait(datetime.timedelta(seconds=25))
    assert re.search(r"ranks 1, 2 \(pids \d+, \d+\) died", str(raised.value)), raised.value
    assert raised.value.ranks == [1, 2]


@gpus.emulated_only  # needs a GPU for each rank
@pytest.mark.stops_ranks
def test_of_ranks_dead_between_two_looks_none_is_called_the_first():
    """One may have ended by the error that the death of the other has raised there."""
    with ranks.Ranks(3, init=False, started_with=gpus.environment) as all:
        all.start(waits_for_two_killed_ranks, *all.store_args(), 3)
        assert all.wait_report(0) == "waits"
        all.kill(0, signal.SIGSTOP)
        for rank in (2, 1):
            all.kill(rank)
            all.exit_code(rank)
        all.kill(0, signal.SIGCONT)
        ranks.check(all.wait(ranks=[0]))


def waits_for_a_killed_rank_in_a_part(port, prefix, world):
    gpus.take_device(world)
    rank, store = int(os.environ["RANK"]), ranks.connect_store(port, prefix)
    device = gpus.current_device()
    options = dict(store=store, rank=rank, size=world, abort_process_on_timeout_or_error=False)
    whole = torchcomms_pg.new_comm("nccl", device, **options)
    part = whole.split([1, 2] if rank else [0], name="part")
    if rank == 0:
        return
    tensor = ones()
    part.all_reduce(tensor, torchcomms_pg.ReduceOp.SUM, False)
    torch.cuda.synchronize()
    ranks.meet(store, "here", 2)
    if part.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    part.all_reduce(tensor, torchcomms_pg.ReduceOp.SUM, True)
    assert ranks.wait_for(part.is_aborted, 10)  # its deadline is after ten minutes
    with pytest.raises(torchcomms_pg.CommError, match=r"rank 1 .*\(pid \d+\) died") as raised:
        part.all_reduce(tensor, torchcomms_pg.ReduceOp.SUM, False)
    assert raised.value.ranks == [1], raised.value


def waits_for_a_killed_rank_in_what_is_left(port, prefix, world):
    gpus.torchcomms(port, prefix, world, 600)
    rank, store = dist.get_rank(), ranks.connect_store(port, f"{prefix}/beside")
    tensor = ones()
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    if rank == 0:
        return
    left = dist.group.WORLD._get_backend(gpus.current_device()).shrink([0])
    left.allreduce([tensor]).wait()
    torch.cuda.synchronize()
    ranks.meet(store, "here", 2)
    if left.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(torchcomms_pg.CommError, match=r"rank 1 .*\(pid \d+\) died") as raised:
        left.allreduce([tensor]).wait(datetime.timedelta(seconds=10))
    assert raised.value.ranks == [1], raised.value


@gpus.emulated_only  # needs a GPU for each rank
@pytest.mark.parametrize(
    "body",
    (waits_for_a_killed_rank_in_a_part, waits_for_a_killed_rank_in_what_is_left),
    ids=("split", "shrunk"),
)
def test_a_dead_rank_is_named_in_what_was_made_from_its_communicator(body):
    the_last_is_killed(body, 3)


def receives_from_a_killed_rank(port, prefix, world):
    gpus.torchcomms(port, prefix, world, 4)
    rank, store = dist.get_rank(), ranks.connect_store(port, f"{prefix}/beside")
    tensor = ones()
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    ranks.meet(store, "here", world)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with ranks.time_limit(0, BOUND, "the deadline of 4 s"):
        with pytest.raises(torchcomms_pg.CommError, match="timed out after 4 s") as raised:
            dist.irecv(tensor, 1).wait(datetime.timedelta(seconds=60))
    assert raised.value.ranks == [1], raised.value
    assert re.search(r"rank 1: its process is dead \(pid \d+\)", str(raised.value)), raised.value


@gpus.emulated_only  # NCCL may have got all of a message
def test_a_receive_from_a_dead_rank_ends_at_its_timeout_which_names_it():
    the_last_is_killed(receives_from_a_killed_rank, 2)


def goes_on_after_its_deadline(port, prefix, world):
    """Rank 0, as a program without a handler of errors: it would save what it has."""
    gpus.torchcomms(port, prefix, world, 30)
    rank, store = dist.get_rank(), ranks.connect_store(port, f"{prefix}/beside")
    tensor = ones()
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    dist.barrier()
    if rank != 0:
        store.wait(["rank 0 ends"], datetime.timedelta(seconds=30))
        return
    torchcomms_pg.get_comm(device="cuda").set_timeout(datetime.timedelta(seconds=2))

    def told():
        store.set("rank 0 ends", "")
        time.sleep(2)  # as a hook that writes a dump

    torchcomms_pg.get_comm(device="cuda").register_abort_hook(told)
    dist.all_reduce(tensor)
    for step in (torch.cuda.synchronize, lambda: dist.all_reduce(tensor)):
        try:
            step()
        except Exception as error:
            print(f"went on: {error}", flush=True)
        print("went on", flush=True)
    time.sleep(20)


def test_a_process_that_a_timeout_ends_does_not_go_on_meanwhile():
    variables = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}
    options = dict(init=False, env=variables, started_with=gpus.environment)
    with ranks.Ranks(2, **options) as both:
        both.start(goes_on_after_its_deadline, *both.store_args(), 2)
        outcomes = both.wait()
        ranks.check(outcomes[1:])
        assert "exit code 1" in outcomes[0].died, outcomes[0]
        assert "went on" not in both.output(0), both.output(0)


@gpus.emulated_only
@gpus.on_own_ranks(2, env={"NCCL_HOSTID": "apart"})  # inside a host it would not hear of it
def test_a_group_whose_peer_fails_while_it_ends_is_not_left_to_nccl(port, prefix, world):
    """Which destroys no communicator that has failed: its memory would stay."""
    gpus.torchcomms(port, prefix, world, 30)
    store = ranks.connect_store(port, f"{prefix}/beside")
    dist.all_reduce(ones())
    torch.cuda.synchronize()
    if dist.get_rank() == 0:
        store.wait(["rank 1 ends"])
        dist.group.WORLD._get_backend(gpus.current_device()).abort()
        dist.destroy_process_group()
        store.set("rank 0 has failed", "")
        return
    with concurrent.futures.ThreadPoolExecutor() as threads, emulated.hold_nccl("finalize"):
        ending = threads.submit(dist.destroy_process_group)
        assert ranks.wait_for(lambda: "tcpg_nccl" in ranks.thread_names(), 20)
        store.set("rank 1 ends", "")
        store.wait(["rank 0 has failed"])
    ending.result()


@gpus.emulated_only
@gpus.on_own_ranks(2, env={"NCCL_HOSTID": "apart"})  # over a network NCCL hears of a failed peer
def test_what_nccl_has_said_of_one_group_is_not_said_of_another(port, prefix, world):
    """It keeps the latest text of the process."""
    gpus.torchcomms(port, prefix, world, 30)
    rank, store = dist.get_rank(), ranks.connect_store(port, f"{prefix}/beside")
    late, failed = (dist.new_group() for _ in range(2))
    for group in (None, late, failed):
        dist.all_reduce(ones(), group=group)
    torch.cuda.synchronize()
    ranks.meet(store, "connected", world)
    assert ctypes.CDLL("libnccl.so.2").ncclGroupEnd() != 0  # "not in a group call"
    # A deadline, on the rank that waits and on the one that is in no operation.
    late.set_timeout(datetime.timedelta(seconds=2))
    comm = torchcomms_pg.get_comm(late, device="cuda")
    if rank == 0:
        dist.all_reduce(ones(), group=late, async_op=True)
    assert ranks.wait_for(comm.is_aborted, BOUND)
    with pytest.raises(torchcomms_pg.CommError) as raised:
        dist.all_reduce(ones(), group=late)
    # Rank 1 may hear of it from NCCL before it hears of the deadline.
    of_this_group, maybe, _ = str(raised.value).partition("maybe of another group: ")
    assert "group call" not in of_this_group and not (maybe and rank == 0), raised.value
    # A failure that NCCL tells of.
    if rank == 1:
        failed._get_backend(gpus.current_device()).abort()
    else:
        with pytest.raises(torchcomms_pg.CommError) as raised:
            dist.all_reduce(ones(), group=failed, async_op=True).wait(datetime.timedelta(seconds=9))
        assert "maybe of another group: " in str(raised.value), raised.value


@gpus.on_own_ranks(2)
def test_a_rank_whose_stream_has_not_arrived_is_called_missing(port, prefix, world):
    gpus.torchcomms(port, prefix, world, 30)
    tensor = ones()
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    torchcomms_pg.get_comm(device="cuda").set_timeout(datetime.timedelta(seconds=10))
    dist.barrier()  # both are here
    with streams.hold():
        dist.all_reduce(tensor, async_op=True)
        assert ranks.wait_for(torchcomms_pg.get_comm(device="cuda").is_aborted, 30)
        with pytest.raises(torchcomms_pg.CommError) as raised:
            dist.all_reduce(tensor)
    # A rank that was held up for longer than its answer is waited for is not accused either.
    known = "all ranks have queued|did not answer, so that nobody knows whether it has queued"
    known = f"({known}) all_reduce #3|cannot be known"
    assert re.search(known, str(raised.value)), raised.value
    assert not re.search(r"\barrived\b", str(raised.value)), raised.value


@gpus.emulated_only
@gpus.on_own_ranks(2)
def test_a_timeout_is_kept_while_the_driver_holds_up_whoever_asks_for_events(port, prefix, world):
    gpus.torchcomms(port, prefix, world, 30)
    store = dist.distributed_c10d._get_default_store()
    on_gpu, on_cpu = ones(), torch.ones(4)
    dist.all_reduce(on_gpu)
    torch.cuda.synchronize()
    torchcomms_pg.get_comm().set_timeout(datetime.timedelta(seconds=3))
    if dist.get_rank() == 1:
        store.wait(["rank 0 has seen it"])
        return
    held = dist.all_reduce(on_gpu, async_op=True)
    with emulated.hold_driver() as waiters:
        assert ranks.wait_for(waiters, 20)
        with pytest.raises(torchcomms_pg.CommError, match="timed out.* did not (arrive|answer)"):
            dist.all_reduce(on_cpu)
    store.set("rank 0 has seen it", "")
    del held


# ---------------------------------------------------------------- bad input


@on_gpus(2)
def test_a_wrong_argument_leaves_the_group_as_it_was(world):
    tensor = ones()
    dist.all_reduce(tensor)
    with pytest.raises((ValueError, RuntimeError)):
        dist.all_gather_into_tensor(torch.empty(7, device="cuda"), tensor)
    dist.all_reduce(tensor)
    assert (tensor.cpu() == world**2).all()


@on_ours(1)
def test_tensors_of_several_devices_in_one_call_are_refused_with_nothing_issued(world):
    here, others = ones(), [torch.ones(1000)]
    if torch.cuda.device_count() > 1:
        others.append(torch.ones(1000, device="cuda:1"))
    dist.all_reduce(here)
    backend = dist.group.WORLD._get_backend(here.device)
    before = backend._get_sequence_number_for_group()
    for other in others:
        for call in (
            lambda: dist.all_gather([other], here),
            lambda: dist.all_gather_into_tensor(other, here),
            lambda: dist.reduce_scatter_tensor(other, here),
            lambda: dist.all_to_all([other], [here]),
            lambda: dist.all_to_all_single(other, here),
            lambda: dist.scatter(here, [other], 0),
            lambda: dist.gather(here, [other], 0),
        ):
            with pytest.raises(ValueError, match=rf"is on {other.device}, wanted cuda:0; move it "):
                call()
        comm = torchcomms_pg.get_comm(device=here.device)
        with pytest.raises(ValueError, match=rf"tensor is on {other.device}, wanted cuda:0"):
            comm.all_reduce(other, torchcomms_pg.ReduceOp.SUM, False)
    assert backend._get_sequence_number_for_group() == before


@gpus.emulated_only
@gpus.on_own_ranks(2, env=gpus.nccl_environment("2.18"))
def test_what_nccl_alone_refuses_leaves_the_group_as_it_was(port, prefix, world):
    gpus.torchcomms(port, prefix, world, 30)
    tensor, float8 = ones(), ones().to(torch.float8_e4m3fn)
    dist.all_reduce(tensor)
    with pytest.raises((ValueError, RuntimeError), match="float8|Float8|type"):
        dist.all_reduce(float8)
    dist.broadcast(float8, 0)  # moves bytes
    assert (float8.float() == 1).all()
    dist.all_reduce(tensor)
    assert (tensor.cpu() == world**2).all()
