"""Programs that load libnccl by themselves, beside torch's link to it, run over the emulated one.

As vLLM's PyNcclCommunicator does by ctypes, and nccl4py, on which torch 2.15 has a backend, by its
bindings: libnccl.so.2, by name, is the copy that is preloaded.
"""

import ctypes
import functools
import importlib.util
import itertools
import os
import threading

import pytest

import emulated

if reason := emulated.available():
    pytest.skip(reason, allow_module_level=True)

import torch
import torch.distributed as dist

from harness import catalogue, gpus, ranks

pytestmark = pytest.mark.torch_version

FLOAT, SUM = 7, 0


# ---------------------------------------------------------------- by ctypes


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 128)]


class Library:
    """libnccl by its name, with declared arguments; a call that fails raises."""

    POINTER, SIZE, INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    DATA = (POINTER, POINTER, SIZE, INT)  # send, receive, count, type
    PLACE = (POINTER, POINTER)  # communicator, stream
    FUNCTIONS = {  # noqa: RUF012
        "ncclGetVersion": (ctypes.POINTER(INT),),
        "ncclGetUniqueId": (ctypes.POINTER(UniqueId),),
        "ncclCommInitRank": (ctypes.POINTER(POINTER), INT, UniqueId, INT),
        "ncclCommCuDevice": (POINTER, ctypes.POINTER(INT)),
        "ncclAllReduce": (*DATA, INT, *PLACE),
        "ncclReduce": (*DATA, INT, INT, *PLACE),
        "ncclAllGather": (*DATA, *PLACE),
        "ncclReduceScatter": (*DATA, INT, *PLACE),
        "ncclBroadcast": (*DATA, INT, *PLACE),
        "ncclSend": (POINTER, SIZE, INT, INT, *PLACE),
        "ncclRecv": (POINTER, SIZE, INT, INT, *PLACE),
        "ncclGroupStart": (),
        "ncclGroupEnd": (),
        "ncclMemAlloc": (ctypes.POINTER(POINTER), SIZE),
        "ncclMemFree": (POINTER,),
        "ncclCommWindowRegister": (POINTER, POINTER, SIZE, ctypes.POINTER(POINTER), INT),
        "ncclCommWindowDeregister": (POINTER, POINTER),
        "ncclCommSuspend": (POINTER, INT),
        "ncclCommResume": (POINTER,),
        "ncclCommAbort": (POINTER,),
    }

    def __init__(self):
        self.library = ctypes.CDLL("libnccl.so.2")
        self.library.ncclGetErrorString.restype = ctypes.c_char_p
        self.library.ncclGetLastError.restype = ctypes.c_char_p

    def __getattr__(self, name):
        function = getattr(self.library, name)
        function.restype, function.argtypes = ctypes.c_int, self.FUNCTIONS[name]

        def call(*args):
            if result := function(*args):
                what = self.library.ncclGetErrorString(result), self.library.ncclGetLastError(None)
                raise RuntimeError(f"{name}: {what}")

        return call


def join(nccl, store):
    """A communicator of all ranks, whose id comes through the store."""
    rank, world = int(os.environ["RANK"]), 2
    id = UniqueId()
    if rank == 0:
        nccl.ncclGetUniqueId(ctypes.byref(id))
        store.set("id", bytes(id))
    id = UniqueId.from_buffer_copy(store.get("id"))
    comm = ctypes.c_void_p()
    nccl.ncclCommInitRank(ctypes.byref(comm), world, id, rank)
    return comm


class Operations:
    """The operations of one communicator, each in the current stream."""

    def __init__(self, nccl, comm):
        self.nccl, self.comm = nccl, comm

    def call(self, name, *args):
        stream = torch.cuda.current_stream().cuda_stream
        getattr(self.nccl, name)(*args, self.comm, stream)

    def all_reduce(self, input, output):
        self.call("ncclAllReduce", input.data_ptr(), output.data_ptr(), input.numel(), FLOAT, SUM)

    def all_gather(self, input, output):
        self.call("ncclAllGather", input.data_ptr(), output.data_ptr(), input.numel(), FLOAT)

    def reduce_scatter(self, input, output):
        args = input.data_ptr(), output.data_ptr(), output.numel(), FLOAT, SUM
        self.call("ncclReduceScatter", *args)

    def all_gather_v(self, input, output, sizes):
        self.nccl.ncclGroupStart()
        for root, part in enumerate(output.split(sizes)):
            args = input.data_ptr(), part.data_ptr(), part.numel(), FLOAT, root
            self.call("ncclBroadcast", *args)
        self.nccl.ncclGroupEnd()

    def reduce_scatter_v(self, input, output, sizes):
        self.nccl.ncclGroupStart()
        for root, part in enumerate(input.split(sizes)):
            args = part.data_ptr(), output.data_ptr(), part.numel(), FLOAT, SUM, root
            self.call("ncclReduce", *args)
        self.nccl.ncclGroupEnd()

    def exchange(self, sent, got, peer):
        self.nccl.ncclGroupStart()
        self.call("ncclSend", sent.data_ptr(), sent.numel(), FLOAT, peer)
        self.call("ncclRecv", got.data_ptr(), got.numel(), FLOAT, peer)
        self.nccl.ncclGroupEnd()


