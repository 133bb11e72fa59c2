"""Shows the status of a job as text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

_THREADS = 4  # most threads of a rank that are shown, a line each


def text(status: dict[str, Any]) -> str:
    """Returns a job's status as text for people. Ranks in the same place share a line."""
    ranks = status["ranks"]
    hosts = {rank["host"] for rank in ranks if rank.get("host")}
    head = f"job of the store {status['store']}" if status["store"] else "job"
    if status["run_id"]:
        head += f" (run {status['run_id']})"
    lines = [
        f"{head}: {len({rank['rank'] for rank in ranks})} ranks on {_count(len(hosts), 'host')}, "
        f"asked process {status['asked']['pid']}, {status['took_s']:.2f} s"
    ]
    for group in status["groups"]:
        lines += ["", *_group(group, ranks, status["late_after_s"])]
    for wait in status["waits"]:
        lines += ["", *wait["verdict"].splitlines()]
    lines += _special(ranks)
    lines += [f"host {each['host']}: {each['why']}" for each in status["unreached_hosts"]]
    return "\n".join(lines)


def brief(status: dict[str, Any]) -> str:
    """Returns the state of a job in a few lines: its store, its ranks, and who waits for whom."""
    ranks = status["ranks"]
    hosts = {rank["host"] for rank in ranks if rank.get("host")}
    store = f"store {status['store']}, " if status["store"] else ""
    lines = [
        f"{store}{_count(len({rank['rank'] for rank in ranks}), 'rank')} on "
        f"{_count(len(hosts), 'host')}"
    ]
    for group in status["groups"]:
        if waits := group["waits"]:
            lines.append(f"waited for {waits['since_s']:.1f} s: {waits['verdict'].splitlines()[0]}")
    lines += [line.strip() for line in _special(ranks) if line and not line.startswith("    ")]
    for rank in ranks:
        for member in rank.get("groups", ()):
            if member["failure"]:
                lines.append(f"rank {rank['rank']}: {_place(member).splitlines()[0]}")
    if len(lines) == 1:
        lines.append(f"nobody has waited for {status['late_after_s']:g} s")
    return "\n".join(lines)


def age(seconds: float) -> str:
    """Returns a duration as a text in one unit, such as ``12 min``."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def runs(numbers: Iterable[int]) -> str:
    """Returns the numbers in order as a text, with runs of three or more as ``0-7``."""
    ordered = sorted(set(numbers))
    parts: list[str] = []
    start = 0
    for index, number in enumerate(ordered):
        last = index + 1 == len(ordered) or ordered[index + 1] != number + 1
        if last:
            run = ordered[start : index + 1]
            parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run)
            start = index + 1
    return ", ".join(parts)


def _named(numbers: Iterable[int]) -> str:
    numbers = list(numbers)
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {runs(numbers)}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _group(group: dict[str, Any], ranks: list[dict[str, Any]], late: float) -> list[str]:
    about = ", ".join(filter(None, (group["description"], group["backend"])))
    head = f"group '{group['name']}'" + (f" ({about})" if about else "")
    head += f", {_named(group['ranks'])}: "
    least, most = (group["completed_collectives"][key] for key in ("least", "most"))
    done = str(least) if least == most else f"{least} to {most}"
    head += f"{done} collective{'' if most == 1 else 's'} completed; "
    if waits := group["waits"]:
        head += f"{waits['operation']} has been waited for {waits['since_s']:.1f} s"
        lines = [head, *("  " + line for line in waits["verdict"].splitlines())]
        return lines + _late(group)
    lines = [head + f"nobody has waited for {late:g} s"]
    places = defaultdict(list)
    for rank in ranks:
        for member in rank.get("groups", ()):
            if member["id"] == group["id"]:
                places[_place(member)].append(rank["rank"])
    lines += [f"  {_named(who)}: {place}" for place, who in places.items()]
    return lines + _late(group)


def _late(group: dict[str, Any]) -> list[str]:
    known = group["lateness"]
    if not known or known["late"] is None:
        return []
    (found,) = (each for each in known["ranks"] if each["rank"] == known["late"])
    return [
        f"  rank {found['rank']} is late: all others wait for it {100 * found['share']:.0f} % of "
        f"the time. It comes {1000 * found['later_s']:.1f} ms later to a collective than the "
        f"others, by the last {known['collectives']}, which took {known['took_s']:.0f} s"
    ]


def _place(member: dict[str, Any]) -> str:
    if member["failure"]:
        return f"gave the group up: {member['failure']}"
    if member["oldest"]:
        oldest = member["oldest"][0]
        called = f", called at {oldest['called_at']}" if oldest["called_at"] else ""
        more = member["in_flight"] - 1
        return f"in {oldest['operation']}{called}" + (f", and {more} more" if more else "")
    return f"last completed {member['last_completed'] or 'nothing'}"


def _special(ranks: list[dict[str, Any]]) -> list[str]:
    lines = []
    for rank in ranks:
        if rank["state"] != "answers":
            lines.append(f"rank {rank['rank']}: {rank['text']}")
            continue
        if rank["compiling_s"] is not None:
            lines.append(f"rank {rank['rank']}: has been compiling for {rank['compiling_s']:.1f} s")
        if (silent := rank["python"]["silent_s"]) is not None:
            lines.append(
                f"rank {rank['rank']}: its Python has not answered for {silent:.1f} s: a thread "
                "keeps the GIL, most likely in native code, or the process gets no core"
            )
            lines += [f"    {line}" for line in rank["python"]["threads"][:_THREADS]]
    return ["", *lines] if lines else []
