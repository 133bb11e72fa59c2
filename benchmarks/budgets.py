"""The budgets of the library's speed, each with what was measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from . import bounds, programs, table
from .plan import IN_CACHE, KB, LARGE, MB, SIZES, hosts_sizes
from .results import OPERATIONS, Results


@dataclass(frozen=True)
class Budget:
    """One promise."""

    what: str
    limit: str
    measured: str
    reached: bool | None
    """None: not measured."""


def all_of(results: Results) -> list[Budget]:
    """Judges every budget that there are measurements for."""
    return [
        latency(results, "dist.all_reduce of 4 B, 2 ranks", "dist", 8),
        latency(results, "TorchComm.all_reduce of 4 B, 2 ranks", "torchcomm", 4),
        share(results),
        watching(results),
        inside(results),
        ahead(results, "gloo", 2, [s for s in SIZES if s <= 64 * KB], 20),
        ahead(results, "gloo", 2, [MB], 4),
        ahead(results, "gloo", 2, [64 * MB], 4),
        speed(results),
        ahead(results, "mpi", 2, [s for s in SIZES if s >= 16 * KB], 1),
        ahead(results, "mpi", 2, [64 * MB], 3),
        *(
            budget
            for ranks in (4, 8)
            for budget in (
                ahead(results, "gloo", ranks, [4], 20),
                ahead(results, "gloo", ranks, [16 * MB], 4),
                ahead(results, "mpi", ranks, SIZES, 1),
            )
        ),
        *(bound(results, kind) for kind in bounds.KINDS),
        *(promised(results, call, beside) for call in programs.CALLS for beside in call.limits),
        half(results),
        step(results),
        growth(results),
    ]


def of_hosts(results: Results) -> list[Budget]:
    """Judges those of groups on several hosts."""
    slow, fast = "2 x 2, 1 Gbit/s", "2 x 2, unshaped"
    return [
        link(results, slow),
        ahead(results, "gloo", 4, [4, KB], 2, slow),
        ahead(results, "gloo", 4, [64 * KB], 1.5, slow),
        ahead(results, "gloo", 4, [MB, 16 * MB], 1.3, slow),
        ahead(results, "gloo", 4, [64 * MB], 1.4, slow),
        ahead(results, "gloo", 4, hosts_sizes("all_reduce"), 1, fast),
    ]


def at_most(what: str, limit: str, most: float, value: float | None, measured: str) -> Budget:
    """Judges a value that has to be small; None: not measured. `measured` writes it."""
    if value is None:
        return Budget(what, limit, "not measured", None)
    return Budget(what, limit, measured.format(value), value <= most)


def at_least(what: str, limit: str, least: float, value: float | None, measured: str) -> Budget:
    """Judges a value that has to be large; None if it was not measured. `measured` writes it."""
    if value is None:
        return Budget(what, limit, "not measured", None)
    return Budget(what, limit, measured.format(value), value >= least)


def latency(results: Results, what: str, frontend: str, limit: float) -> Budget:
    """The latency of the smallest all-reduce."""
    value = smallest(results, frontend)
    return at_most(what, f"<= {limit} us", limit, value, "{:.2f} us")


def share(results: Results) -> Budget:
    """What the object API costs of what process groups cost."""
    own, group = (smallest(results, frontend) for frontend in ("torchcomm", "dist"))
    value = own / group if own and group else None
    return at_most("the same, of dist.all_reduce", "<= 0.5 times", 0.5, value, "{:.2f}")


def watching(results: Results) -> Budget:
    """What a flight recorder, an empty pre and an empty post hook add."""
    own, watched = (smallest(results, frontend) for frontend in ("torchcomm", "watched"))
    value = watched - own if own and watched else None
    return at_most("recorder, empty pre and post hook, 4 B", "<= 2 us", 2, value, "{:.2f} us")


def smallest(results: Results, frontend: str) -> float | None:
    """The latency of the smallest all-reduce of 2 ranks in microseconds; None: not measured."""
    row = results.find("all_reduce", 4, "torchcomms", 2, frontend=frontend)
    return row.median_us if row else None


def inside(results: Results) -> Budget:
    """The latency of the smallest all-reduce, without torch and Python."""
    times = [
        record["median_us"]
        for record in results.sections.get("library", [])
        if (record["op"], record["bytes"], record["ranks"]) == ("all_reduce", 4, 2)
    ]
    value = times[0] if times else None
    return at_most("inside the library, 4 B, 2 ranks", "<= 1.5 us", 1.5, value, "{:.2f} us")


def ahead(
    results: Results,
    backend: str,
    ranks: int,
    sizes: Iterable[int],
    times: float,
    network: str = "",
) -> Budget:
    """How many times faster an all-reduce is than over another backend: the worst size."""
    ratios = {}
    sizes = list(sizes)
    frontend = "mpi4py" if backend == "mpi" else "dist"
    for size in sizes:
        ours = results.find("all_reduce", size, "torchcomms", ranks, network=network)
        other = results.find("all_reduce", size, backend, ranks, frontend=frontend, network=network)
        if ours and other:
            ratios[size] = other.median_us / ours.median_us
    sizes = list(ratios) or sizes
    where = table.size(sizes[0])
    if len(sizes) > 1:
        where += f" to {table.size(sizes[-1])}"
    what = f"all_reduce against {table.NAMES[backend]}, {network or f'{ranks} ranks'}, {where}"
    return worst(what, f">= {times} x", ratios, times)


def worst(what: str, limit: str, ratios: dict[int, float], times: float) -> Budget:
    """Makes a budget of ratios that all have to be large enough."""
    if not ratios:
        return Budget(what, limit, "not measured", None)
    size = min(ratios, key=lambda key: ratios[key])
    measured = f"{table.ratio(ratios[size])} x"
    if len(ratios) > 1:
        missed = [table.size(key) for key in ratios if ratios[key] < times]
        measured += f" at {table.size(size)}"
        measured += f" (missed at {', '.join(missed)})" if len(missed) > 1 else ""
    return Budget(what, limit, measured, ratios[size] >= times)


def speed(results: Results) -> Budget:
    """The bandwidth of a large all-reduce."""
    row = results.find("all_reduce", 64 * MB, "torchcomms", 2)
    value = row.gigabytes_per_second if row else None
    return at_least("all_reduce of 64 MB, 2 ranks", ">= 5 GB/s", 5, value, "{:.2f} GB/s")


def bound(results: Results, kind: str) -> Budget:
    """The other collectives beside the bytes they have to move."""
    copies = results.sections.get("floor", {}).get("copies", [])
    ratios: dict[str, float] = {}
    for row in results.rows:
        c = row.contender
        if not c.plain or c.bytes not in LARGE or c.op not in OPERATIONS[1:]:
            continue
        least = bounds.microseconds(c.op, kind, c.bytes, c.ranks, copies)
        if least:
            where = f"{c.op} {table.size(c.bytes)} {c.ranks} ranks"
            ratios[where] = row.median_us / least
    what = f"other collectives, 16 and 64 MB, {kind} bound"
    if not ratios:
        return Budget(what, "<= 1.3 x", "not measured", None)
    slowest = max(ratios, key=lambda key: ratios[key])
    good = sum(value <= 1.3 for value in ratios.values())
    measured = f"{table.ratio(ratios[slowest])} x ({slowest}); {good} of {len(ratios)} reach it"
    return Budget(what, "<= 1.3 x", measured, good == len(ratios))


def half(results: Results) -> Budget:
    """bfloat16 beside float32 at the same number of elements."""
    ratios = {}
    for size in (s for s in SIZES if s >= MB):
        full_row = results.find("all_reduce", size, "torchcomms", 2)
        half_row = results.find("all_reduce", size // 2, "torchcomms", 2, dtype="bfloat16")
        if full_row and half_row:
            ratios[size] = half_row.median_us / full_row.median_us
    what = "bfloat16 all_reduce / float32, same elements, from 1 MB"
    value, size = max(((ratio, size) for size, ratio in ratios.items()), default=(None, 0))
    return at_most(what, "<= 0.75", 0.75, value, f"{{:.2f}} at {table.size(size)} of float32")


def promised(results: Results, call: programs.Call, beside: str) -> Budget:
    """One of the limits of a call of programs."""
    found = results.sections.get("programs", {})
    times: dict[str, float] = found.get(call.name, {})
    what, limit = f"{call.name}, {call.ranks} ranks", call.limits[beside]
    ours = times.get("torchcomms")
    if beside == programs.WAKE_UPS:
        value = times.get(beside)
        return at_most(what, f"<= {limit:g} wake-ups", limit, value, "{:.2g} a call")
    if beside == programs.US:
        return at_most(what, f"<= {limit:g} us", limit, ours, f"{table.ratio(ours or 0)} us")
    # The other is a backend, or another call of torchcomms.
    other = times.get(beside) or found.get(beside, {}).get("torchcomms")
    if beside in programs.FASTER:
        speed = other / ours if ours and other else None
        text = f">= {limit:g} x {table.NAMES[beside]}'s speed"
        return at_least(what, text, limit, speed, f"{table.ratio(speed or 0)} x")
    value = ours / other if ours and other else None
    return at_most(what, f"<= {limit:g} x {beside}", limit, value, f"{table.ratio(value or 0)} x")


def step(results: Results) -> Budget:
    """The training step."""
    what = "DDP step, 10 million parameters, against Gloo"
    for record in results.sections.get("steps", []):
        times = record["milliseconds"]
        wanted = (record["kind"], record["millions"]) == ("ddp", 10)
        if wanted and {"gloo", "torchcomms"} <= times.keys():
            value = times["gloo"] / times["torchcomms"]
            measured = f"{table.ratio(value)} x"
            if "alone" in times:  # what is left when communication takes no time at all
                measured += (
                    f", of {table.ratio(times['gloo'] / times['alone'])} x that are possible"
                )
            return Budget(what, ">= 1.5 x", measured, value >= 1.5)
    return Budget(what, ">= 1.5 x", "not measured", None)


def growth(results: Results) -> Budget:
    """Whether time grows faster than the size, and than leaving the cache explains."""
    found: dict[str, float] = {}
    rows = [row for row in results.rows if row.contender.plain and row.contender.op == "all_reduce"]
    for small in rows:
        for large in rows:
            a, b = small.contender, large.contender
            if a.ranks == b.ranks and 0 < a.bytes < b.bytes:
                grown = large.median_us / small.median_us / (b.bytes / a.bytes)
                where = f"{table.size(a.bytes)} to {table.size(b.bytes)}, {a.ranks} ranks"
                found[where] = grown
    what = "all_reduce: time grows with bytes, as copies do"
    limit = 1.3 * copies_slow_down(results)
    value, most = max(((grown, where) for where, grown in found.items()), default=(None, ""))
    return at_most(what, f"<= {limit:.1f} x", limit, value, f"{{:.2f}} x ({most})")


def copies_slow_down(results: Results) -> float:
    """How many times longer a byte takes to copy where the buffers leave the cache."""
    copies = results.sections.get("floor", {}).get("copies", [])
    speed = {
        c["copy_bytes"]: c["shared_gb_s"]
        for c in copies
        if c["copiers"] == max(other["copiers"] for other in copies)
    }
    if not {IN_CACHE, max(LARGE)} <= speed.keys():
        return 1
    return max(1.0, float(speed[IN_CACHE]) / float(speed[max(LARGE)]))


def link(results: Results, network: str) -> Budget:
    """The time of a large all-reduce beside what its bytes take on a link of 1 Gbit/s."""
    row = results.find("all_reduce", 64 * MB, "torchcomms", 4, network=network)
    least = bounds.wire(64 * MB, 2) * 8 / 1e9
    what, limit = f"all_reduce of 64 MB, {network}", f"<= 1.15 x {least:.2f} s"
    if not row:
        return Budget(what, limit, "not measured", None)
    seconds = row.median_us / 1e6
    measured = f"{table.ratio(seconds / least)} x, {seconds:.2f} s"
    return Budget(what, limit, measured, seconds <= 1.15 * least)


def as_text(budgets: Iterable[Budget]) -> str:
    """Writes the budgets as a table."""
    words = {True: "reached", False: "MISSED", None: "-"}
    lines = [["budget", "limit", "", "measured"]]
    lines += [[b.what, b.limit, words[b.reached], b.measured] for b in budgets]
    return table.align(lines, left=4)


def as_json(budgets: Iterable[Budget]) -> list[dict[str, Any]]:
    """Returns plain values."""
    return [vars(budget) for budget in budgets]
