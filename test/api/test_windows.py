"""One-sided windows: puts, signals, mapped peers, and everything that can go wrong with them."""

import datetime
import gc
import random
import time

import pytest
import torch
import torch.distributed as dist

from harness.catalogue import ALL_LAYOUTS, place
from harness.comms import make, torchcomms
from harness.leaks import mappings
from harness.limits import grown
from harness.ranks import Ranks, on_ranks, wait_for
from harness.simulated_group import DEVICE, start
from harness.values import MOVABLE, assert_same, data

pytestmark = pytest.mark.beyond_gloo
TORCH_2_14 = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)


def neighbours(world):
    rank = dist.get_rank()
    return (rank + 1) % world, (rank - 1) % world


def start_simulated(*args):
    pytest.importorskip("simulated._simulated", reason="python test/simulated/build.py builds it")
    start(*args)


def on_both(*worlds):
    """As on_ranks, once for windows on CPU tensors and once for those on the simulated device."""
    return on_ranks(*worlds, init={"cpu": True, "sim": start_simulated})


def device():
    """Of the windows of this rank."""
    return DEVICE if hasattr(torch, "sim") else "cpu"


# ---------------------------------------------------------------- put, signal, wait


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@on_both(1, 2, 3)
def test_every_dtype_and_offset_arrives_before_its_signal(world, async_op):
    comm, rank = make("windows", "auto", device()), dist.get_rank()
    after, before = neighbours(world)
    for salt, dtype in enumerate((*MOVABLE, torch.uint16)):
        want = data(rank, 4001, torch.int32, salt).to(dtype)
        whole = place(want, device=device())
        window = comm.new_window(whole)
        for offset, size in ((0, 1), (4000, 1), (17, 1025), (3, 0), (4001, 0), (0, 4001)):
            part = data(rank, size, torch.int32, offset + salt).to(dtype).to(device())
            works = [window.put(part, after, offset, async_op), window.signal(after, async_op)]
            works.append(window.wait_signal(before, async_op))
            for work in works:
                work.wait()
                if device() == "cpu":  # elsewhere a stream waits
                    assert work.is_completed() and work.status().name == "COMPLETED"
            want[offset : offset + size] = data(before, size, torch.int32, offset + salt).to(dtype)
            assert_same(whole.cpu(), want, f"{dtype} at {offset}")
            window.signal(before, False)  # has read it
            window.wait_signal(after, False)
        window.tensor_deregister()
    comm.finalize()


@pytest.mark.parametrize("seed", range(3))
@on_both(2, 3)
def test_random_traffic_matches_a_reference(world, seed):
    """Rounds of puts to random places, through windows of different sizes."""
    comm, rank = make("windows", "auto", device()), dist.get_rank()
    draw, own = random.Random(seed), random.Random(rank)  # the same on all ranks, and not
    if device() == "cpu":
        sizes = [[draw.choice([1, 100, 5000, 300_000]) for _ in range(world)] for _ in range(3)]
    else:  # NCCL has one window of a communicator, as large on every rank
        sizes = [[draw.choice([100, 5000, 300_000])] * world]
    windows = [comm.new_window(torch.zeros(by_rank[rank], device=device())) for by_rank in sizes]
    want = [torch.zeros(by_rank[rank]) for by_rank in sizes]
    for turn in range(20):
        used = [[0] * world for _ in sizes]  # puts of one round do not overlap
        waits = []
        for number in range(draw.randrange(1, 30)):
            which = draw.randrange(len(windows))
            source, target = draw.randrange(world), draw.randrange(world)
            offset = used[which][target]
            length = draw.randrange(sizes[which][target] - offset + 1)
            used[which][target] += length
            content = data(source, length, salt=100 * turn + number)
            if source == rank:
                windows[which].put(content.to(device()), target, offset, own.random() < 0.5)
                windows[which].signal(target, own.random() < 0.5)
            if target == rank:
                want[which][offset : offset + length] = content
                waits.append((which, source))
        own.shuffle(waits)
        for which, source in waits:
            windows[which].wait_signal(source, own.random() < 0.5).wait()
        for which, window in enumerate(windows):
            assert_same(window.get_tensor().cpu(), want[which], f"round {turn}, window {which}")
        comm.barrier(False)
    for window in windows:
        window.tensor_deregister()
    comm.finalize()


