"""One way to make a TorchComm in a rank, and groups that depend on a variable."""

import datetime
import os

import pytest
import torch.distributed as dist


def torchcomms():
    import torchcomms_pg

    return torchcomms_pg


each_backend = pytest.mark.parametrize("backend", ("shm", "gloo"))


def make(name, backend="shm", device="cpu", **options):
    """A communicator of all ranks that raises what fails, over the store of the default group."""
    options.setdefault("abort_process_on_timeout_or_error", False)
    options.setdefault("timeout", datetime.timedelta(seconds=20))
    return torchcomms().new_comm(
        backend,
        device,
        name,
        store=dist.distributed_c10d._get_default_store(),
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        **options,
    )


def new_group_with(variable):
    """A new group that is created with the variable of the environment set to 1."""
    os.environ[variable] = "1"
    try:
        return dist.new_group()
    finally:
        del os.environ[variable]
