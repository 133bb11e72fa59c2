"""Ranks that wait in init_process_group, where they have no group yet in which they could ask."""

import datetime
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.distributed as dist

import torchcomms_pg
from harness import ROOT
from harness.programs import end_tree
from harness.ranks import Ranks, check, connect_store, wait_for
from torchcomms_pg import _C
from torchcomms_pg.status.__main__ import main
from torchcomms_pg.testing.rank import receive, report

pytestmark = pytest.mark.beyond_gloo
WATCHED = pytest.param(
    "gloo",
    marks=pytest.mark.skipif(torch.__version__ < "2.14", reason="c10d has hooks from 2.14 on"),
)
SOON = 20.0
AFTER = 1.5


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Returns the folder of the status's sockets, of this process and of its ranks."""
    path = str(tmp_path / "status")
    monkeypatch.setenv("TORCHCOMMS_PG_STATUS", path)
    return path


@pytest.fixture
def ask(capsys):
    def ask():
        capsys.readouterr()
        code = main(["--json", "--late", "0.5", "--wait", "5"])
        printed = capsys.readouterr().out
        return code, json.loads(printed) if printed else {"waits": []}

    return ask


def rank_1_comes_late(args, world, backend):
    store = connect_store(*args)
    if backend == "gloo":
        torchcomms_pg.watch(timeout=datetime.timedelta(seconds=AFTER))
    rank = int(os.environ["RANK"])
    if rank == 1:
        report("away")
        receive()
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    dist.all_reduce(torch.ones(7))


@pytest.mark.parametrize("backend", ["torchcomms", WATCHED])
def test_a_rank_that_never_comes_to_init_process_group_is_in_verdict_and_status(
    folder, ask, backend
):
    settings = {"TORCHCOMMS_PG_STATUS": folder, "TORCHCOMMS_PG_VERDICT_AFTER": str(AFTER)}
    with Ranks(3, init=False, env=settings) as ranks:
        args = ranks.store_args()
        ranks.start(rank_1_comes_late, args, 3, backend)
        ranks.wait_report(1)
        for rank in (0, 2):
            said = (
                rf"verdict: init_process_group of 3 ranks, begun \S+ s ago on rank {rank} at "
                r".*test_meeting.py:\d+ in rank_1_comes_late.*: "
                r"(rank 1 has|ranks (0-1|1-2) have) not come\n"  # another one may be slow, too
            )
            assert wait_for(lambda r=rank, s=said: re.search(s, ranks.output(r)), SOON), (
                ranks.output(rank)
            )
        found = []

        def both_are_there():
            found[:] = ask()
            return any(wait["there"] == [0, 2] for wait in found[1]["waits"])

        assert wait_for(both_are_there, SOON), found
        (wait,) = found[1]["waits"]
        assert wait["operation"] == "init_process_group of 3 ranks" and wait["waits_for"] == [1]
        assert found[0] == 1 and not found[1]["healthy"]
        assert re.search(r"ranks 0, 2: called at .*test_meeting.py:\d+", wait["verdict"]), wait
        ranks.tell(1, "go on")
        check(ranks.wait())
        over = "the verdict on init_process_group of 3 ranks is over: it has ended"
        assert wait_for(lambda: over in ranks.output(0), SOON), ranks.output(0)
        # A rank that is still there does not miss those that are through, however fast they were.
        store = connect_store(*args)
        host, port, prefix = _C.store_place(store)
        server = dist.TCPStore(host, port, is_master=False)
        listed = server.get(f"torchcomms_pg/came/0/{prefix}/0").decode().split()
        assert set(listed) == {"+0", "+1", "+2"}, listed


PROGRAM = textwrap.dedent(
    """
    import torch.distributed as dist, torchcomms_pg
    dist.init_process_group("torchcomms")
    """
)


@pytest.fixture
def alone(tmp_path, folder):
    """Returns a function that starts one rank of two that meet at a port, and its output's file."""
    programs = []

    def start(rank, port, **variables):
        file = tmp_path / "output"
        with file.open("w") as output:
            program = subprocess.Popen(
                [sys.executable, "-c", PROGRAM],
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={
                    **os.environ,
                    "RANK": str(rank),
                    "WORLD_SIZE": "2",
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "TORCHCOMMS_PG_VERDICT_AFTER": str(AFTER),
                    **variables,
                },
            )
        programs.append(program)
        return program, file

    yield start
    for program in programs:
        end_tree(program.pid)
        program.wait()


def test_a_rank_whose_store_nobody_serves_says_so(alone):
    with socket.socket() as kept:
        kept.bind(("127.0.0.1", 0))  # nobody else gets the port, and nobody listens there
        port = kept.getsockname()[1]
        _, output = alone(1, port)
        said = f": no process serves the store at 127.0.0.1:{port}\n"
        assert wait_for(lambda: said in output.read_text(), 3 * SOON), output.read_text()
        assert "recvValue failed" not in output.read_text()


def test_sigterm_has_a_rank_say_that_it_waited_in_init_process_group(alone, ask):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    program, output = alone(0, store.port, TORCHELASTIC_USE_AGENT_STORE="True")
    assert wait_for(lambda: any(ask()[1]["waits"]), 3 * SOON), output.read_text()
    program.send_signal(signal.SIGTERM)
    assert program.wait(SOON) == -signal.SIGTERM
    said = r"ended by SIGTERM while init_process_group of 2 ranks had waited \S+ s, called at "
    assert re.search(said, output.read_text()), output.read_text()