@pytest.mark.ranks((2, 3))
def test_signals_count_for_each_window_and_pair(world):
    comm = make("windows")
    after, before = neighbours(world)
    first, second = comm.new_window(torch.zeros(1)), comm.new_window(torch.zeros(1))
    for _ in range(500):
        first.signal(after, False)
    for _ in range(499):
        first.wait_signal(before, False)
    waiting = second.wait_signal(before, True)
    comm.barrier(False)  # whatever was sent is there
    assert not waiting.is_completed(), "took the signal of another window"
    comm.barrier(False)
    second.signal(after, False)
    waiting.wait()
    first.wait_signal(before, False)
    waiting = [first.wait_signal(before, True) for _ in range(100)]
    for _ in range(100):
        first.signal(after, False)
    for work in waiting:
        work.wait()
    first.tensor_deregister()
    second.tensor_deregister()
    comm.finalize()


@on_both(2)
def test_a_signal_follows_the_puts_before_it_also_asynchronous_ones(world):
    comm, peer = make("windows", "auto", device()), 1 - dist.get_rank()
    mine = torch.zeros(2_000_000, device=device())
    window = comm.new_window(mine)
    for turn in range(1, 20):
        window.put(torch.full_like(mine, turn), peer, 0, True)
        window.signal(peer, False)  # not waited for the put
        window.wait_signal(peer, False)
        assert mine.eq(turn).all(), f"turn {turn}: the signal overtook the put"
        comm.barrier(False)
    window.tensor_deregister()
    comm.finalize()


@pytest.mark.ranks((1, 2))
def test_left_over_signals_do_not_reach_the_next_window(world):
    comm = make("windows")
    after, before = neighbours(world)
    window = comm.new_window(torch.zeros(4))
    for _ in range(5):
        window.signal(after, False)
    window.wait_signal(before, False)
    window.tensor_deregister()
    window.tensor_register(torch.zeros(4))
    waiting = window.wait_signal(before, True)
    comm.barrier(False)
    assert not waiting.is_completed(), "a signal of before the registration was taken"
    comm.barrier(False)
    window.signal(after, False)
    waiting.wait()
    window.tensor_deregister()
    comm.finalize()


# ---------------------------------------------------------------- the registered tensor


@pytest.mark.ranks(2)
def test_peers_write_into_the_very_tensor_and_all_that_shares_its_storage(world):
    comm, peer = make("windows"), 1 - dist.get_rank()
    layer = torch.nn.Linear(3, 4)
    kept, view = layer.weight, layer.weight.detach()[1]
    window = comm.new_window()
    window.tensor_register(layer.weight)
    assert layer.weight is kept and kept.requires_grad and kept.is_leaf
    content = torch.full((3,), 7.0 + peer)
    window.put(content, peer, 3, False)
    window.signal(peer, False)
    window.wait_signal(peer, False)
    assert view.eq(7 + dist.get_rank()).all() and kept.detach()[1].equal(view)
    layer(torch.ones(1, 3)).sum().backward()
    assert kept.grad.eq(1).all()
    # A window on a part of a storage: offsets count from there.
    whole = torch.zeros(5000)
    other = comm.new_window(whole[1001:4001].view(30, 100))
    other.put(torch.ones(2), peer, 2998, False)
    with pytest.raises(ValueError, match="do not fit into the 3000 that rank"):
        other.put(torch.ones(2), peer, 2999, False)
    comm.barrier(False)
    assert whole.nonzero().flatten().tolist() == [3999, 4000]
    other.tensor_deregister()
    window.tensor_deregister()
    content.zero_()
    layer.weight.data.add_(1)  # still a tensor like any other
    with pytest.raises(RuntimeError, match="resize"):
        whole.resize_(6000)
    comm.finalize()


