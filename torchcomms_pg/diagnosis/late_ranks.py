"""Finds the rank of a group that is always late, so that the others wait for it.

docs/lateness.md has the rule.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from torchcomms_pg import _C
from torchcomms_pg._C import Backend
from torchcomms_pg._patches import unwrapped
from torchcomms_pg.diagnosis import watching


@dataclass(frozen=True)
class RankLateness:
    """How late a rank arrives at the collectives of a group.

    Attributes:
        rank: the rank's number in the group.
        later: seconds that the rank takes longer before a collective than the median of the other
            ranks; waits for other ranks do not count. Negative if the rank takes less time.
        share: part of the time, 0 to 1, for which all others wait for this rank alone.
        collectives: number of collectives in the sample.
        late: whether `share` is more than 0.1 beyond doubt; true for one rank at most.
    """

    rank: int
    later: float
    share: float
    collectives: int
    late: bool


def lateness(group: dist.ProcessGroup | None = None) -> list[RankLateness]:
    """Returns how late each rank of a process group is, from its latest collectives on the CPU.

    The group is one of ``torchcomms``, or a group of another backend that is watched (`watch`).
    Ranks publish their data every two seconds, and less often in groups of more than 64 ranks.

    Args:
        group: by default the default group.

    Returns:
        An entry for each rank, in their order; an empty list until 16 or more training steps
            have ended.

    Raises:
        RuntimeError: the group is of another backend and not watched, has one rank or no backend
            for the CPU, or has ended; or its store does not answer within 4 s.
        ValueError: this process is not in `group`.
    """
    given = dist.group.WORLD if group is None else group
    if not isinstance(given, dist.ProcessGroup):
        raise ValueError(f"lateness: group is {given!r}, wanted a process group this rank is in")
    cpu = torch.device("cpu")
    if cpu in given._device_types:
        backend = unwrapped(given._get_backend(cpu))
        if isinstance(backend, Backend):
            return of_communicator(backend.communicator(cpu))
    if watch := watching.watch_over(given):
        return _by_rank(watch.lateness("lateness"))
    raise RuntimeError(
        f"lateness: the group of backend {given.name()!r} is not watched, or has ended; "
        "torchcomms_pg.watch(), or TORCHCOMMS_PG_WATCH=1, watches groups of other backends"
    )


def of_communicator(comm: _C.Communicator) -> list[RankLateness]:
    """Returns how late each rank of a communicator is, see `lateness`."""
    return _by_rank(comm.lateness("lateness"))


def _by_rank(told: _C._Lateness) -> list[RankLateness]:
    return [
        RankLateness(rank, each.later, each.share, told.collectives, told.late == rank)
        for rank, each in enumerate(told.ranks)
    ]
