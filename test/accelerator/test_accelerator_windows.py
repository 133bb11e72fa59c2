"""One-sided windows over an accelerator: the path of a GPU, on the simulated one.

Streams dawdle at random. The library is that of shared memory with what NCCL has of windows, and no
more: one count of signals for a communicator, and memory that it maps. What does not differ from
windows on CPU tensors is in api/test_windows.py.
"""

import datetime
import gc
import os
import re
import threading

import pytest
import torch
import torch.distributed as dist

import torchcomms_pg
from harness.comms import make
from harness.fake_nccl import Library
from harness.ranks import Ranks, check, time_limit, wait_for
from harness.values import assert_same
from torchcomms_pg import CommError
from torchcomms_pg.registration import serve_host_device

try:
    import simulated
    from harness.simulated_group import DEVICE, both, on_sim, start
    from simulated import _simulated, hold, waits  # noqa: F401  (the first one is built)
except ImportError:
    pytest.skip("python test/simulated/build.py builds it", allow_module_level=True)

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


def neighbours(world):
    rank = dist.get_rank()
    return (rank + 1) % world, (rank - 1) % world


# ---------------------------------------------------------------- put, signal, wait


@both
@on_sim(2)
def test_calls_return_before_the_stream_runs_them(world, async_op):
    comm, rank = make("windows", "nccl", DEVICE), dist.get_rank()
    window = comm.new_window(zeros(8))
    comm.barrier(False)
    with hold() as held, time_limit(0, 10, "a put, a signal and a wait in a stream that is held"):
        # The put reads what the stream has not written yet.
        works = [window.put(zeros(8) + rank + 1, 1 - rank, 0, async_op)]
        works.append(window.signal(1 - rank, async_op))
        works.append(window.wait_signal(1 - rank, async_op))
        for work in works:
            work.wait()
        copy = window.get_tensor().clone()
        held.release()
        assert copy.tolist() == [2 - rank] * 8
    window.tensor_deregister()
    comm.finalize()


@on_sim(1, 2)
def test_left_over_signals_do_not_reach_the_next_window(world):
    comm = make("windows", "nccl", DEVICE)
    after, before = neighbours(world)
    window = comm.new_window(zeros(1))
    for _ in range(3):
        window.signal(after, False)
    window.wait_signal(before, True)
    window.tensor_deregister()
    window = comm.new_window(zeros(1))
    waiting = window.wait_signal(before, True)
    # A stream that looks for a signal in vain tells nobody.
    assert not wait_for(waiting.is_completed, 0.2)
    dist.barrier()  # all have looked
    window.signal(after, False)
    waiting.wait_blocking()
    window.tensor_deregister()
    comm.finalize()


# ---------------------------------------------------------------- memory


@on_sim(2)
def test_peers_write_into_the_very_tensor_and_all_that_shares_its_storage(world):
    comm, rank = make("windows", "nccl", DEVICE), dist.get_rank()
    module = torch.nn.Linear(64, 64).to(DEVICE)
    with torch.no_grad():
        before = module.weight.cpu().clone()
        row = module.weight[3]
        window = comm.new_window(module.weight)
        assert_same(module.weight.cpu(), before, "moved with its content")
        dist.barrier()  # all have looked
        window.put(zeros(64) + rank + 1, 1 - rank, 3 * 64, False)
        window.signal(1 - rank, False)
        window.wait_signal(1 - rank, False)
        assert row.tolist() == [2 - rank] * 64
        assert_same(module.weight[4].cpu(), before[4], "the rest")
    window.tensor_deregister()
    assert module(torch.ones(2, 64, device=DEVICE)).shape == (2, 64)
    comm.finalize()


@on_sim(2)
def test_memory_of_the_library_is_not_moved(world):
    comm = make("windows", "nccl", DEVICE)
    tensor = comm.allocate_tensor(1000, torch.float64)
    assert tensor.device == torch.device(DEVICE) and tensor.shape == (1000,)
    place = tensor.data_ptr()
    for _ in range(2):
        window = comm.new_window(tensor)
        assert tensor.data_ptr() == place and window.device == torch.device(DEVICE)
        window.tensor_deregister()
    comm.finalize()


