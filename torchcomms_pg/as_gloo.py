"""Serves groups named ``gloo`` over torchcomms, for programs that cannot be changed.

c10d makes such groups by calling ``ProcessGroupGloo``, a name in its own module. vLLM calls that,
too, for groups that it registers itself. `install` replaces the class in c10d's module by a class
that makes a `Backend`. Two kinds of calls still get torch's class: calls of torch.distributed's
ProcessGroupGloo, as by torchft and torch's RPC, and calls that pass options of Gloo.
"""

from __future__ import annotations

import inspect
import os
import secrets
import sys
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _DistributedBackendOptions
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

from torchcomms_pg import env
from torchcomms_pg._C import Backend
from torchcomms_pg._patches import record_batches, replace, unwrapped
from torchcomms_pg.registration import create_backend

CPU, CUDA = torch.device("cpu"), torch.device("cuda")

# c10d keeps one backend of each type in a group. This project's backend is registered as both
# types, and the group has the name of the first.
GLOO, OURS = ProcessGroup.BackendType.GLOO, ProcessGroup.BackendType.CUSTOM
GLOO_OF_GPUS = ProcessGroup.BackendType.UCC  # a type that no other backend of the group has


@dataclass
class _Group:
    """A group that c10d is making.

    Attributes:
        name, ranks: of the group; ranks is empty for the default group.
        made: the backends made in place of Gloo's, each with its store and timeout.
    """

    name: str
    ranks: list[int]
    made: list[tuple[Backend, dist.Store, timedelta]] = field(default_factory=list)


# The group that c10d is making, None if that group is to get a real Gloo, or _NO_GROUP if c10d is
# making no group.
_NO_GROUP = _Group("", [])
_making: ContextVar[_Group | None] = ContextVar("torchcomms_pg.as_gloo", default=_NO_GROUP)


def install() -> None:
    """Makes c10d create groups of the name ``gloo`` over torchcomms. Has an effect once.

    The groups' CPU tensors go over torchcomms. Their GPU tensors go over a real Gloo, which
    connects the ranks when it gets the first GPU tensor.
    """
    if not hasattr(c10d, "ProcessGroupGloo") or isinstance(c10d.ProcessGroupGloo, _StandIn):
        return
    attributes = {"__module__": c10d.__name__, "__wrapped__": c10d.ProcessGroupGloo}
    stand_in: Any = _StandIn("ProcessGroupGloo", (), attributes)
    c10d.ProcessGroupGloo = stand_in  # type: ignore[misc]
    replace([c10d], "_new_process_group_helper", _note_the_group)
    replace([c10d], "_create_process_group_wrapper", _over_gloo_itself)
    record_batches()
    replace([DistributedDataParallel], "_ddp_init_helper", _not_called_gloo)
    replace([DistributedDataParallel], "_get_ddp_logging_data", _told_as_gloo)


class _StandIn(type):
    """Metaclass of the class that replaces ``ProcessGroupGloo``; `__wrapped__` is the original."""

    __wrapped__: Any

    def __call__(cls, store: dist.Store, rank: int, size: int, *args: Any, **kwargs: Any) -> Any:
        group = _making.get()
        timeout = args[0] if len(args) == 1 else kwargs.get("timeout")
        if group is _NO_GROUP and isinstance(timeout, timedelta) and len(args) + len(kwargs) == 1:
            # The ranks agree on a name that no other group has.
            name = store.compare_set("torchcomms_pg/name", "", f"gloo-{secrets.token_hex(4)}")
            group = _Group(name.decode(), [])
        if group is None or group is _NO_GROUP:
            return cls.__wrapped__(store, rank, size, *args, **kwargs)
        options: Any = _DistributedBackendOptions()
        options.store = store
        options.group_rank, options.group_size = rank, size
        options.timeout = timeout
        options.group_id = group.name
        options.global_ranks_in_group = group.ranks
        if kwargs.get("enable_reconfigure"):  # from torch 2.14 on
            options.enable_reconfigure = True
        backend = create_backend(options, Backend.Options(options.timeout, "gloo"))
        group.made.append((backend, store, options.timeout))
        _announce(group)
        return backend

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, (cls.__wrapped__, Backend))

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.__wrapped__, name)


