"""Which failures raise, which end the process, and who says so."""

import datetime
import os
import pathlib
import re
import signal
import tempfile
import time

import pytest
import torch
import torch.distributed as dist

import torchcomms_pg
from harness.ranks import Ranks, init_default_group, wait_for
from torchcomms_pg.testing.rank import receive, report

pytestmark = pytest.mark.beyond_gloo
FREE = ("TORCHCOMM_ABORT_ON_ERROR", "TORCH_NCCL_ASYNC_ERROR_HANDLING")
JOINING = datetime.timedelta(seconds=60)
TOLD = "torchcomms_pg ends this process"


def fail(args, device, option):
    """Rank 1 aborts the group that rank 0 operates on; the error, where it is raised."""
    rank = int(os.environ["RANK"])
    if device != "cpu":
        import simulated

        simulated.install()
        torchcomms_pg.registration.serve_host_device("sim")
    options = torchcomms_pg.Backend.Options()
    assert options.abort_process_on_timeout_or_error is None
    options.abort_process_on_timeout_or_error = option
    init_default_group(*args, rank, 2, 60, pg_options=options)
    assert dist.all_reduce(torch.ones(1, device=device), async_op=True).wait(JOINING)
    comm = torchcomms_pg.get_comm(device=device)
    if rank == 1:
        receive()  # rank 0 is done with it, too
        comm.abort()
        return comm.get_options().abort_process_on_timeout_or_error
    report("joined")
    try:
        work = dist.all_reduce(torch.ones(1, device=device), async_op=True)
        work.wait(JOINING)
        dist.all_reduce(torch.ones(1, device=device))
    except torchcomms_pg.CommError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize(
    "device, option, env, ends",
    [
        ("cpu", None, {}, False),
        ("cpu", None, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, False),  # as torchrun sets it
        ("cpu", None, {"TORCHCOMM_ABORT_ON_ERROR": "true"}, True),
        ("cpu", False, {"TORCHCOMM_ABORT_ON_ERROR": "true"}, False),
        ("sim:0", None, {}, True),
        ("sim:0", None, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, False),
        ("sim:0", None, {"TORCHCOMM_ABORT_ON_ERROR": "false"}, False),
        ("sim:0", True, {"TORCHCOMM_ABORT_ON_ERROR": "false"}, True),
    ],
)
def test_the_option_goes_before_the_variables_and_those_before_the_device(
    device, option, env, ends
):
    unset = [name for name in FREE if name not in env]
    with Ranks(2, init=False, env=env, delete_env=unset) as ranks:
        ranks.start(fail, ranks.store_args(), device, option)
        ranks.wait_report(0)
        ranks.tell(1, "abort")
        first, second = ranks.wait(60)
        assert second.ok and second.value is ends, second
        if ends:
            assert ranks.exit_code(0) == 1 and TOLD in ranks.output(0), (first, ranks.output(0))
            for said in ("TORCHCOMM_ABORT_ON_ERROR=false", "pg_options"):
                assert said in ranks.output(0)
        else:
            told = r"aborted on rank 1|rank 1 .*revoked"  # NCCL does not carry the reason
            assert first.ok and re.search(told, first.value), first


def end_first(args, folder):
    """Rank 0 waits in vain and ends; rank 1 calls nothing."""
    rank = int(os.environ["RANK"])
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = os.path.join(folder, "trace_")
    init_default_group(*args, rank, 2, 60)
    dist.all_reduce(torch.ones(1))
    report("ready")
    receive()
    if rank == 0:
        torchcomms_pg.get_comm().set_timeout(datetime.timedelta(seconds=1))
        dist.all_reduce(torch.ones(1))


@pytest.mark.torch_version
def test_who_ends_first_waits_for_the_dumps_of_the_others():
    """For so long: rank 1 is stopped, and so has none."""
    with tempfile.TemporaryDirectory(prefix="torchcomms_pg-ending-") as folder:
        with Ranks(2, init=False, env={"TORCHCOMM_ABORT_ON_ERROR": "true"}) as ranks:
            ranks.start(end_first, ranks.store_args(), folder)
            for rank in range(2):
                ranks.wait_report(rank)
            ranks.kill(1, signal.SIGSTOP)
            ranks.tell(0, "go on")
            assert "exit code 1" in ranks.wait(60, ranks=[0])[0].died
            waited = time.time() - (pathlib.Path(folder) / "trace_0").stat().st_mtime
            assert waited > 1.4, f"rank 0 ended {waited:.2f} s after its own dump"
            ranks.kill(1, signal.SIGCONT)
            assert wait_for((pathlib.Path(folder) / "trace_1").exists, 30)
