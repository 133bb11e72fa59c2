"""What torch's profiler shows of operations on GPUs, as tools look for it."""

import collections
import json
import os
import tempfile

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from harness import gpus
from harness.gpus import on_gpus

if reason := gpus.missing():
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.torch_version

SIZE = 64


def calls(world):
    """Each with the name of its range, and its records: name, elements in, elements out."""
    rank = dist.get_rank()
    other, root = 1 - rank, rank == 0
    part, whole = torch.ones(SIZE, device="cuda"), torch.ones(SIZE * world, device="cuda")
    parts = [torch.ones_like(part) for _ in range(world)]
    total = SIZE * world

    def message():
        (dist.send if root else dist.recv)(part, other)

    def batch():
        operations = [dist.P2POp(dist.isend, part, other), dist.P2POp(dist.irecv, parts[0], other)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    def coalesced(operation, *args):
        with dist._coalescing_manager(device=part.device):
            operation(*args)
            operation(*args)

    def uneven():
        sizes = [SIZE + 1, SIZE - 1] if root else [SIZE - 1, SIZE + 1]
        dist.all_to_all_single(torch.empty_like(whole), whole, sizes, sizes)

    def all_to_all():
        dist.all_to_all(parts, [each.clone() for each in parts])

    yield lambda: dist.all_reduce(part), "all_reduce", [("allreduce", SIZE, SIZE)]
    yield lambda: dist.broadcast(part, 0), "broadcast", [("broadcast", SIZE, SIZE)]
    yield lambda: dist.all_gather(parts, part), "all_gather", [("all_gather", SIZE, total)]
    gathered = [("_allgather_base", SIZE, total)]
    yield lambda: dist.all_gather_into_tensor(whole, part), "_all_gather_base", gathered
    scattered = [("_reduce_scatter_base", total, SIZE)]
    yield lambda: dist.reduce_scatter_tensor(part, whole), "_reduce_scatter_base", scattered
    exchanged = [("all_to_allv", total, total)]
    yield lambda: dist.all_to_all_single(whole, whole.clone()), "all_to_all", exchanged
    yield uneven, "all_to_all", exchanged
    yield all_to_all, "all_to_all", [("all_to_all", total, total)]
    gathered = [("gather", SIZE, total)]
    yield lambda: dist.gather(part, parts if root else None, 0), "gather", gathered
    scattered = [("scatter", total, SIZE)]
    yield lambda: dist.scatter(part, parts if root else None, 0), "scatter", scattered
    named = ("send", "0->1") if root else ("recv", "1<-0")
    yield message, " ".join(named), [(named[0], SIZE, SIZE)]
    yield batch, "coalesced", [("send", SIZE, SIZE), ("recv", SIZE, SIZE)]
    # The range of a batch begins before its operations are known.
    for name, record, operation, *args in (
        ("allreduce_coalesced", "", dist.all_reduce, part),
        (
            *("all_gather_into_tensor_coalesced", "allgather_into_tensor_coalesced"),
            *(dist.all_gather_into_tensor, whole, part),
        ),
        ("reduce_scatter_tensor_coalesced", "", dist.reduce_scatter_tensor, part, whole),
    ):
        sizes = 2 * args[-1].numel(), 2 * args[0].numel()
        title = "coalesced" if dist.get_backend() == "torchcomms" else name
        yield lambda: coalesced(operation, *args), title, [(record or name, *sizes)]
    yield lambda: dist.barrier(), "all_reduce_barrier", None


def events_of(call):
    """Those of a profile of the call, after one call outside."""
    call()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as run:
        call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.json")
        run.export_chrome_trace(path)
        with open(path) as file:
            return json.load(file)["traceEvents"]


# nccl of torch 2.15 has no ranges, and no group in its records.
@on_gpus(2, groups=("nccl-legacy", "torchcomms"))
def test_operations_have_the_names_and_sizes_that_tools_know(world):
    for call, title, wanted in calls(world):
        events = events_of(call)
        ranges = collections.Counter(event.get("name") for event in events)
        assert ranges[f"nccl:{title}"], (title, ranges)
        records = [event["args"] for event in events if event.get("name") == "record_param_comms"]
        records = [record for record in records if record["Collective name"] != "wait"]
        if wanted is None:
            continue
        fields = "Collective name", "In msg nelems", "Out msg nelems"
        found = [tuple(record[field] for field in fields) for record in records]
        assert found == wanted, title
        assert {record["Group size"] for record in records} == {world}, title
        for record in records:
            peer = {"send": "Dst Rank", "recv": "Src Rank"}.get(record["Collective name"])
            if peer in record:
                assert record[peer] == 1 - dist.get_rank(), record
