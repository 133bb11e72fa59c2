"""The TorchComm object API: operations against plain PyTorch, options, groups and errors."""

import copy
import datetime
import gc
import os
import types
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from harness.comms import each_backend, make, torchcomms
from harness.programs import run_python
from harness.ranks import Ranks, connect_store, meet, time_limit
from harness.values import all_data, assert_reduced, assert_same, data
from torchcomms_pg.testing.rank import receive

pytestmark = pytest.mark.beyond_gloo
SECOND = datetime.timedelta(seconds=1)
TIMING = "torchcomm::shm::timing"
TAG = "torchcomm::shm::tag"


@each_backend
@pytest.mark.ranks((1, 2, 3))
def test_all_reduce_takes_a_tensor_as_factor_and_torchs_own_op(world, backend):
    comm, rank, op = make("reductions", backend), dist.get_rank(), torchcomms().ReduceOp
    inputs = all_data(world, 7)
    for async_op in (False, True):
        tensor = inputs[rank].clone()
        work = comm.all_reduce(tensor, op.PREMUL_SUM(torch.tensor([2.0])), async_op)
        work.wait()
        assert_reduced(tensor, [x * 2 for x in inputs])
        assert work.result()[0] is tensor
    tensor = inputs[rank].clone()
    comm.all_reduce(tensor, dist.ReduceOp.MAX, False)
    assert_same(tensor, torch.stack(inputs).amax(0))
    comm.finalize()


@each_backend
@pytest.mark.ranks(3)
def test_a_list_that_only_the_root_needs_is_ignored_elsewhere(world, backend):
    comm, rank = make("lists", backend), dist.get_rank()
    inputs = all_data(world, 5)
    for root in range(world):
        for async_op in (False, True):
            everywhere = [torch.zeros(5) for _ in range(world)]
            work = comm.gather(everywhere, inputs[rank], root, async_op)
            work.wait()
            wanted = inputs if rank == root else [torch.zeros(5)] * world
            assert_same(torch.stack(everywhere), torch.stack(wanted))
            assert len(work.result()) == (world if rank == root else 0)
            got = torch.zeros(5)
            mine = [x + rank for x in inputs] if rank == root else [torch.ones(4)]  # of any shape
            comm.scatter(got, mine, root, async_op).wait()
            assert_same(got, inputs[rank] + root)
    comm.finalize()


@each_backend
@pytest.mark.ranks((2, 3))
def test_messages_tags_and_batches(world, backend):
    comm, rank = make("messages", backend), dist.get_rank()
    right, left = (rank + 1) % world, (rank - 1) % world
    got = torch.empty(5)
    sending = comm.send(data(rank, 5), right, True)
    comm.recv(got, left, False)
    sending.wait()
    assert_same(got, data(left, 5))
    one, two = torch.empty(3), torch.empty(3)
    works = [comm.send(data(rank, 3, salt=tag), right, True, {TAG: str(tag)}) for tag in (1, 2)]
    comm.recv(two, left, False, hints={TAG: "2"})
    comm.recv(one, left, False, hints={TAG: "1"})
    [work.wait() for work in works]
    assert_same(one, data(left, 3, salt=1))
    assert_same(two, data(left, 3, salt=2))
    for tag in ("-1", "two", str(2**31)):
        with pytest.raises(ValueError, match="wanted a number from 0 to 2147483647"):
            comm.recv(one, left, True, {TAG: tag})
    for async_op in (False, True):
        batch, got = comm.batch_op_create(), torch.empty(6)
        batch.send(data(rank, 6), right)
        batch.recv(got, left)
        assert len(batch) == 2
        batch.issue(async_op).wait()
        assert_same(got, data(left, 6))
        assert len(batch) == 0
    batch = comm.batch_op_create()
    batch.send(data(rank, 6), right)
    batch.recv(torch.empty(6), world)  # no such rank: nothing is sent
    with pytest.raises(ValueError, match=f"recv: src {world} is not a rank"):
        batch.issue(False)
    comm.barrier(False)
    comm.finalize()


