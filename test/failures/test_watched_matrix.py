"""Whom watched backends name, over every fault: see watched_matrix.py."""

import pytest
import torch

from failures import watched_matrix
from harness import gpus

pytestmark = [
    pytest.mark.beyond_gloo,
    pytest.mark.stops_ranks,
    pytest.mark.skipif(torch.__version__ < "2.14", reason="c10d has hooks from torch 2.14 on"),
]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("api", watched_matrix.APIS)
def test_the_right_rank_is_named_in_all_cells_but_one_and_a_wrong_one_in_none(api):
    cells = [cell for cell in watched_matrix.CELLS if cell[1] == api]
    if not cells:
        pytest.skip(gpus.missing())
    results = {}
    for _ in range(3):
        results.update(watched_matrix.run_matrix(cells))
        right, judged, wrong = watched_matrix.score(results)
        if right >= judged - 1:
            break
        # Ranks that wait for a core are not all heard in time.
        cells = [cell for cell, (kind, _) in results.items() if kind == "silent"]
    told = [f"{cell}: {outcome}" for cell, outcome in results.items() if outcome[0] != "right"]
    assert wrong == 0, "\n".join(told)
    # Gloo ends many cells itself, and more of them the longer ranks wait for a core.
    assert judged >= len(results) / 3 and right >= judged - 1, "\n".join(told)


@pytest.mark.parametrize(
    "head, ranks",
    [
        ("rank 1 has not arrived at all_reduce #2 (7 x Float), issued 2.5 s ago", {1}),
        ("ranks 0, 2 have not arrived at barrier #2; rank 1 did not answer", {0, 2}),
        ("rank 1 (global 5) did not answer, so that nobody knows whether it has arrived", set()),
        ("rank 1 (global 5) has not arrived at barrier #2, issued 2 s ago", {1}),
        (
            "ranks 0, 1 have not queued all_reduce #2, issued 2.5 s ago, and may wait elsewhere",
            set(),
        ),
        ("its ranks call different operations", set()),
        ("all ranks have arrived at barrier #2, issued 2 s ago, and it has not finished", set()),
    ],
)
def test_the_matrix_reads_whom_a_verdict_accuses(head, ranks):
    assert watched_matrix.accused(f"verdict on group '0', 3 ranks: {head}\n  rank 0: x") == ranks
