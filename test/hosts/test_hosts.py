"""Ranks of one host share memory; between hosts CPU tensors go over Gloo."""

# A host is a host name of its own here, on the loopback device. Where the ranks are is written as
# one letter for each: "aab" has ranks 0 and 1 on one host, rank 2 on another.

import atexit
import contextlib
import ctypes
import gc
import hashlib
import os
import pathlib
import signal
import socket
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

import torchcomms_pg
from harness.ranks import Ranks, asleep, check, init_default_group, wait_for
from harness.values import FLOAT8, FLOATS, INTEGERS, all_data, assert_reduced, assert_same, data
from torchcomms_pg import _C, as_gloo
from torchcomms_pg.testing.rank import receive, report

CLONE_NEWUTS = 0x04000000

pytestmark = pytest.mark.beyond_gloo


def move(places):
    """Gives this rank, and it alone, the host of its letter; skips where it may not have one."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    host = f"host-{places[int(os.environ['RANK'])]}".encode()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWUTS) != 0 or libc.sethostname(host, len(host)) != 0:
        pytest.skip(f"a host name of its own needs root: {os.strerror(ctypes.get_errno())}")


def on_hosts(function, places, *args, timeout=40):
    with Ranks(len(places), init=False) as ranks:
        return ranks.run(function, ranks.store_args(), places, *args, timeout=timeout)


def in_group(args, places, body, *rest):
    """What `body` returns in a group of the ranks' hosts."""
    rank, world = int(os.environ["RANK"]), len(places)
    move(places)
    init_default_group(*args, rank, world, 30)
    result = body(rank, world, *rest)
    dist.destroy_process_group()
    return result


def library(group):
    """Which library carries the CPU tensors of a group: Gloo has no windows."""
    return "shm" if group._get_backend(torch.device("cpu")).supports_window else "gloo"


def operate(args, places, backend):
    rank = int(os.environ["RANK"])
    move(places)
    if backend == "gloo":
        as_gloo.install()
    init_default_group(*args, rank, 3, 20, backend)
    inputs = all_data(3, 70_001)
    tensor = inputs[rank].clone()
    dist.all_reduce(tensor, async_op=True).wait()
    assert_reduced(tensor, inputs)
    outputs = [None] * 3
    dist.all_gather_object(outputs, {"rank": rank})
    assert outputs == [{"rank": r} for r in range(3)]
    if rank == 0:
        dist.send(inputs[0], 2, tag=7)
    if rank == 2:
        dist.recv(tensor, 0, tag=7)
        assert torch.equal(tensor, inputs[0])
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(7, 3))
    model(inputs[rank][:70].view(10, 7)).sum().backward()
    # Of the ranks that share a host, and of others.
    together = dist.new_group([1, 2])
    apart = dist.new_group([0, 2])
    for group, members in ((together, (1, 2)), (apart, (0, 2))):
        if rank in members:
            tensor = inputs[rank].clone()
            dist.all_reduce(tensor, group=group)
            assert_reduced(tensor, [inputs[r] for r in members])
    groups = (dist.group.WORLD, together if rank else None, apart if rank != 1 else None)
    has_windows = hasattr(dist.group.WORLD._get_backend(torch.device("cpu")), "supports_window")
    used = [group and has_windows and library(group) for group in groups]
    dist.destroy_process_group()
    return used


@pytest.mark.parametrize("backend", ["torchcomms", "gloo"])
def test_groups_of_several_hosts_go_over_gloo_and_those_of_one_through_memory(backend):
    for rank, (world, together, apart) in enumerate(on_hosts(operate, "abb", backend)):
        if world:
            assert world == "gloo"
            assert together == (None if rank == 0 else "shm")
            assert apart == (None if rank == 1 else "gloo")


def shrink(rank, world):
    with pytest.raises(RuntimeError, match="on several hosts, where .* make a new group"):
        dist.shrink_group([1 - rank])
    dist.barrier()


def test_shrinking_says_that_groups_of_several_hosts_cannot():
    on_hosts(in_group, "ab", shrink)


