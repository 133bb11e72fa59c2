"""Python objects that ranks send each other, through the process that runs the ranks.

Tensors are not moved. But some programs need a peer's objects to go on, as the stages of a pipeline
do to learn the shapes of their inputs.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from multiprocessing.connection import Connection
from typing import Any

from torchcomms_pg.plan.recorder import modules

Key = tuple[str, str, int, int, int]  # group, operation, sender, receiver or -1, number

_link: list[Connection] = []
_counts: dict[tuple[str, str, int, int], int] = defaultdict(int)


def connect(link: Connection) -> None:
    """Sets the connection of this process to the one that runs the ranks."""
    _link[:] = [link]


def _number(group: str, op: str, sender: int, receiver: int) -> Key:
    key = (group, op, sender, receiver)
    _counts[key] += 1
    return (*key, _counts[key])


def put(group: str, op: str, sender: int, receiver: int, value: object) -> None:
    """Gives an object to the rank ``receiver``, or to all if it is -1; ranks are of the job."""
    key = _number(group, op, sender, receiver)
    if _link:
        _link[0].send_bytes(pickle.dumps(("put", key, pickle.dumps(value))))


def get(group: str, op: str, sender: int, receiver: int) -> tuple[Any] | None:
    """Returns the object in a tuple, or None if the sender does not give one."""
    key = _number(group, op, sender, receiver)
    if not _link:
        return None
    _link[0].send_bytes(pickle.dumps(("get", key, modules())))
    content = _link[0].recv_bytes()
    return (pickle.loads(content),) if content else None
