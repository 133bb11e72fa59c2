"""Device meshes whose dimensions are communicators."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchcomms_pg.comm import TorchComm
from torchcomms_pg.creation import get_comm
from torchcomms_pg.process_group import get_process_group


def init_device_mesh(
    mesh_dim_comms: Sequence[TorchComm],
    mesh_dim_names: Sequence[str],
    _global_comm: TorchComm | None = None,
) -> DeviceMesh:
    """Returns a mesh in which each dimension communicates over one of `mesh_dim_comms`.

    This rank's coordinate in a dimension is its rank in the dimension's communicator. Collective
    over all ranks of the mesh. For the lives of communicators and groups see `get_process_group`.

    Args:
        mesh_dim_comms: for each dimension the communicator that this rank is in, all split from one
            communicator.
        mesh_dim_names: names of the dimensions.
        _global_comm: the communicator of all ranks of the mesh. By default the only communicator of
            `mesh_dim_comms`, or with several the communicator behind the default process group.

    Raises:
        ValueError: the numbers of names and communicators differ, or the communicators are not the
            rows and columns of one mesh.
    """
    comms, names = tuple(mesh_dim_comms), tuple(mesh_dim_names)
    if not comms or len(comms) != len(names):
        raise ValueError(
            f"init_device_mesh: {len(comms)} mesh_dim_comms and {len(names)} mesh_dim_names, "
            "wanted a name for each communicator, and one or more"
        )
    device = comms[0].get_device().type
    if _global_comm is None and len(comms) == 1:
        _global_comm = comms[0]
    if _global_comm is not None:
        get_process_group(_global_comm)  # first, since it may become the default group
    elif dist.is_initialized():
        _global_comm = get_comm(device=device)
    else:
        raise ValueError(
            "init_device_mesh: a mesh of several dimensions needs the communicator of all its "
            "ranks; pass _global_comm, the one that mesh_dim_comms were split from"
        )
    mesh = _layout(comms, _global_comm)
    groups = [get_process_group(comm) for comm in comms]
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], device, mesh_dim_names=names)
    return DeviceMesh.from_group(groups, device, mesh, mesh_dim_names=names)


def _layout(comms: tuple[TorchComm, ...], everyone: TorchComm) -> torch.Tensor:
    """Returns the global rank at every place of the mesh, from an exchange among the ranks."""
    shape = [comm.get_size() for comm in comms]
    mine = [comm.get_rank() for comm in comms]
    told = torch.empty(everyone.get_size(), 2 * len(comms), dtype=torch.int64)
    everyone.all_gather_single(told, torch.tensor(mine + shape), False)
    mesh = torch.full(shape, -1)
    fits = all(row[len(comms) :] == shape for row in told.tolist())
    for rank, row in zip(everyone.get_ranks(), told.tolist(), strict=True):
        if fits:
            mesh[tuple(row[: len(comms)])] = rank
    fits = fits and mesh.numel() == len(told) and bool((mesh >= 0).all())
    for dim, comm in enumerate(comms):
        line: list[slice | int] = list(mine)
        line[dim] = slice(None)
        fits = fits and mesh[tuple(line)].tolist() == comm.get_ranks()
    if not fits:
        raise ValueError(
            f"init_device_mesh: the communicators {[comm.get_name() for comm in comms]}, of ranks "
            f"{[comm.get_ranks() for comm in comms]} here, are not the lines of one mesh of shape "
            f"{tuple(shape)} over the {len(told)} ranks of {everyone.get_name()!r}; split them "
            "so that every rank has one place"
        )
    return mesh