def filled(size, value=0.0):
    return torch.full((size,), float(value), device="cuda")


def uses_libnccl(port, prefix):
    nccl, store = Library(), ranks.connect_store(port, prefix)
    version, device = ctypes.c_int(), ctypes.c_int()
    nccl.ncclGetVersion(ctypes.byref(version))
    assert version.value >= 21800
    comm, rank = join(nccl, store), int(os.environ["RANK"])
    nccl.ncclCommCuDevice(comm, ctypes.byref(device))
    assert device.value == torch.cuda.current_device()
    do, sizes = Operations(nccl, comm), [2, 3]
    mine, output = filled(8, rank + 1), filled(8)

    do.all_reduce(mine, output)
    assert output.tolist() == [3] * 8
    do.all_gather(mine, gathered := filled(16))
    assert gathered.tolist() == [1] * 8 + [2] * 8
    do.reduce_scatter(mine, half := filled(4))
    assert half.tolist() == [3] * 4
    do.all_gather_v(filled(sizes[rank], rank + 1), gathered := filled(5), sizes)
    assert gathered.tolist() == [1, 1, 2, 2, 2]
    do.reduce_scatter_v(filled(5, rank + 1), part := filled(sizes[rank]), sizes)
    assert part.tolist() == [3] * sizes[rank]
    do.exchange(mine, output, 1 - rank)
    assert output.tolist() == [2 - rank] * 8

    nccl.ncclCommSuspend(comm, 1)
    nccl.ncclCommResume(comm)
    memory, window, size = ctypes.c_void_p(), ctypes.c_void_p(), 1 << 16
    nccl.ncclMemAlloc(ctypes.byref(memory), size)
    nccl.ncclCommWindowRegister(comm, memory, size, ctypes.byref(window), 1)
    assert window.value
    nccl.ncclCommWindowDeregister(comm, window)
    nccl.ncclMemFree(memory)

    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        do.all_reduce(mine, output)
    for value in range(3):
        mine.fill_(value)
        graph.replay()
        assert output.tolist() == [2 * value] * 8
    ranks.meet(store, "replayed", 2)
    # The abort waits for the graph, so that whoever holds the graph lets a thread wait.
    thread = threading.Thread(target=nccl.ncclCommAbort, args=(comm,), daemon=True)
    thread.start()
    assert ranks.wait_for(lambda: ranks.asleep(thread.native_id) or not thread.is_alive(), 20)
    assert thread.is_alive()
    graph.reset()
    thread.join(20)
    assert not thread.is_alive()


def test_a_program_finds_libnccl_by_name_and_uses_it_by_ctypes():
    options = dict(init=gpus.no_group, started_with=emulated.environment)
    with ranks.Ranks(2, **options) as both:
        both.run(uses_libnccl, *both.store_args())
        both.run(gpus.assert_no_misuse)


# ---------------------------------------------------------------- nccl4py


def missing_nccl4py():
    """Why torch's backend over nccl4py cannot be used; empty if it can."""
    if importlib.util.find_spec("torch.distributed._nccl4py") is None:
        return "torch has a backend over nccl4py from 2.15 on"
    if importlib.util.find_spec("nccl") is None:
        return "pip install -e '.[nccl4py]' brings what torch's nccl4py backend calls"
    return ""


def nccl4py_group(*args):
    from torch.distributed._nccl4py import _register_nccl4py_backend

    _register_nccl4py_backend()  # torch 2.15.0's entry point names a module that is not there
    gpus.start("nccl4py", *args)


def over_nccl4py(body):
    """A test whose body runs in two ranks with a group of torch's nccl4py backend."""

    @functools.wraps(body)
    def watched(*args, **kwargs):
        body(*args, **kwargs)
        gpus.assert_no_misuse()

    test = ranks.on_ranks(2, init=nccl4py_group, started_with=gpus.environment)(watched)
    return pytest.mark.skipif(bool(missing_nccl4py()), reason=missing_nccl4py())(test)


@over_nccl4py
def test_collectives_of_nccl4py_are_those_of_plain_values(world):
    for name, operation in catalogue.OPERATIONS.items():
        if name in ("all_gather_v", "reduce_scatter_v"):
            continue  # it has none of uneven lists
        cases = (gpu_case(world, rows).over(("sync", "async")) for rows in (1, 1000))
        catalogue.run(operation, itertools.chain.from_iterable(cases))


def gpu_case(world, rows):
    return catalogue.Case(world, rows, device="cuda")


@over_nccl4py
def test_messages_splits_and_graphs_of_nccl4py_are_right(world):
    rank, mine, got = dist.get_rank(), filled(100, dist.get_rank()), filled(100)
    batch = [dist.P2POp(dist.isend, mine, 1 - rank), dist.P2POp(dist.irecv, got, 1 - rank)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    assert (got.cpu() == 1 - rank).all()
    part = dist.split_group(split_ranks=[[0, 1]])
    dist.all_reduce(mine.fill_(1), group=part)
    assert (mine.cpu() == world).all()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        dist.all_reduce(mine)
    for _ in range(2):
        mine.fill_(1)
        graph.replay()
        assert (mine.cpu() == world).all()
    graph.reset()
