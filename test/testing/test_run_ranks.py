"""Functions on ranks without pytest's help: run_ranks, and the notebook's %%ranks."""

import faulthandler
import os
import pathlib
import re
import signal
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

from harness.ranks import Ranks, time_limit
from torchcomms_pg.testing import RanksError, calls, notebook, run_ranks
from torchcomms_pg.testing.processes import end_of
from torchcomms_pg.testing.rank import report


@pytest.fixture(scope="module", autouse=True)
def closed():
    yield
    calls.close()


def summed(value, *, times=1):
    tensor = torch.tensor([value * (dist.get_rank() + 1)])
    dist.all_reduce(tensor)
    return tensor.item() * times


def crashes(depth):
    if depth > 0:
        crashes(depth - 1)
    faulthandler._sigsegv()


def fails(how):
    if dist.get_rank() == 1:
        if how == "crashes":  # in a thread, whose long stack the main one's follows
            threading.Thread(target=crashes, args=(90,)).start()
        if how == "raises":
            raise ValueError("of rank 1")
        if how == "dies":
            os._exit(7)
        time.sleep(100)
    dist.barrier()


def ends_on(ranks):
    if dist.get_rank() not in ranks:
        time.sleep(200)


def backend():
    return dist.get_backend()


def leaves():
    os.environ["LEFT"] = "1"
    dist.new_group([0])


def lives_in(name):
    return name in os.environ


@pytest.mark.torch_version
def test_values_come_in_order_of_ranks_from_ranks_that_are_kept():
    assert run_ranks(summed, 2, 3, times=2) == [18, 18]
    assert run_ranks(dist.get_rank, 3) == [0, 1, 2]
    assert run_ranks(os.getpid, 2) == run_ranks(os.getpid, 2)
    run_ranks(leaves, 2)
    assert run_ranks(lives_in, 2, "LEFT") == [False, False]
    assert run_ranks(backend, 2, backend="gloo") == ["gloo", "gloo"]


@pytest.mark.parametrize(
    "how, text",
    (
        ("raises", r"rank 1 error: Traceback(.|\n)*ValueError: of rank 1"),
        ("dies", r"rank 1 died: ended with exit code 7"),
        (
            "crashes",
            r"killed by SIGSEGV; its output ends:\nFatal Python error: Segmentation fault\n"
            r"(.|\n)*Current thread .*\n(.|\n)*in crashes\n",
        ),
        pytest.param(
            "hangs",
            r"rank 1 hung: still running, at test.*test_run_ranks.py:\d+ in fails",
            marks=pytest.mark.stops_ranks,  # a rank that is stopped does not tell its line
        ),
    ),
)
def test_a_rank_that_fails_is_named_and_the_next_call_succeeds(how, text):
    with pytest.raises(RanksError) as caught:
        run_ranks(fails, 2, how)
    assert re.search(text, str(caught.value)), caught.value
    assert run_ranks(summed, 2, 1) == [3, 3]


def test_the_end_of_an_output_names_the_error_also_of_a_thread_without_a_stack_of_pythons():
    stack = "Thread 0x1 (most recent call first):\n" + 90 * '  File "train.py", line 7 in step\n'
    written = f"epoch 1\nFatal Python error: Segmentation fault\n\n{2 * stack}"
    shown = end_of(written)
    assert shown.startswith("Fatal Python error: Segmentation fault\n\nThread 0x1")
    assert len(shown) == 3000


@pytest.mark.stops_ranks  # the limits are shorter than a stop
@pytest.mark.parametrize("ranks, limits", (([0], {"timeout": 1}), ([], {"limit": 1})))
def test_a_call_ends_at_its_limit_and_a_timeout_after_the_first_rank(ranks, limits):
    run_ranks(backend, 2)  # the ranks have begun
    with time_limit(1, 15, "the call"), pytest.raises(RanksError, match="hung: still running"):
        run_ranks(ends_on, 2, ranks, **limits)


def test_a_function_that_no_rank_could_import_is_refused():
    with pytest.raises(ValueError, match="wanted a function at the top level of a module"):
        run_ranks(lambda: 1, 2)
    with pytest.raises(ValueError, match="n is 0: wanted a number of ranks"):
        run_ranks(summed, 0)


def test_a_function_of_a_notebook_is_refused_with_what_to_do(monkeypatch):
    monkeypatch.setattr(summed, "__module__", "__main__")
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    with pytest.raises(ValueError, match="in a notebook use the cell magic %%ranks"):
        run_ranks(summed, 2, 1)


def test_a_cell_runs_on_ranks_that_keep_its_names(capsys):
    notebook.ranks(
        "2", "import torch.distributed as dist\nmine = dist.get_rank()\nprint('at', mine)"
    )
    assert capsys.readouterr().out == "[rank 0] at 0\n[rank 1] at 1\n"
    notebook.ranks("2", "mine * 2")
    assert capsys.readouterr().out == "[rank 0] 0\n[rank 1] 2\n"
    notebook.ranks("2", "print('before')\nif mine:\n    raise ValueError(mine)")
    said = capsys.readouterr().out
    assert re.search(r'File "cell-\d+", line 3.*\n.*raise ValueError\(mine\)', said), said
    assert "printed before:\nbefore" in said
    notebook.ranks("two", "mine")
    assert "wanted %%ranks N" in capsys.readouterr().out


def computes_in_threads(count):
    def compute():
        tensor = torch.ones(1000)
        while True:
            tensor.sin()

    for _ in range(count):
        threading.Thread(target=compute, daemon=True).start()
    report("computing")
    time.sleep(300)


@pytest.mark.stops_ranks
def test_no_thread_of_a_rank_goes_on_once_it_has_been_stopped():
    with Ranks(1, init=False) as ranks:
        ranks.start(computes_in_threads, 16)
        ranks.wait_report(0)
        threads = pathlib.Path(f"/proc/{ranks.pids[0]}/task")
        for _ in range(20):
            ranks.kill(0, signal.SIGSTOP)
            states = [each.read_text().rpartition(") ")[2][0] for each in threads.glob("*/stat")]
            assert len(states) > 16 and set(states) == {"T"}, states
            ranks.kill(0, signal.SIGCONT)
            time.sleep(0.01)  # what follows holds whatever has run meanwhile
