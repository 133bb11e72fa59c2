"""The status of a job in the formats of NCCL's RAS (NCCL 2.30, src/ras/client_support.cc).

Has what programs read. docs/status.md describes what each part shows.
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

_T = TypeVar("_T")

# NCCL's values for an unknown number and an unknown host.
_UNKNOWN = -1
_UNKNOWN_HOST = "unknown"

# The error code of every failed group, for any reason: NCCL's ncclRemoteError.
_FAILED = 6

# Most elements of a list in a text that is not verbose.
_MOST_LISTED = 10

# The states of a communicator's ranks; the highest is shown if ranks differ. The communicator's
# problems, as bits, in the order in which they are shown. The names are NCCL's.
_NO_COMM, _RUNNING, _ABORT = range(3)
_STATES = ("NOCOMM", "RUNNING", "ABORT")
_MISMATCH, _ERROR, _INCOMPLETE = 1, 2, 4
_PROBLEMS = {_INCOMPLETE: "INCOMPLETE", _ERROR: "ERROR", _MISMATCH: "MISMATCH"}


def as_text(status: dict[str, Any], *, verbose: bool) -> str:
    """Returns the report for people. If `verbose`, lists and verdicts are not shortened."""
    return _Text(status, verbose).write()


def as_json(status: dict[str, Any]) -> str:
    """Returns one line of JSON, with NCCL's fields and some additional ones."""
    communicators = _communicators(status)
    answer = {
        "nccl_version": _version(status),
        "cuda_runtime_version": _UNKNOWN,
        "cuda_driver_version": _UNKNOWN,
        "timestamp": now(),
        "communicators_count": len(communicators),
        "communicators": [each.as_json() for each in communicators],
        "ras": {"collection_time_sec": status["took_s"], "timeouts_count": _timeouts(status)},
    }
    return json.dumps(answer, ensure_ascii=False, separators=(",", ":")) + "\n"


def now() -> str:
    """Returns this host's time, in RAS's format."""
    return time.strftime("%Y-%m-%d %H:%M:%S")


