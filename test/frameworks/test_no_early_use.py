"""What torch's own parallelisms do uses no tensor of an asynchronous operation too early."""

import pytest

from frameworks.test_no_nccl_hazards import CASES, FIRST
from harness.parity import run_over
from harness.ranks import BACKEND, Ranks
from torchcomms_pg import check_async


def run_case(name, store):
    """Called in a rank; returns the rank's findings."""
    world, test, kwargs = CASES[name]
    check_async.start()
    try:
        run_over(BACKEND, store, world, test.over_one, kwargs, {})
    finally:
        findings = check_async.finish()
    return findings.as_dict()


@pytest.mark.parametrize(
    "name",
    [name if name in FIRST else pytest.param(name, marks=pytest.mark.slow) for name in CASES],
)
def test_what_frameworks_do_is_not_accused(name):
    with Ranks(CASES[name][0], init=False) as ranks:
        parts = ranks.run(run_case, name, ranks.store_args())
    report = check_async.merged(map(check_async.Findings.from_dict, parts))
    assert not report.found, f"{report}"