def share_memory(rank, world):
    store = dist.distributed_c10d._get_default_store()
    with pytest.raises(RuntimeError) as error:
        torchcomms_pg.new_comm("shm", "cpu", "here", store=store, rank=rank, size=world)
    return str(error.value)


def test_shared_memory_names_the_ranks_on_different_hosts_with_their_hosts():
    for message in on_hosts(in_group, "ab", share_memory):
        assert "'here'" in message and "different hosts" in message
        assert "rank 0 on host 'host-a'" in message and "rank 1 on host 'host-b'" in message


# One host alone, two of one size, interleaved, uneven, several of one rank each, and so many that
# they are a tree.
PLACES = ("ab", "aab", "aba", "abc", "aabb", "abab", "abba", "aaab", "abbb", "aabc", "abcdefghii")
# Uneven, interleaved, three hosts, a tree: enough where only who shares a host matters.
FEW_PLACES = ("aab", "abba", "aabc", "abcdefghii")
# Nothing, one, what one rank of a host reduces, parts that fit no rail, several pieces (of 4 MiB).
NUMBERS = (0, 1, 7, 1025, 70_001, 2_100_003)
OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")


def reduce_everything(rank, world):
    for dtype in (*FLOATS, *INTEGERS, *FLOAT8, torch.complex64, torch.bool):
        for name in OPS:
            op = getattr(dist.ReduceOp, name)
            real = dtype.is_floating_point or dtype.is_complex
            if (name[0] == "B" and real) or (dtype.is_complex and name not in ("SUM", "AVG")):
                continue
            if (dtype == torch.bool and name == "AVG") or (dtype in FLOAT8 and name == "PRODUCT"):
                continue
            inputs = all_data(world, 1025, dtype)
            tensor = inputs[rank].clone()
            dist.all_reduce(tensor, op)
            assert_reduced(tensor, inputs, op, f"{dtype} {name}")
    for number in NUMBERS if world <= 4 else NUMBERS[:-1]:
        inputs = all_data(world, number)
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
            tensor = inputs[rank].clone()
            dist.all_reduce(tensor, op)
            assert_reduced(tensor, inputs, op, f"{number} {op}")
        bits = [None] * world
        dist.all_gather_object(bits, hashlib.sha1(tensor.numpy().tobytes()).hexdigest())
        assert len(set(bits)) == 1
        for root in range(world):
            tensor = inputs[rank].clone()
            dist.reduce(tensor, root)
            if rank == root:
                assert_reduced(tensor, inputs, what=f"reduce {number} to {root}")
            else:
                assert_same(tensor, inputs[rank], "of another rank than the root")
    scaled = all_data(world, 70_001, torch.float16)
    tensor = scaled[rank].clone()
    dist.all_reduce(tensor, dist._make_nccl_premul_sum(0.5))
    assert_reduced(tensor, [x * 0.5 for x in scaled])
    full = torch.full((9,), 60_000, dtype=torch.float16)
    dist.all_reduce(full, dist.ReduceOp.AVG)
    assert full.tolist() == [60_000] * 9  # though its sum is none in float16
    for number in (0, 1, 1025, 300_001):
        inputs = all_data(world, number * world)
        output = torch.empty(number)
        dist.reduce_scatter_tensor(output, inputs[rank].clone())
        assert_reduced(output, [x[rank * number : (rank + 1) * number] for x in inputs])
    sizes = [100 * r for r in range(world)]
    inputs = [all_data(world, n, salt=i) for i, n in enumerate(sizes)]
    output = torch.empty(sizes[rank])
    dist.reduce_scatter(output, [of[rank].clone() for of in inputs], dist.ReduceOp.AVG)
    assert_reduced(output, inputs[rank], dist.ReduceOp.AVG)


