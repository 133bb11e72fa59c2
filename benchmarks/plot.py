"""The results as a picture: latency and bandwidth over size, one line per backend."""

from __future__ import annotations

import sys
from pathlib import Path

from . import table
from .results import Contender, Results, Row

COLOURS = {"torchcomms": "#c0392b", "gloo": "#2c7fb8", "mpi": "#7f8c8d"}


def missing() -> str:
    """Returns the command that installs what is not there; empty if all is."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return f"{sys.executable} -m pip install matplotlib"
    return ""


def draw(results: Results, file: Path) -> None:
    """Draws every operation and number of ranks that was measured at three sizes or more."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    curves: dict[tuple[str, str], dict[str, list[Row]]] = {}
    for row in results.rows:
        c = row.contender
        frontend = "mpi4py" if c.backend == "mpi" else "dist"
        same = c == Contender(
            c.op, c.bytes, c.backend, c.ranks, frontend=frontend, network=c.network
        )
        if c.backend in COLOURS and c.bytes and same:
            by_backend = curves.setdefault((c.op, c.where), {})
            by_backend.setdefault(c.backend, []).append(row)
    most = max((len(rows) for by in curves.values() for rows in by.values()), default=0)
    # The operations that were measured at many sizes: a curve of four points says little.
    curves = {
        key: by
        for key, by in curves.items()
        if max(len({row.contender.bytes for row in rows}) for rows in by.values()) > most / 2
    }
    if not curves:
        raise ValueError("nothing to plot: no float32 dist operation has been measured")
    figure, axes = pyplot.subplots(
        len(curves), 2, figsize=(10, 3.2 * len(curves)), squeeze=False, layout="constrained"
    )
    for (latency, bandwidth), ((op, where), by_backend) in zip(axes, curves.items(), strict=True):
        for backend, rows in by_backend.items():
            last = {row.contender.bytes: row for row in rows}
            sizes = sorted(last)
            options = dict(label=table.NAMES[backend], color=COLOURS[backend], marker=".")
            latency.plot(sizes, [last[s].median_us for s in sizes], **options)
            speeds = [last[s].gigabytes_per_second for s in sizes]
            bandwidth.plot(sizes, speeds, **options)
        latency.set(title=f"{op}, {where}: latency", ylabel="µs (median)", yscale="log")
        bandwidth.set(title=f"{op}, {where}: bandwidth", ylabel="GB/s")
        for axis in (latency, bandwidth):
            axis.set_xscale("log", base=2)
            ticks = [4, 64, 1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 26]
            axis.set_xticks(ticks, [table.size(s) for s in ticks])
            axis.grid(alpha=0.3)
            axis.legend(frameon=False)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
