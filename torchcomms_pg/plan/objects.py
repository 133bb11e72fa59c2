"""Collectives of Python objects, whose sizes depend on data of other ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from torchcomms_pg.plan import exchange
from torchcomms_pg.plan.recorder import current, wanted

_BYTES = torch.empty(0, dtype=torch.uint8)
_SIZE = torch.empty(1, dtype=torch.int64)
Replace = Callable[[str, Callable[[Callable[..., Any]], Callable[..., Any]]], None]


def install(replace: Replace) -> None:
    """Replaces the collectives of objects by ones that leave this rank's own objects."""
    for function in (
        all_gather_object,
        gather_object,
        broadcast_object_list,
        scatter_object_list,
        send_object_list,
        recv_object_list,
    ):
        replace(function.__name__, lambda old, function=function: function)  # type: ignore[misc]


def _member(group: Any) -> bool:
    return group is not dist.GroupMember.NON_GROUP_MEMBER


def _root(group: Any, of_job: int | None, of_group: int | None) -> int:
    """Returns a root's rank in the group."""
    if of_group is not None:
        return of_group
    return dist.get_group_rank(group, of_job or 0)


def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
    """Fills the list with this rank's object."""
    if not _member(group):
        return
    group = wanted(group)
    sizes = [_SIZE] * group.size()
    current().call("all_gather", group.made, [_SIZE], sizes)
    current().call("all_gather", group.made, [_BYTES], [_BYTES], seen=False)
    object_list[: group.size()] = [obj] * group.size()
    current().unseen("all_gather_object: the other ranks' objects, each rank has its own instead")


def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: Any = None,
    group_dst: int | None = None,
) -> None:
    """Fills the root's list with its own object."""
    if not _member(group):
        return
    group = wanted(group)
    root = _root(group, dst, group_dst)
    current().call("all_gather", group.made, [_SIZE], [_SIZE] * group.size())
    current().call("gather", group.made, [_BYTES], [_BYTES], root=root, seen=False)
    if object_gather_list is not None:
        object_gather_list[: group.size()] = [obj] * group.size()
    current().unseen("gather_object: the other ranks' objects, the root has its own instead")


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Any = None,
    device: Any = None,
    group_src: int | None = None,
    **kwargs: Any,
) -> None:
    """Takes the root's objects; keeps this rank's if the root does not call it."""
    if not _member(group):
        return
    group = wanted(group)
    root = _root(group, src, group_src)
    sizes = torch.empty(len(object_list), dtype=torch.int64)
    current().call("broadcast", group.made, [sizes], [sizes], root=root)
    current().call("broadcast", group.made, [_BYTES], [_BYTES], root=root, seen=False)
    sender = dist.get_global_rank(group, root)
    if group.rank() == root:
        exchange.put(group.group_name, "broadcast", sender, -1, object_list)
    elif (got := exchange.get(group.group_name, "broadcast", sender, -1)) is not None:
        object_list[:] = got[0]
    else:
        current().unseen("broadcast_object_list: the root's objects, a rank keeps its own")


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: Any = None,
    group_src: int | None = None,
) -> None:
    """Gives the root its own object; the other ranks keep theirs."""
    if not _member(group):
        return
    group = wanted(group)
    root = _root(group, src, group_src)
    if group.rank() == root and scatter_object_input_list:
        scatter_object_output_list[0] = scatter_object_input_list[root]
    else:
        current().unseen("scatter_object_list: the root's objects, a rank keeps its own")
    current().call("broadcast", group.made, [_SIZE], [_SIZE], root=root)
    current().call("scatter", group.made, [_BYTES], [_BYTES], root=root, seen=False)
    current().call("scatter", group.made, [_SIZE], [_SIZE], root=root)


def _record_messages(op: str, group: Any, peer: int, count: int, use_batch: bool) -> None:
    """Records the message with the sizes of ``count`` objects, and the one with their bytes."""
    sizes = torch.empty(count, dtype=torch.int64)
    for each, seen in ((sizes, True), (_BYTES, False)):
        inputs, outputs = ([each], []) if op == "send" else ([], [each])
        with current().batch() if use_batch else nullcontext():
            current().call(op, group.made, inputs, outputs, peer=peer, tag=0, seen=seen)


def send_object_list(
    object_list: list[Any],
    dst: int | None = None,
    group: Any = None,
    device: Any = None,
    group_dst: int | None = None,
    use_batch: bool = False,
    **kwargs: Any,
) -> None:
    """Returns at once."""
    if not _member(group):
        return
    group = wanted(group)
    peer = _root(group, dst, group_dst)
    _record_messages("send", group, peer, len(object_list), use_batch)
    receiver = dist.get_global_rank(group, peer)
    exchange.put(group.group_name, "send", dist.get_rank(), receiver, object_list)


def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Any = None,
    device: Any = None,
    group_src: int | None = None,
    use_batch: bool = False,
    **kwargs: Any,
) -> int:
    """Takes the sender's objects, or keeps this rank's; returns the sender, 0 if it is any."""
    if not _member(group):
        return -1
    group = wanted(group)
    anyone = src is None and group_src is None
    peer = -1 if anyone else _root(group, src, group_src)
    _record_messages("recv", group, peer, len(object_list), use_batch)
    sender = -1 if anyone else dist.get_global_rank(group, peer)
    name = group.group_name
    got = None if anyone else exchange.get(name, "send", sender, dist.get_rank())
    if got is not None:
        object_list[:] = got[0]
    else:
        current().unseen("recv_object_list: the sender's objects, a rank keeps its own")
    return max(0, sender)
