"""The results as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from . import bounds
from .results import Contender, Results, Row

NAMES = {"torchcomms": "torchcomms", "gloo": "Gloo", "mpi": "Open MPI", "fake": "fake"}


def size(value: int) -> str:
    """Writes a number of bytes, such as 64 KB."""
    for unit, factor in (("GB", 1 << 30), ("MB", 1 << 20), ("KB", 1 << 10)):
        if value >= factor and value % factor == 0:
            return f"{value // factor} {unit}"
    return f"{value} B"


def time(microseconds: float) -> str:
    """Writes microseconds with as many digits as are worth it."""
    if microseconds < 10:
        return f"{microseconds:.2f}"
    return f"{microseconds:.1f}" if microseconds < 100 else f"{microseconds:,.0f}"


def ratio(value: float) -> str:
    """Writes how many times one thing is another."""
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def align(lines: Sequence[Sequence[str]], left: int = 1) -> str:
    """Sets columns: the first ones to the left, numbers to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    text = []
    for line in lines:
        cells = [
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        text.append("  " + "  ".join(cells).rstrip())
    return "\n".join(text)


def operations(rows: Iterable[Row]) -> str:
    """Writes a table for each operation, number of ranks, network, type, mode and front end."""
    tables: dict[tuple[Any, ...], dict[int, dict[str, Row]]] = {}
    by_mpi: dict[Contender, Row] = {}
    for row in rows:
        c = row.contender
        if c.backend == "mpi":
            by_mpi[c] = row
            continue
        key = (c.op, c.ranks, c.network, c.dtype, c.mode, c.frontend)
        tables.setdefault(key, {}).setdefault(c.bytes, {})[c.backend] = row
    for (op, ranks, network, dtype, mode, _), sizes in tables.items():
        for bytes_, found in sizes.items():
            other = by_mpi.get(Contender(op, bytes_, "mpi", ranks, dtype, mode, "mpi4py", network))
            if other is not None:
                found["mpi"] = other
    text = []
    for (op, ranks, network, dtype, mode, frontend), sizes in tables.items():
        where = network or f"{ranks} ranks"
        heading = f"{op}, {where}, {dtype}, {mode}, {frontend} (microseconds)"
        text.append(f"{heading}\n{comparison(sizes)}")
    lone = [row for row in by_mpi.values() if not tables]
    text += [f"{row.contender.key}: {time(row.median_us)} us" for row in lone]
    return "\n\n".join(text)


def comparison(sizes: dict[int, dict[str, Row]]) -> str:
    """Writes one table: a line for each size, some columns for each backend."""
    backends = [name for name in NAMES if any(name in found for found in sizes.values())]
    head = ["size"]
    for backend in backends:
        head += [NAMES[backend], "p99"]
        if backend != "torchcomms" and "torchcomms" in backends:
            head.append("ratio")
    lines = [[*head, "GB/s"]]
    for bytes_ in sorted(sizes):
        found = sizes[bytes_]
        ours = found.get("torchcomms")
        line = [size(bytes_)]
        for backend in backends:
            row = found.get(backend)
            line += [time(row.median_us), time(row.p99_us)] if row else ["-", "-"]
            if backend != "torchcomms" and "torchcomms" in backends:
                line.append(ratio(row.median_us / ours.median_us) if row and ours else "-")
        first = ours or next(iter(found.values()))
        lines.append([*line, f"{first.gigabytes_per_second:.2f}" if bytes_ >= 1 << 10 else "-"])
    return align(lines)


def bounds_table(results: Results, sizes: Sequence[int]) -> str:
    """Writes what each collective costs beside what the bytes it has to move cost."""
    copies = results.sections.get("floor", {}).get("copies", [])
    lines = [["collective", "ranks", "size", "us", "direct", "ratio", "staged", "ratio"]]
    for row in results.rows:
        c = row.contender
        if not c.plain or c.bytes not in sizes:
            continue
        line = [c.op, str(c.ranks), size(c.bytes), time(row.median_us)]
        for kind in bounds.KINDS:
            bound = bounds.microseconds(c.op, kind, c.bytes, c.ranks, copies)
            line += ["-", "-"] if bound is None else [time(bound), ratio(row.median_us / bound)]
        lines.append(line)
    if len(lines) == 1 or not copies:
        return ""
    heading = "Collectives beside the bounds of the bytes they have to move (microseconds)"
    return f"{heading}\n{align(lines)}"


def growth(results: Results) -> str:
    """Writes how the cost of torchcomms' all-reduce grows with ranks and sizes."""
    times: dict[int, dict[int, float]] = {}
    for row in results.rows:
        c = row.contender
        if c.plain and c.op == "all_reduce":
            times.setdefault(c.bytes, {})[c.ranks] = row.median_us
    counts = sorted({count for by_ranks in times.values() for count in by_ranks})
    if len(counts) < 2 or len(times) < 2:
        return ""
    head = [cell for count in counts for cell in (f"{count} ranks", "ns per KB")]
    lines = [["size", *head]]
    for bytes_ in sorted(times):
        line = [size(bytes_)]
        for count in counts:
            value = times[bytes_].get(count)
            work = bytes_ * count / 1024
            line += [time(value), f"{value * 1e3 / work:,.1f}"] if value else ["-", "-"]
        lines.append(line)
    heading = "all_reduce over ranks and sizes (microseconds; nanoseconds per KB of all ranks)"
    return f"{heading}\n{align(lines)}"


def floor(section: dict[str, Any]) -> str:
    """Writes what the machine allows."""
    lines = [["floor", "", ""]]
    for record in section.get("flags", []):
        how = "spinning" if record["flag"] == "spin" else "spinning, then futex"
        lines.append([f"flag there and back, {how}", f"{record['round_trip_us']:.2f}", "us"])
    for record in section.get("copies", []):
        what = f"{size(record['copy_bytes'])}, {record['copiers']} at once"
        for how, name in (("copy from shared pages", "shared"), ("process_vm_readv", "vm_readv")):
            lines.append([f"{how}, {what}", f"{record[f'{name}_gb_s']:.1f}", "GB/s each"])
    return align(lines)


def library(records: Sequence[dict[str, Any]]) -> str:
    """Writes the library's own times: a line for each size, a column for each operation."""
    text = []
    for ranks in dict.fromkeys(record["ranks"] for record in records):
        mine = [record for record in records if record["ranks"] == ranks]
        names = list(dict.fromkeys(record["op"] for record in mine))
        lines = [["size", *names]]
        for bytes_ in sorted({record["bytes"] for record in mine}):
            cells = {r["op"]: time(r["median_us"]) for r in mine if r["bytes"] == bytes_}
            lines.append([size(bytes_), *(cells.get(name, "-") for name in names)])
        text.append(f"inside the library, {ranks} ranks (microseconds)\n{align(lines)}")
    return "\n\n".join(text)


def overlap(records: Sequence[dict[str, Any]]) -> str:
    """Writes how much of a matrix product runs while a collective does."""
    lines = [["all_reduce, 2 ranks", "backend", "alone", "product", "together", "overlap"]]
    for r in records:
        times = [time(r[name]) for name in ("collective", "product", "together")]
        lines.append([size(r["bytes"]), NAMES[r["backend"]], *times, f"{r['overlap']:.0%}"])
    return "Overlap of an asynchronous collective and a matrix product (microseconds)\n" + align(
        lines
    )


def programs(found: dict[str, dict[str, float]]) -> str:
    """Writes the calls of programs, with the columns of Open MPI if it was measured."""
    others = ["gloo", *(["mpi"] if any("mpi" in times for times in found.values()) else [])]
    head = ["call", "torchcomms"]
    for other in others:
        head += [NAMES[other], "ratio"]
    lines = [[*head, "fake", "wake-ups"]]
    for name, times in found.items():
        ours = times.get("torchcomms")
        line = [name, time(ours) if ours else "-"]
        for other in others:
            value = times.get(other)
            line += [time(value) if value else "-", ratio(value / ours) if ours and value else "-"]
        fake, wake_ups = times.get("fake"), times.get("wake-ups")
        line.append(time(fake) if fake else "-")
        lines.append([*line, "-" if wake_ups is None else f"{wake_ups:.2f}"])
    return "What programs call, 2 ranks where no other number is named (microseconds)\n" + align(
        lines
    )


def sharing(ranks: Sequence[dict[str, Any]], programs: Sequence[dict[str, Any]]) -> str:
    """Writes what ranks take that share cores: with each other, and with other programs."""
    counts = ["sleeps", "switches"]
    lines = [["backend", "ranks", "us", "CPU us", *counts]]
    for r in ranks:
        name = NAMES.get(r["backend"], r["backend"])
        cells = [time(r["time"]), time(r["cpu"]), *(f"{r[count]:.2f}" for count in counts)]
        lines.append([name, str(r["ranks"]), *cells])
    text = "all_reduce of 4 B; CPU time, sleeps and switches are of a call, of each rank\n"
    text += align(lines)
    lines = [["backend", "ranks are", "ms", "CPU ms", *counts]]
    for r in programs:
        where = "pinned" if r["pinned"] else "free"
        cells = [f"{r[what] / 1e3:.1f}" for what in ("time", "cpu")]
        cells += [f"{r[count]:.1f}" for count in counts]
        lines.append([NAMES.get(r["backend"], r["backend"]), where, *cells])
    text += "\n\n2 ms of computing and an all_reduce of 32 KB, 2 ranks beside ten busy programs\n"
    return text + align(lines, 2)


def imperfect(records: Sequence[dict[str, Any]]) -> str:
    """Writes what takes how long over links that are not perfect."""
    whats = ("made", "4 B", "3.2 MB")
    lines = [["link", "backend", "group and its first", *(f"all_reduce {w}" for w in whats[1:])]]
    for r in records:
        lines.append([r["link"], r["backend"], *(f"{r[what] * 1e3:,.0f}" for what in whats)])
    return "Imperfect links, 4 ranks on 3 hosts (milliseconds)\n" + align(lines, 2)


def deepspeed(records: Sequence[dict[str, Any]]) -> str:
    """Writes all-reduces beside DeepSpeed's."""
    lines = [["all_reduce", "dtype", "DeepSpeed", "TorchComm", "ratio", "dist", "ratio"]]
    for r in records:
        line = [size(r["bytes"]), r["dtype"], time(r["deepspeed"])]
        for front_end in ("torchcomm", "dist"):
            line += [time(r[front_end]), ratio(r["deepspeed"] / r[front_end])]
        lines.append(line)
    return "Beside DeepSpeed's all-reduce for CPUs, 2 ranks (microseconds)\n" + align(lines, 2)


def steps(records: Sequence[dict[str, Any]]) -> str:
    """Writes the training steps."""
    lines = [["training step", "parameters"]]
    lines[0] += ["torchcomms", "Gloo", "ratio", "alone", "at most"]
    for r in records:
        ours, other = r["milliseconds"].get("torchcomms"), r["milliseconds"].get("gloo")
        cells = [f"{value:.1f}" if value else "-" for value in (ours, other)]
        times = ratio(other / ours) if ours and other else "-"
        # Without any communication: no backend can be ahead of Gloo by more.
        alone = r["milliseconds"].get("alone")
        most = ratio(other / alone) if alone and other else "-"
        cells += [times, f"{alone:.1f}" if alone else "-", most]
        lines.append([r["kind"], f"{r['millions']} million", *cells])
    ranks, batch = records[0]["ranks"], records[0]["batch"]
    heading = f"One training step, {ranks} ranks, batch of {batch} per rank (milliseconds)"
    return f"{heading}\n{align(lines)}"


def init(records: Sequence[dict[str, Any]]) -> str:
    """Writes what making the default group costs."""
    lines = [["init_process_group", "ranks", "init", "first all_reduce"]]
    for r in records:
        line = [NAMES[r["backend"]], str(r["ranks"])]
        lines.append([*line, f"{r['init_ms']:.1f}", f"{r['first_ms']:.1f}"])
    return "Making the default group (milliseconds)\n" + align(lines)


def groups(section: dict[str, list[dict[str, float]]]) -> str:
    """Writes what groups cost."""
    text = []
    for backend, records in section.items():
        lines = [["groups", "threads", "files", "private MB", "shared MB", "new_group ms"]]
        lines[0] += ["one us", "in turns us"]
        for r in records:
            line = [f"{r[name]:.0f}" for name in ("groups", "threads", "files")]
            line += [f"{r[name] / 1024:.1f}" for name in ("private_kb", "shared_kb")]
            if "one_us" in r:
                line += [f"{r['new_group_ms']:.2f}", time(r["one_us"]), time(r["turns_us"])]
            else:
                line += ["-", "-", "-"]
            lines.append(line)
        text.append(f"Groups in one process, 2 ranks, {NAMES[backend]}\n{align(lines)}")
    return "\n\n".join(text)
