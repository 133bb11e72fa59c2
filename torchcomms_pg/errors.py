"""Errors of communication, as opposed to a caller's mistakes."""

from __future__ import annotations

from torch.distributed import DistBackendError


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
    ) -> None:
        super().__init__(message)
        self.op = op
        self.seq = seq
        self.group = group
        self.ranks = list(ranks or [])
        self.verdict = verdict or message

    def __reduce__(self) -> tuple[object, ...]:
        return (
            _restore,
            (str(self), self.op, self.seq, self.group, self.ranks, self.verdict),
        )


class SplitError(ValueError, RuntimeError):
    """The ranks of a ``split`` make no communicator.

    ``RuntimeError`` as well, since the torchcomms package raises that, and programs for it catch
    it.
    """


def _restore(
    message: str, op: str, seq: int, group: str, ranks: list[int], verdict: str
) -> CommError:
    return CommError(message, op=op, seq=seq, group=group, ranks=ranks, verdict=verdict)