@pytest.mark.ranks(2)
def test_memory_of_the_library_is_not_moved(world):
    comm = make("windows")
    tensor = comm.allocate_tensor(1000, torch.float64).fill_(3)
    assert tensor.shape == (1000,) and tensor.dtype == torch.float64
    address = tensor.data_ptr()
    window = comm.new_window(tensor)
    assert tensor.data_ptr() == address
    window.tensor_deregister()
    again = torch.ones(10)
    for _ in range(2):
        window.tensor_register(again)
        window.tensor_deregister()
        addresses = again.data_ptr()
    window.tensor_register(again)
    assert again.data_ptr() == addresses
    comm.finalize()  # with an open window
    assert again.eq(1).all() and tensor.eq(3).all()
    with pytest.raises(RuntimeError, match="shut down"):
        window.signal(0, False)
    other = make("windows")
    with pytest.raises(ValueError, match="size is -1"):
        other.allocate_tensor(-1, torch.int8)
    with pytest.raises(torch.OutOfMemoryError, match="no shared memory for 281474976710656 bytes"):
        other.allocate_tensor(2**46, torch.float32)
    other.finalize()


@pytest.mark.ranks((2, 3))
def test_ranks_may_register_different_tensors(world):
    comm, rank = make("windows"), dist.get_rank()
    shapes = [(2, 3), (0, 5), ()]
    dtypes = [torch.float32, torch.int64, torch.bfloat16]
    mine = torch.zeros(shapes[rank], dtype=dtypes[rank])
    window = comm.new_window(mine)
    assert window.get_size() == mine.nbytes and window.get_tensor() is mine
    assert (window.dtype, window.shape, window.device) == (
        mine.dtype,
        list(mine.shape),
        mine.device,
    )
    for peer in range(world):
        remote = window.map_remote_tensor(peer)
        assert remote.shape == shapes[peer] and remote.dtype == dtypes[peer]
        window.put(torch.empty(0, dtype=dtypes[peer]), peer, 0, False)
        with pytest.raises(TypeError, match=f"rank {peer} has registered"):
            window.put(torch.zeros(1, dtype=torch.int16), peer, 0, False)
        with pytest.raises(ValueError, match="do not fit"):
            window.put(torch.zeros(7, dtype=dtypes[peer]), peer, 0, False)
    if rank == 1:  # an element of rank 0's, which are smaller than its own
        window.put(torch.full((1,), 7.0), 0, 5, False)
        window.signal(0, False)
    if rank == 0:
        window.wait_signal(1, False)
        assert mine.flatten().tolist() == [0, 0, 0, 0, 0, 7]
    attr = window.get_attr(world - 1)
    assert attr.access_type.name == "WIN_ACCESS_TYPE_UNIFIED"
    window.tensor_deregister()
    assert window.get_size() == 0 and window.get_tensor() is None
    comm.finalize()


@pytest.mark.ranks(2)
def test_a_put_takes_any_strides(world):
    comm, rank = make("windows"), dist.get_rank()
    mine = torch.zeros(6 * 5 * 4, dtype=torch.complex64)
    window = comm.new_window(mine)
    theirs = data(1 - rank, (6, 5, 4), torch.complex64)
    values = data(rank, (6, 5, 4), torch.complex64)
    sources = {layout: place(values, layout) for layout in ALL_LAYOUTS}
    sources["conjugate"] = values.conj()
    for name, source in sources.items():
        mine.zero_()
        comm.barrier(False)
        window.put(source, 1 - rank, 0, name == "inner")
        window.signal(1 - rank, False)
        window.wait_signal(1 - rank, False)
        want = theirs.conj().resolve_conj() if name == "conjugate" else theirs
        assert_same(mine, want.flatten(), name)
        comm.barrier(False)
    window.tensor_deregister()
    comm.finalize()


# ---------------------------------------------------------------- mapped tensors


