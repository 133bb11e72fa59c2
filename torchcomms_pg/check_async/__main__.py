"""``python -m torchcomms_pg.check_async FOLDER``: the report of the findings in a folder."""

from __future__ import annotations

import sys
from pathlib import Path

from torchcomms_pg import checked_run


def main() -> None:
    """Prints the report; the code is 1 if it has findings, 2 if nothing was checked."""
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m torchcomms_pg.check_async FOLDER")
    result = checked_run.ASYNC.read(Path(sys.argv[1]))
    if result is None:
        print(checked_run.ASYNC.nothing)
        raise SystemExit(2)
    print(result[0])
    raise SystemExit(int(result[1]))


if __name__ == "__main__":
    main()