@on_sim(1, 2, 3)
def test_a_mapped_tensor_is_the_memory_of_the_peer(world):
    comm, rank = make("windows", "nccl", DEVICE), dist.get_rank()
    after, before = neighbours(world)
    window = comm.new_window(zeros(3, 5))
    mapped = window.map_remote_tensor(after)
    assert mapped.shape == (3, 5) and mapped.device == torch.device(DEVICE)
    mapped[1] = rank + 1
    window.signal(after, False)
    window.wait_signal(before, False)
    assert window.get_tensor()[1].tolist() == [before + 1] * 5
    assert window.get_attr(after).access_type.name == "WIN_ACCESS_TYPE_UNIFIED"
    window.tensor_deregister()
    comm.finalize()


@on_sim(1)
def test_deregistering_waits_for_puts_in_any_stream(world):
    comm = make("windows", "nccl", DEVICE)
    window, side = comm.new_window(zeros(100)), torch.Stream(DEVICE)
    with hold(side) as held:
        with side:
            window.put(zeros(100) + 1, 0, 0, False)
        ending = threading.Thread(target=window.tensor_deregister)
        ending.start()
        current = torch.accelerator.current_stream()
        assert wait_for(lambda: waits(current) or not ending.is_alive(), 20)
        assert ending.is_alive()
        held.release()
        ending.join(20)
    assert not ending.is_alive()
    comm.finalize()


@on_sim(2)
def test_a_window_may_be_dropped_while_its_puts_are_under_way(world):
    comm, rank = make("windows", "nccl", DEVICE), dist.get_rank()
    window = comm.new_window(zeros(300_000))
    other = window.map_remote_tensor(1 - rank)
    with hold() as held:
        for async_op in (True, False):
            window.put(zeros(300_000) + rank + 1, 1 - rank, 0, async_op)
        del window
        gc.collect()
        held.release()
        assert (other == rank + 1).all()
    comm.finalize()


# ---------------------------------------------------------------- mistakes and limits


@on_sim(2)
def test_mistakes_raise_at_once_and_leave_the_window_usable(world):
    comm, rank = make("windows", "nccl", DEVICE), dist.get_rank()
    window = comm.new_window()
    with pytest.raises(RuntimeError, match="no tensor is registered"):
        window.put(zeros(1), 0, 0, False)
    with pytest.raises(ValueError, match="tensor_register: rank 0 registers 20 bytes, rank 1 24; "):
        window.tensor_register(zeros(5 + rank))
    with pytest.raises(ValueError, match="rank 0 registers 0 bytes"):
        window.tensor_register(zeros(0))
    with pytest.raises(ValueError, match="is on cpu"):
        window.tensor_register(torch.zeros(5))
    window.tensor_register(zeros(5))
    with pytest.raises(
        RuntimeError, match="1 windows of this communicator .* on a GPU, since NCCL"
    ):
        comm.new_window(zeros(5))
    with pytest.raises(TypeError, match="has dtype Int, rank 0 has registered Float"):
        window.put(zeros(1, dtype=torch.int32), 0, 0, False)
    with pytest.raises(ValueError, match="3 elements at offset 3 do not fit"):
        window.put(zeros(3), 0, 3, False)
    with pytest.raises(ValueError, match="put: tensor is on cpu"):
        window.put(torch.zeros(3), 0, 0, False)
    with pytest.raises(RuntimeError, match="part of a group of operations"), comm.group():
        window.signal(0, False)
    window.put(zeros(5) + 1, 1 - rank, 0, False)
    window.signal(1 - rank, False)
    window.wait_signal(1 - rank, False)
    assert window.get_tensor().tolist() == [1] * 5
    window.tensor_deregister()
    comm.finalize()


