"""Watches groups of other backends: finds the rank that holds up the others in a running program.

From torch 2.14 on c10d calls hooks for every operation of every backend. By these hooks the
operations of a group of ``gloo``, ``nccl`` or another backend enter the flight recorder of this
process, and this project's monitor finds out which rank holds up an overdue operation:
docs/watch.md.
"""

from __future__ import annotations

import inspect
import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from torchcomms_pg import _C, env, metrics
from torchcomms_pg._C import Backend
from torchcomms_pg._patches import record_batches, replace, unwrapped
from torchcomms_pg.diagnosis import leaving, python_stacks, settings
from torchcomms_pg.hooks import flight_recorder

_watches: dict[str, _C.Watch] = {}  # by the group's name
_timeout = timedelta(0)  # for groups that are made from now on


def watch(group: dist.ProcessGroup | None = None, timeout: timedelta | None = None) -> None:
    """Watches a process group of any backend, or all groups, including those made later.

    If an operation has not ended in time, each rank prints which rank the others wait for and the
    place of that rank's Python code, or else how the ranks' calls differ. When the operation ends
    after all, each rank prints that it has. Nothing else changes: no operation is aborted, and all
    results stay the same.
    Either all ranks of a group call this or no rank does: a rank that does not call it cannot
    report its place. Groups of ``torchcomms`` are left out, since they print verdicts anyway.

    Calling it again changes the timeout.

    Args:
        group: by default every group of this process.
        timeout: how long an operation may take; by default TORCHCOMMS_PG_WATCH_TIMEOUT, else 60 s.

    Raises:
        RuntimeError: torch is older than 2.14, or `group` is of a class without backends.
        ValueError: this process is not in `group`, or the timeout is not positive.
    """
    global _timeout
    if not _C.groups_have_hooks:
        raise RuntimeError(
            "watch: needs torch 2.14 or later, which calls hooks for the operations of every "
            f"backend; this is torch {torch.__version__}"
        )
    given: Any = group
    if given is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("watch: this process is not in the group; call it on the group's ranks")
    timeout = env.watch_timeout() if timeout is None else timeout
    if timeout < timedelta(milliseconds=1):
        raise ValueError(f"watch: timeout is {timeout}, wanted 1 ms or more")
    flight_recorder.configure()
    settings.configure()
    python_stacks.watch_over_monitor()
    leaving.install_for_errors()
    _C.set_waiting_functions([inspect.unwrap(dist.send), inspect.unwrap(dist.recv)])
    _C.observe_waits(dist.Work)
    record_batches()
    if group is not None:
        _begin(group, dist.get_process_group_ranks(group), timeout)
        return
    _timeout = timeout
    for known in list(c10d._world.pg_map):
        _begin_unasked(known, dist.get_process_group_ranks(known))
    replace([c10d], "_new_process_group_helper", _made)
    replace([c10d], "_register_pg_in_world", _registered)
    replace([c10d], "_unregister_process_group", _destroyed)
    replace([c10d], "_unregister_all_process_groups", _all_destroyed)


def watch_as_told() -> None:
    """Watches all groups if TORCHCOMMS_PG_WATCH is true.

    If that is not possible, rank 0 prints one line on stderr, and the program goes on.
    """
    try:
        if env.watch():
            watch()
    except (RuntimeError, ValueError) as error:
        _tell(f"TORCHCOMMS_PG_WATCH is set, and no group is watched: {error}")


def timeout_of_all() -> timedelta:
    """Returns the timeout of groups that are made from now on, or 0 if these are not watched."""
    return _timeout


def watch_over(group: dist.ProcessGroup) -> _C.Watch | None:
    """Returns the watch over the group, or None if it is not watched or has been destroyed."""
    return _watches.get(group.group_name)


def _begin(group: Any, ranks: list[int], timeout: timedelta) -> None:
    if not group._device_types:
        raise RuntimeError(
            f"watch: the group is a {type(group).__qualname__} without backends, and c10d calls no "
            "hooks for its operations"
        )
    devices = [
        device.type
        for device in group._device_types
        if not isinstance(unwrapped(group._get_backend(device)), Backend)
    ]
    if not devices:
        return
    if known := _watches.get(group.group_name):
        known.set_timeout(timeout)
        return
    _watches[group.group_name] = _C.watch(
        group=group, ranks=ranks, devices=sorted(devices), timeout=timeout
    )
    metrics.configure()


def _begin_unasked(group: Any, ranks: list[int]) -> None:
    """Watches a group that no call has named. Prints an error instead of raising it."""
    try:
        _begin(group, ranks, _timeout)
    except RuntimeError as error:
        _tell(f"a group of ranks {ranks} is not watched: {error}")


def _made(original: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(*args, **kwargs)
    group = result[0]
    if isinstance(group, dist.ProcessGroup):
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        _begin_unasked(group, given["global_ranks_in_group"] or list(range(group.size())))
    return result


def _registered(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Watches groups that c10d makes without `_made`, but registers with their ranks."""
    result = original(*args, **kwargs)
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    if ranks := given.get("rank_mapping"):
        _begin_unasked(given["pg"], sorted(ranks, key=ranks.__getitem__))
    return result


def _destroyed(original: Any, group_name: str) -> Any:
    if known := _watches.pop(group_name, None):
        known.close()
    return original(group_name)


def _all_destroyed(original: Any) -> Any:
    while _watches:
        _watches.popitem()[1].close()
    return original()


def _tell(what: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"torchcomms_pg: {what}", file=sys.stderr)
