"""SIGABRT: a rank first says in which operation it ends, and leaves word; then it aborts."""

import datetime
import json
import os
import re
import signal

import pytest
import torch
import torch.distributed as dist

import torchcomms_pg
from harness.programs import run_python
from harness.ranks import Ranks, connect_store, wait_for
from torchcomms_pg.testing.rank import receive, report

pytestmark = pytest.mark.beyond_gloo
WATCHED = pytest.mark.skipif(torch.__version__ < "2.14", reason="c10d has hooks from 2.14 on")
PAIR = """
    import faulthandler, os, signal, sys, threading
    import torch, torch.distributed as dist, torchcomms_pg

    def join(rank):
        comms[rank] = torchcomms_pg.new_comm(
            "shm", torch.device("cpu"), "pair", store=store, rank=rank, size=2
        )

    def join_both():
        threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    store, comms = dist.HashStore(), {}
"""


def sums(args, backend):
    """Runs two all_reduces. Before the second, rank 1 of `torchcomms` ends its process.

    Rank 1 of `gloo` gives more elements than rank 0, in which Gloo then ends the process.
    """
    rank = int(os.environ["RANK"])
    os.environ["TORCHELASTIC_ERROR_FILE"] = f"{os.environ['TORCH_FR_DUMP_TEMP_FILE']}error{rank}"
    torchcomms_pg.diagnosis.settings.configure()
    if backend == "gloo":
        torchcomms_pg.watch(timeout=datetime.timedelta(seconds=300))
    dist.init_process_group(backend, store=connect_store(*args), rank=rank, world_size=2)
    dist.all_reduce(torch.ones(1))
    if rank == 1 and backend == "torchcomms":
        report("ready")
        receive()
        os.abort()
    dist.all_reduce(torch.ones(7 if rank == 1 else 1))


@pytest.mark.parametrize(
    ("backend", "aborts", "says", "leaves"),
    [
        pytest.param(
            "torchcomms",
            1,
            r"ended by SIGABRT, after all_reduce #1 \(1 x Float.*?\) of group '0'",
            r"; rank 1 ended by SIGABRT, after all_reduce #1 \(1 x Float",
            id="torchcomms",
        ),
        pytest.param(
            "gloo",
            0,
            r"ended by SIGABRT \(gloo::EnforceNotMet: \[enforce fail .*\) while all_reduce #2 "
            r"\(1 x Float.*?\) of group '0', called at \S*test_sigabrt\.py:\d+ in sums.*?, "
            r"had waited \S+ s",
            r"all_reduce #2 \(7 x Float.*?\) of group '0' has failed; rank 0 ended by SIGABRT "
            r"\(gloo::EnforceNotMet: .*\) while all_reduce #2 \(1 x Float.*after all_reduce #1",
            id="watched",
            marks=WATCHED,
        ),
    ],
)
def test_a_rank_that_aborts_says_where_and_the_other_rank_says_so(
    tmp_path, backend, aborts, says, leaves
):
    places = {
        "TORCHCOMMS_PG_STATUS": str(tmp_path / "status"),
        "TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "dump_"),
    }
    for _ in range(3):  # a rank that is stopped for a second aborts at once
        with Ranks(2, init=False, env=places) as ranks:
            ranks.start(sums, ranks.store_args(), backend)
            if backend == "torchcomms":
                ranks.wait_report(1)
                ranks.tell(1, "abort")
            assert ranks.exit_code(aborts) == -signal.SIGABRT
            error = ranks.wait(ranks=[1 - aborts])[0].error
            told = lambda: re.search(leaves, ranks.output(1 - aborts) + error)  # noqa: E731
            said = ranks.output(aborts)
            # A watched group finds the reason of an error in another thread.
            if re.search(rf"\[rank {aborts}\] torchcomms_pg: {says}", said) and wait_for(told):
                break
    else:
        pytest.fail(said + error)
    assert (tmp_path / f"dump_{aborts}").exists()
    # torchrun's summary has the line.
    summary = json.loads((tmp_path / f"dump_error{aborts}").read_text())["message"]["extraInfo"]
    assert re.search(says, summary["py_callstack"])


def test_a_handler_that_the_program_had_before_gets_sigabrt_and_a_forked_child_says_nothing():
    program = f"""{PAIR}
    faulthandler.enable()
    join_both()
    child = os.fork()
    if child == 0:
        os.abort()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGABRT
    print("the child has ended", file=sys.stderr, flush=True)
    os.abort()
    """
    for _ in range(3):  # a process without a core aborts at once
        ended = run_python("-c", program)
        assert ended.returncode == -signal.SIGABRT, ended.stderr
        childs, own = ended.stderr.split("the child has ended\n")
        assert "SIGABRT" not in childs
        assert childs.count("Fatal Python error: Aborted") == 1
        line, _, rest = own.partition("\n")
        if re.fullmatch(r"\[rank [01]\] torchcomms_pg: ended by SIGABRT", line):
            break
    else:
        pytest.fail(own)
    assert rest.startswith("Fatal Python error: Aborted"), own


@pytest.mark.parametrize("sigint", ["signal.default_int_handler", "signal.SIG_IGN"])
def test_a_handler_in_python_keeps_sigabrt(sigint):
    """A shell that starts a program in the background has it ignore SIGINT."""
    program = f"""
    import signal
    signal.signal(signal.SIGINT, {sigint}){PAIR}
    signal.signal(signal.SIGABRT, lambda *_: print("handled", flush=True))
    join_both()
    signal.raise_signal(signal.SIGABRT)
    for comm in comms.values():
        comm.finalize()
    print("goes on")
    """
    ended = run_python("-c", program)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "handled\ngoes on\n" and "SIGABRT" not in ended.stderr
