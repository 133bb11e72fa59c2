"""``python -m torchcomms_pg.trace FOLDER``: prints what the ranks' dumps show."""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path

from torchcomms_pg.trace import report
from torchcomms_pg.trace.analysis import Analysis
from torchcomms_pg.trace.dumps import DumpError, load, printable
from torchcomms_pg.trace.hazards import nccl_hazards

CODES = """\
The code is
  0 if every recorded operation has finished,
  1 if not, or if a dump is left out: one that cannot be read, or that is older than the others,
  2 if no dump can be read, a page cannot be written, or the rule of blame is not built.
With --nccl it is 1 if a hazard is found, and 0 if none is.
"""


def main(arguments: list[str] | None = None) -> int:
    """Reads the dumps, then prints and writes what the command line asks for."""
    parser = argparse.ArgumentParser(
        prog="python -m torchcomms_pg.trace",
        description="Says from the flight recorders' dumps of all ranks which rank holds up the "
        "others, who comes late to collectives, and what takes the time. Reads what torch's own "
        "nccl and gloo backends dump, too.",
        epilog=CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="where the dumps are, one file a rank")
    parser.add_argument("--prefix", help="how the dumps' names begin, if others lie beside them")
    parser.add_argument(
        "--stale", action="store_true", help="read dumps that are older than the others, too"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with a timeline")
    parser.add_argument(
        "--perfetto", type=Path, metavar="FILE", help="write a trace for ui.perfetto.dev"
    )
    parser.add_argument(
        "--nccl",
        action="store_true",
        help="say instead what of the run would hang, be refused or give other data over NCCL",
    )
    options = parser.parse_args(arguments)
    if options.nccl and (options.html or options.perfetto):
        parser.error("--nccl prints a report, and writes no page: leave out --html and --perfetto")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for letters that the locale lacks
    try:
        dumps = load(options.folder, options.prefix, stale=options.stale)
        if options.nccl:
            hazards = nccl_hazards(dumps)
            print(hazards)
            return 1 if hazards.found else 0
        analysis = Analysis(dumps)
        verdict = analysis.verdict()
        try:
            if options.html:
                options.html.write_text(report.html(analysis, verdict), encoding="utf-8")
            if options.perfetto:
                options.perfetto.write_text(report.perfetto(analysis, verdict), encoding="utf-8")
        finally:  # the pages are there also if a pipe's reader, such as head, has ended
            print(report.text(analysis, verdict), flush=True)
    except (DumpError, ImportError, OSError) as error:
        print(printable(str(error)), file=sys.stderr)
        return 2
    return 0 if verdict.kind == "fine" and not dumps.left_out else 1


if __name__ == "__main__":
    sys.exit(main())
