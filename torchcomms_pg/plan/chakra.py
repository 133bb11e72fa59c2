"""Chakra execution traces of one step, a file for each rank, as ASTRA-sim reads them."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchcomms_pg.plan.answer import Answer
from torchcomms_pg.plan.chakra_schema import (
    COLLECTIVE,
    KINDS,
    RECEIVE,
    SEND,
    SIMULATED,
    VERSION,
    messages,
)
from torchcomms_pg.plan.program import Program
from torchcomms_pg.plan.ranges import as_ranges
from torchcomms_pg.plan.report import size_text
from torchcomms_pg.plan.steps import Step, step_of
from torchcomms_pg.plan.volume import BYTES
from torchcomms_pg.trace.dumps import Entry
from torchcomms_pg.trace.groups import Group

_MOST = 1_000_000  # most operations of all ranks that are written unasked, about 150 MB
_NODE = 150  # bytes of an operation, roughly
_LEAST = 1  # least bytes of an operation: ASTRA-sim ends with an error at 0
_BARRIER = 4  # bytes of the number that torch's nccl reduces


@dataclass
class Trace:
    """What was written.

    Attributes:
        step: the step.
        name: beginning of the files' names, with their folder: ``NAME.RANK.et`` for each rank, and
            ``NAME.groups.json`` with the global ranks of each group.
        ranks: the ranks that have a file.
        size: bytes of all files.
        left: what a simulator does not find in them, a line each.
    """

    step: Step
    name: Path
    ranks: list[int]
    size: int = 0
    left: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [
            f"Chakra trace of {self.step}: {as_ranges(self.ranks)}, {size_text(self.size)}",
            f"  ASTRA-sim: --workload-configuration={self.name} "
            f"--comm-group-configuration={self.name}.groups.json",
        ]
        return "\n".join([*lines, *(f"  {line}" for line in self.left)])


def check(folder: Path) -> None:
    """Returns if a trace can be written into a folder.

    Raises:
        ValueError: the folder has files.
        MissingPackageError: ``protobuf`` is not installed, or too old.
    """
    messages()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"--chakra: {folder} is no empty folder, wanted a new or an empty one")


def write(
    answer: Answer, folder: Path, step: int | None = None, ranks: Iterable[int] | None = None
) -> Trace:
    """Writes the traces of one step into a folder.

    A node is an operation. It depends on the data of what its thread has waited for before, and by
    order alone on the operation before it on its communicator.

    Args:
        answer: the answer of a plan.
        folder: a new or an empty folder.
        step: the step, from 1 on; the last that each rank makes if it is None.
        ranks: global ranks whose traces are written. None for all, or if they have more than a
            million operations in all, for those that were run.

    Raises:
        ValueError: the step or a rank is none of the answer's, or the folder has files.
        MissingPackageError: ``protobuf`` is not installed, or too old.
    """
    check(folder)
    chosen = step_of(answer, step)
    known = chosen.entries
    wanted = sorted(known if ranks is None else set(ranks))
    if not wanted or any(rank not in known for rank in wanted):
        raise ValueError(f"--chakra-ranks: {as_ranges(wanted)}, wanted some of {as_ranges(known)}")
    count = sum(len(known[rank]) for rank in wanted)
    trace = Trace(chosen, folder / _name(answer.job.command), wanted)
    if ranks is None and count > _MOST:
        trace.ranks = sorted(known.keys() & answer.programs.keys())
        trace.left.append(
            f"{len(wanted) - len(trace.ranks)} ranks that were not run are left out; "
            f"--chakra-ranks all writes all ranks, about {size_text(count * _NODE)}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    _Writer(trace, answer.job.size).write()
    return trace


def _name(command: tuple[str, ...]) -> str:
    return command[1].rpartition(".")[2] if command[0] == "-m" else Path(command[0]).stem


class _Writer:
    def __init__(self, trace: Trace, size: int) -> None:
        self._trace = trace
        self._size = size
        self._messages = messages()
        self._numbers: dict[Group, int] = {}
        self._left: Counter[str] = Counter()

    def write(self) -> None:
        for rank in self._trace.ranks:
            content = b"".join(map(_delimited, self._of(rank)))
            Path(f"{self._trace.name}.{rank}.et").write_bytes(content)
            self._trace.size += len(content)
        groups = {str(number): list(group.ranks) for group, number in self._numbers.items()}
        text = json.dumps(groups) + "\n"
        Path(f"{self._trace.name}.groups.json").write_text(text)
        self._trace.size += len(text)
        self._trace.left += [f"{count} {what}" for what, count in self._left.items()]

    def _of(self, rank: int) -> Iterable[Any]:
        """Yields the messages of a rank's file."""
        yield self._messages.metadata(version=VERSION)
        entries = []
        for entry in self._trace.step.entries[rank]:
            if entry.p2p and None in (entry.sender, entry.receiver):
                self._left["receives from any rank are left out"] += 1
            else:
                entries.append(entry)
        before = dependencies(entries, self._trace.step.programs[rank])
        for number, (entry, (data, order)) in enumerate(zip(entries, before, strict=True)):
            yield self._node(number, entry, data, order)

    def _node(self, number: int, entry: Entry, data: list[int], order: list[int]) -> Any:
        kind = COLLECTIVE if not entry.p2p else SEND if entry.op == "send" else RECEIVE
        node = self._messages.node(
            id=number, name=entry.op, type=kind, data_deps=data, ctrl_deps=order
        )
        add = node.attr.add
        add(name="is_cpu_op", bool_val=False)
        add(name="comm_size", int64_val=self._bytes(entry))
        if entry.p2p:
            add(name="comm_src", int32_val=entry.sender)
            add(name="comm_dst", int32_val=entry.receiver)
            add(name="comm_tag", int32_val=entry.tag or 0)
        else:
            op = KINDS[entry.op]
            if op not in SIMULATED:
                self._left[f"of {entry.op}, which ASTRA-sim does not simulate"] += 1
            add(name="comm_type", int64_val=op)
        if len(entry.group.ranks) < self._size:  # without a group, all ranks are meant
            group = self._numbers.setdefault(entry.group, len(self._numbers) + 1)
            description = entry.group.description
            add(name="pg_name", string_val=str(group), doc_string=description)
        if entry.where is not None:
            add(name="line", string_val=str(entry.where))
        return node

    def _bytes(self, entry: Entry) -> int:
        """Returns the bytes of what the rank gives; of what it gets if it gives nothing."""
        if entry.op == "all_reduce_barrier":
            return _BARRIER
        if not entry.input_sizes and not entry.output_sizes:
            self._left["operations have 1 byte, since their size depends on data"] += 1
        sizes = entry.input_sizes or entry.output_sizes
        return max(_LEAST, sum(map(math.prod, sizes)) * BYTES.get(entry.dtype, 0))


