"""Makes and reads flight recorders, and the dumps of ranks that fail."""

import datetime
import json
import os
import pickle
import urllib.request

import pytest
import torch.distributed as dist

from harness.comms import torchcomms
from harness.ranks import check, time_limit, wait_for

LIMIT = 1.0
TOGETHER = 3.0  # the limit if several ranks call: a rank later than this is missing, too
SOON = 20.0  # seconds until a dump, which follows the verdict; a busy machine may need them


def recorder(comm=None, **kwargs):
    hook = torchcomms().hooks.FlightRecorderHook(**kwargs)
    if comm is not None:
        hook.register_with_comm(comm)
    return hook


def entries(hook, **kwargs):
    return json.loads(hook.dump_json(**kwargs)).get("entries", [])


def process_trace(completed=True):
    """Returns the content of the process groups' ring."""
    return json.loads(torchcomms()._C.process_recorder().json(completed))


def process_entries(group, completed=True):
    """Returns the entries of one group, including its messages."""
    name = group.group_name
    return [
        entry
        for entry in process_trace(completed).get("entries", [])
        if entry["process_group"][0].split(":")[0] == name
    ]


def dumped(folder, world):
    """Waits for the dumps of all ranks, and returns them."""
    paths = [f"{folder}/trace_{rank}" for rank in range(world)]
    assert wait_for(lambda: all(map(os.path.exists, paths)), SOON), os.listdir(folder)
    traces = []
    for path in paths:
        with open(path, "rb") as file:
            traces.append(pickle.load(file))
    return traces


def short_group(limit=LIMIT, **kwargs):
    """Returns a new group, whose short deadline is set after a first barrier of its ranks."""
    group = dist.new_group(**kwargs)
    if group != dist.GroupMember.NON_GROUP_MEMBER:
        dist.barrier(group)
        group.set_timeout(datetime.timedelta(seconds=limit))
    return group


def fails(call, *args, **kwargs):
    """Asserts that the call raises once this rank's dump is written; returns the error's text."""
    with time_limit(0, SOON, "the failure and its dump"):
        with pytest.raises(torchcomms().CommError) as caught:
            call(*args, **kwargs)
    path = f"{os.environ['TORCH_FR_DUMP_TEMP_FILE']}{dist.get_rank()}"
    assert os.path.exists(path), os.listdir(os.path.dirname(path))
    return str(caught.value)


def dumped_without_the_gil(ranks, holder, path):
    """Asserts that rank 0 writes its dump while it keeps the GIL, which it does until a read."""
    there = wait_for(path.exists, SOON)
    holder.read()
    check(ranks.wait())
    assert there
    with open(path, "rb") as file:
        assert "frames" not in pickle.load(file)["entries"][-1]


def ask(server, handler, query=""):
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/handler/{handler}?{query}", method="POST"
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.status, answer.read().decode()
