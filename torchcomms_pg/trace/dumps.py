"""Reads flight recorders' dumps: c10d's schema, version 2, as pickle or JSON.

``torch/csrc/distributed/c10d/FlightRecorder.hpp`` defines the schema. Dumps of torch's own ``nccl``
and ``gloo`` backends have it, too, but leave something out:

- Gloo's recorder writes no states (only ``retired`` shows that an entry has ended), no messages,
  and only the ranks of the group that was made last;
- the recorder of ``nccl`` writes no states of a batch's members, and does not number messages.

A file may contain anything. The values that are read have the types that `Entry` declares, texts
are safe to print on a terminal, and the file's length bounds the time of reading.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from torchcomms_pg.trace.groups import Group, settle
from torchcomms_pg.trace.plain_pickle import unpickle
from torchcomms_pg.trace.stale import find_stale

T = TypeVar("T")

# Most frames and tensors of a small file: a pickle may refer to one list many times. A ring of 2000
# operations has 128,000 frames at most.
_MOST = 500_000
_MOST_DIMS = 64  # most dimensions of a tensor of torch

# This project records messages between two ranks, and operations outside c10d's schema, in separate
# groups. Their names begin with the name of the group on which the operations were called.
_ONE_SIDED = re.compile(r"(.*):(put|signal|wait_signal) (\d{1,9})(->|<-)(\d{1,9})", re.DOTALL)
_PAIR = re.compile(r"(.*):(\d{1,9})-(\d{1,9})", re.DOTALL)
_SIDES = re.compile(r"(\d{1,9}|\?|-1)(->|<-)(\d{1,9}|\?|-1)")
_BATCH = re.compile(r"coalesced|[A-Z_]+_coalesced")


class DumpError(ValueError):
    """Raised for a file that is no flight recorder's dump; the message says why."""


@lru_cache(maxsize=4096)
def is_library(file: str) -> bool:
    """Returns whether a file is torch's, this package's, a module of wrappers, or no file."""
    wrappers = r"/(contextlib|typing_extensions)\.py$"
    return bool(re.search(rf"/(torch|torchcomms_pg)/|{wrappers}|^<|^\?\?", file))


@dataclass(frozen=True)
class Frame:
    """One line of a Python stack. Lists of frames begin with the innermost."""

    function: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


@dataclass(eq=False, slots=True)
class Entry:
    """One operation on one rank. Times are nanoseconds since 1970, sizes are in elements.

    ``sender`` and ``receiver`` of a message are global ranks, None for any rank. ``number`` counts
    the messages of one direction between two ranks; a message has one number on both. It is None
    if unknown. A ``batched`` operation may end with the batch that it is a member of: torch's hook
    reports only the end of a batch's last member.

    Only some dumps contain the remaining fields. ``batch`` is equal for the messages of one batch
    of a group, 0 for a message in no batch, and None if unknown. ``tag`` of a message and ``root``
    of a collective (a global rank) are None if unknown or absent. ``from_any`` marks a receive from
    any rank. ``thread``, ``reduce_op``, ``device`` and ``backend`` are empty if unknown;
    ``thread`` distinguishes the threads of one rank, and ``backend`` is the group's, by its name in
    c10d.
    """

    rank: int
    group: Group
    record: int
    op_id: int
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
    retired: bool
    created: int
    started: int | None
    completed: int | None
    duration_ms: float | None
    timeout_ms: int
    frames: tuple[Frame, ...]
    local: bool = False  # True while sender and receiver are ranks of the group, not global ranks
    batched: bool = False
    thread: str = ""
    batch: int | None = None
    tag: int | None = None
    from_any: bool = False
    root: int | None = None
    reduce_op: str = ""
    device: str = ""
    backend: str = ""

    @property
    def finished(self) -> bool:
        """Whether the operation has ended. False if it failed: it is then started and retired."""
        if self.state == "completed" or self.completed is not None:
            return True
        return self.retired and self.state == "scheduled"

    @property
    def numel_in(self) -> int:
        """Number of elements of all inputs."""
        return sum(math.prod(size) for size in self.input_sizes)

    @property
    def numel_out(self) -> int:
        """Number of elements of all outputs."""
        return sum(math.prod(size) for size in self.output_sizes)

    @property
    def numel(self) -> int:
        """Number of elements of a message."""
        return self.numel_in if self.op == "send" else self.numel_out

    @property
    def what(self) -> str:
        """Name and size: ``all_reduce (1024 x Float)`` or ``send 0->2 (16 x Int)``."""
        return self.describe(self.sender, self.receiver)

    def describe(self, sender: object, receiver: object) -> str:
        """Returns name and size as `what` does, with these names of a message's two ranks."""
        name = self.op
        if self.p2p and self.op != "coalesced":
            sides = ["?" if side is None else str(side) for side in (sender, receiver)]
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
        """The innermost line of the user's own code: not of torch, this package or contextlib.

        contextlib is innermost at the end of a batch's ``with`` block.
        """
        for frame in self.frames:
            if not is_library(frame.file):
                return frame
        return self.frames[0] if self.frames else None


