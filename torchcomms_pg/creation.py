"""Makes communicators, and returns those behind process groups."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from torchcomms_pg import _C, env, metrics, nccl
from torchcomms_pg._patches import unwrapped
from torchcomms_pg.bootstrap import find_ranks, find_store, with_index
from torchcomms_pg.comm import TorchComm, wrap
from torchcomms_pg.diagnosis import leaving, python_stacks, settings
from torchcomms_pg.errors import UnknownBackendError
from torchcomms_pg.options import (
    COMMUNICATOR_HINTS,
    HIGH_PRIORITY,
    CommOptions,
    Hints,
    check_hints,
    check_timeout,
    config_of,
)

_ACCELERATED = ("nccl", "ncclx")
_OLDEST_NCCLX = 22500


def new_comm(
    backend: str,
    device: torch.device | str,
    name: str | CommOptions | None = None,
    abort_process_on_timeout_or_error: bool | None = None,
    timeout: timedelta | None = None,
    is_high_priority_stream: bool | None = None,
    store: dist.Store | None = None,
    *,
    hints: Hints | None = None,
    rank: int | None = None,
    size: int | None = None,
    options: CommOptions | None = None,
) -> TorchComm:
    """Creates a communicator. All of its ranks call this.

    Args:
        backend: ``"shm"`` (CPU tensors, ranks of one host), ``"gloo"`` (CPU tensors, ranks on any
            hosts), ``"nccl"`` (CUDA tensors), ``"ncclx"`` (CUDA tensors, over the library that
            TORCHCOMM_NCCLX_LIBRARY names) or ``"auto"``, which chooses by `device`.
        device: the device whose tensors it takes.
        name: identifies the communicator in the store, in messages and, from NCCL 2.27.3 on, in
            NCCL. Communicators of one name on one store are matched by the order of their creation.
            A `CommOptions` passed in this place counts as `options`.
        abort_process_on_timeout_or_error: whether a timeout or error ends the process, after the
            abort hooks; otherwise it raises `CommError`. An error of `new_comm` itself always
            raises.
        timeout: limit of an operation's time, and of this call's wait for the other ranks.
        is_high_priority_stream: on an accelerator, whether asynchronous operations run in a stream
            of high priority; the same as the hint ``torchcomm::nccl::high_priority_stream``.
        store: the store for the rendezvous. By default the store at MASTER_ADDR and MASTER_PORT, as
            torchrun and other launchers set them.
        hints: see docs/api.md.
        rank: of this process or thread. By default taken from the launcher's environment.
        size: number of ranks; pass it with `rank`.
        options: values for the arguments above that are not passed. For defaults see `CommOptions`.

    Raises:
        UnknownBackendError: no backend has this name.
        ValueError, TypeError: an argument or an environment variable is wrong or missing.
        RuntimeError: the backend is not available, or does not support the arguments.
        CommError: not all ranks arrived in time.
    """
    device = torch.device(device)
    if backend == "auto":
        backend = "shm" if device.type == "cpu" else "nccl"
    if backend not in ("shm", "gloo", *_ACCELERATED):
        known = "'shm', 'gloo', 'auto', 'nccl' or 'ncclx'"
        raise UnknownBackendError(f"new_comm: failed to find backend {backend!r}, wanted {known}")
    if (device.type == "cpu") == (backend in _ACCELERATED):
        wanted = "CUDA tensors, got device cpu; pass 'cuda'"
        if device.type != "cpu":
            wanted = f"CPU tensors, got device {device}; pass 'cpu'"
        raise ValueError(f"new_comm: backend {backend!r} communicates {wanted}")
    if isinstance(name, CommOptions):
        if options is not None:
            raise TypeError("new_comm: options are given twice, third and as options=; pass one")
        name, options = None, name
    _check_type("name", name, str)
    _check_type("options", options, CommOptions)
    library = _library(backend)
    check_timeout("new_comm", timeout)
    chosen = options or CommOptions()
    abort = abort_process_on_timeout_or_error
    chosen = CommOptions(
        chosen.abort_process_on_timeout_or_error if abort is None else abort,
        chosen.timeout if timeout is None else timeout,
        chosen.store if store is None else store,
        dict(chosen.hints if hints is None else hints),
    ).resolved()
    if is_high_priority_stream is not None:
        chosen.hints[HIGH_PRIORITY[1]] = str(bool(is_high_priority_stream)).lower()
    check_hints("new_comm", chosen.hints, COMMUNICATOR_HINTS)
    config = config_of("new_comm", chosen.hints)
    named = bool(name) and config.comm_name is None
    name = name or "torchcomm"
    rank, size = find_ranks(rank, size)
    assert chosen.timeout is not None  # resolved
    meeting = find_store(chosen.store, rank, size, name, chosen.timeout)
    settings.configure()
    ends_process = bool(chosen.abort_process_on_timeout_or_error)
    if backend in ("shm", "gloo"):
        comm = _C.new_host_communicator(
            meeting, rank, size, name, chosen.timeout, ends_process, backend == "gloo"
        )
    else:
        nccl.stay_deterministic()
        comm = _C.new_accelerator_communicator(
            meeting,
            rank,
            size,
            name,
            chosen.timeout,
            ends_process,
            with_index(device),
            library,
            nccl.package_folder(),
            "true" in (chosen.hints.get(hint) for hint in HIGH_PRIORITY),
            config,
            named,
            env.ranks_per_root(),
        )
    python_stacks.watch_over_monitor()
    leaving.install_for_errors()
    metrics.configure()
    return wrap(comm, backend, chosen, meeting)


def _check_type(argument: str, value: object, wanted: type) -> None:
    if value is not None and not isinstance(value, wanted):
        raise TypeError(f"new_comm: {argument} is {value!r}, wanted a {wanted.__name__} or None")


def _library(backend: str) -> str:
    """Returns the path of the chosen library, or an empty text if none was chosen."""
    if backend != "ncclx":
        return env.read("TORCHCOMM_NCCL_LIBRARY") or ""
    if path := env.read("TORCHCOMM_NCCLX_LIBRARY"):
        library = _C.load_nccl(path, "")
        if library.version < _OLDEST_NCCLX:
            raise RuntimeError(
                f"new_comm: backend 'ncclx' needs NCCLX 2.25.0 or later, and {path} says that it "
                f"is {nccl.version_text(library.version)}; set TORCHCOMM_NCCLX_LIBRARY to a newer "
                "one, or use backend 'nccl'"
            )
        return path
    raise RuntimeError(
        "new_comm: backend 'ncclx' takes NCCLX, which is built from "
        "https://github.com/meta-pytorch/torchcomms; set TORCHCOMM_NCCLX_LIBRARY to the path of "
        "its libnccl.so, or use backend 'nccl'"
    )


def get_comm(
    group: dist.ProcessGroup | None = None, device: torch.device | str | None = None
) -> TorchComm:
    """Returns the communicator behind a process group of backend ``torchcomms``.

    The communicator's hooks also see the process group's operations. The group owns the
    communicator, which cannot be finalized.

    Args:
        group: by default the default group.
        device: the device whose tensors the communicator takes. By default the CPU.

    Raises:
        ValueError: this rank is not in the group, or the group has another backend for the device.
    """
    device = torch.device("cpu" if device is None else device)
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"get_comm: group is {group!r}, wanted a process group this rank is in")
    backend = unwrapped(group._get_backend(device))
    if not isinstance(backend, _C.Backend):
        raise ValueError(
            f"get_comm: the group's backend for {device} is {backend.name()!r}, wanted 'torchcomms'"
        )
    comm = backend.communicator(with_index(device))
    options = CommOptions(abort_process_on_timeout_or_error=comm.ends_process, timeout=comm.timeout)
    name = "shm" if device.type == "cpu" else "nccl"
    return TorchComm(comm, name, options, group=group, owned=False)
