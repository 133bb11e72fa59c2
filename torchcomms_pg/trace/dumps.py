"""Reads what flight recorders wrote: c10d's schema, version 2, as pickle or JSON.

The schema is that of ``torch/csrc/distributed/c10d/FlightRecorder.hpp``; dumps of torch's own
``nccl`` and ``gloo`` backends have it too.
"""

from __future__ import annotations

import ast
import io
import json
import pickle
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


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
    """One operation on one rank. Times are nanoseconds since 1970, sizes in elements."""

    rank: int
    group: str
    record: int
    seq: int
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
        """Whether it ended; one that failed did not."""
        return self.state == "completed"

    @property
    def numel_in(self) -> int:
        """Elements of all inputs."""
        return sum(_numel(size) for size in self.input_sizes)

    @property
    def numel_out(self) -> int:
        """Elements of all outputs."""
        return sum(_numel(size) for size in self.output_sizes)

    @property
    def what(self) -> str:
        """E.g. ``all_reduce (1024 x Float)`` or ``send 0->2 (16 x Int)``."""
        name = self.op
        if self.p2p:
            sides = ["?" if side is None else str(side) for side in (self.sender, self.receiver)]
            name = f"{self.op} {'->'.join(sides)}"
        numel = self.numel_in if self.numel_in == self.numel_out or self.op == "send" else None
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
    """What one rank's recorder held."""

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
    if str(content["version"]).partition(".")[0] != "2":
        raise DumpError(f"{path}: the dump is of version {content['version']}, wanted 2.x")
    groups = {
        name: (config.get("desc", ""), list(ast.literal_eval(config["ranks"])))
        for name, config in content["pg_config"].items()
    }
    dump = Dump(rank, path, groups)
    try:
        dump.entries = [_entry(rank, raw, groups) for raw in content.get("entries", [])]
    except (KeyError, TypeError, ValueError) as error:
        raise DumpError(f"{path}: an entry lacks or garbles {error}") from error
    return dump


class _PlainUnpickler(pickle.Unpickler):
    """Loads lists, dicts, numbers and texts, which dumps consist of, and runs nothing."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no dump does")


def _parse(path: Path) -> Any:
    content = path.read_bytes()
    try:
        if content[:1] == b"{":
            return json.loads(content)
        return _PlainUnpickler(io.BytesIO(content)).load()
    except Exception as error:  # the unpickler raises whatever the bytes lead it to
        raise DumpError(f"{path}: neither JSON nor a pickle of plain data: {error}") from error


def _entry(rank: int, raw: dict[str, Any], groups: dict[str, tuple[str, list[int]]]) -> Entry:
    group = str(raw["process_group"][0])
    members = groups.get(group, ("", []))[1]
    name = str(raw["profiling_name"]).rpartition(":")[2]
    op, _, sides = name.partition(" ")
    sender = receiver = None
    if match := re.fullmatch(r"(\d+|\?)(->|<-)(\d+|\?)", sides):
        first, last = _global(match[1], members), _global(match[3], members)
        sender, receiver = (first, last) if match[2] == "->" else (last, first)
    dtypes = list(raw["input_dtypes"]) + list(raw["output_dtypes"])
    p2p = bool(raw["is_p2p"])
    return Entry(
        rank=rank,
        group=group,
        record=int(raw["record_id"]),
        seq=int(raw["p2p_seq_id" if p2p else "collective_seq_id"]),
        p2p=p2p,
        op=op,
        sender=sender,
        receiver=receiver,
        input_sizes=_sizes(raw["input_sizes"]),
        output_sizes=_sizes(raw["output_sizes"]),
        dtype=str(dtypes[0]) if dtypes else "",
        state=str(raw["state"]),
        created=int(raw["time_created_ns"]),
        started=raw["time_discovered_started_ns"] or None,  # JSON has 0 for none
        completed=raw["time_discovered_completed_ns"] or None,
        duration_ms=raw.get("duration_ms"),
        timeout_ms=int(raw["timeout_ms"]),
        frames=tuple(
            Frame(str(frame["name"]), str(frame["filename"]), int(frame["line"]))
            for frame in raw.get("frames", [])
        ),
    )


def _global(rank: str, members: list[int]) -> int | None:
    """Names in dumps hold ranks of the group."""
    if rank == "?":
        return None
    number = int(rank)
    return members[number] if number < len(members) else number


def _sizes(raw: Iterable[Iterable[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(length) for length in size) for size in raw)


def _numel(size: tuple[int, ...]) -> int:
    product = 1
    for length in size:
        product *= length
    return product
