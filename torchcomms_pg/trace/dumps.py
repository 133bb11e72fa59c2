"""Reads what flight recorders wrote: c10d's schema, version 2, as pickle or JSON.

The schema is that of ``torch/csrc/distributed/c10d/FlightRecorder.hpp``; dumps of torch's own
``nccl`` and ``gloo`` backends have it too. A file may hold anything: what is read here is of the
types that `Entry` says, its texts show as they are on a terminal, and reading takes a time that
its length bounds.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from torchcomms_pg.trace.plain_pickle import unpickle

T = TypeVar("T")

# A pickle may name one list many times. A ring of 2000 operations has 128,000 frames at most.
_MOST = 500_000
_MOST_DIMS = 64  # of a tensor of torch

# An operation outside c10d's schema has a group of its own, whose name tells what it is.
_ONE_SIDED = re.compile(r"(.*):(put|signal|wait_signal) (\d{1,9})(->|<-)(\d{1,9})", re.DOTALL)
_PAIR = re.compile(r"(.*):\d{1,9}-\d{1,9}", re.DOTALL)


class DumpError(ValueError):
    """A file is not a flight recorder's dump; the message names it and says what it is."""


@dataclass(frozen=True)
class Frame:
    """One line of a Python stack, innermost first in a list of them."""

    function: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


@dataclass(frozen=True)
class Entry:
    """One operation on one rank. Times are nanoseconds since 1970, sizes in elements.

    ``base`` is the group that the operation was called on, where messages are recorded in groups
    of their two ranks. ``number`` counts the messages of one direction between two ranks, the
    same on both; None where the dump does not have it.
    """

    rank: int
    group: str
    base: str
    record: int
    seq: int
    number: int | None
    p2p: bool
    op: str
    sender: int | None
    receiver: int | None
    input_sizes: tuple[tuple[int, ...], ...]
    output_sizes: tuple[tuple[int, ...], ...]
    dtype: str
    state: str
    created: int
    started: int | None
    completed: int | None
    duration_ms: float | None
    timeout_ms: int
    frames: tuple[Frame, ...]

    @property
    def finished(self) -> bool:
        """True if it ended; one that failed did not."""
        return self.state == "completed"

    @property
    def numel_in(self) -> int:
        """Elements of all inputs."""
        return sum(math.prod(size) for size in self.input_sizes)

    @property
    def numel_out(self) -> int:
        """Elements of all outputs."""
        return sum(math.prod(size) for size in self.output_sizes)

    @property
    def what(self) -> str:
        """Name and size: ``all_reduce (1024 x Float)`` or ``send 0->2 (16 x Int)``."""
        name = self.op
        if self.p2p:
            sides = ["?" if side is None else str(side) for side in (self.sender, self.receiver)]
            name = f"{self.op} {'->'.join(sides)}"
        one_side = self.op in ("send", "put")
        numel = self.numel_in if self.numel_in == self.numel_out or one_side else None
        if self.op == "recv":
            numel = self.numel_out
        if not self.dtype:
            return name
        count = f"{self.numel_in} -> {self.numel_out}" if numel is None else str(numel)
        return f"{name} ({count} x {self.dtype})"

    @property
    def where(self) -> Frame | None:
        """The innermost line of the user's own code: not of torch, nor of this package."""
        for frame in self.frames:
            if not re.search(r"/(torch|torchcomms_pg)/|^<|^\?\?", frame.file):
                return frame
        return self.frames[0] if self.frames else None


@dataclass
class Dump:
    """The content of one rank's recorder."""

    rank: int
    path: Path
    groups: dict[str, tuple[str, list[int]]]  # name -> (description, global ranks)
    entries: list[Entry] = field(default_factory=list)


