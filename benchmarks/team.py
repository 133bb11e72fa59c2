"""Ranks that each serve an object and do nothing between two calls of its methods."""

from __future__ import annotations

import os
from typing import Any

from harness.ranks import RankFailure, Ranks

CALL_SECONDS = 90.0
_served: Any = None  # in a rank


class Team(Ranks):
    """Processes that each make kind(rank, *arguments); after a failure they are gone."""

    def __init__(self, world: int, kind: type, *arguments: Any) -> None:
        self.closed = False
        super().__init__(world, init=False)
        self._all(make, kind, *arguments)

    def call(self, method: str, *arguments: Any, timeout: float = CALL_SECONDS) -> list[Any]:
        """Calls a method of every rank's object, and returns what each returned."""
        return self._all(call, method, *arguments, timeout=timeout)

    def _all(self, function: Any, *arguments: Any, timeout: float = CALL_SECONDS) -> list[Any]:
        try:
            answers: list[Any] = self.run(function, *arguments, timeout=timeout)
        except RankFailure:
            self.close()
            raise
        return answers

    def close(self) -> None:
        """Ends every process, at once if it is in a call."""
        if not self.closed:
            self.closed = True
            super().close()


def make(kind: type, *arguments: Any) -> None:
    """Makes this rank's object."""
    global _served
    _served = kind(int(os.environ["RANK"]), *arguments)


def call(method: str, *arguments: Any) -> Any:
    """Calls a method of this rank's object."""
    return getattr(_served, method)(*arguments)
