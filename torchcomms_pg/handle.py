"""Objects that stand for one thing of the process, such as a communicator."""

from __future__ import annotations

from typing import Any, TypeVar

_Self = TypeVar("_Self", bound="Handle")


class Handle:
    """A copy of it, also a deep one, is the object itself, as the thing is one."""

    __slots__ = ()

    def __copy__(self: _Self) -> _Self:
        return self

    def __deepcopy__(self: _Self, memo: dict[int, Any]) -> _Self:
        return self
