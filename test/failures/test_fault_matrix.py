"""Every fault, over every library, raising or ending the process: see fault_matrix.py."""

import os

import pytest

from failures import fault_matrix
from harness.ranks import wait_for

pytestmark = pytest.mark.beyond_gloo


def segments():
    return {name for name in os.listdir("/dev/shm") if "torchcomms" in name}


@pytest.mark.stops_ranks
@pytest.mark.timeout(90)
@pytest.mark.parametrize("fault", fault_matrix.FAULTS)
@pytest.mark.parametrize(
    "quick", (True, pytest.param(False, marks=pytest.mark.slow)), ids=["quick", "rest"]
)
def test_each_cell_ends_in_time_with_the_right_error_on_every_rank(fault, quick):
    before = segments()
    cells = [cell for cell in fault_matrix.CELLS if cell[0] == fault]
    cells = [cell for cell in cells if (cell in fault_matrix.QUICK) == quick]
    results = dict(fault_matrix.run_matrix(cells, together=len(cells)))
    assert len(results) == len(cells)
    wrong = {" / ".join(cell): found for cell, found in results.items() if found}
    assert not wrong, "\n".join(f"{cell}: {line}" for cell in wrong for line in wrong[cell])
    assert wait_for(lambda: segments() <= before, 5), sorted(segments() - before)
