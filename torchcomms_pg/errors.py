"""Errors of communication, as opposed to a caller's mistakes."""

from __future__ import annotations

import json
from typing import NamedTuple

from torch.distributed import DistBackendError


class PartedAt(NamedTuple):
    """A statement at which ranks took different ways.

    ``file`` and ``line`` (from 1) are its place, ``function`` is the name of the function around
    it, and ``statement`` the first line of its source.
    """

    file: str
    line: int
    function: str
    statement: str


class CommError(DistBackendError):
    """A communicator has failed: a peer died, aborted, disagrees, or did not arrive in time.

    The communicator cannot be used any more; every later call on it raises the same error.
    A caller's own mistake (a wrong shape, dtype or rank) raises ``ValueError``, ``TypeError``
    or ``RuntimeError`` instead, and leaves the communicator unchanged.

    Attributes:
        op: name of the operation, such as ``"all_reduce"``; empty if none was involved.
        seq: its sequence number in the group, from 1; 0 if none was involved.
        group: the group's name.
        ranks: group ranks that did not arrive, died or aborted, if known.
        verdict: the result of the hang diagnosis, the same text on all ranks: which rank holds up
            the operation, what that rank did last in the group and where its Python threads are.
            The error's own text if no diagnosis was needed.
        parted_at: where the ranks took different ways: one `PartedAt`, or two or three if it was
            one of these; empty if unknown.
    """

    def __init__(
        self,
        message: str,
        *,
        op: str = "",
        seq: int = 0,
        group: str = "",
        ranks: list[int] | None = None,
        verdict: str = "",
        parting: str = "",
    ) -> None:
        super().__init__(message)
        self.op = op
        self.seq = seq
        self.group = group
        self.ranks = list(ranks or [])
        self.verdict = verdict or message
        places = json.loads(parting.partition("\n")[0] or "[]")
        self.parted_at = tuple(PartedAt(*place) for place in places)

    def __reduce__(self) -> tuple[object, ...]:
        return (
            _restore,
            (
                str(self),
                self.op,
                self.seq,
                self.group,
                self.ranks,
                self.verdict,
                json.dumps(self.parted_at),
            ),
        )


class SplitError(ValueError, RuntimeError):
    """The ranks of a ``split`` make no communicator.

    ``RuntimeError`` as well, since the torchcomms package raises that, and programs for it catch
    it.
    """


class UnknownBackendError(ValueError, ModuleNotFoundError):
    """`new_comm` was asked for a backend that does not exist.

    ``ModuleNotFoundError`` as well, since the torchcomms package raises that: a program that tries
    one backend after the other catches it.
    """


def _restore(
    message: str,
    op: str,
    seq: int,
    group: str,
    ranks: list[int],
    verdict: str,
    parting: str = "",
) -> CommError:
    return CommError(
        message, op=op, seq=seq, group=group, ranks=ranks, verdict=verdict, parting=parting
    )