def load(folder: Path, prefix: str | None = None) -> dict[int, Dump]:
    """Reads every dump in ``folder``, by global rank.

    A dump's name ends with its rank, as torch writes them, optionally with ``.json``, ``.pkl``
    or ``.pickle`` after it. ``prefix`` limits what is read to names that begin so.

    Raises:
        DumpError: nothing to read, two files of one rank, or a file that is no dump.
    """
    dumps: dict[int, Dump] = {}
    for path in sorted(folder.iterdir()):
        match = re.fullmatch(r"(.*?)(\d+)(\.json|\.pkl|\.pickle)?", path.name)
        if not path.is_file() or match is None:
            continue
        if prefix is not None and match[1] != prefix:
            continue
        rank = int(match[2])
        if rank in dumps:
            raise DumpError(
                f"{path.name} and {dumps[rank].path.name} are both of rank {rank}; "
                "name one of them with --prefix, or move the other away"
            )
        dumps[rank] = read(path, rank)
    if not dumps:
        raise DumpError(
            f"{folder}: no file ends with a rank, as the recorder's dumps do "
            "(TORCH_FR_DUMP_TEMP_FILE sets how they begin)"
        )
    return dumps


def read(path: Path, rank: int) -> Dump:
    """Reads the dump of ``rank`` from ``path``, pickle or JSON."""
    content = _parse(path)
    if not isinstance(content, dict) or "version" not in content or "pg_config" not in content:
        raise DumpError(f"{path}: no flight recorder's dump: 'version' or 'pg_config' is missing")
    where = ""
    try:
        version = _get(content, "version", str)
        if version.partition(".")[0] != "2":
            raise DumpError(f"the dump is of version {version[:20]}, wanted 2.x")
        where = "pg_config: "
        groups = {
            _checked(name, str, "a group's name"): _group(_checked(config, dict, "a group"))
            for name, config in _get(content, "pg_config", dict).items()
        }
        where = ""
        dump = Dump(rank, path, groups)
        left = _MOST
        for number, raw in enumerate(_get(content, "entries", list, [])):
            where = f"entry {number}: "
            entry = _entry(rank, _checked(raw, dict, "it"), groups)
            left -= len(entry.frames) + len(entry.input_sizes) + len(entry.output_sizes)
            if left < 0:
                raise DumpError(f"the dump has more than {_MOST} frames and tensors")
            dump.entries.append(entry)
    except DumpError as error:
        raise DumpError(f"{path}: {where}{error}") from error
    return dump


def printable(text: str) -> str:
    """Escapes, as Python does, what would move the cursor or is no character: ``\\x1b``."""
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text
    )


def _parse(path: Path) -> Any:
    content = path.read_bytes()
    try:
        return json.loads(content) if content[:1] == b"{" else unpickle(content)
    except (ValueError, RecursionError) as error:
        raise DumpError(f"{path}: neither JSON nor a pickle of plain data: {error}") from error


_REQUIRED: Any = object()


def _get(raw: dict[Any, Any], key: str, kind: type[T], default: Any = _REQUIRED) -> T:
    value = raw.get(key, default)
    if value is _REQUIRED:
        raise DumpError(f"{key!r} is missing")
    return value if value is default else _checked(value, kind, repr(key))


def _checked(value: Any, kind: type[T], what: str) -> T:
    """Checks that ``value`` can be shown and counted with; texts become `printable`."""
    if kind is float and type(value) is int:
        value = float(value) if abs(value) < 2**63 else math.inf
    if type(value) is not kind:
        raise DumpError(f"{what} is of type {type(value).__name__}, wanted {kind.__name__}")
    if isinstance(value, str):
        return printable(value)  # type: ignore[return-value]
    if isinstance(value, (int, float)) and not abs(value) < 2**63:
        raise DumpError(f"{what} is beyond 64 bits")
    return value


def _list(raw: Any, kind: type[T], what: str) -> list[T]:
    """Checks a list or a tuple, and returns a list."""
    if not isinstance(raw, (list, tuple)):
        raise DumpError(f"{what} is of type {type(raw).__name__}, wanted list")
    return [_checked(value, kind, f"in {what} one") for value in raw]


