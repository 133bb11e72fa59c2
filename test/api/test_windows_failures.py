"""Windows: mistakes, ranks that die, abort or leave, and what windows leave behind."""

import datetime
import gc
import operator
import os
import pathlib
import time

import pytest
import torch
import torch.distributed as dist

from harness.comms import make, torchcomms
from harness.leaks import descriptors, mappings
from harness.limits import grown
from harness.ranks import Ranks, check, wait_for
from torchcomms_pg.testing.rank import report

pytestmark = pytest.mark.beyond_gloo


# ---------------------------------------------------------------- mistakes


def register_in_small_group(procs, kibibytes):
    """The error of a window that the memory cgroup has no room for; the next one works."""
    with open(procs, "w") as file:
        file.write(str(os.getpid()))
    comm = torchcomms().new_comm("shm", "cpu", "c", rank=0, size=1, store=dist.HashStore())
    with pytest.raises(torch.OutOfMemoryError) as raised:
        comm.allocate_tensor(2 * kibibytes << 10, torch.uint8)
    assert comm.allocate_tensor(1 << 20, torch.uint8).numel() == 1 << 20
    comm.finalize()
    return str(raised.value)


@pytest.fixture
def memory_group():
    """A memory cgroup of a limit that processes may join; the limit is in KiB."""
    first = pathlib.Path("/sys/fs/cgroup/memory")
    folder = (first if first.is_dir() else first.parent) / f"torchcomms_pg_{os.getpid()}"
    limit = folder / ("memory.limit_in_bytes" if first.is_dir() else "memory.max")
    kibibytes = 1 << 20
    try:
        folder.mkdir()
        limit.write_text(f"{kibibytes}K")
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made: {error}")
    yield str(folder / "cgroup.procs"), kibibytes
    wait_for(lambda: not (folder / "cgroup.procs").read_text(), 30)
    folder.rmdir()


def test_memory_beyond_the_limit_of_a_container_is_an_error(memory_group):
    with Ranks(1, init=False) as ranks:
        (text,) = ranks.run(register_in_small_group, *memory_group)
    assert "the memory cgroup" in text and "torchcomms_pg_" in text, text