def merged(statuses: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns what the formats show of several jobs, as if they were one job."""
    return {
        "torchcomms_pg": statuses[0]["torchcomms_pg"],
        "took_s": sum(status["took_s"] for status in statuses),
        **{
            part: [each for status in statuses for each in status[part]]
            for part in ("groups", "ranks", "unreached_hosts")
        },
    }


class _Communicator:
    """A group, as RAS shows it.

    Attributes:
        group: the status of the group.
        members: ranks that have answered, by rank in the group: the rank, and its part in it.
        states: of the members, and of the ranks that are not in the group.
        wrong: bits of `_PROBLEMS`.
        per_node: numbers of members, by host.
    """

    def __init__(self, group: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
        self.group = group
        self.size = len(group["ranks"])
        self.members = {
            member["rank"]: (rank, member)
            for rank in ranks
            for member in rank.get("groups", ())
            if member["id"] == group["id"]
        }
        self.members = dict(sorted(self.members.items()))
        self.per_node = Counter(rank["host"] for rank, _ in self.members.values())
        self.states = {_state(member) for _, member in self.members.values()}
        self.wrong = 0
        for missing in group["missing"]:
            if missing["state"] == "elsewhere":
                self.states.add(_NO_COMM)
            else:
                self.wrong |= _INCOMPLETE
        if _ABORT in self.states:
            self.wrong |= _ERROR
        issued = [member["issued"] for _, member in self.members.values()]
        if len(self.states) > 1 or any(each != issued[0] for each in issued):
            self.wrong |= _MISMATCH

    def row(self) -> tuple[int, int, int, int]:
        """Returns the values that all communicators in a row of the table share."""
        return self.size, len(self.per_node), max(self.states), self.wrong

    def as_json(self) -> dict[str, Any]:
        group = self.group
        return {
            "hash": f"0x{int(group['id']):x}",
            "secondary_hash": f"0x{_hash(group['backend']):x}:0x{_hash(group['name']):x}",
            "size": self.size,
            "ranks_count": len(self.members),
            "missing_ranks_count": len(group["missing"]),
            "name": group["name"],
            "backend": group["backend"],
            "verdict": group["waits"] and group["waits"]["verdict"],
            "ranks": [
                {
                    **self._rank_as_json(number, rank),
                    "status": {
                        "init_state": 0,
                        "async_error": _FAILED if member["failure"] else 0,
                        "finalize_called": False,
                        "destroy_flag": False,
                        "abort_flag": bool(member["failure"]),
                    },
                    "collective_counts": member["issued"],
                }
                for number, (rank, member) in self.members.items()
            ],
            "missing_ranks": [
                {
                    **self._rank_as_json(missing["rank"], missing),
                    "status": {
                        "unresponsive": missing["state"] != "elsewhere",
                        "considered_dead": missing["state"] == "dead",
                    },
                    "why": missing["text"],
                }
                for missing in group["missing"]
            ],
        }

    def _rank_as_json(self, number: int, known: dict[str, Any]) -> dict[str, Any]:
        return {
            "rank": number,
            "host": known.get("host", _UNKNOWN_HOST),
            "pid": known.get("pid", _UNKNOWN),
            "cuda_dev": _UNKNOWN,
            "nvml_dev": _UNKNOWN,
            "global_rank": self.group["ranks"][number],
        }


def _communicators(status: dict[str, Any]) -> list[_Communicator]:
    """Returns the communicators in the table's order.

    The largest come first, and within a row the ones with the most missing ranks.
    """
    members = defaultdict(list)
    for rank in status["ranks"]:
        for identity in {member["id"] for member in rank.get("groups", ())}:
            members[identity].append(rank)
    found = [_Communicator(group, members[group["id"]]) for group in status["groups"]]
    return sorted(found, key=lambda each: (*(-value for value in each.row()), len(each.members)))


def _state(member: dict[str, Any]) -> int:
    return _ABORT if member["failure"] else _RUNNING


def _hash(text: str) -> int:
    """Returns the 64-bit FNV-1a hash of the text."""
    value = 14695981039346656037
    for byte in text.encode():
        value = (value ^ byte) * 1099511628211 % (1 << 64)
    return value


def _timeouts(status: dict[str, Any]) -> int:
    states = [rank["state"] for rank in status["ranks"]]
    return len(status["unreached_hosts"]) + states.count("silent")


def _quiet(status: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns a rank of each known process that does not answer."""
    return [rank for rank in status["ranks"] if rank["state"] not in ("answers", "unknown")]


def _version(status: dict[str, Any]) -> str:
    return f"unknown (torchcomms_pg {status['torchcomms_pg']})"


def _lines(text: str) -> list[str]:
    return text.removesuffix("\n").split("\n")


class _Text:
    """The report for people."""

    def __init__(self, status: dict[str, Any], verbose: bool) -> None:
        self._status = status
        self._verbose = verbose
        self._communicators = _communicators(status)
        self._text = ""

    def write(self) -> str:
        self._text = (
            f"NCCL version {_version(self._status)} compiled with CUDA unknown\n"
            f"CUDA runtime version {_UNKNOWN}, driver version {_UNKNOWN}\n\n"
        )
        self._write_summary()
        self._write_table()
        self._text += "\nErrors\n======\n\n"
        self._write_processes()
        for communicator, name in self._named():
            self._write_errors(communicator, name)
        self._text += "Warnings\n========\n\n"
        self._write_timeouts()
        for communicator, name in self._named():
            self._write_warnings(communicator, name)
        return self._text

    def _write_summary(self) -> None:
        nodes = defaultdict(set)
        for rank in self._status["ranks"]:
            if rank["state"] != "unknown":
                nodes[rank["host"]].add(rank["pid"])
        numbers = Counter(len(pids) for pids in nodes.values())
        processes = sum(len(pids) for pids in nodes.values())
        self._text += "Job summary\n===========\n\n"
        if len(numbers) == 1:
            (per_node,) = numbers
            self._text += (
                "  Nodes  Processes         GPUs  Processes     GPUs\n"
                "(total)   per node  per process    (total)  (total)\n"
                f"{len(nodes):7}  {per_node:9}  {_UNKNOWN:11}  {processes:9}  {_UNKNOWN:7}\n"
            )
            return
        self._text += "  Nodes  Processes         GPUs\n          per node  per process\n"
        for per_node, count in sorted(numbers.items(), reverse=True):
            self._text += f"{count:7}  {per_node:9}  {_UNKNOWN:11}\n"
        self._text += (
            "\n  Nodes  Processes         GPUs\n(total)    (total)      (total)\n"
            f"{len(nodes):7}  {processes:9}  {_UNKNOWN:11}\n"
        )

    def _rows(self) -> list[list[_Communicator]]:
        rows: list[list[_Communicator]] = []
        for each in self._communicators:
            if rows and rows[-1][0].row() == each.row():
                rows[-1].append(each)
            else:
                rows.append([each])
        return rows

    def _named(self) -> Iterator[tuple[_Communicator, str]]:
        """Yields each communicator and its name in the report, "#ROW-PLACE (ID)"."""
        for number, row in enumerate(self._rows()):
            for place, each in enumerate(row):
                yield each, f"#{number}-{place} ({int(each.group['id']):016x})"

    def _write_table(self) -> None:
        self._text += f"\nCommunicators... ({self._status['took_s']:.3f}s)\n=============\n\n"
        if not self._communicators:
            self._text += "There are none.\n"
            return
        self._text += (
            "Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors\n"
            "    #  in group  per comm  per node  per comm  in group\n"
        )
        for number, row in enumerate(self._rows()):
            per_node = [count for each in row for count in each.per_node.values()]
            least, most = min(per_node), max(per_node)
            spread = str(least) if least == most else f"{least}-{most}"
            ranks = {id(rank) for each in row for rank, _ in each.members.values()}
            size, nodes, state, wrong = row[0].row()
            problems = ",".join(name for bit, name in _PROBLEMS.items() if wrong & bit)
            self._text += (
                f"{number:5}  {len(row):8}  {nodes:8}  {spread:>8}  {size:8}  {len(ranks):8}  "
                f"{_STATES[state]:>8}  {problems or 'OK':>6}\n"
            )

    def _write_list(self, elements: list[_T], describe: Callable[[_T], str]) -> None:
        """Writes the line that `describe` returns for each element, not all unless verbose."""
        listed = elements if self._verbose else elements[:_MOST_LISTED]
        self._text += "".join(f"  {describe(each)}\n" for each in listed)
        if len(listed) < len(elements):
            self._text += f"  ... and {len(elements) - len(listed)} more\n"

    def _write_processes(self) -> None:
        quiet = _quiet(self._status)
        dead = [rank for rank in quiet if rank["state"] == "dead"]
        silent = [rank for rank in quiet if rank["state"] != "dead"]
        for name, ranks, what in (
            ("INCOMPLETE", silent, "do not answer"),
            ("DEAD", dead, "are dead"),
        ):
            if ranks:
                self._text += f"{name}\n  Processes that {what}: {len(ranks)}\n"
                self._write_list(
                    ranks,
                    lambda rank: f"Process {rank['pid']} on node {rank['host']}: {rank['text']}",
                )
                self._text += "\n"

    def _begin(self, of: _Communicator, name: str, what: str) -> None:
        """Begins the section about a communicator's problem."""
        group = of.group
        self._text += f"{name} {what}\n  Group '{group['name']}' ({group['backend']}), "
        self._text += f"{of.size} ranks\n"

    def _write_errors(self, of: _Communicator, name: str) -> None:
        if of.wrong & _INCOMPLETE:
            self._begin(of, name, "INCOMPLETE")
            silent = [each for each in of.group["missing"] if each["state"] != "elsewhere"]
            self._write_list(
                silent, lambda each: f"{_described(each['rank'], each)}: {each['text']}"
            )
            self._text += "\n"
        if of.wrong & _ERROR:
            self._begin(of, name, "ERROR")
            failed = [each for each in of.members.items() if each[1][1]["failure"]]
            self._write_list(
                failed,
                lambda each: (
                    f"{_described(each[0], each[1][0])}: {_lines(each[1][1]['failure'])[0]}"
                ),
            )
            self._text += "\n"

    def _write_timeouts(self) -> None:
        if unreached := self._status["unreached_hosts"]:
            self._text += "TIMEOUT\n"
            self._write_list(unreached, lambda each: f"{each['host']}: {each['why']}")
            self._text += "\n"

    def _joined(self, ranks: list[int]) -> str:
        listed = ranks if self._verbose else ranks[:_MOST_LISTED]
        named = ", ".join(map(str, listed))
        more = "" if len(listed) == len(ranks) else f", ... ({len(ranks)} in all)"
        return f"rank{'' if len(listed) == 1 else 's'} {named}{more}"

    def _write_differences(
        self, values: Iterable[tuple[int, int]], describe: Callable[[int], str]
    ) -> None:
        """Writes a line for each value and the ranks that have it, unless all values are equal."""
        ranks_with = defaultdict(list)
        for value, rank in values:
            ranks_with[value].append(rank)
        if len(ranks_with) > 1:
            for value, ranks in sorted(ranks_with.items()):
                self._text += f"  {describe(value)}: {self._joined(ranks)}\n"

    def _write_warnings(self, of: _Communicator, name: str) -> None:
        if of.wrong & _MISMATCH:
            self._begin(of, name, "MISMATCH")
            states = [(_state(member), rank) for rank, (_, member) in of.members.items()]
            for each in of.group["missing"]:
                if each["state"] == "elsewhere":
                    states.append((_NO_COMM, each["rank"]))
            self._write_differences(states, _STATES.__getitem__)
            first = next(iter(of.members.values()))[1]
            for kind in first["issued"]:
                self._write_differences(
                    ((member["issued"][kind], rank) for rank, (_, member) in of.members.items()),
                    f"{kind} {{}}".format,
                )
            self._text += "\n"
        if waits := of.group["waits"]:
            self._begin(of, name, "WAITS")
            lines = _lines(waits["verdict"])
            shown = lines if self._verbose else lines[:1]
            self._text += "".join(f"  {line}\n" for line in shown) + "\n"


def _described(number: int, known: dict[str, Any]) -> str:
    """Returns a rank with its process, if that is known."""
    if "pid" not in known:
        return f"Rank {number}"
    return f"Rank {number} -- process {known['pid']} on node {known['host']}"
