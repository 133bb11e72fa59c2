"""The job's store when the rank that serves it has ended before the others."""

import os
import re
import subprocess
import sys
import textwrap

import pytest
import torch

from harness import ROOT, limits
from harness.programs import PROGRAM_LIMIT, end_tree

pytestmark = pytest.mark.beyond_gloo
TRIES = 4

PROGRAM = textwrap.dedent(
    """
    import os, sys, time
    import torch, torch.distributed as dist, torchcomms_pg

    rank, backend, port, pid = int(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:])
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    if rank == 0:
        print("port", store.port, flush=True)
    dist.init_process_group(backend, store=store, rank=rank, world_size=2)
    dist.all_reduce(torch.ones(1))
    dist.barrier()
    if rank == 0:
        os._exit(0)
    while os.path.exists(f"/proc/{pid}"):
        time.sleep(0.05)
    time.sleep(2.5)  # the time of two looks into the store
    print("ends", flush=True)
    os._exit(0)
    """
)


def run(backend):
    """Runs two ranks, of which rank 0 serves the store and ends first. Returns what rank 1 says."""
    environment = {**os.environ, "TORCHCOMMS_PG_WATCH": "1", "TORCHCOMMS_PG_VERDICT_AFTER": "30"}
    programs = []

    def start(*arguments):
        programs.append(
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM, *map(str, arguments)],
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        return programs[-1]

    try:
        first = start(0, backend, 0, 0)
        said = ""
        while not (port := re.search(r"^port (\d+)\n", said, re.MULTILINE)):
            line = first.stdout.readline()  # also a warning of torch
            assert line, said
            said += line
        second = start(1, backend, port[1], first.pid)
        first.communicate(timeout=limits.grown(PROGRAM_LIMIT))
        return second.communicate(timeout=limits.grown(PROGRAM_LIMIT))[0]
    except subprocess.TimeoutExpired as error:
        for program in programs:
            end_tree(program.pid)
        said = [program.communicate()[0] for program in programs]
        raise AssertionError(f"{error}; rank 0 and rank 1 have said: {said}") from None
    finally:
        for program in programs:
            end_tree(program.pid)
            program.wait()


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < "2.14", reason="c10d has hooks from 2.14 on")
@pytest.mark.parametrize("backend", ["gloo", "torchcomms"])
def test_no_thread_of_ours_has_the_store_print_that_its_server_has_ended(backend):
    for _ in range(TRIES):  # the server may end between a thread's look and its call
        said = run(backend)
        assert said.endswith("ends\n"), said
        if "TCPStore" not in said:
            return
    raise AssertionError(said)
