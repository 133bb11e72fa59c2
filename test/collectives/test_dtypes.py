"""The dtype tables of docs/api.md, held against both backends."""

import pytest
import torch
import torch.distributed as dist

from harness import ROOT
from harness.comms import each_backend, make, torchcomms
from harness.ranks import on_ranks
from harness.values import (
    COMPLEX,
    FLOAT8,
    FLOATS,
    MOVABLE,
    all_data,
    assert_reduced,
    assert_same,
    data,
)

pytestmark = pytest.mark.beyond_gloo

DOCUMENT = ROOT / "docs" / "api.md"
COLUMNS = {
    "floats 16 to 64 bit": FLOATS,
    "float8": FLOAT8,
    "int8, uint8, int32, int64": (torch.int8, torch.uint8, torch.int32, torch.int64),
    "int16": (torch.int16,),
    "bool": (torch.bool,),
    "complex": COMPLEX,
}
FACTOR = 0.5


def table():
    """{reduce op: {dtype: what the document says}}."""
    lines = DOCUMENT.read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("| reduce op |"))
    header, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines[first : lines.index("", first)]
    ]
    assert header[1:] == list(COLUMNS)
    found = {}
    for first_cell, *cells in rows:
        names = first_cell.split(", ")
        for position, name in enumerate(names):
            by_dtype = found[name.split("(")[0]] = {}
            for column, cell in zip(header[1:], cells, strict=True):
                each = cell.split(", ")  # one for every name, or one for all
                said = each[position] if len(each) == len(names) else cell
                by_dtype.update((dtype, said) for dtype in COLUMNS[column])
    return found


@on_ranks(2)
@each_backend
def test_every_reduction_takes_what_the_document_says(world, backend):
    comm, rank, ops = make("reducible", backend), dist.get_rank(), torchcomms().ReduceOp
    said = table()
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
    comm, rank = make("movable", backend), dist.get_rank()
    other, root = 1 - rank, rank == 0
    for dtype in (*MOVABLE, torch.uint16, torch.uint32, torch.uint64):
        rows = [data(r, (world, 3), torch.int64).to(dtype) for r in range(world)]
        mine, got, all_of = rows[rank], torch.empty(world, 3, dtype=dtype), torch.cat(rows)
        whole = torch.empty(2 * world, 3, dtype=dtype)
        tensor = mine.clone()
        comm.broadcast(tensor, 1, False)
        assert_same(tensor, rows[1], f"broadcast of {dtype}")
        comm.all_gather_single(whole, mine, False)
        assert_same(whole, all_of, f"all_gather_single of {dtype}")
        comm.all_to_all_single(got, mine, False)
        assert_same(got, torch.stack([row[rank] for row in rows]), f"all_to_all_single of {dtype}")
        comm.gather_single(whole.zero_() if root else None, mine, 0, False)
        comm.scatter(got, list(rows) if root else [], 0, False)
        assert_same(got, mine, f"scatter of {dtype}")
        if root:
            assert_same(whole, all_of, f"gather_single of {dtype}")
        batch = comm.batch_op_create()
        batch.send(mine, other)
        batch.recv(got, other)
        batch.issue(False)
        assert_same(got, rows[other], f"messages of {dtype}")
    comm.finalize()