def dependencies(entries: list[Entry], program: Program) -> list[tuple[list[int], list[int]]]:
    """Returns the operations that each operation depends on: by its data, and by order alone.

    Both are indices. By its data an operation depends on what was waited for before its call, as
    far as that does not follow from another dependency; messages of a batch do not depend on each
    other. By order it depends on the operation before it on its communicator. A group has a
    communicator, and so have each two ranks of a group for their messages outside of batches.
    """
    ends: dict[tuple[str, int], int] = {}
    for entry in entries:
        if entry.batch:
            ends[entry.thread, entry.batch] = entry.record + 1
    waited: dict[int, list[int]] = defaultdict(list)  # by the number of calls before the wait
    frontier: dict[int, None] = {}
    above: list[set[int]] = []  # the frontier when each was called
    done: set[int] = set()
    last: dict[object, tuple[object, list[int], list[int]]] = {}
    found = []
    upcoming = 0
    for number, entry in enumerate(entries):
        while upcoming <= entry.record:
            for each in waited.pop(upcoming, ()):
                frontier = {other: None for other in frontier if other not in above[each]}
                frontier[each] = None
                done.add(each)
            upcoming += 1
        data = sorted(frontier)
        above.append(set(data))
        end = ends.get((entry.thread, entry.batch or 0), entry.record + 1)
        waited[max(end, program.waits.get(entry.record, end))].append(number)
        communicator: object = entry.group
        if entry.p2p and not entry.batch:
            communicator = (entry.group, frozenset((entry.sender, entry.receiver)))
        unit = (entry.thread, entry.batch) if entry.batch else number
        known, members, before = last.get(communicator, (None, [], []))
        if known != unit:
            before, members = members, []
        members.append(number)
        last[communicator] = (unit, members, before)
        found.append((data, [each for each in before if each not in done]))
    return found


def _delimited(message: Any) -> bytes:
    """Returns a message with its length before it."""
    content: bytes = message.SerializeToString()
    length, left = bytearray(), len(content)
    while left > 127:
        length.append(left & 127 | 128)
        left >>= 7
    return bytes((*length, left)) + content