def move_everything(rank, world):
    for number in NUMBERS if world <= 4 else NUMBERS[:-1]:
        for dtype in (torch.float32, torch.bool) if number < 2000 else (torch.float32,):
            inputs = all_data(world, number, dtype)
            for root in range(world):
                tensor = inputs[rank].clone()
                dist.broadcast(tensor, root)
                assert_same(tensor, inputs[root], f"broadcast {number} of {root}")
    for number in (0, 1, 7, 1025, 300_001):
        inputs = all_data(world, number)
        everything = torch.empty(number * world)
        dist.all_gather_into_tensor(everything, inputs[rank])
        assert_same(everything, torch.cat(inputs))
        for root in range(world):
            got = [torch.empty(number) for _ in inputs] if rank == root else None
            dist.gather(inputs[rank], got, root)
            for tensor, want in zip(got or [], inputs):
                assert_same(tensor, want, f"gather {number} to {root}")
            tensor = torch.empty(number)
            dist.scatter(tensor, inputs if rank == root else None, root)
            assert_same(tensor, inputs[rank], f"scatter {number} of {root}")
        received = torch.empty(number * world)
        dist.all_to_all_single(
            received, torch.cat([data(rank, number, salt=r) for r in range(world)])
        )
        assert_same(received, torch.cat([data(r, number, salt=rank) for r in range(world)]))
    sizes = [(0, 1, 70_001, 13)[r % 4] for r in range(world)]
    got = [torch.empty(n) for n in sizes]
    dist.all_gather(got, data(rank, sizes[rank]))
    for r, tensor in enumerate(got):
        assert_same(tensor, data(r, sizes[r]))
    # From rank s to rank r: so many rows, none among them.
    rows = [[(s * 7 + r * 5) % 4 * 331 for r in range(world)] for s in range(world)]
    output = torch.empty(sum(rows[s][rank] for s in range(world)), 3)
    sent = [data(rank, (rows[rank][r], 3), salt=r) for r in range(world)]
    splits = [rows[s][rank] for s in range(world)]
    dist.all_to_all_single(output, torch.cat(sent), splits, rows[rank])
    want = [data(s, (rows[s][rank], 3), salt=rank) for s in range(world)]
    assert_same(output, torch.cat(want))
    got = [torch.empty(rows[s][rank], 3) for s in range(world)]
    dist.all_to_all(got, sent)
    for tensor, expected in zip(got, want):
        assert_same(tensor, expected)
    dist.barrier()
    with_objects = [None] * world
    dist.all_gather_object(with_objects, {"rank": rank})
    assert with_objects == [{"rank": r} for r in range(world)]


def overlap(rank, world):
    """Asynchronous operations, some of them under way at once, messages among them."""
    inputs = [all_data(world, number) for number in (3, 70_001, 1_100_003)]
    tensors = [of[rank].clone() for of in inputs]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    right, left = (rank + 1) % world, (rank - 1) % world
    messages = [data(rank, n) for n in (5, 300_001)]
    got = [torch.empty_like(tensor) for tensor in messages]
    works += [dist.isend(tensor, right, tag=i) for i, tensor in enumerate(messages)]
    works += [dist.irecv(got[1], left, tag=1), dist.irecv(got[0], left, tag=0)]
    here = torch.ones(3)
    dist.all_reduce(here)  # behind the others
    assert here.tolist() == [world] * 3
    for work in works:
        work.wait()
    for tensor, of in zip(tensors, inputs):
        assert_reduced(tensor, of)
    for n, tensor in zip((5, 300_001), got):
        assert_same(tensor, data(left, n))
    if rank == 0:
        seen = [dist.recv(tensor := torch.empty(1)) for _ in range(1, world)]
        assert sorted(seen) == list(range(1, world))
    else:
        dist.send(torch.ones(1), 0)


def converse(rank, world):
    """Messages between any two ranks, many at once, and from any rank."""
    others = [r for r in range(world) if r != rank]
    sizes = (1, 70_001, 300_001)
    for salt in range(3):
        got = {(r, n): torch.empty(n) for r in others for n in sizes}
        # Nobody receives in the order in which the others send.
        batch = [dist.P2POp(dist.irecv, got[r, n], r) for r in others[::-1] for n in sizes]
        batch += [
            dist.P2POp(dist.isend, data(rank, n, salt=salt + r), r) for r in others for n in sizes
        ]
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        for (r, n), tensor in got.items():
            assert_same(tensor, data(r, n, salt=salt + rank), f"{n} of rank {r}")
    # Every rank in turn takes what comes first, twice of each; its own works are under way.
    for root in range(world):
        if rank != root:
            sent = [dist.isend(torch.full((5,), float(rank)), root, tag=9) for _ in range(2)]
            [work.wait() for work in sent]
            continue
        came = []
        for _ in range(2 * len(others)):
            tensor = torch.empty(5)
            came.append(dist.recv(tensor, tag=9))
            assert tensor.tolist() == [came[-1]] * 5
        assert sorted(came) == sorted(2 * others)
    tag = 2**31 - 1
    for peer in others:
        work = dist.isend(torch.tensor([rank]), peer, tag=tag)
        dist.recv(tensor := torch.empty(1, dtype=torch.int64), peer, tag=tag)
        assert tensor.item() == peer
        work.wait()