@pytest.mark.ranks(2)
def test_mistakes_raise_at_once_and_enqueue_nothing(world):
    comm = make("windows")
    window = comm.new_window()
    one = torch.zeros(1)
    unregistered = [
        lambda: window.put(one, 0, 0, False),
        lambda: window.signal(0, False),
        lambda: window.wait_signal(0, False),
        lambda: window.map_remote_tensor(0),
        window.tensor_deregister,
        lambda: window.shape,
        lambda: window.dtype,
    ]
    for call in unregistered:
        with pytest.raises(RuntimeError, match="no tensor is registered"):
            call()
    with pytest.raises(ValueError, match="not contiguous"):
        window.tensor_register(torch.zeros(4, 4).t())
    with pytest.raises(ValueError, match="not contiguous"):
        window.tensor_register(torch.zeros(4, dtype=torch.complex64).conj())
    with pytest.raises(ValueError, match="wanted cpu"):
        window.tensor_register(torch.zeros(4, device="meta"))
    with pytest.raises(ValueError, match="dense"):
        window.tensor_register(torch.zeros(4).to_sparse())
    array = torch.zeros(4).numpy()
    seen = torch.zeros(4)
    seen.numpy()
    for foreign in (torch.from_numpy(array), torch.zeros(4).share_memory_(), seen):
        with pytest.raises(ValueError, match=r"belongs to something else.*clone\(\)"):
            window.tensor_register(foreign)

    window.tensor_register(torch.zeros(10))
    with pytest.raises(RuntimeError, match="registered with this window already"):
        window.tensor_register(torch.zeros(10))
    for rank in (-1, world, 2**40):
        with pytest.raises(ValueError, match=f"dst_rank {rank} is not a rank"):
            window.put(one, rank, 0, False)
        with pytest.raises(ValueError, match=f"signal: dst_rank {rank} is not a rank"):
            window.signal(rank, False)
        with pytest.raises(ValueError, match=f"wait_signal: peer_rank {rank} is not a rank"):
            window.wait_signal(rank, True)
        with pytest.raises(ValueError, match=f"rank {rank} is not a rank"):
            window.map_remote_tensor(rank)
        with pytest.raises(ValueError, match=f"peer_rank {rank} is not a rank"):
            window.get_attr(rank)
    for size, offset in ((1, 10), (1, -1), (11, 0), (2, 9), (1, 2**62), (0, 11)):
        with pytest.raises(ValueError, match=f"{size} elements at offset {offset} "):
            window.put(torch.zeros(size), 0, offset, True)
    with pytest.raises(TypeError, match=r"tensor has dtype Double, rank 1 has registered Float"):
        window.put(torch.zeros(1, dtype=torch.float64), 1, 0, False)
    with pytest.raises(ValueError, match="wanted cpu"):
        window.put(torch.zeros(1, device="meta"), 1, 0, False)
    with pytest.raises(TypeError, match="hints is 3"):
        window.put(one, 1, 0, False, hints=3)
    with pytest.raises(TypeError, match="timeout is 3"):
        window.wait_signal(1, False, timeout=3)
    with comm.group():
        for call in (
            lambda: window.put(one, 0, 0, False),
            lambda: window.signal(0, True),
            lambda: window.wait_signal(0, True),
            window.tensor_deregister,
            comm.new_window,
        ):
            with pytest.raises(RuntimeError, match="group of operations"):
                call()
        comm.barrier(False)
    assert window.get_tensor().eq(0).all()
    window.tensor_deregister()
    with pytest.raises(RuntimeError, match="no tensor is registered"):
        window.tensor_deregister()
    comm.finalize()
    with pytest.raises(RuntimeError, match="finalized"):
        comm.new_window()


@pytest.mark.ranks(2)
def test_the_limit_of_windows_is_named_and_none_is_lost(world):
    comm = make("windows")
    windows = [comm.new_window(torch.zeros(1)) for _ in range(128)]
    extra = comm.new_window()
    with pytest.raises(RuntimeError, match="128 windows of this communicator"):
        extra.tensor_register(torch.zeros(1))
    windows.pop().tensor_deregister()
    extra.tensor_register(torch.zeros(1))
    extra.signal(1 - dist.get_rank(), False)
    extra.wait_signal(1 - dist.get_rank(), False)
    for window in (*windows, extra):
        window.tensor_deregister()
    comm.finalize()


# ---------------------------------------------------------------- failures


def wait_for_rank_1(how, seconds, async_op):
    comm, rank = make("windows", timeout=datetime.timedelta(seconds=30.0)), dist.get_rank()
    mine = torch.zeros(10)
    window = comm.new_window(mine)
    view = window.map_remote_tensor(1)
    if rank == 1:
        window.put(torch.ones(10), 0, 0, False)
        window.signal(0, False)
        window.wait_signal(0, False)  # a rank that has not taken its signal yet would fail there
    if rank == 0:
        window.wait_signal(1, False)
        window.signal(1, False)
        report("waiting")
    if rank == 1:
        report("ready")
        if how == "abort":
            window.signal(2, False)
            window.wait_signal(2, False)
            comm.abort()
        elif how == "leave":
            window.signal(2, False)
            window.wait_signal(2, False)
            comm.finalize()
        else:  # is killed, or never signals
            time.sleep(60)
        return None
    if rank == 2:  # waits for nobody but the peers' failure
        window.wait_signal(1, False)
        window.signal(1, False)
    comm.set_timeout(datetime.timedelta(seconds=seconds))  # not of what was before
    begin = time.monotonic()
    with pytest.raises(torchcomms().CommError) as error:
        window.wait_signal(1, async_op).wait()
    took = time.monotonic() - begin
    with pytest.raises(torchcomms().CommError):
        window.put(torch.ones(1), 1, 0, False)
    with pytest.raises(torchcomms().CommError):
        window.tensor_deregister()
    assert view.eq(view).all() and mine.eq(mine).all()  # the memory is there
    named, text = error.value.ranks, str(error.value)
    comm.finalize()
    return named, text, took


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
def test_wait_signal_for_a_dead_rank_ends_and_names_it(async_op):
    with Ranks(2) as ranks:
        ranks.start(wait_for_rank_1, "kill", grown(30.0), async_op)
        ranks.wait_report(0)
        ranks.wait_report(1)
        ranks.kill(1)
        outcome = ranks.wait(ranks=[0])[0]
    check([outcome])
    named, text, took = outcome.value
    assert named == [1] and took < grown(20)
    assert "wait_signal #" in text and "rank 1 (pid " in text and "died" in text, text