@each_backend
@pytest.mark.ranks((2, 3))
def test_split_inherits_options(world, backend):
    comm, rank = (
        make("parent", backend, timeout=17 * SECOND, hints={TIMING: "true"}),
        dist.get_rank(),
    )
    mine = [r for r in range(world) if r % 2 == rank % 2]
    child = comm.split(mine, "half")
    options = child.get_options()
    assert options.timeout == 17 * SECOND and options.hints == {TIMING: "true"}
    assert options.abort_process_on_timeout_or_error is False
    assert (child.get_name(), child.get_ranks(), child.get_rank()) == (
        "half", mine, mine.index(rank)
    )  # fmt: skip
    tensor = torch.ones(3)
    child.all_reduce(tensor, torchcomms().ReduceOp.SUM, False)
    assert_same(tensor, torch.full((3,), float(len(mine))))
    first = comm.split([world - 1, 0] if rank in (0, world - 1) else [], timeout=9 * SECOND)
    if rank in (0, world - 1):
        assert first.get_ranks() == [world - 1, 0] and first.get_options().timeout == 9 * SECOND
        first.finalize()
    else:
        assert first is None
    with pytest.raises(ValueError, match="do not include this rank"):
        comm.split([(rank + 1) % world])
    child.finalize()
    comm.finalize()


@pytest.mark.ranks(3)
def test_the_groups_of_one_split_have_names_of_their_own(world):
    comm, rank = make("whole"), dist.get_rank()
    names = [None] * world
    child = comm.split([0, 2] if rank != 1 else [1])
    comm.all_gather_object(names, child.get_name())
    assert names[0] == names[2] != names[1], names
    child.finalize()
    comm.finalize()