def expect_more(rank, world):
    """Rank 3 awaits a row more of rank 0 than that sends."""
    rows = [1] * world
    awaited = [2 if (rank, peer) == (3, 0) else 1 for peer in range(world)]
    with pytest.raises(torchcomms_pg.CommError) as raised:
        dist.all_to_all_single(torch.empty(sum(awaited)), torch.ones(world), awaited, rows)
    text = str(raised.value)
    assert "rank 3 on host-b expects 8 bytes of rank 0 on host-a, which sends it 4" in text, text


def test_a_mismatch_of_splits_between_hosts_says_by_how_much():
    on_hosts(in_group, "aabb", expect_more)


WAITS = {
    "a small collective": lambda tensor: dist.all_reduce(tensor[:1]),
    "a large collective": dist.all_reduce,
    "a message": lambda tensor: dist.recv(tensor, 3),
}


def see_signals(rank, world, wait):
    """Rank 3 comes when rank 0, which waits for it, has run its handler several times."""
    store = dist.group.WORLD.get_group_store().clone()
    inputs = all_data(world, 300_001)
    tensor = inputs[rank].clone()
    dist.all_reduce(tensor)  # the connections are there
    tensor = inputs[rank].clone()
    entered, seen, ended = threading.Event(), [], threading.Event()

    def handle(number, frame):
        if entered.is_set() and (not seen or time.monotonic() - seen[-1] > 0.3):
            seen.append(time.monotonic())
            if len(seen) == 3:
                store.set("seen", "")

    def send():
        while not ended.wait(0.05):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

    if rank == 0:
        signal.signal(signal.SIGUSR1, handle)
        sender = threading.Thread(target=send)
        sender.start()
        try:
            entered.set()
            WAITS[wait](tensor)
        finally:
            ended.set()
            sender.join()
        assert len(seen) >= 3
    else:
        if rank == 3:
            store.wait(["seen"])
        if wait != "a message":
            WAITS[wait](tensor)
        elif rank == 3:
            dist.send(tensor, 0)
    if wait == "a message":
        assert rank != 0 or torch.equal(tensor, inputs[3])
    else:
        count = 1 if "small" in wait else len(tensor)
        assert_reduced(tensor[:count], [values[:count] for values in inputs])
    dist.barrier()


@pytest.mark.parametrize("wait", WAITS)
def test_signals_are_seen_while_a_rank_waits_for_another_host(wait):
    """And what the rank waits for is as if there had been none."""
    on_hosts(in_group, "aabb", see_signals, wait)


def drop(groups):
    dist.destroy_process_group(groups.pop())
    gc.collect()


# What a forked child does with the groups of its parent.
CHILDREN = {
    "drops one": drop,
    "destroys all": lambda groups: dist.destroy_process_group(),
    "aborts all": lambda groups: dist.distributed_c10d._abort_process_group(),
    "ends": lambda groups: atexit._run_exitfuncs(),
}


def fork(rank, world, what):
    """Every rank's child does `what`; then the parents go on, also with a message that is new."""
    groups = [dist.new_group(list(range(world)))]
    dist.all_reduce(torch.ones(4), group=groups[0])
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # ends one that hangs
        CHILDREN[what](groups)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    dist.barrier()
    for group in (dist.group.WORLD, groups[0]):
        if rank == 1:
            # A rank that waits looks once a second whether another has left, and tells nobody.
            time.sleep(1.5)
            dist.send(torch.ones(1), world - 1, group=group)
        if rank == world - 1:
            dist.recv(torch.ones(1), 1, group=group)
        dist.all_reduce(tensor := torch.ones(4), group=group)
        assert tensor.tolist() == [world] * 4


