"""Collectives of Python objects, in the format of `torch.save`; methods of `TorchComm`.

All of them are synchronous. Objects may differ in size from rank to rank.

A rank accepts the objects that ``torch.load`` accepts with ``weights_only=True``: tensors, numbers,
strings, containers of these, and the classes added by `torch.serialization.add_safe_globals`. It
accepts objects of other classes only with ``weights_only=False``. Unpickling such objects executes
code that their bytes contain, so set it only among ranks that trust each other. An object that is
not accepted raises pickle.UnpicklingError on the rank that receives it, after the communication;
that rank's list is unchanged.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torchcomms_pg.comm import TorchComm


def _pack(value: object) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(value, file)
    # A bytearray, since torch warns of memory that is not writable.
    return torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)


def _unpack(what: str, data: torch.Tensor, rank: int, weights_only: bool) -> Any:
    try:
        return torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=weights_only)
    except pickle.UnpicklingError as error:
        if not weights_only:
            raise
        found = re.search(r"GLOBAL (\S+)", str(error))
        raise pickle.UnpicklingError(
            f"{what}: rank {rank} sent {found[1] if found else 'an object'}, which is not taken "
            "with weights_only=True; pass weights_only=False where all ranks can be trusted, or "
            "allow its class by torch.serialization.add_safe_globals"
        ) from error


def _check_length(what: str, argument: str, got: object, wanted: int) -> None:
    if not isinstance(got, Sequence) or len(got) != wanted:
        length = f"has {len(got)} entries" if isinstance(got, Sequence) else f"is {got!r}"
        raise ValueError(f"{what}: {argument} {length}, wanted a list of {wanted}, one per rank")


def _check_alone(what: str, comm: TorchComm) -> None:
    if comm._comm.in_batch:
        raise RuntimeError(
            f"{what}: called inside `with comm.group():`, which launches nothing before its end, "
            "while objects are sent after their sizes; call it before or after the block"
        )


def _check_nonempty(what: str, argument: str, got: Sequence[object]) -> None:
    if not got:
        raise ValueError(f"{what}: {argument} is empty; its length says how many objects move")


def all_gather_object(
    comm: TorchComm,
    object_list: list[Any],
    obj: object,
    timeout: timedelta | None = None,
    weights_only: bool = True,
) -> None:
    """Fills `object_list`, which has one entry per rank, with the ranks' `obj`.

    Args:
        object_list: its entries are replaced; one entry for each rank.
        obj: an object that `torch.save` can save.
        timeout: limit of each of the operations that this call issues.
        weights_only: whether to refuse, with pickle.UnpicklingError, objects other than tensors,
            numbers, strings and containers; unpickling them executes code.
    """
    _check_alone("all_gather_object", comm)
    _check_length("all_gather_object", "object_list", object_list, comm.get_size())
    mine = _pack(obj)
    sizes = torch.empty(comm.get_size(), dtype=torch.int64)
    comm.all_gather_single(sizes, torch.tensor([mine.numel()]), False, timeout=timeout)
    parts = [torch.empty(size, dtype=torch.uint8) for size in sizes.tolist()]
    comm.all_gather_v(parts, mine, False, timeout=timeout)
    object_list[:] = [
        _unpack("all_gather_object", part, rank, weights_only) for rank, part in enumerate(parts)
    ]


def gather_object(
    comm: TorchComm,
    obj: object,
    root: int,
    object_gather_list: list[Any] | None = None,
    timeout: timedelta | None = None,
    weights_only: bool = True,
) -> None:
    """Gathers the ranks' objects on one rank.

    Args:
        obj: an object that `torch.save` can save.
        root: the rank that gets the objects, from 0.
        object_gather_list: on `root` a list with one entry for each rank; its entries are replaced.
        timeout, weights_only: as of `all_gather_object`.
    """
    _check_alone("gather_object", comm)
    rank, size = comm.get_rank(), comm.get_size()
    comm._check_rank("gather_object", "root", root)
    if rank == root:
        _check_length("gather_object", "object_gather_list", object_gather_list, size)
    mine = _pack(obj)
    sizes = torch.empty(size, dtype=torch.int64) if rank == root else None
    comm.gather_single(sizes, torch.tensor([mine.numel()]), root, False, timeout=timeout)
    if sizes is None or object_gather_list is None:
        comm.send(mine, root, False, timeout=timeout)
        return
    parts = [torch.empty(length, dtype=torch.uint8) for length in sizes.tolist()]
    parts[root] = mine
    batch = comm.batch_op_create()
    for peer in range(size):
        if peer != root:
            batch.recv(parts[peer], peer)
    batch.issue(False, timeout=timeout)
    object_gather_list[:] = [
        _unpack("gather_object", part, peer, weights_only) for peer, part in enumerate(parts)
    ]


def broadcast_object_list(
    comm: TorchComm,
    object_list: list[Any],
    root: int,
    timeout: timedelta | None = None,
    weights_only: bool = True,
) -> None:
    """Replaces the entries of `object_list`, equally many on all ranks, by the entries of `root`.

    Args:
        object_list: on `root` objects that `torch.save` can save.
        root: the rank whose objects are sent, from 0.
        timeout, weights_only: as of `all_gather_object`.
    """
    _check_alone("broadcast_object_list", comm)
    comm._check_rank("broadcast_object_list", "root", root)
    _check_nonempty("broadcast_object_list", "object_list", object_list)
    is_root = comm.get_rank() == root
    packed = [_pack(obj) for obj in object_list] if is_root else []
    sizes = torch.tensor([part.numel() for part in packed] or [0] * len(object_list))
    comm.broadcast(sizes, root, False, timeout=timeout)
    data = torch.cat(packed) if is_root else torch.empty(int(sizes.sum()), dtype=torch.uint8)
    comm.broadcast(data, root, False, timeout=timeout)
    if not is_root:
        object_list[:] = [
            _unpack("broadcast_object_list", part, root, weights_only)
            for part in data.split(sizes.tolist())
        ]


def scatter_object_list(
    comm: TorchComm,
    root: int,
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    timeout: timedelta | None = None,
    weights_only: bool = True,
) -> None:
    """Sets ``scatter_object_output_list[0]`` to this rank's entry of the root's input list.

    Args:
        root: the rank that has the objects, from 0.
        scatter_object_output_list: a list of one or more entries, of which the first is replaced.
        scatter_object_input_list: on `root` an object for each rank.
        timeout, weights_only: as of `all_gather_object`.
    """
    _check_alone("scatter_object_list", comm)
    rank, size = comm.get_rank(), comm.get_size()
    comm._check_rank("scatter_object_list", "root", root)
    _check_nonempty("scatter_object_list", "scatter_object_output_list", scatter_object_output_list)
    length = torch.empty(1, dtype=torch.int64)
    if rank != root:
        comm.scatter(length, [], root, False, timeout=timeout)
        data = torch.empty(int(length), dtype=torch.uint8)
        comm.recv(data, root, False, timeout=timeout)
        scatter_object_output_list[0] = _unpack("scatter_object_list", data, root, weights_only)
        return
    _check_length(
        "scatter_object_list", "scatter_object_input_list", scatter_object_input_list, size
    )
    packed = [_pack(obj) for obj in scatter_object_input_list or []]
    lengths = [torch.tensor([part.numel()]) for part in packed]
    comm.scatter(length, lengths, root, False, timeout=timeout)
    batch = comm.batch_op_create()
    for peer in range(size):
        if peer != root:
            batch.send(packed[peer], peer)
    batch.issue(False, timeout=timeout)
    scatter_object_output_list[0] = _unpack("scatter_object_list", packed[root], root, weights_only)


def send_object_list(
    comm: TorchComm, object_list: Sequence[object], dst: int, timeout: timedelta | None = None
) -> None:
    """Sends the entries of `object_list` to rank `dst`."""
    _check_alone("send_object_list", comm)
    _check_nonempty("send_object_list", "object_list", object_list)
    packed = [_pack(obj) for obj in object_list]
    comm.send(torch.tensor([part.numel() for part in packed]), dst, False, timeout=timeout)
    comm.send(torch.cat(packed), dst, False, timeout=timeout)


def recv_object_list(
    comm: TorchComm,
    object_list: list[Any],
    src: int,
    timeout: timedelta | None = None,
    weights_only: bool = True,
) -> None:
    """Replaces the entries of `object_list`, as many as were sent, by rank `src`'s entries.

    Args:
        object_list: its length says how many objects are received.
        src: the rank that sends, from 0.
        timeout, weights_only: as of `all_gather_object`.
    """
    _check_alone("recv_object_list", comm)
    _check_nonempty("recv_object_list", "object_list", object_list)
    sizes = torch.empty(len(object_list), dtype=torch.int64)
    comm.recv(sizes, src, False, timeout=timeout)
    data = torch.empty(int(sizes.sum()), dtype=torch.uint8)
    comm.recv(data, src, False, timeout=timeout)
    object_list[:] = [
        _unpack("recv_object_list", part, src, weights_only) for part in data.split(sizes.tolist())
    ]
