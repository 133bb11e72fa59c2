"""Patches of torch functions that name torch's own backends and so exclude plugins.

One function per case. Each says which torch versions need it, changes nothing for groups of other
backends, and keeps the replaced function as ``__wrapped__``, by which test/package/test_patches.py
notices when torch no longer needs the patch. Registration calls `apply`.
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed import distributed_c10d as c10d

from torchcomms_pg import _C, env
from torchcomms_pg._C import Backend

CPU = torch.device("cpu")


def apply(minor: int) -> None:
    """Applies the patches that torch 2.`minor` needs. Calling it again has no effect."""
    for patch, last in PATCHES.items():
        if last is None or minor <= last:
            patch()


def replace(
    owners: list[Any],
    name: str,
    replacement: Callable[..., Any],
    kind: Callable[[Any], Any] = lambda function: function,
) -> None:
    """Replaces a function of all `owners`, once, by `replacement`, which gets the original first.

    `kind` wraps the new function, for example in staticmethod.
    """
    original = known = getattr(owners[0], name)
    while known is not None:
        if getattr(known, "replacement", None) is replacement.__code__:
            return
        known = getattr(known, "__wrapped__", None)

    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    patched.replaced_by = __name__  # type: ignore[attr-defined]
    patched.replacement = replacement.__code__  # type: ignore[attr-defined]
    for owner in owners:
        setattr(owner, name, kind(patched))


def record_batches() -> None:
    """Has recorders know which messages are of one batch, also where c10d issues each by itself.

    It does so over a backend without coalescing, such as Gloo, watched or replaced.
    """

    def batch_isend_irecv(original: Any, p2p_op_list: list[dist.P2POp]) -> list[dist.Work]:
        former = _C.set_message_batch(True)
        try:
            works: list[dist.Work] = original(p2p_op_list)
        finally:
            _C.set_message_batch(former)
        return works

    replace([c10d, dist], "batch_isend_irecv", batch_isend_irecv)


def unwrapped(backend: Any) -> Any:
    """Returns the backend inside the wrapper that TORCH_DISTRIBUTED_DEBUG=DETAIL puts around it."""
    return getattr(backend, "wrapped_pg", backend)


def backends_of(group: Any) -> list[Any]:
    """Returns those backends of `group`, by default the default group, that are torchcomms_pg's."""
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return []
    group = group or c10d._get_default_group()
    found: list[Any] = []
    for device in group._device_types:
        backend = unwrapped(group._get_backend(device))
        if isinstance(backend, Backend) and backend not in found:
            found.append(backend)
    return found


def all_gather_base_has_gradients() -> None:
    """Makes the backward of ``torch.distributed.nn.functional._all_gather_base`` take torchcomms.

    Up to 2.15 it takes NCCL and XCCL only, and raises "Backend not supported!" for other names.
    """
    function: Any = dist_nn._AllGatherBase

    def backward(original: Any, ctx: Any, grad_output: torch.Tensor) -> Any:
        if not backends_of(ctx.group):
            return original(ctx, grad_output)
        size = dist.get_world_size(ctx.group)
        if grad_output.shape[0] % size:
            raise RuntimeError(
                f"_all_gather_base: the gradient's first dimension is {grad_output.shape[0]}, "
                f"wanted a multiple of the {size} ranks"
            )
        gradient = grad_output.new_empty(grad_output.shape[0] // size, *grad_output.shape[1:])
        dist.reduce_scatter_tensor(gradient, grad_output.contiguous(), ReduceOp.SUM, ctx.group)
        return None, gradient, None

    replace([function], "backward", backward, staticmethod)


def monitored_barrier_takes_more_than_gloo() -> None:
    """Makes ``dist.monitored_barrier`` take torchcomms; up to 2.13 it takes only Gloo."""

    def monitored_barrier(
        original: Any,
        group: ProcessGroup | None = None,
        timeout: datetime.timedelta | float | None = None,
        wait_all_ranks: bool = False,
    ) -> Any:
        if c10d._rank_not_in_group(group) or not backends_of(group):
            return original(group, timeout, wait_all_ranks)
        if timeout is None:
            timeout = c10d._get_default_timeout(c10d.get_backend(group))
        elif isinstance(timeout, float):
            timeout = datetime.timedelta(seconds=timeout)
        c10d._check_valid_timeout(timeout)
        chosen: Any = group or c10d._get_default_group()
        return chosen.monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)

    replace([c10d, dist], "monitored_barrier", monitored_barrier)


def timeouts_reach_the_backend() -> None:
    """Makes ``_set_pg_timeout`` set the backend's timeout; up to 2.13 it sets Gloo's and NCCL's."""

    def set_timeout(
        original: Any, timeout: datetime.timedelta, group: ProcessGroup | None = None
    ) -> None:
        ours = [] if c10d._rank_not_in_group(group) else backends_of(group)
        if not ours:
            original(timeout, group)
            return
        c10d._check_valid_timeout(timeout)
        # Sets the timeout of every backend of the group, as torch's own loop does.
        (group or c10d._get_default_group()).set_timeout(timeout)

    replace([c10d], "_set_pg_timeout", set_timeout)


def ephemeral_timeouts_reach_the_backend() -> None:
    """Makes ``_add_ephemeral_timeout_for_all_pgs`` reach this backend; up to 2.13 only NCCL's."""

    def add(original: Any, timeout: datetime.timedelta) -> None:
        original(timeout)
        for group in c10d._world.pg_map:
            for backend in backends_of(group):
                backend._add_ephemeral_timeout(timeout)

    replace([c10d], "_add_ephemeral_timeout_for_all_pgs", add)


def groups_tell_their_sequence_number() -> None:
    """Makes ``_get_sequence_number_for_group`` work; up to 2.13 it raises for plugins."""

    def get(original: Any, group: ProcessGroup) -> int:
        for backend in backends_of(group):
            return int(backend._get_sequence_number_for_group())
        return int(original(group))

    replace([ProcessGroup], "_get_sequence_number_for_group", get)


def timeouts_have_a_default() -> None:
    """Makes TORCHCOMMS_PG_TIMEOUT the timeout of groups of torchcomms that are made without one.

    torch has a constant for all backends but ``nccl``, and no variable.
    """

    def get(original: Any, backend: str) -> datetime.timedelta:
        given = env.group_timeout()
        known: datetime.timedelta = original(backend)
        if given is None:
            return known
        ours = "torchcomms" in backend or ("gloo" in backend and env.as_gloo())
        return given if ours else known

    replace([c10d], "_get_default_timeout", get)


# The patches, each with the last torch minor that needs it, or None if every minor so far does.
PATCHES: dict[Callable[[], None], int | None] = {
    all_gather_base_has_gradients: None,
    timeouts_have_a_default: None,
    monitored_barrier_takes_more_than_gloo: 13,
    timeouts_reach_the_backend: 13,
    ephemeral_timeouts_reach_the_backend: 13,
    groups_tell_their_sequence_number: 13,
}