@dataclass
class Dump:
    """The content of one rank's recorder.

    ``whole``: whether the dump has every operation of the process. ``gapless``: whether it has
    every operation from its first entry on. ``lost`` counts the operations that the ring has
    dropped, and ``captured`` the operations in graphs, which are not recorded. ``detailed``:
    whether the dump has tags, batches and devices.
    """

    rank: int
    path: Path
    groups: dict[str, tuple[str, tuple[int, ...]]]  # name -> (description, global ranks)
    entries: list[Entry] = field(default_factory=list)
    library: str = ""  # prefix of the operations' names, such as "nccl"
    whole: bool = True
    gapless: bool = True
    lost: int = 0
    captured: int = 0
    detailed: bool = False
    time: int | None = None  # when it was written, in nanoseconds since 1970; None if unknown
    threads: tuple[str, ...] = ()  # where Python's threads were then, the main thread first
    # True if a group without entries shares its name with another group. The dump lists only one
    # group's ranks for the name.
    namesakes: bool = False


class Dumps(dict[int, Dump]):
    """Dumps by global rank. ``left_out`` has the reason for each file that is left out, by rank."""

    def __init__(self, dumps: Iterable[Dump], left_out: dict[int, str] | None = None) -> None:
        super().__init__((dump.rank, dump) for dump in dumps)
        self.left_out = left_out or {}
        settle(self)


def load(folder: Path, prefix: str | None = None, *, stale: bool = False) -> Dumps:
    """Reads and returns every dump in ``folder``.

    A dump's file name ends with its rank, as in torch, optionally followed by ``.json``, ``.pkl``
    or ``.pickle``. ``prefix`` is the part of the names before the rank; None reads all. Leaves out
    files that are no dumps and, unless ``stale``, dumps that are older than others.

    Raises:
        DumpError: no file has such a name, two files are of one rank, or no file is a dump with a
            group.
    """
    paths: dict[int, Path] = {}
    for path in sorted(folder.iterdir()) if folder.exists() else ():
        match = re.fullmatch(r"(.*?)(\d{1,9})(\.json|\.pkl|\.pickle)?", path.name)
        if not path.is_file() or match is None:
            continue
        if prefix is not None and match[1] != prefix:
            continue
        rank = int(match[2])
        if rank in paths:
            raise DumpError(
                f"{path.name} and {paths[rank].name} are both of rank {rank}; "
                "name one of them with --prefix, or move the other away"
            )
        paths[rank] = path
    if not paths:
        raise DumpError(_no_dump(folder, prefix))
    left_out: dict[int, str] = {}
    dumps = _read(paths, left_out)
    if not dumps:
        raise DumpError(next(iter(left_out.values())))
    found = Dumps(dumps, left_out)
    if not stale and (old := find_stale(found)):
        # Matches the groups again, without the old dumps' groups.
        left_out.update(old)
        found = Dumps(_read({rank: paths[rank] for rank in found if rank not in old}, {}), left_out)
    return found


def _no_dump(folder: Path, prefix: str | None) -> str:
    named = "a name that ends with a rank" if prefix is None else f"the name {prefix}RANK"
    return (
        f"{folder}: no dump has been written yet, as no file has {named}. A dump is written when "
        "an operation has failed or its timeout has passed, and at the end of the process with "
        "TORCHCOMMS_PG_DUMP_AT_EXIT=1; TORCH_FR_DUMP_TEMP_FILE is its path without the rank. A job "
        "that still runs answers python -m torchcomms_pg.status"
    )