def test_wait_signal_times_out_and_names_the_rank_that_sent_none():
    with Ranks(2) as ranks:
        ranks.start(wait_for_rank_1, "sleep", 1.0, False)
        outcome = ranks.wait(ranks=[0])[0]
    check([outcome])
    named, text, took = outcome.value
    assert named == [1] and 0.9 <= took < grown(20)
    assert "from rank 1" in text and "timed out after 1 s: rank 1 sent no signal" in text, text


@pytest.mark.parametrize("how", ["abort", "leave"])
def test_wait_signal_for_a_rank_that_aborts_or_leaves_ends(how):
    with Ranks(3) as ranks:
        ranks.start(wait_for_rank_1, how, grown(30.0), False)
        outcomes = ranks.wait()
    check(outcomes)
    for rank in (0, 2):
        named, text, took = outcomes[rank].value
        assert named == [1] and took < grown(20), text
        assert ("aborted" if how == "abort" else "destroyed its communicator") in text, text


def test_a_timeout_of_its_own_ends_one_wait():
    with Ranks(2) as ranks:
        took, _ = ranks.run(short_wait)
    assert took < grown(20)


def short_wait():
    comm = make("windows", timeout=datetime.timedelta(seconds=60))
    window = comm.new_window(torch.zeros(1))
    begin = time.monotonic()
    if dist.get_rank() == 1:
        with pytest.raises(torchcomms().CommError, match="rank 0 gave up"):
            window.wait_signal(0, False)
    else:
        with pytest.raises(torchcomms().CommError, match="timed out after 0.5 s"):
            window.wait_signal(1, False, timeout=datetime.timedelta(seconds=0.5))
    return time.monotonic() - begin


@pytest.mark.ranks(2)
def test_windows_leave_no_file_mapping_or_thread(world):
    def resources():
        gc.collect()
        return len(descriptors()), len(mappings())

    def use(comm):
        tensor = torch.zeros(5000)
        window = comm.new_window(tensor)
        window.put(torch.ones(10), 1 - dist.get_rank(), 0, True).wait()
        view = window.map_remote_tensor(1 - dist.get_rank())
        comm.barrier(False)
        window.tensor_deregister()
        forgotten = comm.new_window(torch.zeros(10))
        return view, forgotten

    comm = make("windows")
    use(comm)
    comm.barrier(True).wait()
    # A thread of the library connects to the store when its turn comes: that is no window's.
    files, mapped = resources()
    before = (files + 1, mapped)
    for _ in range(30):
        use(comm)
    comm.barrier(False)
    assert wait_for(lambda: all(map(operator.le, resources(), before))), (resources(), before)
    comm.finalize()
    for _ in range(3):
        comm = make("windows")
        use(comm)  # one is open
        comm.finalize()
    del comm
    gc.collect()
    assert wait_for(lambda: all(map(operator.le, resources(), before))), (resources(), before)
