"""The emulated NCCL follows NCCL's rules, by version."""

import ctypes
import os
import threading

import pytest

import emulated

if reason := emulated.available():
    pytest.skip(reason, allow_module_level=True)

import torch

from gpu.test_emulated import alone
from harness import gpus, ranks, streams

pytestmark = pytest.mark.torch_version

SUCCESS, CUDA_ERROR, INTERNAL, INVALID_ARGUMENT, INVALID_USAGE, IN_PROGRESS = 0, 1, 3, 4, 5, 7
FLOAT, SUM = 7, 0


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * 128)]


class Config(ctypes.Structure):
    """ncclConfig_t of 2.18."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
        ("split_share", ctypes.c_int),
    ]

    def __init__(self, blocking):
        unset = -(2**31)
        size = ctypes.sizeof(Config)
        super().__init__(size, 0xCAFEBEEF, 21803, blocking, unset, unset, unset, None, unset)


nccl = ctypes.CDLL(None)  # what is preloaded


def unique_id():
    made = UniqueId()
    assert nccl.ncclGetUniqueId(ctypes.byref(made)) == SUCCESS
    return made


def begin(blocking, size=1, rank=0, id=None):
    """ncclCommInitRankConfig: its result and the communicator."""
    comm = ctypes.c_void_p()
    result = nccl.ncclCommInitRankConfig(
        ctypes.byref(comm), size, id or unique_id(), rank, ctypes.byref(Config(blocking))
    )
    return result, comm


def state(comm):
    found = ctypes.c_int(-1)
    assert nccl.ncclCommGetAsyncError(comm, ctypes.byref(found)) == SUCCESS
    return found.value


def settled(comm):
    """The state once it is not ncclInProgress."""
    ranks.wait_for(lambda: state(comm) != IN_PROGRESS, timeout=20)
    return state(comm)


def made(blocking):
    result, comm = begin(blocking)
    assert result in ((SUCCESS,) if blocking else (SUCCESS, IN_PROGRESS))
    assert settled(comm) == SUCCESS
    return comm


def all_reduce(comm, tensor, stream=None):
    stream = torch.cuda.current_stream() if stream is None else stream
    memory = ctypes.c_void_p(tensor.data_ptr())
    return nccl.ncclAllReduce(
        *(memory, memory, ctypes.c_size_t(tensor.numel()), FLOAT, SUM),
        *(comm, ctypes.c_void_p(stream.cuda_stream)),
    )


# ---------------------------------------------------------------- versions


def it_has_the_functions_of_its_version(version):
    number = ctypes.c_int()
    assert nccl.ncclGetVersion(ctypes.byref(number)) == SUCCESS
    assert number.value // 100 == 200 + int(version[2:])
    library = ctypes.CDLL(os.environ["TORCHCOMM_NCCL_LIBRARY"])
    assert library.ncclGetVersion(ctypes.byref(number)) == SUCCESS
    since = dict(ncclAllReduce=18, ncclMemAlloc=19, ncclCommShrink=27, ncclCommRevoke=28)
    for name, minor in since.items():
        assert hasattr(library, name) == (int(version[2:]) >= minor), name
    comm = made(blocking=1)
    if version == "2.18":  # torch's libraries load all the same, and hear of it when they call
        assert nccl.ncclCommRevoke(comm, 0) == INVALID_USAGE
        assert emulated.misuses() == ["ncclCommRevoke: this NCCL does not have it yet"]


@pytest.mark.parametrize("version", gpus.NCCL_VERSIONS)
def test_it_has_the_functions_of_its_version(version):
    alone(it_has_the_functions_of_its_version, version, **emulated.nccl_environment(version))


# ---------------------------------------------------------------- blocking or not


@gpus.on_gpu()
def test_a_communicator_that_blocks_is_ready_when_a_call_returns():
    result, comm = begin(blocking=1)
    values = torch.ones(4, device="cuda")
    assert result == state(comm) == SUCCESS
    assert all_reduce(comm, values) == state(comm) == SUCCESS
    torch.cuda.synchronize()
    assert nccl.ncclCommFinalize(comm) == nccl.ncclCommDestroy(comm) == SUCCESS


@gpus.on_gpu()
def test_a_communicator_that_does_not_block_refuses_calls_while_it_launches():
    comm = made(blocking=0)
    values = torch.ones(4, device="cuda")
    torch.cuda.synchronize()
    with emulated.hold_nccl("launch"):
        assert all_reduce(comm, values) == IN_PROGRESS
        assert torch.cuda.current_stream().query()  # nothing is in the stream yet
        assert all_reduce(comm, values) == INVALID_ARGUMENT
        assert state(comm) == INVALID_ARGUMENT  # kept
    # until the launch that was under way is over
    assert ranks.wait_for(lambda: state(comm) == SUCCESS, timeout=20)
    torch.cuda.synchronize()
    assert nccl.ncclCommAbort(comm) == SUCCESS


@gpus.on_gpu()
def test_an_argument_that_is_refused_is_the_state_of_one_that_does_not_block():
    values = torch.ones(4, device="cuda")
    memory, stream = ctypes.c_void_p(values.data_ptr()), ctypes.c_void_p(None)
    for blocking, kept in (1, SUCCESS), (0, INVALID_ARGUMENT):
        comm = made(blocking)
        arguments = (memory, memory, ctypes.c_size_t(4), FLOAT, 3, comm, stream)
        assert nccl.ncclBroadcast(*arguments) == INVALID_ARGUMENT  # there is no rank 3
        assert state(comm) == kept
        assert nccl.ncclCommAbort(comm) == SUCCESS


@gpus.on_gpu()
def test_a_group_is_launched_at_its_end_and_has_communicators_of_one_kind():
    comms = [made(blocking) for blocking in (1, 1, 0)]
    values = torch.ones(3, 4, device="cuda")
    assert nccl.ncclGroupEnd() == INVALID_USAGE
    with streams.hold():
        assert nccl.ncclGroupStart() == SUCCESS
        assert all_reduce(comms[0], values[0]) == all_reduce(comms[1], values[1]) == SUCCESS
        assert nccl.ncclGroupEnd() == SUCCESS
    assert nccl.ncclGroupStart() == SUCCESS
    assert all_reduce(comms[0], values[0]) == all_reduce(comms[2], values[2]) == SUCCESS
    assert nccl.ncclGroupEnd() == INVALID_ARGUMENT
    torch.cuda.synchronize()
    for comm in comms:
        assert nccl.ncclCommAbort(comm) == SUCCESS


def last_error():
    nccl.ncclGetLastError.restype = ctypes.c_char_p
    return nccl.ncclGetLastError(None).decode()


@gpus.on_gpu()
def test_the_latest_text_is_that_of_any_thread_and_communicator():
    comm = made(blocking=1)
    thread = threading.Thread(target=nccl.ncclGroupEnd)
    thread.start()
    thread.join()
    assert "not in a group call" in last_error()
    values = torch.ones(4, device="cuda")
    assert all_reduce(comm, values) == SUCCESS
    assert "not in a group call" in last_error()  # nothing clears it
    torch.cuda.synchronize()
    assert nccl.ncclCommDestroy(comm) == SUCCESS


# ---------------------------------------------------------------- the end


def destroy_while_it_finalizes(group_stays_open):
    comm = made(blocking=0)
    with emulated.hold_nccl("finalize"):
        assert nccl.ncclCommFinalize(comm) == IN_PROGRESS
        assert nccl.ncclCommDestroy(comm) == INVALID_ARGUMENT
    (told,) = emulated.misuses()
    assert ("the thread's group is open" in told) == group_stays_open
    result, comm = begin(blocking=0)
    if group_stays_open:  # what is begun now is never launched
        assert (result, state(comm)) == (SUCCESS, IN_PROGRESS)
        assert nccl.ncclGroupEnd() == IN_PROGRESS
    assert settled(comm) == SUCCESS


@pytest.mark.parametrize("version", gpus.NCCL_VERSIONS)
def test_a_destroy_that_comes_too_early_leaks(version):
    group_stays_open = version != "2.18"
    alone(destroy_while_it_finalizes, group_stays_open, **emulated.nccl_environment(version))


@gpus.on_gpu()
def test_a_communicator_that_was_finalized_is_destroyed():
    comm = made(blocking=0)
    assert nccl.ncclCommFinalize(comm) in (SUCCESS, IN_PROGRESS)
    assert settled(comm) == SUCCESS
    assert nccl.ncclCommDestroy(comm) == SUCCESS and not emulated.misuses()
    assert nccl.ncclCommDestroy(comm) == INVALID_ARGUMENT
    assert emulated.misuses() == [
        "ncclCommDestroy: the communicator was destroyed or aborted before"
    ]


@pytest.mark.parametrize("blocking", [1, 0], ids=["blocking", "non-blocking"])
@gpus.on_gpu()
def test_an_abort_ends_an_init_that_waits_for_its_peers(blocking):
    comm, returned = ctypes.c_void_p(), []
    config = Config(blocking)

    def init():
        returned.append(
            nccl.ncclCommInitRankConfig(ctypes.byref(comm), 2, unique_id(), 0, ctypes.byref(config))
        )

    thread = threading.Thread(target=init)
    thread.start()
    assert ranks.wait_for(lambda: comm.value, timeout=20)
    assert blocking == thread.is_alive() or ranks.wait_for(lambda: returned, timeout=20)
    assert nccl.ncclCommAbort(comm) == SUCCESS
    thread.join()
    assert returned == [INTERNAL if blocking else IN_PROGRESS]


def an_operation_without_its_peer(end, port, prefix):
    """Rank 1 never comes to the second operation; on rank 0 `end` lets the stream go."""
    rank, store = int(os.environ["RANK"]), ranks.connect_store(port, prefix)
    id = UniqueId()
    if rank == 0:
        id = unique_id()
        store.set("id", bytes(id).hex())
    id = UniqueId.from_buffer_copy(bytes.fromhex(store.get("id").decode()))
    result, comm = begin(1, 2, rank, id)
    values = torch.ones(4, device="cuda")
    assert result == all_reduce(comm, values) == SUCCESS
    torch.cuda.synchronize()
    assert values.tolist() == [2] * 4
    if rank == 0:
        assert all_reduce(comm, values) == SUCCESS
        assert not torch.cuda.current_stream().query()
        assert end(comm) == SUCCESS
        torch.cuda.synchronize()
        store.set("done", "")
    store.get("done")
    return comm


def abort(*store):
    an_operation_without_its_peer(nccl.ncclCommAbort, *store)


def revoke(*store):
    comm = an_operation_without_its_peer(lambda c: nccl.ncclCommRevoke(c, 0), *store)
    if int(os.environ["RANK"]) == 0:
        assert all_reduce(comm, torch.ones(4, device="cuda")) == INVALID_USAGE
        assert nccl.ncclCommRevoke(comm, 0) == nccl.ncclCommFinalize(comm) == INVALID_ARGUMENT
        assert nccl.ncclCommDestroy(comm) == SUCCESS


@pytest.mark.parametrize("end", [abort, revoke])
def test_a_kernel_that_waits_for_its_peer_ends(end):
    options = dict(init=gpus.no_group, started_with=emulated.environment)
    with ranks.Ranks(2, **options) as both:
        both.run(end, *both.store_args())


@gpus.on_gpu()
def test_a_graph_keeps_its_communicator_from_ending():
    comm = made(blocking=0)
    values = torch.ones(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        assert all_reduce(comm, values) in (SUCCESS, IN_PROGRESS)
        assert settled(comm) == SUCCESS
    assert nccl.ncclCommFinalize(comm) == IN_PROGRESS
    graph.replay()
    torch.cuda.synchronize()
    assert state(comm) == IN_PROGRESS
    graph.reset()
    assert settled(comm) == SUCCESS
    assert nccl.ncclCommDestroy(comm) == SUCCESS


# ---------------------------------------------------------------- misuse


@gpus.on_gpu()
def test_two_threads_in_one_communicator_are_reported():
    comm = made(blocking=0)
    values = torch.ones(4, device="cuda")
    with emulated.hold_nccl("end"):
        nccl.ncclGroupStart()
        all_reduce(comm, values)
        assert nccl.ncclGroupEnd() == IN_PROGRESS
        threads = [threading.Thread(target=settled, args=(comm,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        told = []
        kinds = "two threads complete one group job", "another thread is in ncclCommGetAsyncError"

        def both_told():
            told.extend(emulated.misuses())
            return all(any(kind in line for line in told) for kind in kinds)

        assert ranks.wait_for(both_told, timeout=20)
    for thread in threads:
        thread.join()
    emulated.misuses()  # it may have gone on
    torch.cuda.synchronize()
    assert nccl.ncclCommAbort(comm) == SUCCESS


@gpus.on_gpu()
def test_a_thread_may_ask_for_the_state_of_a_communicator_that_blocks():
    comm = made(blocking=1)
    values = torch.ones(4, device="cuda")
    with emulated.hold_nccl("launch"):
        thread = threading.Thread(target=lambda: all_reduce(comm, values))
        thread.start()
        assert state(comm) == SUCCESS and thread.is_alive()
    thread.join()
    torch.cuda.synchronize()
    assert nccl.ncclCommAbort(comm) == SUCCESS


# ---------------------------------------------------------------- memory


@gpus.on_gpu()
def test_memory_is_that_of_a_device_and_is_registered():
    memory, handle, window = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    size = ctypes.c_size_t(1 << 16)
    assert nccl.ncclMemAlloc(ctypes.byref(memory), size) == SUCCESS
    comm = made(blocking=1)
    assert nccl.ncclCommRegister(comm, memory, size, ctypes.byref(handle)) == SUCCESS
    assert nccl.ncclCommDeregister(comm, handle) == SUCCESS
    assert nccl.ncclCommWindowRegister(comm, memory, size, ctypes.byref(window), 1) == SUCCESS
    pointer = ctypes.c_void_p()
    own = (window, ctypes.c_size_t(8), 0, ctypes.byref(pointer))
    assert nccl.ncclGetPeerDevicePointer(*own) == SUCCESS
    assert pointer.value == memory.value + 8
    assert nccl.ncclCommWindowDeregister(comm, window) == SUCCESS
    assert nccl.ncclGetPeerDevicePointer(*own) == INVALID_ARGUMENT
    assert nccl.ncclMemFree(memory) == nccl.ncclCommDestroy(comm) == SUCCESS
