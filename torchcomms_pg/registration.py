"""Registers ``torchcomms`` with ``torch.distributed``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _DistributedBackendOptions
from torch.distributed import distributed_c10d as c10d

from torchcomms_pg import _C, _patches, env, metrics, nccl
from torchcomms_pg._C import Backend, Communicator
from torchcomms_pg._compat import minor_of
from torchcomms_pg._version import __version__
from torchcomms_pg.diagnosis import leaving, python_stacks, settings
from torchcomms_pg.hooks import flight_recorder

BACKEND_NAME = "torchcomms"
DEVICES = ["cpu", "cuda"]


def register() -> None:
    """Registers the backend ``torchcomms`` for CPU and CUDA devices.

    ``import torchcomms_pg`` calls this; from torch 2.14 on, so does the first use of the name.
    Calling it again has no effect.

    Raises:
        RuntimeError: another package has registered the name, or torch would give the name to the
            torchcomms package.
    """
    _refuse_hijack()
    if BACKEND_NAME.upper() in c10d.Backend._plugins:
        creator = c10d.Backend._plugins[BACKEND_NAME.upper()].creator_fn
        if creator is not create_backend:
            owner = f"{creator.__module__}.{creator.__qualname__}"
            raise RuntimeError(
                f"the backend name {BACKEND_NAME!r} is already registered by {owner}; "
                "torchcomms_pg does not replace it. Do not import both in one process."
            )
        return
    dist.Backend.register_backend(
        BACKEND_NAME, create_backend, extended_api=True, devices=list(DEVICES)
    )
    # From torch 2.14 on torch records the operations of backends that do not record them
    # themselves.
    recording: set[str] = getattr(c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    recording.add(BACKEND_NAME)
    leaving.install()
    if _torch_minor() < 14:
        _name_default_backend()
    _patches.apply(_torch_minor())


class SharedOptions(Backend.Options):
    """Options that make a new group use an existing communicator."""

    def __init__(self, communicator: Communicator) -> None:
        super().__init__(communicator.timeout)
        self.communicator = communicator


def create_backend(options: _DistributedBackendOptions, group_options: object) -> Backend:
    """Creates the backend of one process group; called by ``torch.distributed``.

    Args:
        options: store, rank, size, timeout and name of the group.
        group_options: the user's ``pg_options``, or None.
    """
    if group_options is None:
        own = Backend.Options()
    elif isinstance(group_options, Backend.Options):
        own = group_options.__copy__()
    elif nccl.is_options(group_options):
        own = nccl.options_like(group_options)
    else:
        raise TypeError(
            f"pg_options: got {type(group_options).__module__}.{type(group_options).__qualname__}, "
            f"wanted torchcomms_pg.Backend.Options for backend {BACKEND_NAME!r}, or torch's "
            "ProcessGroupNCCL.Options"
        )
    own.nccl_library = own.nccl_library or env.read("TORCHCOMM_NCCL_LIBRARY") or ""
    own.nccl_folder = own.nccl_folder or nccl.package_folder()
    own.ranks_per_root = env.ranks_per_root()
    own.blocking_wait = env.blocking_wait()
    own.nan_check = env.nan_check()
    desync_debug = env.desync_debug() or dist.get_debug_level() == dist.DebugLevel.DETAIL
    timing = env.enable_timing() or desync_debug
    own._timeout = options.timeout
    if own.abort_process_on_timeout_or_error is None:
        own.abort_process_on_timeout_or_error = env.group_aborts_on_error()
    own.accelerator_ends_process = env.accelerator_ends_process(desync_debug)
    own.group_name = options.group_id
    own.global_ranks_in_group = options.global_ranks_in_group
    if getattr(options, "enable_reconfigure", False):  # from torch 2.14 on
        own.enable_reconfigure = True
    flight_recorder.configure()
    settings.configure()
    nccl.stay_deterministic()
    if isinstance(group_options, SharedOptions):
        backend = Backend(group_options.communicator, own)
    else:
        backend = Backend(options.store, options.group_rank, options.group_size, own)
        python_stacks.watch_over_monitor()
        leaving.install_for_errors()
    metrics.configure()
    if timing:
        backend._enable_collectives_timing()
    _C.log_info(
        f"torchcomms_pg environment of group {options.group_id!r}: version {__version__}, built "
        f"with torch {_C.torch_version} and nccl.h {nccl.version_text(_C.nccl_header_version)}; "
        f"{env.described()}"
    )
    return backend


def serve_host_device(device_type: str, library: str = "") -> None:
    """Makes ``torchcomms`` carry the tensors of a simulated accelerator, over shared memory.

    Has an effect on groups created afterwards. Their operations take a GPU's code path, with
    streams and events, so tests need no GPU.

    Args:
        device_type: the name of a device whose memory is the host's. The native handles of its
            streams must point to objects of `torchcomms_pg::host::HostStream`
            (csrc/host/HostStream.hpp); other handles crash the process.
        library: the path of a library with NCCL's API for such memory and streams, in place of
            shared memory.
    """
    _C.use_host_streams(device_type, library)
    devices = c10d.Backend.backend_capability[BACKEND_NAME]
    if device_type not in devices:
        devices.append(device_type)


def _torch_minor() -> int:
    return int(minor_of(torch.__version__).split(".")[1])


def _refuse_hijack() -> None:
    """Raises if torch is configured to give this backend's name to the torchcomms package."""
    handles = getattr(c10d, "_torchcomms_handles_backend", None)  # from torch 2.14 on
    if handles(BACKEND_NAME) if handles else c10d._use_torchcomms_enabled():
        raise RuntimeError(
            "TORCH_DISTRIBUTED_USE_TORCHCOMMS is set and the torchcomms package is installed: "
            f"torch would create {BACKEND_NAME!r} groups with that package, not with "
            "torchcomms_pg. Unset the variable, or uninstall torchcomms."
        )


def _name_default_backend() -> None:
    """Gives groups of mixed strings such as ``cpu:gloo,cuda:torchcomms`` a default backend.

    Up to torch 2.13 a group of a mixed string takes its default backend from the first entry of
    ``Backend._plugins`` whose name is among the string's backends. The plugins' names are in upper
    case and the string's names in lower case: no name matches, and the group's default stays
    undefined. An additional entry in lower case, in front of all entries, matches.
    """
    plugins: dict[str, Any] = c10d.Backend._plugins
    others = dict(plugins)
    plugins.clear()
    plugins[BACKEND_NAME] = others[BACKEND_NAME.upper()]
    plugins.update(others)
