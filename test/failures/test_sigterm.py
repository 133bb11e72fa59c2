"""SIGTERM: a rank first says whom it waits for, and dumps; then the signal does what it did."""

import contextlib
import datetime
import json
import os
import re
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist

import torchcomms_pg
from harness.programs import run_python
from harness.ranks import Ranks, check, connect_store, wait_for
from torchcomms_pg.status.__main__ import main
from torchcomms_pg.testing.rank import receive, report

pytestmark = pytest.mark.beyond_gloo
WATCHED = pytest.param(
    "gloo",
    marks=pytest.mark.skipif(torch.__version__ < "2.14", reason="c10d has hooks from 2.14 on"),
)
SOON = 20.0
AGAIN = 2.0  # longer than a signal is kept
WAITED = (
    r"SIGTERM (?:came )?while all_reduce #2 \(1024 x Float.*?\) of group '\w+' had waited \S+ s"
)


@pytest.fixture
def started(tmp_path, monkeypatch, capsys):
    """Returns a function that starts two ranks, and returns them when rank 0 waits for rank 1."""
    folder = str(tmp_path / "status")
    monkeypatch.setenv("TORCHCOMMS_PG_STATUS", folder)

    def waits():
        capsys.readouterr()
        main(["--json", "--late", "0.1"])
        printed = capsys.readouterr().out
        groups = json.loads(printed)["groups"] if printed else []
        return any(group["waits"] and group["waits"]["waits_for"] == [1] for group in groups)

    @contextlib.contextmanager
    def start(*args, **variables):
        places = {
            "TORCHCOMMS_PG_STATUS": folder,
            "TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "dump_"),
        }
        with Ranks(2, init=False, env=places | variables) as ranks:
            ranks.start(rank_0_waits, ranks.store_args(), *args)
            ranks.wait_report(1)
            assert wait_for(waits, SOON), ranks.output(0)
            yield ranks

    return start


def stays_away():
    report("away")
    receive()


def rank_0_waits(args, backend, handles=False, sigint=signal.default_int_handler):
    store = connect_store(*args)
    if backend == "gloo":
        torchcomms_pg.watch(timeout=datetime.timedelta(seconds=300))
    rank = int(os.environ["RANK"])
    os.environ["TORCHELASTIC_ERROR_FILE"] = f"{os.environ['TORCH_FR_DUMP_TEMP_FILE']}error{rank}"
    signal.signal(signal.SIGINT, sigint)
    torchcomms_pg.diagnosis.settings.configure()
    dist.init_process_group(backend, store=store, rank=rank, world_size=2)
    dist.all_reduce(torch.ones(7))
    if handles:
        signal.signal(signal.SIGTERM, lambda *_: print("handled", file=sys.stderr, flush=True))
    if rank == 1:
        stays_away()
    dist.all_reduce(torch.ones(1024))


@pytest.mark.parametrize("backend", ["torchcomms", WATCHED])
def test_a_rank_that_sigterm_ends_says_that_it_waited_and_dumps(started, tmp_path, backend):
    for _ in range(3):  # a rank that is stopped for a second passes the signal on at once
        with started(backend) as ranks:
            begun = time.monotonic()
            ranks.kill(0, signal.SIGTERM)
            assert ranks.exit_code(0) == -signal.SIGTERM
            assert time.monotonic() - begun < SOON
            ranks.kill(1, signal.SIGTERM)
            assert ranks.exit_code(1) == -signal.SIGTERM
            assert "SIGTERM" not in ranks.output(1)  # it waited for no rank
            said = ranks.output(0)
        if re.search(rf"\[rank 0\] torchcomms_pg: ended by {WAITED}", said):
            break
    else:
        pytest.fail(said)
    assert (tmp_path / "dump_0").exists()
    # torchrun's summary has the line.
    told = json.loads((tmp_path / "dump_error0").read_text())["message"]["extraInfo"]
    assert re.search(f"ended by {WAITED}", told["py_callstack"])
    assert told["ranks"] in ([1], [])  # a rank without a core does not tell in time


@pytest.mark.parametrize(
    ("backend", "sigint"),
    [
        ("torchcomms", signal.default_int_handler),
        ("torchcomms", signal.SIG_IGN),  # as of a program that a shell starts in the background
        pytest.param("gloo", signal.default_int_handler, marks=WATCHED.marks),
    ],
)
def test_sigterm_names_the_missing_rank_and_its_line_before_a_later_handler(
    started, backend, sigint
):
    named = WAITED + r" for rank 1, at .*test_sigterm.py:\d+ in stays_away"
    with started(backend, True, sigint) as ranks:
        sent = 0.0

        def said():
            nonlocal sent
            if time.monotonic() - sent > AGAIN:
                ranks.kill(0, signal.SIGTERM)
                sent = time.monotonic()
            return re.search(named, ranks.output(0))

        # A rank that is stopped passes the signal on at once, or does not tell its line in time.
        assert wait_for(said, SOON), ranks.output(0)
        named_at = re.search(named, ranks.output(0)).start()
        if backend == "gloo":  # Python's handlers run when its call has returned
            ranks.tell(1, "go on")
        handled = lambda: ranks.output(0).rfind("handled") > named_at  # noqa: E731
        assert wait_for(handled, SOON), ranks.output(0)
        if backend != "gloo":
            ranks.tell(1, "go on")
        check(ranks.wait())


def test_sigterm_says_nothing_if_the_environment_forbids_it(started):
    with started("torchcomms", TORCHCOMMS_PG_SIGTERM="0") as ranks:
        ranks.kill(0, signal.SIGTERM)
        assert ranks.exit_code(0) == -signal.SIGTERM
        assert "SIGTERM" not in ranks.output(0)


def test_a_forked_child_and_a_process_whose_groups_have_ended_get_sigterm_at_once():
    program = """
        import os, signal, threading, time
        import torch, torch.distributed as dist, torchcomms_pg

        store, comms = dist.HashStore(), {}

        def join(rank):
            comms[rank] = torchcomms_pg.new_comm(
                "shm", torch.device("cpu"), "pair", store=store, rank=rank, size=2
            )

        threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        child = os.fork()
        if child == 0:
            time.sleep(100)
        time.sleep(1)  # the monitor looks at the handler meanwhile
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        for rank in range(2):
            comms.pop(rank).finalize()
        signal.signal(signal.SIGTERM, lambda *_: print("handled", flush=True))
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(100)
    """
    ended = run_python("-c", program)
    assert ended.returncode == -signal.SIGTERM, ended.stderr
    assert ended.stdout == "handled\n"
