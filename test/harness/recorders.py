"""Flight recorders and the dumps of ranks that fail."""

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
TOGETHER = 3.0  # where several ranks call: one that comes later than that is missing, too
SOON = 20.0  # a dump comes with the verdict, which may take a busy machine long


def recorder(comm=None, **kwargs):
    hook = torchcomms().hooks.FlightRecorderHook(**kwargs)
    if comm is not None:
        hook.register_with_comm(comm)
    return hook


def entries(hook, **kwargs):
    return json.loads(hook.dump_json(**kwargs)).get("entries", [])


def process_trace(completed=True):
    """What the ring of the process groups holds."""
    return json.loads(torchcomms()._C.process_recorder().json(completed))


def process_entries(group, completed=True):
    """The entries of one group, its messages included."""
    name = group.group_name
    return [
        entry
        for entry in process_trace(completed).get("entries", [])
        if entry["process_group"][0].split(":")[0] == name
    ]


def dumped(folder, world):
    """The traces of all ranks; they may still be on their way."""
    paths = [f"{folder}/trace_{rank}" for rank in range(world)]
    assert wait_for(lambda: all(map(os.path.exists, paths)), SOON), os.listdir(folder)
    traces = []
    for path in paths:
        with open(path, "rb") as file:
            traces.append(pickle.load(file))
    return traces


def short_group(limit=LIMIT, **kwargs):
    """The deadline holds once all ranks have used the group, however late they were."""
    group = dist.new_group(**kwargs)
    if group != dist.GroupMember.NON_GROUP_MEMBER:
        dist.barrier(group)
        group.set_timeout(datetime.timedelta(seconds=limit))
    return group


def fails(call, *args, **kwargs):
    """The call raises, and this rank's dump is there by then."""
    with time_limit(0, SOON, "the failure and its dump"):
        with pytest.raises(torchcomms().CommError) as caught:
            call(*args, **kwargs)
    path = f"{os.environ['TORCH_FR_DUMP_TEMP_FILE']}{dist.get_rank()}"
    assert os.path.exists(path), os.listdir(os.path.dirname(path))
    return str(caught.value)


def dumped_without_the_gil(ranks, holder, path):
    """Rank 0 keeps the GIL, and lets go of it when its dump is there."""
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
