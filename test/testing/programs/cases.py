"""Tests that test_ranks.py has pytest run: each is a case of what a test with ranks may do."""

import gc
import logging
import os
import random
import signal
import sys
import threading
import time
import unittest
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist


@pytest.fixture(scope="module")
def process_number():
    return os.getpid()


def all_reduced(value):
    tensor = torch.tensor([float(value)])
    dist.all_reduce(tensor)
    return tensor.item()


@pytest.mark.ranks(2)
def test_fixtures(rank, world_size, group, process_number, tmp_path, capfd, monkeypatch, caplog):
    assert (world_size, group.size(), group.rank()) == (2, 2, rank)
    assert process_number == os.getpid()
    assert all_reduced(rank) == 1
    (tmp_path / str(rank)).touch()
    dist.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
    os.system("echo said")
    assert capfd.readouterr().out == "said\n"
    monkeypatch.setenv("PATCHED", "1")
    os.environ["LEFT"] = "1"
    os.environ["GROUP_RANK"] = "7"
    os.environ["PATH"] += ":/left"
    os.chdir("/")
    sys.path.append("/left")
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(3)
    torch.autograd.set_detect_anomaly(True, check_nan=False)
    torch.set_float32_matmul_precision("medium")
    torch.set_grad_enabled(False)
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    gc.disable()
    logging.disable()
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    dist.new_group([0, 1])
    torch.set_default_device("meta")


@pytest.mark.ranks(2)
def test_nothing_is_left(rank):
    assert {"PATCHED", "LEFT"}.isdisjoint(os.environ)
    assert not os.environ["PATH"].endswith("/left") and os.environ["GROUP_RANK"] == "0"
    assert os.getcwd() != "/" and "/left" not in sys.path
    assert torch.ones(1).device.type == "cpu" and torch.is_grad_enabled()
    assert random.random() == random.Random(0).random()
    assert np.random.rand() == np.random.RandomState(0).rand()
    assert torch.ones(1).dtype == torch.float32
    assert (torch.initial_seed(), torch.get_num_threads()) == (0, 1)
    assert torch.get_float32_matmul_precision() == "highest" and not torch.is_anomaly_enabled()
    assert gc.isenabled() and not logging.root.manager.disable
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL


@pytest.mark.parametrize("value", (1, 2))
class TestOfAClass:
    @pytest.mark.ranks(3)
    def test_mesh(self, device_mesh, value):
        warnings.warn("a warning of all ranks", stacklevel=1)
        assert device_mesh.size() == 3


class TestOfUnittest(unittest.TestCase):
    def setUp(self):
        self.value = 2

    @pytest.mark.ranks(2)
    def test_of_unittest(self):
        self.assertEqual(all_reduced(self.value), 4)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("value", [threading.Lock()], ids=["lock"])
def test_unpicklable(value):
    assert not value.locked() and all_reduced(1) == 2


@pytest.mark.ranks(2)
async def test_async():
    raise AssertionError


@pytest.mark.ranks(2)
def test_raises(rank):
    print("said by rank", rank)
    found = rank + 5
    if rank == 1:
        assert found == 3
    dist.barrier()


@pytest.mark.ranks(2)
def test_leaves_with_a_code(rank):
    if rank == 1:
        os.write(2, b"last words\n")
        os._exit(3)
    dist.barrier()


@pytest.mark.ranks(2)
def test_is_killed(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


@pytest.mark.ranks(2)
def test_leaves_a_child_that_holds_the_connection(rank):
    if rank == 1:
        if os.fork() == 0:
            time.sleep(20)
        os._exit(4)
    time.sleep(100)


@pytest.mark.ranks(2)
def test_prints_more_than_a_socket_holds():
    print("much" * 500_000)
    assert not dist.is_initialized()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ("stdout", "stderr"))
def test_closes_its_output(name):
    getattr(sys, name).close()


@pytest.mark.ranks(2)
def test_prints_after_another_has_closed_its_output():
    print("open")
    print("open", file=sys.stderr)
    assert all_reduced(1) == 2


@pytest.mark.ranks(2, timeout=1)
def test_hangs(rank):
    if rank == 1:
        time.sleep(100)
    dist.barrier()


@pytest.mark.ranks(2, timeout=1)
def test_is_late(rank):
    if rank == 1:
        time.sleep(100)


@pytest.mark.ranks(2, limit=1)
def test_never_ends():
    time.sleep(100)


@pytest.mark.ranks(2)
def test_exits(rank):
    if rank == 1:
        sys.exit(2)
    dist.barrier()


@pytest.mark.ranks(2)
def test_after_failures(rank):
    assert all_reduced(1) == 2


@pytest.fixture
def broken(rank):
    if rank == 1:
        raise ValueError("no fixture of rank 1")


@pytest.mark.ranks(2)
def test_fixture_raises(broken):
    dist.barrier()


@pytest.mark.ranks(2)
def test_skips(rank):
    if rank == 1:
        pytest.skip("not on rank 1")
    dist.barrier()


@pytest.mark.ranks(2)
@pytest.mark.xfail(strict=True)
def test_fails_as_expected(rank):
    assert rank == 0


@pytest.mark.ranks(2)
@pytest.mark.xfail(strict=True)
def test_fails_late_as_expected(rank):
    time.sleep(1.5 * rank)
    assert rank == 0


@pytest.mark.ranks(2)
@pytest.mark.xfail(strict=True)
def test_dies_as_expected(rank):
    os._exit(1)


@pytest.mark.ranks(2)
def test_subtests(rank, request):
    subtests = request.getfixturevalue("subtests")
    for part in range(3):
        with subtests.test("part", part=part):
            assert part * rank < 2


@pytest.mark.ranks(2)
def test_leaves_a_thread():
    threading.Thread(target=time.sleep, args=(100,), name="left", daemon=True).start()


@pytest.mark.ranks(2)
def test_finds_no_thread_of_an_earlier_test():
    assert "left" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.ranks(2, backend=None)
def test_makes_its_own_group():
    dist.init_process_group("gloo")
    assert all_reduced(1) == 2


def test_of_no_ranks(rank):
    pass


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["of this process"], ids=[f"process {os.getpid()}"])
def test_whose_name_changes(name):
    pass


@pytest.mark.ranks("2")
def test_of_a_wrong_mark():
    pass


def test_without_the_mark(tmp_path):
    assert not dist.is_initialized()
