"""torch.profiler shows every collective with what it moved."""

import json
import os
import tempfile

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

pytestmark = [pytest.mark.beyond_gloo, pytest.mark.torch_version]

CALLS = {
    "allreduce": lambda w: dist.all_reduce(torch.ones(1024)),
    "broadcast": lambda w: dist.broadcast(torch.ones(1024), 0),
    "_allgather_base": lambda w: dist.all_gather_into_tensor(
        torch.ones(1024 * w), torch.ones(1024)
    ),
    "_reduce_scatter_base": lambda w: dist.reduce_scatter_tensor(
        torch.ones(1024), torch.ones(1024 * w)
    ),
    "all_to_all": lambda w: dist.all_to_all_single(torch.ones(1024), torch.ones(1024)),
    "barrier": lambda w: dist.barrier(),
}


def events_of(call):
    """The exported trace's events, after one warm-up call outside."""
    call()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as run:
        call()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.json")
        run.export_chrome_trace(path)
        with open(path) as file:
            return json.load(file)["traceEvents"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", CALLS)
def test_a_collective_is_recorded_with_its_name_sizes_and_group(world, name):
    events = events_of(lambda: CALLS[name](world))
    records = [e for e in events if e.get("name") == "record_param_comms"]
    records = [e["args"] for e in records if e["args"].get("Collective name") != "wait"]
    assert records, sorted({e.get("name") for e in events})
    names = [r.get("Collective name", "") for r in records]
    assert any(n.startswith(name) for n in names), names
    record = records[[n.startswith(name) for n in names].index(True)]
    assert record["Group size"] == world
    assert json.loads(record["Process Group Ranks"]) == list(range(world))
    if name == "barrier":
        return
    assert record["dtype"] == "Float"
    inputs = 1024 * world if name == "_reduce_scatter_base" else 1024
    outputs = 1024 * world if name == "_allgather_base" else 1024
    assert (record["In msg nelems"], record["Out msg nelems"]) == (inputs, outputs)


@pytest.mark.ranks(2)
def test_messages_are_recorded(world):
    def call():
        tensor = torch.ones(77)
        dist.send(tensor, 1) if dist.get_rank() == 0 else dist.recv(tensor, 0)

    events = events_of(call)
    names = [
        e["args"].get("Collective name", "")
        for e in events
        if e.get("name") == "record_param_comms"
    ]
    assert any(n.startswith(("send", "recv")) for n in names), names


def comms_records(call):
    """What torch's profiler has of the operations in the call."""
    events = events_of(call)
    return [e["args"] for e in events if e.get("name") == "record_param_comms"]


@pytest.mark.ranks(2)
def test_a_batch_of_messages_is_recorded_as_its_messages(world):
    me = dist.get_rank()
    other = 1 - me

    def call():
        dist.all_reduce(torch.ones(5))
        ops = [
            dist.P2POp(dist.isend, torch.ones(30), other),
            dist.P2POp(dist.irecv, torch.empty(30), other),
            dist.P2POp(dist.isend, torch.ones(40), other),
            dist.P2POp(dist.irecv, torch.empty(40), other),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    records = [r for r in comms_records(call) if r["Collective name"] != "wait"]
    assert [r["Collective name"] for r in records] == ["allreduce"] + ["send", "recv"] * 2
    messages = records[1:]
    if "Seq" in messages[0]:  # not in every torch
        first = messages[0]["Seq"]
        assert [record["Seq"] for record in messages] == list(range(first, first + 4)), messages
    sizes = [(record["In msg nelems"], record["Out msg nelems"]) for record in messages]
    assert sizes == [(30, 30), (30, 30), (40, 40), (40, 40)]
    for record in messages:
        sends = record["Collective name"] == "send"
        if "Src Rank" in record or "Dst Rank" in record:
            assert record["Dst Rank" if sends else "Src Rank"] == other, record


@pytest.mark.ranks(2)
def test_a_wait_moves_nothing_in_a_profile(world):
    records = comms_records(lambda: reduced(True))
    (moved,) = [r for r in records if r["Collective name"] != "wait"]
    assert moved["In msg nelems"] == 21
    waits = [r for r in records if r["Collective name"] == "wait"]
    assert waits, records
    for wait in waits:
        assert (wait["In msg nelems"], wait["Out msg nelems"]) == (0, 0), wait
        assert wait["dtype"] == "Byte", wait


def ranges(name, call):
    """The ranges of an operation on this rank, in a profile of what is called."""
    if name == "send or recv":
        name = ("send", "recv")[dist.get_rank()]
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as run:
        call()
    return [event for event in run.events() if event.name == f"torchcomms:{name}"]


def reduced(async_op):
    work = dist.all_reduce(torch.ones(7, 3), async_op=async_op)
    if async_op:
        work.wait()


def message():
    """From rank 0 to rank 1."""
    call = dist.isend if dist.get_rank() == 0 else dist.irecv
    call(torch.ones(7, 3), 1 - dist.get_rank()).wait()


CASES = {
    "sync": ("all_reduce", lambda: reduced(False)),
    "async": ("all_reduce", lambda: reduced(True)),
    "message": ("send or recv", message),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.ranks(2)
def test_an_operation_has_a_range_with_the_shapes_of_its_tensors(world, case):
    name, call = CASES[case]
    (event,) = ranges(name, call)
    assert event.is_async and event.count == 1 and event.input_shapes == [[7, 3]]


@pytest.mark.ranks(2)
def test_the_range_of_a_message_has_ended_when_its_wait_returns(world):
    """The profiler may be stopped then: a range that ended later would crash the process."""
    for _ in range(30):
        assert len(ranges("send or recv", message)) == 1
