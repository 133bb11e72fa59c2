"""Objects that stand for a resource of the process, such as a communicator."""

from __future__ import annotations

from typing import Any, TypeVar

_Self = TypeVar("_Self", bound="Handle")


class Handle:
    """A base class whose copies, deep copies included, are the object itself."""

    __slots__ = ()

    def __copy__(self: _Self) -> _Self:
        return self

    def __deepcopy__(self: _Self, memo: dict[int, Any]) -> _Self:
        return self
