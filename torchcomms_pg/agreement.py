"""Ranks compare values of their programs, without a collective and without a wait."""

from __future__ import annotations

import contextlib
import hashlib
import json
import queue
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from torchcomms_pg import _C
from torchcomms_pg._patches import unwrapped
from torchcomms_pg.bootstrap import with_index
from torchcomms_pg.diagnosis import python_stacks

_Value = TypeVar("_Value")
_LONGEST = 60  # characters of a value in a message
_LOOK = 1.0  # seconds between two looks for the disagreement of other ranks, of up to _USUAL
_USUAL = 64  # ranks; more look less often, since one process serves the store for all of them
_FAILED = "failed"

_PLAIN = (int, float, complex, bool, str, bytes, type(None))
_OF_TORCH = (torch.dtype, torch.device, torch.Size)


def agree(value: _Value, name: str | None = None, group: dist.ProcessGroup | None = None) -> _Value:
    """Returns ``value``, and has the group's ranks compare it, without a wait for other ranks.

    Every rank of the group has to call it, as often and in the same order as the others, or in the
    same order for each ``name``. A thread compares digests through the group's store. If the value
    of a rank differs, within about a second all ranks of a group of ``torchcomms`` fail: pending
    and later calls raise `CommError` with both values and the lines of both calls. For a group of
    another backend each rank prints that line to stderr.

    Args:
        value: a number, string, bytes or None; a ``torch`` dtype, device or size; or a tuple, list,
            dict, set or frozenset of such values. No tensor.
        name: what the value is, for the message. Values of different names are not compared.
        group: by default the default group.

    Raises:
        TypeError: the value has a type that cannot be compared.
        ValueError: this process is not in ``group``.
    """
    digest = hashlib.sha256(_canonical(value).encode()).hexdigest()
    given = dist.group.WORLD if group is None else group
    if not isinstance(given, dist.ProcessGroup):
        raise ValueError(f"agree: group is {given!r}, wanted a process group this rank is in")
    if given.size() > 1:
        caller = sys._getframe(1)
        place = python_stacks.line_name(caller.f_code.co_filename, caller.f_lineno)
        text = repr(value)
        shown = text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
        _of(given).put(name or "", digest, {"value": shown, "place": place})
    return value


def _canonical(value: object) -> str:
    """Returns a text that is equal on all ranks if the values are; raises TypeError."""
    kind = type(value)
    if kind in _PLAIN or kind in _OF_TORCH:
        return f"{kind.__name__}:{value!r}"
    if isinstance(value, tuple | list):
        return f"{kind.__name__}[{','.join(map(_canonical, value))}]"
    if isinstance(value, set | frozenset):
        return f"set[{','.join(sorted(map(_canonical, value)))}]"
    if isinstance(value, dict):
        items = [f"{_canonical(key)}={_canonical(each)}" for key, each in value.items()]
        return f"dict[{','.join(items)}]"
    raise TypeError(
        f"agree: a value of type {kind.__module__}.{kind.__qualname__} cannot be compared; pass "
        "numbers, strings, or tuples, lists, dicts or sets of these"
    )


class _Agreement:
    """The values of one group, and the thread that compares them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._rank, self._size = group.rank(), group.size()
        self._group = weakref.ref(group)
        self._name = group.group_name
        self._number = dist.get_global_rank(group, self._rank)
        store: Any = dist.distributed_c10d._get_process_group_store(group)
        self._board = _C.StoreBoard(dist.PrefixStore("torchcomms_pg/agree", store))
        self._pause = _LOOK * max(self._size, _USUAL) / _USUAL
        self._counts: dict[str, int] = {}
        self._lock = threading.Lock()
        self._values: queue.SimpleQueue[tuple[str, str, dict[str, str]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="torchcomms_pg.agree", daemon=True).start()

    def put(self, name: str, digest: str, told: dict[str, str]) -> None:
        """Hands over a value to be compared."""
        with self._lock:
            number = self._counts[name] = self._counts.get(name, 0) + 1
            self._values.put((f"{number}/{name}", digest, {**told, "name": name}))

    def _run(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store has ended with its process
            while self._group() is not None and not self._board.get(_FAILED):
                with contextlib.suppress(queue.Empty):
                    key, digest, told = self._values.get(timeout=self._pause)
                    for other in self._differing(key, digest, told):
                        self._board.claim(_FAILED, json.dumps(other))
            failed = self._board.get(_FAILED)
            if failed and self._group() is not None:
                self._fail(json.loads(failed))

    def _differing(
        self, key: str, digest: str, told: dict[str, str]
    ) -> Iterator[list[dict[str, str]]]:
        """Yields both ranks' values, if this one's differs from the first rank's."""
        mine = {**told, "rank": str(self._number), "digest": digest}
        first = json.loads(self._board.claim(key, json.dumps(mine)))
        if first["digest"] != digest:
            yield [first, mine]
        elif self._board.add(f"{key}/compared", 1) == self._size:
            for each in (key, f"{key}/compared"):
                self._board.erase(each)

    def _fail(self, values: list[dict[str, str]]) -> None:
        one, other = sorted(values, key=lambda each: int(each["rank"]))
        what = f" about {one['name']}" if one["name"] else ""
        text = (
            f"the ranks of group '{self._name}' do not agree{what}: rank {one['rank']} agreed to "
            f"{one['value']} at {one['place']}, rank {other['rank']} to {other['value']} at "
            f"{other['place']}"
        )
        group = self._group()
        failed = False
        for device in group._device_types if group is not None else ():
            backend = unwrapped(group._get_backend(device))  # type: ignore[union-attr]
            if isinstance(backend, _C.Backend):
                failed = True
                if device.type == "cpu" or torch.accelerator.is_available():
                    backend.communicator(with_index(device)).abort(text)
        if not failed:
            print(f"[rank {self._number}] torchcomms_pg: {text}", file=sys.stderr, flush=True)


_agreements: weakref.WeakKeyDictionary[dist.ProcessGroup, _Agreement] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def _of(group: dist.ProcessGroup) -> _Agreement:
    with _lock:
        if group not in _agreements:
            _agreements[group] = _Agreement(group)
        return _agreements[group]
