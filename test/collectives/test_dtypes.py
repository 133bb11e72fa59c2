"""The dtype tables of docs/api.md, held against both backends."""

import pytest
import torch
import torch.distributed as dist

from harness import catalogue
from harness.comms import each_backend, make, torchcomms
from harness.document import reducible
from harness.ranks import on_ranks
from harness.values import MOVABLE, all_data, assert_reduced, assert_same

pytestmark = pytest.mark.beyond_gloo

FACTOR = 0.5
MOVING = (
    "broadcast",
    "all_gather_single",
    "all_to_all_single",
    "gather_single",
    "scatter",
    "messages",
)


@on_ranks(2)
@each_backend
def test_every_reduction_takes_what_the_document_says(world, backend):
    comm, rank, ops = make("reducible", backend), dist.get_rank(), torchcomms().ReduceOp
    said = reducible()
    assert len(said) == 9
    for name, by_dtype in said.items():
        scaled = name == "PREMUL_SUM"
        op = ops.PREMUL_SUM(FACTOR) if scaled else getattr(ops, name)
        for dtype, cell in by_dtype.items():
            what = f"{name} of {dtype}"
            inputs = all_data(world, (world, 5), dtype)
            tensor, part = inputs[rank].clone(), torch.empty(5, dtype=dtype)
            if cell == "-":
                with pytest.raises((ValueError, TypeError)):
                    comm.all_reduce(tensor, op, False)
                continue
            if scaled:
                inputs = [x * FACTOR for x in inputs]
            reference = dist.ReduceOp.SUM if scaled else getattr(dist.ReduceOp, name)
            comm.reduce_scatter_single(part, tensor, op, False)
            assert_reduced(part, [x[rank] for x in inputs], reference, what)
            comm.all_reduce(tensor, op, True).wait()
            assert_reduced(tensor, inputs, reference, what)
            words = {"or": "any", "and": "all"}
            if cell in words:
                want = getattr(torch.stack(inputs), words[cell])(0)
                assert_same(tensor, want, what)
            else:
                assert cell in ("✓", "truncated"), what
    comm.finalize()


@on_ranks(2)
@each_backend
def test_every_dtype_moves(world, backend):
    comm = make("movable", backend)
    for dtype in (*MOVABLE, torch.uint16, torch.uint32, torch.uint64):
        case = catalogue.Case(world, 5)
        case.comm, case.dtype = comm, dtype
        for name in MOVING:
            catalogue.run(catalogue.TORCHCOMM[name], [case])
    comm.finalize()
