"""What a check is, and how it says that it cannot be made here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from gpu.here import Here


class Skip(Exception):  # noqa: N818
    """Raised by a check, on any rank: it cannot be made here, for the reason given."""


@dataclass(frozen=True)
class Check:
    """A function that every rank runs, each in a process of its own.

    Attributes:
        name: short, for --only.
        body: module and name of the function. It raises what is wrong, and returns what rank 0 has
            to tell about it: a line for the table, and perhaps more for below it.
        ranks: number of processes.
        gpus: that they spread over; more ranks than GPUs share one.
        cuda: whether it needs what only CUDA has: libnccl, torch's nccl.
        seconds: after which its processes are killed.
    """

    name: str
    body: str
    ranks: int = 1
    gpus: int = 1
    cuda: bool = False
    seconds: float = 60.0

    @property
    def id(self) -> str:
        """What tells it apart from the same function on other ranks."""
        where = "" if self.gpus == 1 else f"-on-{self.gpus}"
        return f"{self.name}-{self.ranks}{where}"

    def resolve(self) -> Callable[[Here], str]:
        """Imports the function; only the ranks need it."""
        return cast("Callable[[Here], str]", resolve_name(self.body))

    @property
    def shares_a_gpu(self) -> bool:
        """Whether NCCL, left alone, would refuse its ranks."""
        return self.ranks > self.gpus