@pytest.mark.parametrize("what", CHILDREN)
def test_a_forked_child_leaves_its_parents_group_alone(what):
    on_hosts(in_group, "aab", fork, what)


def divide(rank, world):
    """Communicators of a communicator: those of one host alone share memory, and have windows."""
    comm = torchcomms_pg.get_comm(dist.group.WORLD)
    hosts = [None] * world
    dist.all_gather_object(hosts, socket.gethostname())
    for members in ([*range(world)], [0, world - 1], [r for r in range(world) if r != 1], [0, 1]):
        members = members[::-1]  # in another order
        child = comm.split(members if rank in members else [], f"of {members}")
        if rank not in members:
            continue
        for number in (5, 200_003):
            inputs = [data(r, number) for r in members]
            tensor = data(rank, number)
            child.all_reduce(tensor, torchcomms_pg.ReduceOp.SUM, False)
            assert_reduced(tensor, inputs)
        if len({hosts[r] for r in members}) == 1:
            child.new_window()
        else:
            with pytest.raises(RuntimeError, match="window"):
                child.new_window()
        alone = members[0] == rank
        grandchild = child.split([0] if alone else [], "one")
        if alone:
            grandchild.barrier(False)
            grandchild.finalize()
        child.finalize()


def coalesce(rank, world):
    """Several exchanges in one batch, of their own sizes and types, with another collective."""
    dtypes = (torch.float32, torch.int64, torch.float32)
    got = [[torch.empty(5 + r, dtype=dtype) for r in range(world)] for dtype in dtypes]
    rows = [rank + 1] * world
    uneven = torch.empty(sum(r + 1 for r in range(world)))
    total = torch.ones(3)
    with _coalescing_manager(device=torch.device("cpu")):
        for salt, (outputs, dtype) in enumerate(zip(got, dtypes)):
            sent = [data(rank, 5 + rank, dtype, salt=salt * world + r) for r in range(world)]
            dist.all_to_all(outputs, sent)
        dist.all_reduce(total)
        dist.all_to_all_single(uneven, data(rank, sum(rows)), [r + 1 for r in range(world)], rows)
    for salt, (outputs, dtype) in enumerate(zip(got, dtypes)):
        for r, tensor in enumerate(outputs):
            assert_same(tensor, data(r, 5 + r, dtype, salt=salt * world + rank), f"{salt} of {r}")
    assert total.tolist() == [world] * 3
    parts = [data(r, world * (r + 1))[rank * (r + 1) :][: r + 1] for r in range(world)]
    assert_same(uneven, torch.cat(parts))


@pytest.mark.product
@pytest.mark.parametrize("body", (reduce_everything, move_everything))
@pytest.mark.parametrize(
    "places",
    [each if each in FEW_PLACES else pytest.param(each, marks=pytest.mark.slow) for each in PLACES],
)
def test_collectives_between_hosts_give_what_they_give_on_one(places, body):
    on_hosts(in_group, places, body, timeout=55)


@pytest.mark.product
@pytest.mark.parametrize("body", (overlap, converse, divide, coalesce))
@pytest.mark.parametrize("places", FEW_PLACES)
def test_each_way_to_use_a_group_of_several_hosts_gives_what_it_gives_on_one(places, body):
    on_hosts(in_group, places, body, timeout=55)


def end_before_messages(args, places):
    """Rank 1 ends its group before its messages; returns an error, and what it has received."""
    rank = int(os.environ["RANK"])
    move(places)
    as_gloo.install()
    init_default_group(*args, rank, len(places), 60, "gloo")
    dist.barrier()
    if rank == 0:
        receive()
        works = [dist.isend(torch.ones(100), 1)]
        report("sends")
        receive()
    if rank == 2:
        tensor = torch.zeros(1 << 26)
        works = [dist.irecv(tensor, 1)]
        while not tensor[0]:
            time.sleep(0.001)
        report("receives")
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank != 1:
        return None
    tensor = torch.zeros(100)
    works = [dist.isend(torch.ones(1 << 26), 2), dist.irecv(tensor)]
    receive()
    end = threading.Thread(target=dist.destroy_process_group)
    end.start()
    with pytest.raises(RuntimeError) as error:
        works[1].wait()
    report("has an error")
    end.join()
    return str(error.value), tensor.sum().item()