@pytest.mark.skipif(TORCH < (2, 12), reason="torch's streams tell of a capture from 2.12 on")
@on_sim(1)
def test_a_graph_holds_nothing_of_a_window(world):
    comm = make("windows", "nccl", DEVICE)
    window, one = comm.new_window(zeros(5)), zeros(1)
    with simulated.Graph().capture():
        for call in (
            lambda: window.put(one, 0, 0, False),
            lambda: window.signal(0, True),
            lambda: window.wait_signal(0, False),
        ):
            with pytest.raises(RuntimeError, match="cannot be captured in a graph"):
                call()
    window.tensor_deregister()
    comm.finalize()


def refusal(path, features):
    """The error of a window over a libnccl of these features."""
    simulated.install()
    serve_host_device("sim", path)
    comm = torchcomms_pg.new_comm(
        *("nccl", DEVICE), store=dist.HashStore(), rank=0, size=1,
        abort_process_on_timeout_or_error=False,
    )  # fmt: skip
    try:
        comm.new_window(zeros(5) if features else None)
    except Exception as error:
        return str(error)
    finally:
        comm.finalize()


@pytest.mark.parametrize(
    "version, features, error",
    [
        (22809, (), "ncclGetPeerDevicePointer, which came with NCCL 2.29.2"),
        (23007, ("MEMORY", "RMA"), "rank 0 cannot map the memory of rank 0; windows are for GPUs"),
    ],
    ids=["too old", "cannot map"],
)
def test_what_the_loaded_nccl_cannot_do_is_said(tmp_path, version, features, error):
    library = Library(tmp_path, version, *features)
    with Ranks(1, init=False) as ranks:
        (text,) = ranks.run(refusal, library.path, features)
    assert error in (text or "")


# ---------------------------------------------------------------- failures


def wait_for_rank_1(how, async_op):
    store = dist.distributed_c10d._get_default_store()
    comm = make("windows", "nccl", DEVICE)
    window = comm.new_window(zeros(1))
    dist.barrier()
    if how == "late":
        comm.set_timeout(datetime.timedelta(seconds=3))
    if dist.get_rank() == 1:
        if how == "die":
            os._exit(7)
        if how == "abort":
            comm.abort()
        store.wait(["rank 0 has seen it"], datetime.timedelta(seconds=30))
        return
    with time_limit(0, 15, "a wait without a signal"), pytest.raises(CommError) as caught:
        window.wait_signal(1, async_op).wait()
        comm.barrier(False)
    store.set("rank 0 has seen it", "")
    want = {"die": "rank 1", "abort": "rank 1 .* revoked", "late": "timed out after 3 s"}[how]
    assert re.search(want, str(caught.value)), caught.value
    comm.finalize()


@both
@pytest.mark.parametrize("how", ("die", "abort", "late"))
def test_a_wait_without_a_signal_ends_in_a_timeout(how, async_op):
    with Ranks(2, init=start) as ranks:
        ranks.start(wait_for_rank_1, how, async_op)
        check(ranks.wait(ranks=[0]))


def register_alone():
    comm = make("windows", "nccl", DEVICE)
    dist.barrier()
    if dist.get_rank() == 1:
        os._exit(7)
    with (
        time_limit(0, 20, "registering"),
        pytest.raises(CommError, match="tensor_register.*rank 1"),
    ):
        comm.new_window(zeros(5))
    comm.finalize()


def test_registering_names_a_dead_peer():
    with Ranks(2, init=start) as ranks:
        ranks.start(register_alone)
        check(ranks.wait(ranks=[0]))


# ---------------------------------------------------------------- c10d


@pytest.mark.skipif(TORCH < (2, 14), reason="c10d has windows from torch 2.14 on")
@both
@on_sim(2)
def test_c10d_windows(world, async_op):
    rank = dist.get_rank()
    window = dist.group.WORLD._get_backend(torch.device(DEVICE)).new_window(zeros(100))
    works = [window.put(zeros(100) + rank + 1, 1 - rank, 0, async_op)]
    works.append(window.signal(1 - rank, async_op))
    works.append(window.wait_signal(1 - rank, async_op))
    for work in works:
        work.wait()
    assert window.map_remote_tensor(rank).tolist() == [2 - rank] * 100
    window.tensor_deregister()
