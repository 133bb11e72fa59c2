"""Makes this process a rank of a large job for torch.distributed, without peers."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from torchcomms_pg.plan import objects
from torchcomms_pg.plan.group import NAME, PlanGroup
from torchcomms_pg.plan.program import Made
from torchcomms_pg.plan.recorder import current, start
from torchcomms_pg.plan.store import PlanStore

NO_CUDA = (
    "torchcomms_pg.plan: the program asks for {what}, and this torch has no CUDA device. Let the "
    "program take its device from an argument, and give it cpu or meta; groups may be called nccl"
)


class NoCudaError(RuntimeError):
    """Raised if the program asks for CUDA, and no device of it is there."""


def enter(rank: int, size: int, per_host: int) -> None:
    """Makes this process a rank of a job of `size` ranks, `per_host` of them on each host.

    Changes what torch.distributed does in this process. The process is not to be used otherwise.
    """
    recorder = start(rank)
    host = rank // per_host
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(rank % per_host),
        LOCAL_WORLD_SIZE=str(min(per_host, size - host * per_host)),
        GROUP_RANK=str(host),
        GROUP_WORLD_SIZE=str(-(-size // per_host)),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="1",
        TORCHELASTIC_RUN_ID="plan",
        TORCH_DIST_INIT_BARRIER="0",
    )
    world = _World(rank, size)
    dist.Backend.register_backend(NAME, world.make, extended_api=True, devices=["cpu", "cuda"])
    _replace("init_process_group", world.init_process_group)
    _replace("_new_group_with_tag", world.new_group)
    _replace("split_group", world.split_group)
    _replace("batch_isend_irecv", _batch)
    objects.install(_replace)
    _watch_meshes()
    assert recorder is current()


def _replace(name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replaces a function of torch.distributed, in each module of torch that has its name."""
    from torch.distributed import device_mesh

    old = getattr(c10d, name)
    new = functools.wraps(old)(make(old))
    for module in (c10d, dist, device_mesh):
        if getattr(module, name, None) is old:
            setattr(module, name, new)


