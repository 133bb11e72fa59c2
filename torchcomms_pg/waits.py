"""Waits for other ranks that are no operations of a group, for verdicts and the status."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from torchcomms_pg import _C, env, python_stacks, watching
from torchcomms_pg._patches import replace


def install() -> None:
    """Has c10d's making of process groups and Gloo's monitored barriers count as waits, once."""
    replace([c10d], "_new_process_group_helper", _made)
    replace([dist.ProcessGroup], "monitored_barrier", _monitored)


@contextlib.contextmanager
def waiting(name: str, for_ranks: Iterable[int]) -> Iterator[None]:
    """Says that this rank waits for other ranks in a way that is no operation of a process group.

    For libraries that wait in queues, locks or files. While the ``with`` block runs,
    verdicts, ``python -m torchcomms_pg.status`` and the watch know that this rank waits, for whom,
    and in which line. If the block takes longer than TORCHCOMMS_PG_VERDICT_AFTER, or the watch's
    timeout, the process prints which ranks it waits for, and their places::

        with torchcomms_pg.waiting("shm_broadcast", for_ranks=[0]):
            block = queue.get()

    Has an effect in a process that has a process group of several ranks that is of ``torchcomms``
    or watched. Costs about 20 us.

    Args:
        name: what this rank waits in, for people.
        for_ranks: the ranks that are waited for, by their numbers in the default group.

    Raises:
        ValueError: `for_ranks` is empty or has a negative number.
    """
    ranks = sorted(set(for_ranks))
    if not ranks or ranks[0] < 0:
        raise ValueError(f"waiting: for_ranks is {ranks}, wanted numbers of one rank or more")
    with _wait(name, ranks, meets=False):
        yield


@contextlib.contextmanager
def _wait(text: str, ranks: list[int], meets: bool) -> Iterator[None]:
    number = _C.begin_wait(
        text=text,
        ranks=ranks,
        meets=meets,
        called_at=python_stacks.caller(),
        verdict_after=_verdict_after(),
    )
    try:
        yield
    finally:
        _C.end_wait(number)


def _verdict_after() -> timedelta:
    return env.verdict_after() or watching.timeout_of_all()


def _made(original: Any, *args: Any, **kwargs: Any) -> Any:
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    ranks = list(given["global_ranks_in_group"] or range(given["group_size"]))
    if len(ranks) == 1:
        return original(*args, **kwargs)
    text = f"the making of group '{given['group_name']}' of ranks {_shown(ranks)}"
    with _wait(text, ranks, meets=True):
        return original(*args, **kwargs)


def _monitored(original: Any, group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
    # Gloo's monitored barrier consists of messages, of which neither hooks nor recorders learn.
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == 1 or dist.get_backend(group) != "gloo":
        return original(group, *args, **kwargs)
    text = f"monitored_barrier of group '{group.group_name}' of ranks {_shown(ranks)}"
    with _wait(text, ranks, meets=True):
        return original(group, *args, **kwargs)


def _shown(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if ranks[8:] else "")
