"""``python -m torchcomms_pg.env``: prints the variables with their values or defaults.

With ``--markdown`` the command prints the first half of docs/variables.md, up to the effects.
"""

from __future__ import annotations

import argparse
import os

from torchcomms_pg.env import VARIABLES

PAGE = """\
# Variables

The environment variables that torchcomms_pg defines or takes over from torch's `nccl` and NCCL.
`python -m torchcomms_pg.env` shows the values in force. The variables of torchrun (`RANK`,
`MASTER_PORT`) and of torch's Gloo (`GLOO_SOCKET_IFNAME`, `GLOO_DEVICE_TRANSPORT`) are also read, as
torch reads them.

Variables are read when a group is created. [Below](#beside-torchs-nccl) is the effect of each that
torch's `nccl` knows, and of those that have none here. What a build reads is in the first lines of
`setup.py`, what the tools read in those of `tools/_env`.

| variable | default | meaning | since |
|---|---|---|---|
"""


def page() -> str:
    """Returns the list of docs/variables.md, which its second half follows."""
    rows = "".join(
        f"| `{each.name}` | {each.default} | {each.meaning} | {each.since} |\n"
        for each in VARIABLES
    )
    return PAGE + rows.replace("<", "&lt;")  # else a placeholder is a tag, which is not shown


def main() -> None:
    """Prints the variables."""
    parser = argparse.ArgumentParser(
        prog="python -m torchcomms_pg.env",
        description="Lists the environment variables that torchcomms_pg defines or takes over: "
        "their values or defaults, and their meanings.",
    )
    parser.add_argument(
        "--markdown", action="store_true", help="print the list of docs/variables.md"
    )
    if parser.parse_args().markdown:
        print(page(), end="")
        return
    for variable in VARIABLES:
        value = os.environ.get(variable.name)
        now = f"(default: {variable.default})" if value is None else f"= {value}"
        print(f"{variable.name} {now}\n    {variable.meaning}")


if __name__ == "__main__":
    main()