def _note_the_group(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Tells `_StandIn` which group c10d is making, then registers backends as in a Gloo group."""
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    group = _Group(given["group_name"], given["global_ranks_in_group"])
    on_cpu = c10d.BackendConfig(given["backend"]).get_device_backend_map().get("cpu")
    token = _making.set(group if on_cpu == "gloo" else None)
    try:
        result = original(*args, **kwargs)
    finally:
        _making.reset(token)
    if group.made:
        pg = result[0]
        pg._register_backend(CPU, OURS, pg._get_backend(CPU))
        # Up to 2.13 torch sets the default backend of a group of "cpu:gloo" only if no plugin is
        # registered.
        if pg.name() == "undefined":
            pg._set_default_backend(GLOO)
        _give_gpus_to_gloo(pg, group)
    return result


def _over_gloo_itself(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Gives torch a real Gloo for the comparison of calls by TORCH_DISTRIBUTED_DEBUG=DETAIL."""
    token = _making.set(None)
    try:
        return original(*args, **kwargs)
    finally:
        _making.reset(token)


def _not_called_gloo(original: Any, ddp: Any, *args: Any, **kwargs: Any) -> Any:
    """Hides the type GLOO from DDP's logger, which would cast the backend to ProcessGroupGloo."""
    pg = ddp.process_group
    if not _stands_for_gloo(pg):
        return original(ddp, *args, **kwargs)
    pg._register_backend(CPU, OURS, pg._get_backend(CPU))  # missing if a program made the group
    pg._set_default_backend(OURS)
    try:
        return original(ddp, *args, **kwargs)
    finally:
        pg._set_default_backend(GLOO)


def _told_as_gloo(original: Any, ddp: Any) -> Any:
    """Returns DDP's log data as over Gloo, with Gloo's name, threads and variables."""
    data = original(ddp)
    if _stands_for_gloo(ddp.process_group):
        data["backend_name"] = "gloo"
        gloo: Any = c10d.ProcessGroupGloo
        data["gloo_num_threads"] = gloo._Options()._threads
        for variable in ("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT"):
            data[variable.lower()] = os.environ.get(variable, "N/A")
    return data


def _stands_for_gloo(pg: Any) -> bool:
    return (
        pg.name() == "gloo"
        and CPU in pg._device_types
        and isinstance(unwrapped(pg._get_backend(CPU)), Backend)
    )


def _give_gpus_to_gloo(pg: ProcessGroup, group: _Group) -> None:
    if CUDA not in pg._device_types or not torch.cuda.device_count():
        return
    there = unwrapped(pg._get_backend(CUDA))
    for backend, store, timeout in group.made:
        if backend is there:
            gloo: Any = c10d.ProcessGroupGloo.__wrapped__  # type: ignore[attr-defined]
            options = gloo._Options()
            options._devices = [gloo.create_default_device(lazy_init=True)]
            options._timeout = timeout
            own = dist.PrefixStore("torchcomms_pg.gpus/", store)
            connected = gloo(own, backend.rank(), backend.size(), options)
            pg._register_backend(CUDA, GLOO_OF_GPUS, connected)


_announced = False


def _announce(group: _Group) -> None:
    global _announced
    if _announced or group.ranks or group.made[0][0].rank() != 0:
        return
    _announced = True
    run, variable = "torchcomms_pg.run runs the program", "TORCHCOMMS_PG_AS_GLOO is set"
    why = run if env.as_gloo_by_run() else variable
    print(
        f"torchcomms_pg: groups of the name gloo run over torchcomms, since {why}; without it they "
        "run over Gloo",
        file=sys.stderr,
    )
