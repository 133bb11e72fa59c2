"""The libnccl of this process; ``python -m torchcomms_pg.nccl`` shows it.

The library is loaded when a group first communicates tensors of a GPU, or when a function of this
module needs the library, and stays loaded.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from torchcomms_pg import _C, env

# Value of an unset number in torch's NCCLConfig: NCCL_CONFIG_UNDEF_INT.
_UNSET = -(2**31)


def load(path: str | None = None) -> _C.NcclLibrary:
    """Loads libnccl, unless that was done before, and returns it.

    Args:
        path: of libnccl.so.2. None takes the first of: the value of TORCHCOMM_NCCL_LIBRARY, the
            library that torch has loaded, the installed package's, the one that the system's loader
            finds.

    Raises:
        RuntimeError: no library was found, or it is too old. The message names the places that
            were searched, and what to install.
    """
    return _C.load_nccl(path or env.read("TORCHCOMM_NCCL_LIBRARY") or "", package_folder())


def version() -> tuple[int, int, int]:
    """Returns the version of the loaded library, for example ``(2, 30, 7)``.

    Raises:
        RuntimeError: as `load`.
    """
    return _parts(load().version)


def version_text(code: int) -> str:
    """Returns NCCL's version number `code`, e.g. 23007, as a text, e.g. ``"2.30.7"``."""
    return ".".join(map(str, _parts(code)))


def _parts(code: int) -> tuple[int, int, int]:
    return code // 10000, code // 100 % 100, code % 100


def stay_deterministic() -> None:
    """Excludes NCCL's algorithm NVLS if torch is told to be deterministic.

    Call before creating a group.
    """
    if torch.are_deterministic_algorithms_enabled():
        env.exclude_nvls()


def is_options(options: object) -> bool:
    """Returns whether these are options of torch's own ``nccl``, which not every torch has."""
    nccl = getattr(c10d, "ProcessGroupNCCL", None)
    return nccl is not None and isinstance(options, nccl.Options)


def options_like(theirs: Any) -> _C.Backend.Options:
    """Returns options for this backend, made from options of torch's own ``nccl``.

    Args:
        theirs: a ``ProcessGroupNCCL.Options``. Its priority and its NCCL configuration are copied,
            except ``blocking``, which this backend sets itself.

    Raises:
        ValueError: NCCL would refuse a value of the configuration.
    """
    own = _C.Backend.Options()
    own.is_high_priority_stream = theirs.is_high_priority_stream
    for name in set(_C.nccl_config_names.values()) - {"blocking"}:
        value = getattr(theirs.config, name, None)  # older versions of torch have fewer
        if value not in (None, _UNSET):
            setattr(own.config, name, value)
    return own


@functools.cache
def package_folder() -> str:
    """Returns the folder of the installed NCCL package, or an empty text without one."""
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return ""
    locations = list(spec.submodule_search_locations or []) if spec else []
    return locations[0] if locations else ""
