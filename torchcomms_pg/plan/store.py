"""A store that has what this rank wrote, and tells a program that waits for another rank so."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from torchcomms_pg.plan.recorder import current


class PlanStore(dist.Store):
    """Keeps values in this process. A key that this rank has not written is empty, and noted."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        """Sets a key to a value."""
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        """Returns a key's value, or an empty one."""
        if key not in self._values:
            current().unseen(f"the store's key {key!r}, which another rank writes")
        return self._values.get(key, b"")

    def add(self, key: str, amount: int) -> int:
        """Adds to a number, and returns the sum."""
        value = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(value).encode()
        return value

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """Sets a key if it has the expected value or none; returns its value then."""
        if key not in self._values or self._values[key] == expected:
            self.set(key, desired)
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        """Returns True: every rank has written its keys."""
        return True

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Returns at once."""

    def delete_key(self, key: str) -> bool:
        """Removes a key, and returns whether it was there."""
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        """Returns the number of keys that this rank wrote."""
        return len(self._values)

    def set_timeout(self, timeout: timedelta) -> None:
        """Does nothing, since no call waits."""
