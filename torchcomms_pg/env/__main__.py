"""``python -m torchcomms_pg.env``: prints every variable with its value or default.

With ``--markdown`` the command prints docs/variables.md.
"""

from __future__ import annotations

import argparse
import os

from torchcomms_pg.env import VARIABLES

PAGE = """\
# Variables

Everything in the environment that torchcomms_pg reads, written by
`python -m torchcomms_pg.env --markdown`; without the option that command shows the values in force.
Variables are read when a group is created. [environment.md](environment.md) has the effect of each
that torch's `nccl` knows, and of those that have none here. What a build reads is in the first
lines of `setup.py`, what the tools read in those of `tools/_env`.

| variable | default | meaning | since |
|---|---|---|---|
"""


def page() -> str:
    """Returns docs/variables.md."""
    rows = (
        f"| `{each.name}` | {each.default} | {each.meaning} | {each.since} |\n"
        for each in VARIABLES
    )
    return PAGE + "".join(rows)


def main() -> None:
    """Prints the variables."""
    parser = argparse.ArgumentParser(
        prog="python -m torchcomms_pg.env",
        description="Lists every environment variable that torchcomms_pg reads: its value or "
        "default, and its meaning.",
    )
    parser.add_argument("--markdown", action="store_true", help="print them as docs/variables.md")
    if parser.parse_args().markdown:
        print(page(), end="")
        return
    for variable in VARIABLES:
        value = os.environ.get(variable.name)
        now = f"(default: {variable.default})" if value is None else f"= {value}"
        print(f"{variable.name} {now}\n    {variable.meaning}")


if __name__ == "__main__":
    main()
