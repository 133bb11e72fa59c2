"""The dtype tables of docs/api.md, held against both backends."""

import pytest
import torch

from harness import catalogue
from harness.comms import each_backend, make
from harness.document import reducible
from harness.values import MOVABLE

pytestmark = pytest.mark.beyond_gloo

REDUCING = ("all_reduce", "reduce", "reduce_scatter_single")
MOVING = (
    "broadcast",
    "all_gather_single",
    "all_to_all_single",
    "gather_single",
    "scatter",
    "messages",
)
LOGICAL = {"or": torch.any, "and": torch.all}


class Reduced(catalogue.Case):
    """A reduction of which the document says something."""

    def check_reduced(self, got, inputs):
        super().check_reduced(got, inputs)
        if self.said in LOGICAL:
            self.check(got, LOGICAL[self.said](torch.stack(inputs), 0))

    def finish(self, name, work):
        super().finish(name, work)
        assert work.is_completed() and work.status().name == "COMPLETED"
        assert work.exception() is None


@pytest.mark.ranks((1, 2, 3))
@each_backend
def test_every_reduction_takes_what_the_document_says(world, backend):
    comm, document = make("reducible", backend), reducible()
    assert len(document) == 9
    for op, by_dtype in document.items():
        for dtype, said in by_dtype.items():
            case = Reduced(world, 5, comm=comm, dtype=dtype, ops=(op,), said=said)
            if said == "-":
                for native in case.each_op():
                    with pytest.raises((ValueError, TypeError)):
                        case.call("all_reduce", case.mine(), native)
                continue
            assert said in ("✓", "truncated", *LOGICAL), f"{op} of {dtype}"
            for name in REDUCING:
                catalogue.run(catalogue.TORCHCOMM[name], case.over(("sync", "async")))
    comm.finalize()


@pytest.mark.ranks(2)
@each_backend
def test_every_dtype_moves(world, backend):
    comm = make("movable", backend)
    for dtype in (*MOVABLE, torch.uint16, torch.uint32, torch.uint64):
        case = catalogue.Case(world, 5, comm=comm, dtype=dtype)
        for name in MOVING:
            catalogue.run(catalogue.TORCHCOMM[name], [case])
    comm.finalize()
