"""``python -m torchcomms_pg.env``: every variable with its value or default."""

from __future__ import annotations

import argparse
import os

from torchcomms_pg.env import VARIABLES


def main() -> None:
    """Prints them."""
    argparse.ArgumentParser(
        prog="python -m torchcomms_pg.env",
        description="Lists every environment variable that torchcomms_pg reads: its value or "
        "default, and its meaning.",
    ).parse_args()
    for variable in VARIABLES:
        value = os.environ.get(variable.name)
        now = f"(default: {variable.default})" if value is None else f"= {value}"
        print(f"{variable.name} {now}\n    {variable.meaning}")


if __name__ == "__main__":
    main()
