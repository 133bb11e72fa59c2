"""A rank that is in no operation learns of a failure elsewhere before its next call."""

import datetime
import json
import re

import pytest
import torch
import torch.distributed as dist

import torchcomms_pg
from harness.ranks import Ranks, wait_for
from harness.recorders import ask

pytestmark = pytest.mark.beyond_gloo
SUM = torchcomms_pg.ReduceOp.SUM


def learn(backend, how):
    """Rank 0's group fails; what rank 1, which calls nothing, has heard."""
    store, me = dist.distributed_c10d._get_default_store(), dist.get_rank()
    comm = torchcomms_pg.new_comm(
        backend,
        "cpu",
        f"{backend}/{how}",
        store=store,
        rank=me,
        size=2,
        timeout=datetime.timedelta(seconds=60),
        abort_process_on_timeout_or_error=False,
    )
    hooks = []
    comm.register_abort_hook(lambda: hooks.append("ran"))
    comm.barrier(False)
    dist.barrier()
    if me == 0 and how == "abort":
        comm.abort()
    elif me == 0:
        comm.set_timeout(datetime.timedelta(seconds=0.5))
        with pytest.raises(torchcomms_pg.CommError, match="rank 1 did not (arrive|answer)"):
            comm.all_reduce(torch.ones(1), SUM, async_op=False)
    assert wait_for(lambda: comm.is_aborted() and hooks, 60), (comm.is_aborted(), hooks)
    with pytest.raises(torchcomms_pg.CommError) as raised:
        comm.all_reduce(torch.ones(1), SUM, async_op=False)
    dist.barrier()
    comm.finalize()
    return str(raised.value), hooks


@pytest.mark.parametrize(
    "backend, how",
    [("shm", "abort"), ("shm", "timeout"), ("gloo", "abort"), ("gloo", "timeout")],
)
def test_a_late_rank_knows_that_its_group_has_failed(backend, how):
    with Ranks(2) as ranks:
        for text, hooks in ranks.run(learn, backend, how):
            assert hooks == ["ran"]
            # Over Gloo nobody knows it of a rank that is held up, and does not answer.
            late = "rank 1 (has not arrived|did not answer)"
            assert re.search("aborted on rank 0" if how == "abort" else late, text), text


def look_at_health():
    """Rank 0 aborts; what rank 1, which calls nothing, has on its page then."""
    from torch._C._distributed_c10d import _WorkerServer

    store, me = dist.distributed_c10d._get_default_store(), dist.get_rank()
    options = dict(store=store, rank=me, size=2, abort_process_on_timeout_or_error=False)
    comm = torchcomms_pg.new_comm("shm", "cpu", "watched", **options)
    comm.barrier(False)
    dist.barrier()  # all have left that one
    if me == 0:
        comm.abort()
        dist.barrier()
        return None
    server = _WorkerServer("127.0.0.1", 0)
    page = lambda: json.loads(ask(server, "torchcomms_health_check")[1])  # noqa: E731
    try:
        assert wait_for(lambda: not page()["healthy"], 60)
        return page()["failures"]
    finally:
        server.shutdown()
        dist.barrier()
        comm.abort()


def test_the_page_of_a_late_rank_does_not_call_a_failed_group_healthy():
    with Ranks(2) as ranks:
        (failure,) = ranks.run(look_at_health)[1]
    assert "aborted on rank 0" in failure