class _World:
    """Makes the groups of one rank."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        self._next = 0  # index of the call that makes the group which `make` is asked for

    def make(self, options: Any, backend_options: Any = None) -> PlanGroup:
        """Returns a group; c10d calls it."""
        made = current().program.made[self._next]
        return PlanGroup(
            options.group_rank,
            options.group_size,
            self._next,
            str(options.group_id),
            made.description,
        )

    def _record(
        self,
        lists: Sequence[Sequence[int]],
        names: Sequence[str],
        description: str,
        backend: object,
        everyone: bool,
    ) -> None:
        made = Made(
            tuple(map(tuple, lists)),
            tuple(names),
            description,
            _told(backend),
            everyone,
            current().where(),
        )
        self._next = current().made(made)

    def init_process_group(self, old: Callable[..., Any]) -> Callable[..., Any]:
        def init_process_group(
            backend: str | None = None,
            init_method: str | None = None,
            timeout: Any = None,
            world_size: int = -1,
            rank: int = -1,
            store: Any = None,
            group_name: str = "",
            pg_options: Any = None,
            device_id: Any = None,
            **kwargs: Any,
        ) -> None:
            if world_size not in (-1, self._size) or rank not in (-1, self._rank):
                raise ValueError(
                    f"init_process_group: rank {rank} of {world_size}, but the plan runs rank "
                    f"{self._rank} of {self._size}; take them from RANK and WORLD_SIZE"
                )
            _refuse_cuda(device_id)
            ranks = range(self._size)
            self._record([ranks], ["0"], "default_pg", backend, True)
            old(
                NAME,
                store=PlanStore(),
                rank=self._rank,
                world_size=self._size,
                timeout=timeout,
            )

        return init_process_group

    def new_group(self, old: Callable[..., Any]) -> Callable[..., Any]:
        def new_group(
            ranks: Sequence[int] | None = None,
            timeout: Any = None,
            backend: Any = None,
            backend_options: Any = None,
            pg_tag: Any = None,
            use_local_synchronization: bool = False,
            group_desc: str | None = None,
            device_id: Any = None,
            **kwargs: Any,
        ) -> Any:
            _refuse_cuda(device_id)
            wanted = list(range(self._size) if ranks is None else ranks)
            if kwargs.get("sort_ranks", True):
                wanted.sort()
            if use_local_synchronization and self._rank not in wanted:
                return None
            name = c10d._process_group_name(wanted, use_hashed_name=use_local_synchronization)
            if not use_local_synchronization:
                c10d._world.group_count -= 1  # the call below counts it
            asked = backend or current().program.made[0].backend
            self._record(
                [wanted], [name], group_desc or "undefined", asked, not use_local_synchronization
            )
            return old(
                ranks,
                timeout=timeout,
                backend=NAME,
                pg_tag=pg_tag,
                use_local_synchronization=use_local_synchronization,
                group_desc=group_desc,
                **kwargs,
            )

        return new_group

    def split_group(self, old: Callable[..., Any]) -> Callable[..., Any]:
        def split_group(
            parent_pg: Any = None,
            split_ranks: Sequence[Sequence[int]] | None = None,
            timeout: Any = None,
            pg_options: Any = None,
            group_desc: str | None = None,
            **kwargs: Any,
        ) -> Any:
            parent: Any = parent_pg or c10d._get_default_group()
            if not split_ranks:
                raise ValueError("split_group: split_ranks is empty, wanted a list of lists")
            of_parent = dist.get_process_group_ranks(parent)
            lists = [sorted(of_parent[rank] for rank in some) for some in split_ranks]
            mine = next((some for some in lists if self._rank in some), None)
            names = [c10d._process_group_name(some, use_hashed_name=True) for some in lists]
            above = current().program.made[parent.made]
            whole = len(of_parent) == self._size
            self._record(lists, names, group_desc or "undefined", above.backend, whole)
            if mine is None:
                return None
            made = len(current().program.made) - 1
            name = names[lists.index(mine)]
            group = PlanGroup(
                mine.index(self._rank), len(mine), made, name, group_desc or "undefined"
            )
            c10d._register_process_group(name, group)
            world = c10d._world
            world.pg_map[group] = (NAME, PlanStore())
            world.pg_names[group] = name
            world.pg_backend_config[group] = str(c10d.BackendConfig(dist.Backend(NAME)))
            world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(mine)}
            world.pg_to_tag[group] = "ptd:" + name
            world.tags_to_pg.setdefault("ptd:" + name, []).append(group)
            return group

        return split_group


def _batch(old: Callable[..., Any]) -> Callable[..., Any]:
    def batch_isend_irecv(p2p_op_list: Any) -> Any:
        with current().batch():
            return old(p2p_op_list)

    return batch_isend_irecv


def _told(backend: object) -> str:
    """Returns the name of the backend that nccl or gloo stands for, without its device."""
    names = {each.rpartition(":")[2] for each in str(backend or "undefined").lower().split(",")}
    return "nccl" if "nccl" in names else min(names)


def _refuse_cuda(device: Any) -> None:
    kind = getattr(device, "type", device)
    if isinstance(kind, str) and kind.startswith("cuda") and not torch.cuda.is_available():
        raise NoCudaError(NO_CUDA.format(what=f"device {device}"))


def _watch_meshes() -> None:
    """Notes each mesh of the whole job, and refuses meshes of CUDA without a device of it."""
    from torch.distributed import device_mesh

    old = device_mesh.DeviceMesh.__init__

    @functools.wraps(old)
    def init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        _refuse_cuda(device_type)
        old(self, device_type, *args, **kwargs)
        names = tuple(self.mesh_dim_names or ())
        shape = tuple(self.mesh.shape)
        flat = self.mesh.flatten().tolist()
        mesh = (shape, names)
        if flat == list(range(dist.get_world_size())) and mesh not in current().program.meshes:
            current().program.meshes.append(mesh)

    device_mesh.DeviceMesh.__init__ = init  # type: ignore[method-assign]
