"""Those who are asked in a hang which rank holds up the others, where, and since which decision.

Each entrant gets the evidence that it has in practice, and returns an `Answer`.
"""

import contextlib
import json
import pathlib
import re
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from harness.scene_scores import by_torchfrtrace
from torchcomms_pg.trace.analysis import Analysis
from torchcomms_pg.trace.dumps import Dumps, parse

PY_SPY = shutil.which("py-spy", path=str(pathlib.Path(shutil.sys.executable).parent))
PLACE = re.compile(r"([\w./-]+\.py):(\d+)")
RANKS = re.compile(r"ranks? (\d+(?:(?:-|, )\d+)*)")
ACCUSED = re.compile(
    r"(?:aborted on )?(ranks? [\d, -]+?)(?: \((?:global|pid) [\d, ]+\))?"
    r"(?: (?:has|have|did not answer|died|destroyed|left|revoked)|(?<=aborted on rank \d)\b)"
)
BRANCH = re.compile(r"the ranks parted at (?:one of )?(.*)")


@dataclass
class Answer:
    """What an entrant says. Files are names without folders."""

    accused: set[int] = field(default_factory=set)  # said to be at fault
    named: set[int] = field(default_factory=set)  # said to be, or perhaps to be
    places: dict[int, set[tuple[str, int]]] = field(default_factory=dict)  # by rank, where it is
    branches: list[tuple[str, int]] = field(default_factory=list)  # where the ranks parted


class Evidence(NamedTuple):
    """What there is in a hang."""

    world: int
    verdicts: list[str]  # as printed
    dumps: dict[int, dict]  # by rank, the content of its flight recorder's dump
    stacks: dict[int, list[list[tuple[str, int, str]]]]  # by rank and thread, innermost first


def verdict(evidence):
    """The verdict that the ranks have printed."""
    answer = Answer()
    for text in evidence.verdicts:
        head, _, rows = text.partition("\n")
        ranks = set().union(*map(_ranks, ACCUSED.findall(head)))
        answer.accused |= ranks
        answer.named |= ranks
        if "different operations" in head or "disagree" in head:
            answer.named |= set(range(evidence.world))
        for circle in re.findall("deadlock: (.*)", text):
            answer.named |= set().union(*map(_ranks, RANKS.findall(circle)))
        _read_rows(rows, answer)
        for line in BRANCH.findall(text):
            answer.branches += [(pathlib.Path(f).name, int(n)) for f, n in PLACE.findall(line)]
    return answer


def trace(evidence):
    """`python -m torchcomms_pg.trace` over the dumps."""
    found = Analysis(Dumps(parse(c, rank) for rank, c in evidence.dumps.items())).verdict()
    answer = Answer()
    for finding in found.findings:
        answer.named |= set(finding.culprits)
        if finding.kind not in ("unknown", "order"):
            answer.accused |= set(finding.culprits)
        _read_rows("\n".join(finding.lines), answer)
    return answer


def torchfrtrace(evidence):
    """torch's analyser of the same dumps, which tells no lines."""
    accused, named = by_torchfrtrace(evidence.dumps)
    return Answer(accused, named)


def counts(evidence):
    """The rule of the clients of NCCL's RAS: who has called fewer operations of a group."""
    latest = {}
    for rank, dump in evidence.dumps.items():
        for entry in dump["entries"]:
            if not entry["is_p2p"]:
                group = latest.setdefault(tuple(entry["process_group"]), {})
                group[rank] = max(group.get(rank, 0), entry["collective_seq_id"])
    answer = Answer()
    for group in latest.values():
        answer.accused |= {rank for rank, count in group.items() if count < max(group.values())}
    answer.accused |= set(range(evidence.world)) - evidence.dumps.keys()
    answer.named = answer.accused
    return answer


def py_spy(evidence):
    """Those whose stacks, as `py-spy dump` shows them, are not those of the majority."""
    shown = {}
    for rank in range(evidence.world):
        threads = evidence.stacks.get(rank, [])
        shown[rank] = tuple(tuple(stack) for stack in threads)
    most, count = Counter(shown.values()).most_common(1)[0]
    answer = Answer()
    if count > evidence.world / 2:
        answer.accused = {rank for rank in shown if shown[rank] != most}
        answer.named = answer.accused
    for rank in answer.accused:
        threads = shown[rank]
        answer.places[rank] = {(file, line) for stack in threads for file, line, _ in stack}
    return answer


ENTRANTS = {
    "verdict": verdict,
    "`torchcomms_pg.trace`": trace,
    "`torchfrtrace`": torchfrtrace,
    "RAS' rule": counts,
    "majority of `py-spy` stacks": py_spy,
}


def stacks_of(pids):
    """{rank: the program's frames of each of its threads}, of processes, by py-spy."""
    begun = {
        rank: subprocess.Popen(
            [PY_SPY, "dump", "--json", "--nonblocking", "--pid", str(pid)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        for rank, pid in pids.items()
    }
    found = {}
    for rank, process in begun.items():
        text, _ = process.communicate()
        with contextlib.suppress(ValueError):  # the process has ended
            found[rank] = [
                [
                    (pathlib.Path(frame["filename"]).name, frame["line"], frame["name"])
                    for frame in thread["frames"]
                ]
                for thread in json.loads(text)
            ]
    return found


def _ranks(text):
    """The numbers of "ranks 0, 2-4"."""
    found = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        found |= set(range(int(first), int(last or first) + 1))
    return found


def _read_rows(text, answer):
    """Adds the places of lines that begin with ranks, and of lines that are indented below."""
    ranks, depth = set(), 0
    for line in text.splitlines():
        indented = len(line) - len(line.lstrip())
        if found := RANKS.match(line.strip()):
            ranks, depth = _ranks(found[1]), indented
        elif indented <= depth:
            ranks = set()
        places = {(pathlib.Path(file).name, int(at)) for file, at in PLACE.findall(line)}
        for rank in ranks:
            answer.places.setdefault(rank, set()).update(places)
