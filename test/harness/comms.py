"""TorchComm objects: one way to make them in a rank."""

import datetime

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
