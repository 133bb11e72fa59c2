"""``python -m torchcomms_pg.nccl``: shows which libnccl is used."""

from __future__ import annotations

import argparse

from torchcomms_pg import _C, nccl


def main() -> None:
    """Prints the library's path, its version and the functions that it lacks."""
    argparse.ArgumentParser(
        prog="python -m torchcomms_pg.nccl",
        description="Tells which libnccl is used for GPUs, how it was found, its version, and "
        "which functions it lacks.",
    ).parse_args()
    library = nccl.load()
    print(f"NCCL {nccl.version_text(library.version)} at {library.path}, {library.origin}")
    print(f"built with the header of {nccl.version_text(_C.nccl_header_version)}")
    if library.missing:
        print(f"it lacks {', '.join(library.missing)}")


if __name__ == "__main__":
    main()