@pytest.mark.ranks(2)
def test_names_of_splits_differ_however_the_parent_is_reached_and_agree_on_all_ranks(world):
    comms = [torchcomms().get_comm() for _ in range(2)]
    if dist.get_rank() == 0:
        cancel = comms[0].register_pre_hook(lambda args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            comms[0].split([0, 1])
        cancel.remove()
    children = [comm.split([0, 1]) for comm in comms]
    names = [child.get_name() for child in children]
    assert len(set(names)) == 2
    told = [None] * world
    dist.all_gather_object(told, names)
    assert told == [names] * world
    [child.finalize() for child in children]


@each_backend
@pytest.mark.ranks(2)
def test_accessors_and_set_timeout(world, backend):
    comm, rank = make("accessors", backend), dist.get_rank()
    assert comm.get_rank() == rank and comm.get_size() == world
    assert comm.get_ranks() == list(range(world)) and comm.get_name() == "accessors"
    assert comm.get_device() == torch.device("cpu") and comm.get_backend() == backend
    assert comm.get_backend_version() == (
        torch.__version__ if backend == "gloo" else torchcomms().__version__
    )
    comm.set_timeout(5 * SECOND)
    assert comm.get_options().timeout == 5 * SECOND
    with pytest.raises(ValueError, match="a millisecond or more"):
        comm.set_timeout(0 * SECOND)
    with pytest.raises(TypeError, match="wanted a datetime.timedelta"):
        comm.barrier(False, timeout=3)
    comm.finalize()


@each_backend
@pytest.mark.ranks(2)
def test_mistakes_raise_with_nothing_enqueued(world, backend):
    comm, op, ones = make("mistakes", backend), torchcomms().ReduceOp, torch.ones(4)
    if dist.get_rank() == 0:
        for error, match, call in (
            (ValueError, "'true' or 'false'", lambda: comm.barrier(
                False, {"torchcomm::ncclx::high_priority_stream": "maybe"})),
            (TypeError, "hints is 3", lambda: comm.barrier(False, 3)),
            (TypeError, "op is 'sum'", lambda: comm.all_reduce(ones, "sum", False)),
            (TypeError, "call ReduceOp.PREMUL_SUM",
             lambda: comm.all_reduce(ones, op.PREMUL_SUM, False)),
            (ValueError, "root 7", lambda: comm.broadcast(ones, 7, False)),
            (ValueError, "src -1", lambda: comm.recv(ones, -1, False)),
            (ValueError, "output has 3 elements", lambda: comm.all_reduce(
                ones, op.SUM, False, output=torch.ones(3))),
            (TypeError, "output has dtype", lambda: comm.all_reduce(
                ones, op.SUM, False, output=torch.ones(4).int())),
            (ValueError, "use all_gather_v", lambda: comm.all_gather(
                [torch.ones(1), torch.ones(2)], torch.ones(1), False)),
            (ValueError, "output_split_sizes has 0", lambda: comm.all_to_all_v_single(
                ones, ones, [], [2, 2], False)),
            (ValueError, "gather_single: output is None", lambda: comm.gather_single(
                None, ones, 0, False)),
        ):  # fmt: skip
            with pytest.raises(error, match=match):
                call()
    comm.all_reduce(ones, op.SUM, False)
    assert_same(ones, torch.full((4,), 2.0))
    comm.finalize()


@each_backend
@pytest.mark.ranks(2)
def test_timeout_of_one_operation(world, backend):
    comm = make("timeouts", backend)
    if dist.get_rank() == 0:
        with time_limit(0.4, 15, "all_reduce"):
            work = comm.barrier(True, timeout=SECOND / 2)
            with pytest.raises(torchcomms().CommError, match="timed out.*did not (arrive|answer)"):
                work.wait()
        assert work.status().name == "TIMEDOUT" and work.is_completed()
        assert isinstance(work.exception(), torchcomms().CommError)
        with pytest.raises(RuntimeError, match="timed out"):
            work.get_future().wait()
        assert comm.is_aborted()
    # Rank 1 waits in the store, and so for no rank.
    meet(dist.distributed_c10d._get_default_store(), f"{backend} timed out", world)
    with pytest.raises(torchcomms().CommError, match="timed out"):
        comm.barrier(False)
    comm.finalize()


@each_backend
@pytest.mark.ranks(2)
def test_abort_releases_and_never_ends_the_process(world, backend):
    comm = make("abort", backend, abort_process_on_timeout_or_error=dist.get_rank() == 0)
    comm.barrier(False)
    dist.barrier()
    if dist.get_rank() == 0:
        comm.abort()
        comm.abort()
        assert comm.is_aborted()
    dist.barrier()
    with pytest.raises(torchcomms().CommError, match="aborted"):
        comm.barrier(False)
    comm.finalize()
    comm.finalize()
    with pytest.raises(RuntimeError, match="was finalized"):
        comm.barrier(False)


@pytest.mark.ranks((1, 2))
def test_duration_is_known_when_timing_is_on(world):
    comm = make("timing", hints={TIMING: "true"})
    for async_op in (False, True):
        work = comm.barrier(async_op)
        work.wait()
        assert 0 < work.duration() < 20_000
    comm.finalize()
    comm = make("no timing")
    with pytest.raises(RuntimeError, match="no duration was taken"):
        comm.barrier(False).duration()
    comm.finalize()


@each_backend
@pytest.mark.ranks((2, 3))
def test_several_communicators_of_one_name_and_in_threads(world, backend):
    rank = dist.get_rank()
    comms = [make("twin", backend), make("twin", backend)]
    sums = [torch.full((1000,), float(rank + i)) for i in range(2)]

    def reduce(i):
        for _ in range(20):
            comms[i].all_reduce(sums[i], torchcomms().ReduceOp.MAX, False)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(reduce, range(2)))
    assert [float(s[0]) for s in sums] == [world - 1.0, float(world)]
    [comm.finalize() for comm in comms]