@pytest.mark.stops_ranks
def test_a_message_that_has_ended_with_its_group_is_not_received_any_more():
    """Rank 1 cannot tell rank 2, which is stopped, that it leaves, and tries for half a second."""
    with Ranks(3, init=False) as ranks:
        ranks.start(end_before_messages, ranks.store_args(), "aab")
        ranks.wait_report(2)
        ranks.tell(1, "end")
        ranks.wait_report(1)
        ranks.tell(0, "send")
        ranks.wait_report(0)
        outcomes = ranks.wait(ranks=[1])
        check(outcomes)
    text, received = outcomes[0].value
    assert "had not ended when the group ended" in text, text
    assert received == 0


PTRACE_DETACH, PTRACE_SEIZE, PTRACE_INTERRUPT = 17, 0x4206, 0x4207
WALL = 0x40000000  # waitpid() also for threads


@contextlib.contextmanager
def stopped(thread):
    """Stops one thread of another process meanwhile; skips where that is forbidden."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    if libc.ptrace(PTRACE_SEIZE, thread, None, None) != 0:
        pytest.skip(f"no thread can be stopped: {os.strerror(ctypes.get_errno())}")
    libc.ptrace(PTRACE_INTERRUPT, thread, None, None)
    os.waitpid(thread, WALL)
    try:
        yield
    finally:
        libc.ptrace(PTRACE_DETACH, thread, None, None)


def interrupt_in(function):
    """Interrupts the main thread once it waits in a function of Python's, at one place."""
    main, looks, last = threading.main_thread().ident, 0, None
    while looks < 30:
        time.sleep(0.01)
        stack = _C.thread_stacks()[main]
        looks = looks + 1 if stack[0] == last else 0
        last = stack[0]
        if function not in [code.co_name for code, _, _ in stack]:
            looks = 0
    os.kill(os.getpid(), signal.SIGINT)


def threads(name):
    """The ids of this process's threads of a name."""
    found = []
    for path in pathlib.Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it has just ended
            if path.read_text().strip() == name:
                found.append(int(path.parent.name))
    return found


def end_before_worker(args, places):
    """Rank 0 ends its group, interrupted, while its worker is stopped; returns the error."""
    rank = int(os.environ["RANK"])
    move(places)
    init_default_group(*args, rank, len(places), 60)
    dist.barrier()
    if rank == 1:
        return receive()
    work = dist.all_reduce(torch.ones(10), async_op=True)
    assert wait_for(lambda: threads("tcpg_worker"), 20)  # it has its name a moment after its start
    [worker] = threads("tcpg_worker")
    # It waits for rank 1, and holds no lock when it is stopped.
    assert wait_for(lambda: all(asleep(worker) for _ in range(20)), 20)
    report(worker)
    receive()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
    with pytest.raises(KeyboardInterrupt):
        threading.Thread(target=interrupt_in, args=("destroy_process_group",)).start()
        dist.destroy_process_group()
    report("has ended")
    with pytest.raises(torchcomms_pg.CommError) as error:
        work.wait()
    return str(error.value)


@pytest.mark.slow
@pytest.mark.stops_ranks
def test_an_operation_that_outlasts_its_interrupted_group_ends_with_an_error():
    """The end of the group gives up waiting for the worker after ten seconds."""
    with Ranks(2, init=False) as ranks:
        ranks.start(end_before_worker, ranks.store_args(), "ab")
        with stopped(ranks.wait_report(0)):
            ranks.tell(0, "end")
            ranks.wait_report(0, timeout=60)
        outcomes = ranks.wait(ranks=[0])
        check(outcomes)
    assert "interrupt" in outcomes[0].value
