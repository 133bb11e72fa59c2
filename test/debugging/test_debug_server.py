"""torch's debug server: its workers in the ranks, and its front end, run as it is."""

import datetime
import json
import os
import urllib.request

import pytest
import torch
import torch.distributed as dist

from harness.comms import torchcomms
from harness.ranks import meet, wait_for
from harness.recorders import LIMIT, ask, fails, short_group

pytestmark = [pytest.mark.beyond_gloo, pytest.mark.torch_version]


def worker_handlers():
    from torch._C._distributed_c10d import _WorkerServer

    server = _WorkerServer("127.0.0.1", 0)
    rank = dist.get_rank()
    try:
        group = short_group()
        trace = json.loads(ask(server, "torchcomms_fr_trace_json")[1])
        assert [e["state"] for e in trace["entries"]].count("completed") >= 1
        active = json.loads(ask(server, "torchcomms_fr_trace_json", "onlyactive=true")[1])
        assert "entries" not in active and active["pg_config"]
        health = json.loads(ask(server, "torchcomms_health_check")[1])
        assert health == dict(healthy=True, rank=rank, failures=[])
        dist.barrier()
        if rank == 0:
            message = fails(dist.all_reduce, torch.ones(5), group=group)
            health = json.loads(ask(server, "torchcomms_health_check")[1])
            assert health == dict(healthy=False, rank=0, failures=[message])
            dist.destroy_process_group(group)
            assert json.loads(ask(server, "torchcomms_health_check")[1])["healthy"]
            path = f"{os.environ['TORCH_FR_DUMP_TEMP_FILE']}0"
            os.unlink(path)
            assert path in ask(server, "torchcomms_fr_dump_file")[1]
            assert os.path.exists(path)
        dist.barrier()
    finally:
        server.shutdown()


def test_the_workers_of_the_debug_server_answer(recording):
    recording(2).run(worker_handlers)


def debug_pages(port):
    """torch's front end, as start_debug_server() puts it together, on the loopback interface."""
    pytest.importorskip("requests")
    pytest.importorskip("tabulate")
    pytest.importorskip("jinja2")
    from http.server import ThreadingHTTPServer

    from torch._C._distributed_c10d import _WorkerServer
    from torch.distributed.debug import _debug_handlers, _frontend
    from torch.distributed.debug._store import tcpstore_client

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE="2")
    rank = dist.get_rank()
    worker = _WorkerServer("127.0.0.1", 0)
    tcpstore_client().set(f"rank{rank}", f"http://127.0.0.1:{worker.port}")
    group = short_group()
    dist.barrier()
    if rank == 1:
        wait_for(lambda: os.path.exists(f"{os.environ['TORCH_FR_DUMP_TEMP_FILE']}1"), 20)
        meet(dist.distributed_c10d._get_default_store(), "the pages are read", 2)
        worker.shutdown()
        return
    _frontend._IPv6HTTPServer = lambda address, handler: ThreadingHTTPServer(
        ("127.0.0.1", address[1]), handler
    )
    server = _frontend.FrontendServer(0)

    def page(path):
        url = f"http://127.0.0.1:{server._server.server_port}/{path}"
        with urllib.request.urlopen(url, timeout=20) as answer:
            return answer.read().decode()

    group.set_timeout(datetime.timedelta(seconds=30))  # the pages may take their time
    work = dist.all_reduce(torch.ones(77), group=group, async_op=True)
    trace = page("torchcomms_fr_trace")
    assert "nccl:all_reduce" in trace and "default_pg" in trace, trace
    assert group.group_name in trace
    assert "77" in page("torchcomms_fr_trace_json")

    def health_page():
        if hasattr(_debug_handlers, "TorchCommsHealthCheckHandler"):
            shown = page("torchcomms_health_check")
        else:  # torch 2.12 has no page for what these handlers answer
            asked = ("torchcomms_health_check", "torchcomms_fr_dump_file")
            answers = [_frontend.fetch_all(path, timeout=20)[1] for path in asked]
            shown = "".join(answer.text for each in answers for answer in each)
        return shown.replace("&#34;", '"').replace("&#39;", "'")

    assert '"healthy":true' in health_page()
    with pytest.raises(torchcomms().CommError):
        work.wait(datetime.timedelta(seconds=LIMIT))
    health = health_page()
    assert '"healthy":false' in health and "rank 1 did not arrive" in health, health
    for other in range(2):
        path = f"{os.environ['TORCH_FR_DUMP_TEMP_FILE']}{other}"
        assert f"dump written to {path}" in health, health
    server._server.shutdown()
    meet(dist.distributed_c10d._get_default_store(), "the pages are read", 2)
    worker.shutdown()


def test_the_pages_of_the_debug_server_show_a_hang(recording):
    handlers = pytest.importorskip("torch.distributed.debug._debug_handlers", exc_type=ImportError)
    if not hasattr(handlers, "TorchCommsFlightRecorderHandler"):
        pytest.skip("this torch has no such pages; they came with 2.12")
    ranks = recording(2)
    ranks.run(debug_pages, ranks.store_args()[0])