def _read(paths: dict[int, Path], unreadable: dict[int, str]) -> list[Dump]:
    dumps = []
    for rank, path in paths.items():
        try:
            # Accepts a ring of any size: a frame takes more than eight bytes of a file.
            most = max(_MOST, path.stat().st_size // 8)
            dump = parse(_content(path), rank, path, most)
            if not dump.groups and not dump.entries:
                raise DumpError("the dump is empty: its process has had no operation of a group")
            dumps.append(dump)
        except (DumpError, OSError) as error:
            unreadable[rank] = f"{path}: {error}" if isinstance(error, DumpError) else str(error)
    return dumps


def parse(content: Any, rank: int, path: Path = Path(), most: int = _MOST) -> Dump:
    """Makes the dump of ``rank`` from a file's content; ``most`` limits its frames and tensors."""
    if not isinstance(content, dict) or "version" not in content or "pg_config" not in content:
        raise DumpError("no flight recorder's dump: 'version' or 'pg_config' is missing")
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
        entries: list[Entry] = []
        made: dict[tuple[str, str, int], Group] = {}
        batch = _OpenBatch()
        left = most
        where = "details: "
        captured = _get(content, "captured", int, 0)
        time = _get(content, "dumped", int, None)
        threads = tuple(_list(content.get("threads", []), str, "'threads'"))
        details = {
            _get(_checked(detail, dict, "one"), "record_id", int): detail
            for detail in _get(content, "details", list, [])
        }
        for number, raw in enumerate(_get(content, "entries", list, [])):
            where = f"entry {number}: "
            entry = _entry(rank, _checked(raw, dict, "it"), made)
            if (detail := details.get(entry.record)) is not None:
                _add_details(entry, detail)
            left -= len(entry.frames) + len(entry.input_sizes) + len(entry.output_sizes)
            if left < 0:
                raise DumpError(f"the dump has more than {most} frames and tensors")
            entries.append(entry)
            batch.add(entry, raw)
    except DumpError as error:
        raise DumpError(f"{where}{error}") from error
    dump = Dump(rank, path, groups, entries, captured=captured, detailed=bool(details))
    dump.time, dump.threads = time, threads
    _look_for_gaps(dump)
    names = [name for name in groups if not (_PAIR.fullmatch(name) or _ONE_SIDED.fullmatch(name))]
    ids = {str(id) for id in _get(content, "pg_status", dict, {})}
    dump.namesakes = len(ids) > len(names) and not ids <= {str(id) for _, _, id in made}
    if dump.whole:
        _number_messages(entries)
    if entries:
        dump.library = _get(raw, "profiling_name", str).rpartition(":")[0]
    return dump


class _OpenBatch:
    """Gives a batch's state to its members, which have no state in dumps of torch's ``nccl``.

    In its group, the entry of a batch directly follows its members' entries and has their numbers.
    """

    def __init__(self) -> None:
        self.key: tuple[object, ...] = ()
        self.members: list[Entry] = []

    def add(self, entry: Entry, raw: dict[Any, Any]) -> None:
        numbers = (raw.get("collective_seq_id"), raw.get("p2p_seq_id"))
        key = (entry.group.name, entry.group.id, entry.p2p, *numbers)
        if key != self.key:
            self.key, self.members = key, []
        if _BATCH.fullmatch(entry.op):
            for member in self.members:
                member.state, member.retired = entry.state, entry.retired
                member.started, member.completed = entry.started, entry.completed
                member.batched, member.batch = True, entry.record
            self.members = []
        elif entry.state == "scheduled" and not entry.retired:
            self.members.append(entry)


def _look_for_gaps(dump: Dump) -> None:
    counts: dict[tuple[str, int], int] = {}
    first = dump.entries[0].record if dump.entries else 0
    for place, entry in enumerate(dump.entries):
        key = (entry.group.name, entry.group.id)
        last = counts.get(key, entry.op_id if first else 0)
        dump.gapless &= entry.record == first + place and entry.op_id <= last + 1
        counts[key] = entry.op_id
    dump.whole = dump.gapless and first == 0
    if dump.entries:
        dump.lost = max(0, dump.entries[-1].record + 1 - len(dump.entries))


def _number_messages(entries: list[Entry]) -> None:
    counts: Counter[tuple[object, ...]] = Counter()
    for entry in entries:
        if entry.p2p and entry.number is None and None not in (entry.sender, entry.receiver):
            key = (entry.group.name, entry.group.id, entry.op, entry.sender, entry.receiver)
            counts[key] += 1
            entry.number = counts[key]


def printable(text: str) -> str:
    """Returns a text with unprintable characters escaped as Python does, for example ``\\x1b``."""
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text
    )


def _content(path: Path) -> Any:
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
    """Returns ``value``, with a text made `printable`. ``what``: the value's name in errors.

    Raises DumpError if the value is not of type ``kind``, or is a number beyond 64 bits.
    """
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
    """Returns a list or a tuple as a list, with each item checked by `_checked`."""
    if not isinstance(raw, (list, tuple)):
        raise DumpError(f"{what} is of type {type(raw).__name__}, wanted list")
    return [_checked(value, kind, f"in {what} one") for value in raw]


