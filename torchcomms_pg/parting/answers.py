"""This rank's answers to the question at which statement two ranks of a verdict parted.

The extension asks in a separate thread (csrc/diagnosis/hang/Parting). The rank that leads the
diagnosis compares itself with one other rank; only these two are asked.
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import threading
from pathlib import Path

import torch
import torch.distributed

from torchcomms_pg import _C
from torchcomms_pg.diagnosis import python_stacks
from torchcomms_pg.parting import branches, inquiry
from torchcomms_pg.parting.compare import Decision
from torchcomms_pg.parting.flow import EXIT
from torchcomms_pg.parting.inquiry import Inquiry, Parting, Place, Side
from torchcomms_pg.parting.positions import Operation, Report, Sources, read, stack_of, write
from torchcomms_pg.parting.statement import function_of, statement_of

_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_OWN = f"{Path(__file__).parents[1]}{os.sep}"
_STANDARD = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib"))
_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_DISTRIBUTED = f"{Path(torch.distributed.__file__).parent}{os.sep}"
# Each call of a function in these files issues an operation, if it issues operations at all.
_PRIMITIVE = tuple(
    f"{_DISTRIBUTED}{name}.py"
    for name in ("distributed_c10d", "c10d_logger", "_functional_collectives")
)

# What the recorder calls otherwise than a verdict.
_NAMES = {"all_reduce_barrier": "barrier"}

# Inquiries that wait for the other rank's values, by group and rank.
_open: dict[tuple[str, int], Inquiry] = {}
_long_ago: dict[tuple[str, int], branches.Difference | None] = {}
_lock = threading.Lock()

# A branch that differed fewer collectives ago is found from the stacks, with its values.
_LONG_AGO = 2

_recorder = branches.Recorder(lambda file: not _is_primitive(file) and not _is_library(file))


def record_branches() -> None:
    """Begins to record the program's branches; prints a line if this Python cannot."""
    if not _recorder.start():
        print(
            "torchcomms_pg: TORCHCOMMS_PG_BRANCHES has no effect: it needs Python 3.12 or later, "
            "and a free tool id of sys.monitoring",
            file=sys.stderr,
        )


def answer(step: str, group: str, number: int, rank: int, texts: list[str]) -> str:
    """Does a step of the talk between two ranks, see PartingQuestion::Asked."""
    if step == "tell":
        return f"{write(_report(group, number, rank))}\n{_branches(group, rank)}"
    if step == "read":
        return _values(texts[0])
    key = (group, rank)
    if step == "compare":
        told, _, ways = texts[0].partition("\n")
        other = read(told)
        if other is None:
            return ""
        if ways and (mine := _branches(group, rank)):
            with _lock:
                _long_ago[key] = branches.first_difference(branches.read(mine), branches.read(ways))
        own = Side(_report(group, number, rank), *texts[1:3])
        asked = Inquiry(own, Side(other, *texts[3:5]), group, number, _is_primitive, _is_opaque)
        with _lock:
            known = asked.found or _long_ago.get(key) is not None
            if known:
                _open[key] = asked
        return asked.questions()[1] if known else ""
    with _lock:
        asked = _open.pop(key)
        difference = _long_ago.pop(key, None)
    if difference is not None and number - difference.number >= _LONG_AGO:
        return _tell_branch(difference, number)
    values = _values(asked.questions()[0])
    parting = asked.conclude((values, texts[0]))
    return "" if parting is None else _told(parting)


def _branches(group: str, rank: int) -> str:
    """Returns this rank's branches between the group's operations as text, or ""."""
    told = _C.recent_operations(group, rank)
    if not _recorder.started or not told:
        return ""
    thread = told[-1][2]
    operations = [(at, number) for number, _, of, _, at in told if of == thread]
    return branches.write(_recorder.intervals(thread, operations))


def _tell_branch(difference: branches.Difference, number: int) -> str:
    """Returns the text of a branch that went differently long ago, or ""."""
    code, place = difference.branch
    flow = Sources().flow(code)
    if flow is None:
        return ""
    decision = Decision(code, flow.place(place), 0, None, None, (EXIT, EXIT))
    statement = statement_of(decision, flow, called=False)
    if statement is None:
        return ""
    where = Place(code.file, statement.line, function_of(code), statement.text)
    since = f"{number - difference.number:,} collectives ago, before #{difference.number}"
    return _told(Parting([where], [f"against its habit: {since}"]))


def _told(parting: Parting) -> str:
    places = [[place.file, place.line, place.function, place.statement] for place in parting.places]
    return f"{json.dumps(places)}\n{parting.text(python_stacks.line_name)}"


def _values(question: str) -> str:
    return inquiry.answer(question, _C.thread_stacks(), _C.variables_of)


def _report(group: str, number: int, rank: int) -> Report:
    stacks = _C.thread_stacks()
    operations = []
    known = {}
    for seq, name, thread, calls, _ in _C.recent_operations(group, rank):
        if id(calls) not in known:
            known[id(calls)] = (calls, stack_of(calls))  # keeps the list, so that its id is unique
        shown = _NAMES.get(name, name).lstrip("_")
        operations.append(Operation(group, seq, shown, thread, known[id(calls)][1]))
    if operations and operations[-1].number == number and not operations[-1].stack:
        operations[-1] = _in_backward(operations[-1], stacks)
    threads = {each.thread for each in operations} | {threading.main_thread().ident or 0}
    return Report(rank, operations, inquiry.now_of(stacks, threads))


def _in_backward(operation: Operation, stacks: inquiry.Stacks) -> Operation:
    """Returns an operation of autograd's thread as one of the thread that called backward()."""
    found = [
        thread
        for thread, calls in stacks.items()
        if any(code.co_name == "_engine_run_backward" for code, _, _ in calls)
    ]
    if len(found) != 1:
        return operation
    stack = inquiry.now_of(stacks, set(found))[found[0]]
    return operation._replace(thread=found[0], stack=stack)


def _is_primitive(file: str) -> bool:
    return file.startswith(_OWN) or file in _PRIMITIVE


def _is_library(file: str) -> bool:
    return _is_opaque(file) or any(folder in file for folder in _PACKAGES)


def _is_opaque(file: str) -> bool:
    if file.startswith((_TORCH, _OWN, "<frozen")):
        return True
    return file.startswith(_STANDARD) and not any(folder in file for folder in _PACKAGES)