@pytest.mark.ranks(2)
def test_forgetting_finalize_warns(world):
    comm = make("forgotten")
    comm.barrier(False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del comm
        gc.collect()
    assert any("'forgotten' was not finalized" in str(w.message) for w in caught)


@pytest.mark.ranks(1)
def test_a_copy_of_a_communicator_a_window_or_a_work_is_that_object(world):
    comm = make("copies")
    works = [comm.barrier(True), comm.barrier(False), dist.barrier(async_op=True)]
    for thing in (comm, comm.new_window(), *works):
        assert copy.copy(thing) is thing and copy.deepcopy(thing) is thing
        assert copy.deepcopy({"here": [thing]})["here"][0] is thing
    [work.wait() for work in works]
    comm.finalize()


FORKS = """
import faulthandler, os, sys, torchcomms_pg
import torch.distributed as dist
comm = torchcomms_pg.new_comm("shm", "cpu", "parent's", store=dist.HashStore(), rank=0, size=1)
child = os.fork()
if child == 0:
    faulthandler.dump_traceback_later(60, exit=True)  # says where a child is that does not end
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
comm.finalize()
"""


def test_a_forked_child_that_exits_gets_no_warning_to_finalize():
    # Without the threads of numpy's OpenBLAS, which it joins when a process forks.
    done = run_python("-c", FORKS, OPENBLAS_NUM_THREADS="1")
    assert done.returncode == 0 and "finalize" not in done.stderr, done.stderr


def test_missing_backends_say_what_is_missing():
    new_comm = torchcomms().new_comm
    for backend, error, match in (
        ("nccl", ValueError, "CUDA tensors, got device cpu"),
        ("ncclx", ValueError, "CUDA tensors, got device cpu"),
        ("mpi", ValueError, "failed to find backend 'mpi'"),
    ):
        with pytest.raises(error, match=match):
            new_comm(backend, "cpu", rank=0, size=1)
    with pytest.raises(ValueError, match="got device cuda"):
        new_comm("shm", "cuda:0", rank=0, size=1)
    with pytest.raises(RuntimeError, match="takes NCCLX, which is built from.*NCCLX_LIBRARY"):
        new_comm("ncclx", "cuda:0", rank=0, size=1)


def test_ncclx_is_the_library_that_the_environment_names(monkeypatch):
    paths = []
    library = types.SimpleNamespace(version=22500)

    def connect(*arguments):
        paths.append(arguments[7])
        raise RuntimeError("far enough")

    monkeypatch.setattr(torchcomms()._C, "new_accelerator_communicator", connect)
    monkeypatch.setattr(torchcomms()._C, "load_nccl", lambda path, folder: library)
    monkeypatch.setenv("TORCHCOMM_NCCLX_LIBRARY", "/somewhere/libncclx.so")
    monkeypatch.setenv("TORCHCOMM_NCCL_LIBRARY", "/somewhere/libnccl.so")
    for backend in ("ncclx", "nccl"):
        with pytest.raises(RuntimeError, match="far enough"):
            torchcomms().new_comm(backend, "cuda:0", store=dist.HashStore(), rank=0, size=1)
    assert paths == ["/somewhere/libncclx.so", "/somewhere/libnccl.so"]
    library.version = 22499
    with pytest.raises(
        RuntimeError, match=r"needs NCCLX 2\.25\.0 or later, and /somewhere.* 2.24.99"
    ):
        torchcomms().new_comm("ncclx", "cuda:0", store=dist.HashStore(), rank=0, size=1)


def absent(args):
    """Rank 0 waits in vain for rank 1, over a communicator with the default options."""
    rank, store = int(os.environ["RANK"]), connect_store(*args)
    comm = torchcomms().new_comm("shm", "cpu", store=store, rank=rank, size=2, timeout=20 * SECOND)
    comm.register_abort_hook(lambda: print("hook ran", flush=True))
    comm.barrier(False)
    if rank == 1:
        receive()
    comm.barrier(False, timeout=SECOND / 2)


def test_timeout_ends_the_process_after_the_abort_hooks():
    with Ranks(2, init=False, delete_env=["TORCHCOMM_ABORT_ON_ERROR"]) as ranks:
        ranks.start(absent, ranks.store_args())
        (outcome,) = ranks.wait(ranks=[0])
        output = ranks.output(0)
        assert ranks.exit_code(0) == 1, (outcome, output)
        assert output.count("hook ran\n") == 1
        assert "ends this process: barrier" in output and "rank 1 did not arrive" in output