@pytest.mark.ranks((1, 2, 3))
def test_a_mapped_tensor_is_the_memory_of_the_peer(world):
    comm, rank = make("windows"), dist.get_rank()
    after, before = neighbours(world)
    mine = torch.arange(6).view(2, 3) + 100 * rank
    window = comm.new_window(mine)
    remote = window.map_remote_tensor(after)
    assert_same(remote, torch.arange(6).view(2, 3) + 100 * after)
    comm.barrier(False)
    remote[1, 2] = 1000 + rank  # without an operation
    window.signal(after, False)
    window.wait_signal(before, False)
    assert mine[1, 2] == 1000 + before
    mine[0, 0] = -rank
    window.signal(before, False)
    window.wait_signal(after, False)
    assert remote[0, 0] == -after
    window.tensor_deregister()
    comm.finalize()


@pytest.mark.ranks(2)
def test_a_mapped_tensor_outlives_everything(world):
    comm, rank = make("windows"), dist.get_rank()
    mine = torch.full((100_000,), 5.0 + rank)
    window = comm.new_window(mine)
    views = [window.map_remote_tensor(r) for r in range(2)]
    comm.barrier(False)
    window.tensor_deregister()
    comm.finalize()
    dist.barrier()
    del comm, window, mine
    gc.collect()
    dist.barrier()
    for peer, view in enumerate(views):
        assert view.eq(5 + peer).all()
    dist.barrier()
    if rank == 0:
        views[0].add_(1)
    dist.barrier()
    assert views[0].eq(6).all(), "the two ranks no longer share it"
    before = len(mappings())
    views.clear()
    view = None
    assert wait_for(lambda: len(mappings()) <= before - 2)


@pytest.mark.ranks(2)
def test_a_tensor_that_is_not_owned_may_go(world):
    comm, peer = make("windows"), 1 - dist.get_rank()
    window = comm.new_window()
    mine = torch.zeros(1000)
    window.tensor_register(mine, owning=False)
    assert window.get_tensor() is None
    del mine
    gc.collect()
    comm.barrier(False)
    window.put(torch.ones(1000), peer, 0, False)
    comm.barrier(False)
    assert window.map_remote_tensor(dist.get_rank()).eq(1).all()
    window.tensor_deregister()
    comm.finalize()


# ---------------------------------------------------------------- hooks and c10d


@pytest.mark.ranks(2)
def test_hooks_get_every_operation_of_a_window(world):
    comm, peer = make("windows"), 1 - dist.get_rank()
    calls, ended = [], []
    comm.register_pre_hook(lambda a: calls.append(("pre", a.name.name, a.op_id, a.peer, a.tensor)))
    comm.register_post_hook(lambda a: calls.append(("post", a.name.name, a.op_id, a.work, a.error)))
    comm.register_end_hook(lambda a: ended.append((a.name.name, a.status)))
    mine, content = torch.zeros(4), torch.ones(2)
    window = comm.new_window(mine)
    window.put(content, peer, 1, False)
    window.signal(peer, False)
    window.wait_signal(peer, True).wait()
    window.tensor_deregister()
    names = ["new_window", "tensor_register", "put", "signal", "wait_signal", "tensor_deregister"]
    assert wait_for(lambda: len(calls) == 12)  # that of the asynchronous one comes in its time
    pre = [call for call in calls if call[0] == "pre"]
    post = sorted((call for call in calls if call[0] == "post"), key=lambda call: call[2])
    assert [call[1] for call in pre] == names == [call[1] for call in post]
    assert [call[2] for call in pre] == [call[2] for call in post]
    assert [call[3] for call in pre] == [None, None, peer, peer, peer, None]
    assert pre[1][4] is mine and pre[2][4].equal(content)
    assert all(work is not None and error is None for _, _, _, work, error in post)
    assert wait_for(lambda: len(ended) == 6)
    assert sorted(ended) == sorted((name, "completed") for name in names)

    def refuse(args):
        if args.name == torchcomms().OpName.put:
            raise RuntimeError("no puts today")

    window.tensor_register(mine.zero_())
    handle = comm.register_pre_hook(refuse)
    with pytest.raises(RuntimeError, match="no puts today"):
        window.put(content, peer, 0, False)
    handle.remove()
    comm.barrier(False)
    assert mine.eq(0).all()
    window.tensor_deregister()
    comm.finalize()


