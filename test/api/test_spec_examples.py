"""The programs that the documents of the API and of the hooks show, as a reader would type them.

Written down here with two exchanges, so that they run on every machine: the module is imported as
``torchcomms_pg``, and device and backend are those of a machine without a GPU. Each ends with what
it promises.
"""

import contextlib
import datetime
import io
import json
import os
import uuid

import pytest
import torch
import torch.distributed as dist

import torchcomms_pg as torchcomms
from harness.ranks import wait_for

pytestmark = [pytest.mark.beyond_gloo, pytest.mark.torch_version]


@contextlib.contextmanager
def as_launched(world):
    """The environment of ranks that a launcher has started: new_comm finds its store by itself."""
    before = dict(os.environ)
    server = None
    if dist.get_rank() == 0:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = [server.port if server else None]
    dist.broadcast_object_list(port, 0)
    os.environ.update(
        RANK=str(dist.get_rank()),
        WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port[0]),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    try:
        yield
        dist.barrier()  # nobody ends the store that others still use
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def store_file():
    """The path of a FileStore of all ranks."""
    path = [f"/tmp/torchcomms_pg-{uuid.uuid4()}"]
    dist.broadcast_object_list(path, 0)
    try:
        yield path[0]
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path[0])


@pytest.mark.ranks(2)
def test_basic_usage(world):
    with as_launched(world), store_file() as path:
        store = torch.distributed.FileStore(path, 2)
        device = torch.device("cpu")
        comm = torchcomms.new_comm("shm", device, store=store)
        rank = comm.get_rank()
        assert comm.get_size() == world
        tensor = torch.ones(10, device=device) * rank
        comm.all_reduce(tensor, torchcomms.ReduceOp.SUM, async_op=False)
        comm.finalize()
    assert tensor.tolist() == [1.0] * 10


@pytest.mark.ranks(2)
def test_asynchronous_operations(world):
    with as_launched(world), store_file() as path:
        store = torch.distributed.FileStore(path, 2)
        device = torch.device("cpu")
        comm = torchcomms.new_comm("shm", device, store=store)
        rank = comm.get_rank()
        send_tensor = torch.full((10,), 7.0, device=device)
        recv_tensor = torch.zeros(10, device=device)
        if rank == 0:
            work = comm.send(send_tensor, dst=1, async_op=True)
        else:
            work = comm.recv(recv_tensor, src=0, async_op=True)
        work.wait()
        comm.finalize()
    assert recv_tensor.tolist() == [7.0 * rank] * 10


def cuda_graphs(world):
    """For test_gpu_graphs.py."""
    with as_launched(world):
        device = torch.device("cuda", dist.get_rank())
        torch.cuda.set_device(device)
        comm = torchcomms.new_comm("nccl", device)
        tensor = torch.ones(10, device=device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            comm.all_reduce(tensor, torchcomms.ReduceOp.SUM, async_op=True)
        for _ in range(10):
            graph.replay()
            torch.cuda.current_stream().synchronize()
        comm.finalize()
    assert tensor.tolist() == [2.0**10] * 10


@pytest.mark.ranks(2)
def test_custom_options(world):
    with as_launched(world):
        # The document writes torch.timedelta, which torch does not have.
        comm = torchcomms.new_comm(
            "shm",
            torch.device("cpu"),
            timeout=datetime.timedelta(seconds=60),
            abort_process_on_timeout_or_error=False,
            hints={"torchcomm::ncclx::high_priority_stream": "true", "backend_option": "value"},
        )
        tensor = torch.ones(3)
        comm.all_reduce(tensor, torchcomms.ReduceOp.SUM, async_op=False)
        comm.finalize()
    assert tensor.tolist() == [2.0] * 3


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@pytest.mark.ranks(2)
def test_registering_hooks(world, async_op):
    from torchcomms_pg._comms import OpName, PostHookArgs, PreHookArgs

    lines = []
    with as_launched(world):
        comm = torchcomms.new_comm("shm", torch.device("cpu"))

        def my_pre_hook(args: PreHookArgs) -> None:
            assert args.name == OpName.all_reduce
            lines.append(f"Starting operation: {args.name} (op_id={args.op_id})")

        def my_post_hook(args: PostHookArgs) -> None:
            lines.append(f"Completed operation: {args.name} (op_id={args.op_id})")

        def my_abort_hook() -> None:
            lines.append("Process is about to abort, saving debug info...")

        pre_handle = comm.register_pre_hook(my_pre_hook)
        post_handle = comm.register_post_hook(my_post_hook)
        abort_handle = comm.register_abort_hook(my_abort_hook)
        tensor = torch.ones(10)
        if async_op and comm.get_rank() == 1:
            dist.barrier()  # rank 0 has looked
        work = comm.all_reduce(tensor, torchcomms.ReduceOp.SUM, async_op=async_op)
        if async_op:
            if comm.get_rank() == 0:
                assert len(lines) == 1, lines  # it has started, and no more
                dist.barrier()
            work.wait()
        pre_handle.remove()
        post_handle.remove()
        abort_handle.remove()
        comm.all_reduce(tensor, torchcomms.ReduceOp.SUM, async_op=False)  # nobody hears of it
        comm.finalize()
    # A thread tells of the end, maybe after wait() has returned.
    assert wait_for(lambda: len(lines) >= 2)
    assert [line.partition(":")[0] for line in lines] == [
        "Starting operation",
        "Completed operation",
    ]
    assert tensor.tolist() == [4.0] * 10


@pytest.mark.ranks(2)
def test_flight_recorder_hook(world):
    from torchcomms_pg.hooks import FlightRecorderHook

    prefix = [f"/tmp/torchcomms_pg-{uuid.uuid4()}-"]
    dist.broadcast_object_list(prefix, 0)
    with as_launched(world):
        os.environ["TORCHCOMM_FR_DUMP_TEMP_FILE"] = prefix[0]
        comm = torchcomms.new_comm("shm", torch.device("cpu"))
        recorder = FlightRecorderHook(max_entries=1024)
        recorder.register_with_comm(comm)
        tensor = torch.ones(10)
        comm.all_reduce(tensor, torchcomms.ReduceOp.SUM, async_op=False)
        comm.barrier(async_op=False)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            print(recorder.dump_json())
        recorder.dump_file(rank=comm.get_rank())
        recorder.unregister()
        rank = comm.get_rank()
        comm.finalize()
    entries = json.loads(printed.getvalue())["entries"]
    assert [entry["state"] for entry in entries] == ["completed", "completed"]
    with open(f"{prefix[0]}{rank}", "rb") as file:
        assert file.read()
    os.unlink(f"{prefix[0]}{rank}")
