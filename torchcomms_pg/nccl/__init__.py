"""NCCL's library, libnccl, as this process has it; ``python -m torchcomms_pg.nccl`` shows it.

It is loaded when a group first communicates tensors of a GPU, or when it is asked for here, and
stays loaded.
"""

from __future__ import annotations

import functools
import importlib.util

import torch

from torchcomms_pg import _C, env


def load(path: str | None = None) -> _C.NcclLibrary:
    """Loads libnccl, unless that was done before, and returns it.

    Args:
        path: of libnccl.so.2. None: what TORCHCOMM_NCCL_LIBRARY says, else the copy that torch has
            loaded, else that of the installed package, else what the system's loader finds.

    Raises:
        RuntimeError: there is none, or it is too old; names what was tried and what to install.
    """
    return _C.load_nccl(path or env.read("TORCHCOMM_NCCL_LIBRARY") or "", package_folder())


def version() -> tuple[int, int, int]:
    """Returns the version of the loaded library, for example ``(2, 30, 7)``.

    Raises:
        RuntimeError: as `load`.
    """
    return _parts(load().version)


def version_text(code: int) -> str:
    """Returns e.g. ``"2.30.7"`` of NCCL's number `code`, e.g. 23007."""
    return ".".join(map(str, _parts(code)))


def _parts(code: int) -> tuple[int, int, int]:
    return code // 10000, code // 100 % 100, code % 100


def stay_deterministic() -> None:
    """Excludes NVLS if torch is to use deterministic algorithms. Call before creating a group."""
    if torch.are_deterministic_algorithms_enabled():
        env.exclude_nvls()


@functools.cache
def package_folder() -> str:
    """Returns the folder of the installed NCCL package, empty where there is none."""
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return ""
    locations = list(spec.submodule_search_locations or []) if spec else []
    return locations[0] if locations else ""