@pytest.mark.ranks(2)
def test_windows_of_a_process_group(world):
    comm, peer = torchcomms().get_comm(), 1 - dist.get_rank()
    group = dist.new_group([0, 1])
    for owner in (comm, torchcomms().get_comm(group)):
        mine = torch.zeros(3)
        window = owner.new_window(mine)
        window.put(torch.full((3,), 4.0), peer, 0, False)
        window.signal(peer, False)
        dist.all_reduce(torch.ones(1))  # other operations go on
        window.wait_signal(peer, False)
        assert mine.eq(4).all()
        window.tensor_deregister()
    dist.destroy_process_group(group)


@pytest.mark.skipif(not TORCH_2_14, reason="c10d has windows from torch 2.14 on")
@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@pytest.mark.ranks((1, 2, 3))
def test_c10d_windows(world, async_op):
    from torch._C import _distributed_c10d as c10d

    rank = dist.get_rank()
    after, before = neighbours(world)
    group = dist.group.WORLD
    assert dist._supports_window()
    for given in (False, True):
        mine = torch.zeros(10 * world, dtype=torch.int64)
        window = dist._new_window(mine if given else None)
        assert isinstance(window, c10d.Window)
        if not given:
            window.tensor_register(mine)
        for turn in range(3):
            content = torch.full((10,), rank + 10 * turn)
            window.put(content, after, 10 * after, async_op).wait()
            window.signal(after, async_op).wait()
            window.wait_signal(before, async_op).wait()
            assert mine[10 * rank : 10 * rank + 10].eq(before + 10 * turn).all()
            remote = window.map_remote_tensor(rank)
            assert_same(remote, mine)
            dist.barrier()
        assert window.get_attr(after).access_type == c10d.WindowAccessType.UNIFIED
        with pytest.raises(ValueError, match="is not a rank"):
            window.get_attr(world)
        with pytest.raises(ValueError, match="do not fit"):
            window.put(mine, after, 1, async_op)
        window.tensor_deregister()
    assert group.supports_window


def c10d_timeout():
    from torch._C import _distributed_c10d as c10d

    window = dist._new_window(torch.zeros(1))
    options = c10d.WaitSignalOptions()
    options.timeout = datetime.timedelta(seconds=0.5)
    begin = time.monotonic()
    with pytest.raises(torchcomms().CommError) as error:
        window.wait_signal(1 - dist.get_rank(), True, options).wait()
    return str(error.value), time.monotonic() - begin


@pytest.mark.skipif(not TORCH_2_14, reason="c10d has windows from torch 2.14 on")
def test_a_c10d_wait_has_its_own_timeout():
    with Ranks(2) as ranks:
        ends = ranks.run(c10d_timeout)
    # Whoever calls later may find that the other has given up already.
    assert any("timed out after 0.5 s" in text and took > 0.4 for text, took in ends), ends
    assert all(took < grown(20) for _, took in ends), ends


# The examples of the API's reference pages, which the documents point to.


@pytest.mark.ranks(2)
def test_example_of_the_reference(world):
    comm, rank = make("windows"), dist.get_rank()
    data_, buffer = torch.arange(100.0), torch.zeros(1024)
    window = comm.new_window()
    window.tensor_register(buffer)
    if rank == 0:
        work = window.put(data_, dst_rank=1, offset=0, async_op=True)
        work.wait()
        window.signal(dst_rank=1, async_op=False)
    else:
        window.wait_signal(peer_rank=0, async_op=False)
        received = buffer[: data_.numel()]
        assert_same(received, data_)
        attr = window.get_attr(peer_rank=0)
        if attr.access_type == torchcomms().TorchCommWinAccessType.WIN_ACCESS_TYPE_UNIFIED:
            assert window.map_remote_tensor(rank=0).eq(0).all()
    window.tensor_deregister()
    comm.finalize()
