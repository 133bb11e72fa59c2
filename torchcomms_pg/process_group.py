"""Process groups over communicators, for code that takes groups: DDP, FSDP, device meshes."""

from __future__ import annotations

import inspect
from typing import Any

import torch.distributed as dist

from torchcomms_pg.comm import TorchComm
from torchcomms_pg.registration import BACKEND_NAME, SharedOptions


def get_process_group(comm: TorchComm) -> dist.ProcessGroup:
    """Returns the process group over a communicator; the first call makes it.

    The group's operations are operations of the communicator, with its connections, hooks, timeout
    and failures; all ranks call the operations of both in one order. `destroy_process_group` ends
    only the group, after which a new one may be made. `TorchComm.finalize` ends both, and a later
    operation of the group raises RuntimeError.

    If no default group exists, the group of a communicator of all ranks becomes it. Otherwise the
    numbers that `TorchComm.get_ranks` returns must be the ranks' numbers in the default group. All
    ranks of the communicator call this, for several communicators in one order; nothing is sent.

    Raises:
        ValueError: the communicator is neither the default group's nor a part of it.
        RuntimeError: the communicator was finalized.
    """
    if comm._group is not None and _exists(comm._group):
        return comm._group
    native = comm._native("get_process_group")
    ranks, rank = comm.get_ranks(), comm.get_rank()
    options: dict[str, Any] = {
        "backend": BACKEND_NAME,
        "timeout": native.timeout,
        "pg_options": SharedOptions(native),
    }
    if not dist.is_initialized():
        if ranks != list(range(comm._world_size)):
            raise ValueError(
                f"get_process_group: {comm!r} has ranks {ranks} of {comm._world_size}, and there "
                "is no default process group that it could be a part of; call get_process_group "
                "first with the communicator that it was split from, or init_process_group"
            )
        dist.init_process_group(store=comm._store, rank=rank, world_size=comm.get_size(), **options)
        group: Any = dist.group.WORLD
    else:
        if comm._world_size > dist.get_world_size() or ranks[rank] != dist.get_rank():
            raise ValueError(
                f"get_process_group: {comm!r} calls this process rank {ranks[rank]} of "
                f"{comm._world_size}, and the default process group rank {dist.get_rank()} of "
                f"{dist.get_world_size()}; make the communicator with the group's ranks"
            )
        if ranks != sorted(ranks):
            if "sort_ranks" not in inspect.signature(dist.new_group).parameters:
                raise ValueError(
                    f"get_process_group: the ranks {ranks} are not in ascending order, and the "
                    "groups of this version of torch are; split with ascending ranks"
                )
            options["sort_ranks"] = False
        group = dist.new_group(ranks, use_local_synchronization=True, **options)
    assert isinstance(group, dist.ProcessGroup)
    comm._group = group
    return group


def _exists(group: dist.ProcessGroup) -> bool:
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, ValueError):  # destroyed
        return False
    return True
