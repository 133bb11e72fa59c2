"""Every dtype and every reduce op, through both front ends."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from values import COMPLEX, FLOAT8, FLOATS, INTEGERS, MOVABLE, all_data, assert_reduced, assert_same

import torchcomms_pg
from gpu.here import Here, finish
from gpu.torchcomm import new_comm

ARITHMETIC = ("SUM", "PRODUCT", "MIN", "MAX", "AVG")
BITWISE = ("BAND", "BOR", "BXOR")
FACTOR = 0.5
LENGTH = 1003


def combinations(float8: bool) -> Iterator[tuple[torch.dtype, str]]:
    """Returns what docs/api.md says is reducible, as dtype and reduce op."""
    kinds = [
        (FLOATS, (*ARITHMETIC, "PREMUL_SUM")),
        ((*INTEGERS, torch.int16), (*ARITHMETIC, *BITWISE)),
        ((torch.bool,), ("SUM", "PRODUCT", "MIN", "MAX", *BITWISE)),
        (COMPLEX, ("SUM", "AVG", "PREMUL_SUM")),
        (FLOAT8 if float8 else (), ("SUM", "MIN", "MAX")),
    ]
    for dtypes, ops in kinds:
        for dtype in dtypes:
            for op in ops:
                yield dtype, op


def reduces_float8(device: torch.device) -> bool:
    """Whether NCCL has such kernels for the device; from Hopper on."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)


def reductions(here: Here) -> str:
    """Reduces every dtype with every op that takes it."""
    here.start()
    comm = new_comm(here, "reductions")
    float8 = reduces_float8(here.device)
    count = 0
    for dtype, op in combinations(float8):
        try:
            _reduce(here, comm, dtype, op)
        except Exception as error:
            raise AssertionError(f"{op} of {dtype}: {error}") from error
        count += 1
    comm.finalize()
    here.stop()
    left_out = "" if float8 else "; no 8-bit floats: NCCL reduces them from compute capability 9.0"
    return f"{count} pairs of dtype and reduce op{left_out}"


def _reduce(here: Here, comm: torchcomms_pg.TorchComm, dtype: torch.dtype, name: str) -> None:
    rank = here.rank
    inputs = all_data(here.ranks, (here.ranks, LENGTH), dtype)
    scaled = name == "PREMUL_SUM"
    wanted = [x * FACTOR for x in inputs] if scaled else inputs
    reference = dist.ReduceOp.SUM if scaled else getattr(dist.ReduceOp, name)
    op = dist._make_nccl_premul_sum(FACTOR) if scaled else reference
    ours = torchcomms_pg.ReduceOp
    our_op = ours.PREMUL_SUM(FACTOR) if scaled else getattr(ours, name)

    tensor, part = here.place(inputs[rank]), here.empty((LENGTH,), dtype)
    dist.reduce_scatter_tensor(part, tensor.view(-1), op)
    assert_reduced(part.cpu(), [x[rank] for x in wanted], reference, "reduce_scatter_tensor")
    finish(dist.all_reduce(tensor, op, async_op=True))
    assert_reduced(tensor.cpu(), wanted, reference, "all_reduce")

    tensor, part = here.place(inputs[rank]), here.empty((LENGTH,), dtype)
    comm.reduce_scatter_single(part, tensor.view(-1), our_op, True).wait()
    assert_reduced(part.cpu(), [x[rank] for x in wanted], reference, "reduce_scatter_single")
    comm.all_reduce(tensor, our_op, False)
    assert_reduced(tensor.cpu(), wanted, reference, "TorchComm.all_reduce")


def moves(here: Here) -> str:
    """Moves every dtype, bit by bit."""
    here.start()
    comm = new_comm(here, "moves")
    dtypes = (*MOVABLE, torch.uint16, torch.uint32, torch.uint64)
    for dtype in dtypes:
        try:
            _move(here, comm, dtype)
        except Exception as error:
            raise AssertionError(f"{dtype}: {error}") from error
    comm.finalize()
    here.stop()
    return f"{len(dtypes)} dtypes"


def _move(here: Here, comm: torchcomms_pg.TorchComm, dtype: torch.dtype) -> None:
    rank, ranks = here.rank, here.ranks
    rows = [x.to(dtype) for x in all_data(ranks, (ranks, 5), torch.int64)]
    mine, column = here.place(rows[rank]), torch.stack([row[rank] for row in rows])
    root = ranks - 1

    tensor = mine.clone()
    dist.broadcast(tensor, root)
    assert_same(tensor.cpu(), rows[root], "broadcast")
    everything = here.empty((ranks * ranks, 5), dtype)
    finish(dist.all_gather_into_tensor(everything, mine, async_op=True))
    assert_same(everything.cpu(), torch.cat(rows), "all_gather_into_tensor")
    tensor = here.empty((ranks, 5), dtype)
    dist.all_to_all_single(tensor, mine)
    assert_same(tensor.cpu(), column, "all_to_all_single")

    tensor = mine.clone()
    comm.broadcast(tensor, root, True).wait()
    assert_same(tensor.cpu(), rows[root], "TorchComm.broadcast")
    everything = here.empty((ranks * ranks, 5), dtype)
    comm.all_gather_single(everything, mine, False)
    assert_same(everything.cpu(), torch.cat(rows), "all_gather_single")
    tensor = here.empty((ranks, 5), dtype)
    comm.all_to_all_single(tensor, mine, True).wait()
    assert_same(tensor.cpu(), column, "TorchComm.all_to_all_single")
    batch, tensor = comm.batch_op_create(), here.empty((ranks, 5), dtype)
    batch.send(mine, (rank + 1) % ranks)
    batch.recv(tensor, (rank - 1) % ranks)
    batch.issue(False)
    assert_same(tensor.cpu(), rows[(rank - 1) % ranks], "messages")
