"""Draws README's pictures: ``_pictures.py hang``, ``_pictures.py speed``.

Each picture has its own background, so that it shows on light and on dark pages. Imports no torch.
"""

from __future__ import annotations

import math
import re
import subprocess
import sys
import time
from html import escape
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
HANG, SPEED = ROOT / "docs/hang.svg", ROOT / "docs/speed.svg"
COMMAND = (
    "TORCHCOMMS_PG_WATCH=1 TORCHCOMMS_PG_WATCH_TIMEOUT=5 "
    "torchrun --nproc-per-node 3 examples/watch_gloo.py"
)
COLUMNS = 92  # of the terminal
COLOURS = {"torchcomms": "#c0392b", "Gloo": "#2c7fb8", "Open MPI": "#6a737d"}


def run_watched() -> list[tuple[float, str]]:
    """Runs the example. Returns its command and the lines of the rank that prints the verdict.

    Each line has the seconds since the start of the command.
    """
    start = time.monotonic()
    told = [(0.0, f"$ {COMMAND}")]
    with subprocess.Popen(
        ["bash", "-c", COMMAND],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        assert process.stdout is not None
        told += [(time.monotonic() - start, line.rstrip()) for line in process.stdout]
    return select(told)


def select(told: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """Leaves out torchrun's lines, and the shorter lines of the other ranks."""
    (speaker,) = {
        match[0]
        for _, line in told
        if (match := re.match(r"\[rank \d+\]", line))
        and ": verdict on" in line
        and "prints the rest" not in line
    }
    return [
        (when, line)
        for when, line in told
        if line.startswith(("$ ", speaker, "  ", "trained")) and line.strip()
    ]


def pieces(line: str) -> list[str]:
    """Returns the line as a terminal of COLUMNS shows it, broken behind spaces."""
    found = [""]
    for word in re.findall(r"\s*\S+\s?", line):
        if found[-1] and len(found[-1] + word.rstrip()) > COLUMNS:
            found.append("")
        found[-1] += word
    return found


def draw_hang(lines: list[tuple[float, str]]) -> str:
    """Returns the picture of a terminal, with the time of each line at its left."""
    body, y, before = [], 30, ""
    for when, line in lines:
        shown = f"{when:.0f} s"
        if shown != before:
            body.append(f'<text class="when" x="46" y="{y}">{shown}</text>')
            before = shown
        kind = "said"
        if line.startswith("$ "):
            kind = "typed"
        elif "has not arrived" in line or line.startswith("      "):
            kind = "found"
        spans = "".join(
            f'<tspan x="58" y="{y + 18 * number}">{escape(piece, quote=False)}</tspan>'
            for number, piece in enumerate(pieces(line))
        )
        body.append(f'<text class="{kind}" xml:space="preserve">{spans}</text>')
        y += 18 * len(pieces(line)) + 4
    style = (
        "text{font:12.5px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace}"
        ".when{fill:#8b949e;text-anchor:end}.typed{fill:#fff;font-weight:bold}"
        ".said{fill:#c9d1d9}.found{fill:#ffa657}"
    )
    return picture(776, y, style, "#161b22", body)


def lines_of(svg: str) -> list[tuple[float, str]]:
    """Returns the lines of a picture of a terminal, with their seconds."""
    found, when = [], 0.0
    for text in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text"):
        content = "".join(text.itertext())
        if text.get("class") == "when":
            when = float(content.split()[0])
        else:
            found.append((when, content))
    return found


def read_table(readme: str) -> tuple[list[str], dict[str, list[float]]]:
    """Returns the sizes of README's table of speed, and each library's microseconds."""
    rows = [
        [cell.strip() for cell in row.split("|")]
        for row in re.findall(r"^\| (.*) \|$", readme.partition("## Speed")[2], re.M)
    ]
    (_, *names), *rows = [row for row in rows if len(row) == 4]
    times = [[float(cell.replace(",", "")) for cell in row[1:]] for row in rows]
    return [row[0] for row in rows], dict(
        zip(names, map(list, zip(*times, strict=True)), strict=True)
    )


def draw_speed(sizes: list[str], times: dict[str, list[float]]) -> str:
    """Returns the plot of the table: its rows side by side, and a logarithmic axis of time."""
    left, right, top, bottom = 82, 590, 46, 250

    def x(row: int) -> int:
        return left + 28 + (right - left - 40) * row // (len(sizes) - 1)

    def y(us: float) -> float:
        return round(bottom - (bottom - top) * math.log10(us) / 5, 1)

    body = [
        '<text class="title" x="20" y="26">dist.all_reduce on two ranks: lower is faster</text>'
    ]
    for power, name in enumerate(["1 µs", "10 µs", "100 µs", "1 ms", "10 ms", "100 ms"]):
        body.append(f'<path class="grid" d="M{left} {y(10**power)}H{right}"/>')
        body.append(f'<text class="y" x="{left - 8}" y="{y(10**power) + 4}">{name}</text>')
    for row, size in enumerate(sizes):
        body.append(f'<text class="x" x="{x(row)}" y="{bottom + 22}">{size}</text>')
    free = bottom + 4.0  # the lowest place of the next name, so that no two overlap
    for name, values in sorted(times.items(), key=lambda each: each[1][-1]):
        colour = COLOURS[name]
        points = [(x(row), y(us)) for row, us in enumerate(values)]
        line = " ".join(f"{x},{y}" for x, y in points)
        body.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        body += [f'<circle cx="{x}" cy="{y}" r="3.5" fill="{colour}"/>' for x, y in points]
        place = min(points[-1][1] + 4, free)
        free = place - 16
        body.append(f'<text class="name" x="{right}" y="{place}" fill="{colour}">{name}</text>')
    style = (
        "text{font:13px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif}"
        ".title{font-weight:600;fill:#24292f}.x{text-anchor:middle;fill:#57606a}"
        ".y{text-anchor:end;fill:#57606a}.name{font-weight:600}.grid{stroke:#d8dee4}"
    )
    return picture(690, bottom + 38, style, "#fff", body)


def picture(width: int, height: int, style: str, background: str, body: list[str]) -> str:
    """Returns an SVG of these elements on a background of its own."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">\n'
        f"<style>{style}</style>\n"
        f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="6" '
        f'fill="{background}" stroke="#8b949e"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def main() -> None:
    """Draws the picture that is named."""
    match sys.argv[1:]:
        case ["hang"]:
            HANG.write_text(draw_hang(run_watched()), encoding="utf-8")
        case ["speed"]:
            readme = (ROOT / "README.md").read_text(encoding="utf-8")
            SPEED.write_text(draw_speed(*read_table(readme)), encoding="utf-8")
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
