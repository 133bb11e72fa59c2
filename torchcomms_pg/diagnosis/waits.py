"""Waits for other ranks that are no operations of a group, for verdicts and the status."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import torch.distributed as dist
from torch.distributed import device_mesh
from torch.distributed import distributed_c10d as c10d

from torchcomms_pg import _C, env
from torchcomms_pg._patches import replace
from torchcomms_pg.diagnosis import python_stacks, settings, watching

_joining = ContextVar("torchcomms_pg.joining", default=False)  # in a wait of `_joined`
_waiting = ContextVar("torchcomms_pg.waiting", default=False)  # in any wait
_LONGEST = 60  # characters of a store's keys in a text


@dataclass(frozen=True)
class _Meeting:
    """Where the ranks of an `init_process_group` meet: at their store's server, by `key`.

    A process that initializes its default group once more finds another list under the key.
    """

    rank: int
    size: int
    host: str
    port: int
    where: str

    @property
    def key(self) -> str:
        return f"{self.where}/{_joins[self]}"


_joins: Counter[_Meeting] = Counter()  # how often this process has joined the others there


def install() -> None:
    """Has c10d's making of groups, Gloo's monitored barriers and waits in stores count as waits.

    Has an effect once.
    """
    replace([c10d, dist, device_mesh], "init_process_group", _joined)
    replace([c10d], "_new_process_group_helper", _made)
    replace([c10d], "_store_based_barrier", _barred)
    replace([dist.ProcessGroup], "monitored_barrier", _monitored)
    # Not multi_get: of a store that is written in Python, C++ would take it for an override.
    replace([dist.Store], "get", _got)
    replace([dist.Store], "wait", _waited)


@contextlib.contextmanager
def waiting(name: str, for_ranks: Iterable[int]) -> Iterator[None]:
    """Says that this rank waits for other ranks in a way that is no operation of a process group.

    For libraries that wait in queues, locks or files. While the ``with`` block runs,
    verdicts, ``python -m torchcomms_pg.status`` and the watch know that this rank waits, for whom,
    and in which line. If the block takes longer than TORCHCOMMS_PG_VERDICT_AFTER, or the watch's
    timeout, the process prints which ranks it waits for, and their places::

        with torchcomms_pg.waiting("shm_broadcast", for_ranks=[0]):
            block = queue.get()

    Has an effect in a process that has a process group of several ranks that is of ``torchcomms``
    or watched. Costs about 20 us.

    Args:
        name: what this rank waits in, for people.
        for_ranks: the ranks that are waited for, by their numbers in the default group.

    Raises:
        ValueError: `for_ranks` is empty or has a negative number.
    """
    ranks = sorted(set(for_ranks))
    if not ranks or ranks[0] < 0:
        raise ValueError(f"waiting: for_ranks is {ranks}, wanted numbers of one rank or more")
    with _wait(name, ranks, meets=False):
        yield


@contextlib.contextmanager
def _wait(
    text: str, ranks: list[int], meets: bool, meeting: _Meeting | None = None
) -> Iterator[None]:
    token = _waiting.set(True)
    number = _C.begin_wait(
        text=text,
        ranks=ranks,
        meets=meets,
        called_at=python_stacks.caller() if ranks else "",
        verdict_after=_verdict_after(),
        meeting=(meeting.host, meeting.port, meeting.key) if meeting else None,
        rank=meeting.rank if meeting else -1,
    )
    joined = False
    try:
        yield
        joined = True
    finally:
        _C.end_wait(number, joined)
        _waiting.reset(token)


def _verdict_after() -> timedelta:
    return env.verdict_after() or watching.timeout_of_all()


def _joined(original: Any, *args: Any, **kwargs: Any) -> Any:
    # Without a group the processes cannot ask each other, so they write into the store.
    try:
        meeting = _meeting(inspect.signature(original).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):
        meeting = None  # `original` raises the error
    if meeting is None or meeting.size < 2:
        return original(*args, **kwargs)
    settings.configure()
    text = f"init_process_group of {meeting.size} ranks"
    token = _joining.set(True)
    try:
        with _wait(text, list(range(meeting.size)), meets=True, meeting=meeting):
            result = original(*args, **kwargs)
            _say_joined(meeting)
            return result
    finally:
        _joining.reset(token)


def _say_joined(meeting: _Meeting) -> None:
    # A rank that is slower must not miss this one, which mostly has not been listed.
    store = c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    with contextlib.suppress(RuntimeError):  # the process that serves the store has ended
        store.append(meeting.key, f"+{meeting.rank}\n")  # type: ignore[attr-defined]
    _joins[meeting] += 1


def _meeting(given: dict[str, Any]) -> _Meeting | None:
    """Returns where the ranks meet, or None if this package has no part in it, or it is unknown."""
    ours = "torchcomms" in str(given.get("backend")).lower()
    if not (ours or watching.timeout_of_all() or env.as_gloo()) or given.get("_ranks"):
        return None
    rank, size = given.get("rank", -1), given.get("world_size", -1)
    key = f"torchcomms_pg/came/{env.restarts()}"
    if (store := given.get("store")) is not None:
        place = _C.store_place(store)
        return place and _Meeting(rank, size, place[0], place[1], f"{key}/{place[2]}")
    url = urlsplit(given.get("init_method") or "env://")
    query: dict[str, str | None] = dict(parse_qsl(url.query))
    host, port = url.hostname, url.port
    if url.scheme == "env":
        host, port = env.read("MASTER_ADDR"), env.read_int("MASTER_PORT")
        query = {"rank": env.read("RANK"), "world_size": env.read("WORLD_SIZE")} | query
    elif url.scheme != "tcp":
        return None
    rank = int(query.get("rank") or -1) if rank == -1 else rank
    size = int(query.get("world_size") or -1) if size == -1 else size
    return _Meeting(rank, size, host, port, key) if host and port and 0 <= rank < size else None


def _made(original: Any, *args: Any, **kwargs: Any) -> Any:
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    ranks = list(given["global_ranks_in_group"] or range(given["group_size"]))
    if len(ranks) == 1 or (_joining.get() and not given["global_ranks_in_group"]):
        return original(*args, **kwargs)
    text = f"the making of group '{given['group_name']}' of ranks {_shown(ranks)}"
    with _wait(text, ranks, meets=True):
        return original(*args, **kwargs)


def _barred(original: Any, *args: Any, **kwargs: Any) -> Any:
    # After each new_group if TORCH_DIST_INIT_BARRIER is 1. It waits in the store, ten seconds each.
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    count = given["rendezvous_count"]
    if _joining.get() or count == 1 or count != dist.get_world_size():
        return original(*args, **kwargs)
    text = f"the barrier after the making of group '{given['group_name']}'"
    with _wait(text, list(range(count)), meets=True):
        return original(*args, **kwargs)


def _monitored(original: Any, group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
    # Gloo's monitored barrier consists of messages, of which neither hooks nor recorders learn.
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == 1 or dist.get_backend(group) != "gloo":
        return original(group, *args, **kwargs)
    text = f"monitored_barrier of group '{group.group_name}' of ranks {_shown(ranks)}"
    with _wait(text, ranks, meets=True):
        return original(group, *args, **kwargs)


def _got(original: Any, store: dist.Store, key: str, *args: Any, **kwargs: Any) -> Any:
    return _of_store("get", key, lambda: original(store, key, *args, **kwargs))


def _waited(original: Any, store: dist.Store, keys: list[str], *args: Any, **kwargs: Any) -> Any:
    return _of_store("wait", keys, lambda: original(store, keys, *args, **kwargs))


def _of_store(name: str, keys: str | list[str], call: Callable[[], Any]) -> Any:
    # Helper threads wait for commands in stores for as long as a program runs.
    if (
        not c10d.is_initialized()
        or threading.get_ident() != threading.main_thread().ident
        or _waiting.get()
    ):
        return call()
    shown = repr(keys)
    if len(shown) > _LONGEST:
        shown = shown[: _LONGEST - 3] + "..."
    with _wait(f"the store's {name}({shown})", [], meets=False):
        return call()


def _shown(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if ranks[8:] else "")