def _group(config: dict[Any, Any]) -> tuple[str, list[int]]:
    """Returns (description, global ranks)."""
    text = _get(config, "ranks", str)
    try:
        ranks = _list(json.loads(text), int, "'ranks'")
    except (ValueError, RecursionError) as error:
        raise DumpError(f"'ranks' is no list of whole numbers: {error}") from error
    return _get(config, "desc", str, ""), ranks


def _entry(rank: int, raw: dict[Any, Any], groups: dict[str, tuple[str, list[int]]]) -> Entry:
    names = _list(raw.get("process_group"), str, "'process_group'")
    if not names:
        raise DumpError("'process_group' is empty")
    group = names[0]
    members = groups.get(group, ("", []))[1]
    name = _get(raw, "profiling_name", str).rpartition(":")[2]
    op, _, sides = name.partition(" ")
    p2p = _get(raw, "is_p2p", bool)
    sender = receiver = number = None
    base = group
    if match := re.fullmatch(r"(\d{1,9}|\?|-1)(->|<-)(\d{1,9}|\?|-1)", sides):
        first, last = _global(match[1], members), _global(match[3], members)
        sender, receiver = (first, last) if match[2] == "->" else (last, first)
    seq = _get(raw, "p2p_seq_id" if p2p else "collective_seq_id", int)
    if match := _ONE_SIDED.fullmatch(group):
        p2p, base, op = True, match[1], match[2]
        left, right = int(match[3]), int(match[5])
        sender, receiver = (left, right) if match[4] == "->" else (right, left)
        number, seq = seq, _get(raw, "p2p_seq_id", int)
    elif p2p and (match := _PAIR.fullmatch(group)):
        base, number = match[1], _get(raw, "collective_seq_id", int)
    dtypes = [
        dtype
        for key in ("input_dtypes", "output_dtypes")
        for dtype in _list(raw.get(key), str, repr(key))
    ]
    frames = [_checked(frame, dict, "a frame") for frame in _get(raw, "frames", list, [])]
    return Entry(
        rank=rank,
        group=group,
        base=base,
        record=_get(raw, "record_id", int),
        seq=seq,
        number=number,
        p2p=p2p,
        op=op,
        sender=sender,
        receiver=receiver,
        input_sizes=_sizes(raw, "input_sizes"),
        output_sizes=_sizes(raw, "output_sizes"),
        dtype=dtypes[0] if dtypes else "",
        state=_get(raw, "state", str),
        created=_get(raw, "time_created_ns", int),
        started=_time(raw, "time_discovered_started_ns"),
        completed=_time(raw, "time_discovered_completed_ns"),
        duration_ms=_get(raw, "duration_ms", float, None),
        timeout_ms=_get(raw, "timeout_ms", int),
        frames=tuple(map(_frame, frames)),
    )


def _frame(raw: dict[Any, Any]) -> Frame:
    return Frame(_get(raw, "name", str), _get(raw, "filename", str), _get(raw, "line", int))


def _global(rank: str, members: list[int]) -> int | None:
    """Returns the global rank, since names in dumps hold ranks of the group."""
    if rank in ("?", "-1"):
        return None
    number = int(rank)
    return members[number] if number < len(members) else number


def _time(raw: dict[Any, Any], key: str) -> int | None:
    """Returns a time or None, for which JSON has 0."""
    return _get(raw, key, int) or None if raw.get(key) is not None else None


def _sizes(raw: dict[Any, Any], key: str) -> tuple[tuple[int, ...], ...]:
    sizes = []
    for size in _get(raw, key, list):
        if isinstance(size, (list, tuple)) and len(size) > _MOST_DIMS:
            raise DumpError(f"{key!r} has a tensor of {len(size)} dimensions")
        sizes.append(tuple(_list(size, int, f"{key!r}")))
    return tuple(sizes)
