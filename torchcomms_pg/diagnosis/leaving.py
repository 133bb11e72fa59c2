"""The word that a rank leaves when it ends a group, for ranks that are in it or come later."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from torchcomms_pg import _C
from torchcomms_pg._patches import replace
from torchcomms_pg.diagnosis import python_stacks


def install() -> None:
    """Has ``dist.destroy_process_group`` leave word. Has an effect once."""
    replace([c10d, dist], "destroy_process_group", _destroy)


def install_for_errors() -> None:
    """Has an exception that ends the program leave word in all groups. Has an effect once.

    A process without a group keeps its ``sys.excepthook``.
    """
    replace([sys], "excepthook", _end_with_error)


def leave(names: list[str]) -> None:
    """Leaves word in the groups `names` that the caller destroys them, and where.

    If the caller handles an exception, for example in a ``finally``, the word has its text and its
    line, and the latest operations are written to a file.
    """
    error = python_stacks.in_hand()
    handling = f", handling {error}" if error else ""
    how = f"destroyed the group at {python_stacks.caller()}{handling}"
    _C.leave_word(how, names, fails=bool(error))


def _destroy(original: Any, group: Any = None) -> Any:
    if group is not dist.GroupMember.NON_GROUP_MEMBER and dist.is_initialized():
        ends_all = group is None or group is dist.group.WORLD
        ended = list(c10d._world.pg_map) if ends_all else [group]
        leave([each.group_name for each in ended if isinstance(each, dist.ProcessGroup)])
    return original(group)


def _end_with_error(
    original: Any, kind: type[BaseException], error: BaseException, traced: TracebackType | None
) -> None:
    # Comes first, since torchrun ends the process soon after another one has failed.
    _C.end_with_error(f"ended with {python_stacks.named(error)}")
    original(kind, error, traced)