def _group(config: dict[Any, Any]) -> tuple[str, tuple[int, ...]]:
    """Returns a group's description and global ranks."""
    text = _get(config, "ranks", str)
    try:
        ranks = _list(json.loads(text), int, "'ranks'")
    except (ValueError, RecursionError) as error:
        raise DumpError(f"'ranks' is no list of whole numbers: {error}") from error
    return _get(config, "desc", str, ""), tuple(ranks)


def _entry(rank: int, raw: dict[Any, Any], made: dict[tuple[str, str, int], Group]) -> Entry:
    """Returns an entry. Its group, which has no ranks yet, is taken from or added to ``made``."""
    names = _list(raw.get("process_group"), str, "'process_group'")
    if not names:
        raise DumpError("'process_group' is empty")
    group, description = (*names, "")[:2]
    library, _, name = _get(raw, "profiling_name", str).rpartition(":")
    state = _get(raw, "state", str)
    op, _, sides = name.partition(" ")
    p2p = _get(raw, "is_p2p", bool)
    sender = receiver = number = None
    local = False
    seq = _get(raw, "p2p_seq_id" if p2p else "collective_seq_id", int)
    if match := _SIDES.fullmatch(sides):
        first, last = (None if side in ("?", "-1") else int(side) for side in match.group(1, 3))
        sender, receiver = (first, last) if match[2] == "->" else (last, first)
    if match := _ONE_SIDED.fullmatch(group):
        p2p, group, op = True, match[1], match[2]
        left, right = int(match[3]), int(match[5])
        sender, receiver = (left, right) if match[4] == "->" else (right, left)
        number, seq = seq, _get(raw, "p2p_seq_id", int)
    elif p2p and (match := _PAIR.fullmatch(group)):
        group, number = match[1], _get(raw, "collective_seq_id", int)
        both = (int(match[2]), int(match[3]))
        sender, receiver = (both[side] if side in (0, 1) else side for side in (sender, receiver))
    else:
        local = p2p
    # 0 until a batch follows its members in a dump of torch's nccl, see _OpenBatch.
    batch = 0 if local and library == "nccl" else None
    dtypes = [
        dtype
        for key in ("input_dtypes", "output_dtypes")
        for dtype in _list(raw.get(key), str, repr(key))
    ]
    frames = [_checked(frame, dict, "a frame") for frame in _get(raw, "frames", list, [])]
    key = (group, description, _get(raw, "pg_id", int, 0))
    return Entry(
        rank=rank,
        group=made.setdefault(key, Group(*key)),
        record=_get(raw, "record_id", int),
        op_id=_get(raw, "op_id", int, 0),
        seq=seq,
        number=number,
        p2p=p2p,
        op=op,
        sender=sender,
        receiver=receiver,
        input_sizes=_sizes(raw, "input_sizes"),
        output_sizes=_sizes(raw, "output_sizes"),
        dtype=dtypes[0] if dtypes else "",
        state=state,
        retired=_get(raw, "retired", bool, False),
        created=_get(raw, "time_created_ns", int),
        started=_time(raw, "time_discovered_started_ns"),
        completed=_time(raw, "time_discovered_completed_ns"),
        duration_ms=_get(raw, "duration_ms", float, None),
        timeout_ms=_get(raw, "timeout_ms", int),
        frames=tuple(map(_frame, frames)),
        local=local,
        batched=p2p and state == "scheduled" and library != "nccl",
        thread=_get(raw, "thread_id", str, ""),
        batch=batch,
    )


def _add_details(entry: Entry, detail: dict[Any, Any]) -> None:
    """Sets the fields that this project's recorder writes beyond c10d's schema."""
    entry.tag = _get(detail, "tag", int, None)
    entry.batch = _get(detail, "batch", int, None)
    entry.from_any = bool(_get(detail, "from_any", int, 0))
    entry.root = _get(detail, "root", int, None)
    entry.reduce_op = _get(detail, "reduce_op", str, "")
    entry.device = _get(detail, "device", str, "")
    entry.backend = _get(detail, "backend", str, "")


def _frame(raw: dict[Any, Any]) -> Frame:
    return Frame(_get(raw, "name", str), _get(raw, "filename", str), _get(raw, "line", int))


def _time(raw: dict[Any, Any], key: str) -> int | None:
    """Returns a time, or None if it is unknown: None in a pickle, 0 in JSON."""
    return _get(raw, key, int) or None if raw.get(key) is not None else None


def _sizes(raw: dict[Any, Any], key: str) -> tuple[tuple[int, ...], ...]:
    sizes = []
    for size in _get(raw, key, list):
        if isinstance(size, (list, tuple)) and len(size) > _MOST_DIMS:
            raise DumpError(f"{key!r} has a tensor of {len(size)} dimensions")
        sizes.append(tuple(_list(size, int, f"{key!r}")))
    return tuple(sizes)
