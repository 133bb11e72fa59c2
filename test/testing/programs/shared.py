"""Tests whose mark has neither a timeout nor a fresh group: test_ranks.py sets both for all."""

import os
import sys
import time

import pytest
import torch
import torch.distributed as dist

groups = []  # of the tests that have run in this process


def all_reduced(value):
    tensor = torch.tensor([float(value)])
    dist.all_reduce(tensor)
    return tensor.item()


@pytest.mark.parametrize("number", range(3))
@pytest.mark.ranks(2)
def test_shares_its_group(number, group, store, rank):
    assert groups == [group] * number and dist.get_process_group_ranks(group) == [0, 1]
    store.set(f"rank {rank} of {number}", "")
    store.wait([f"rank 0 of {number}", f"rank 1 of {number}"])
    assert not store.check([f"rank {rank} of {number - 1}"])  # a key of another test
    groups.append(group)
    assert dist.new_group([0, 1]).group_name == f"{number + 1}"
    assert all_reduced(1) == 2


@pytest.mark.ranks(2)
def test_finds_no_group_of_an_earlier_test(group):
    assert list(dist.distributed_c10d._world.pg_names) == [group] == groups[:1]


@pytest.mark.ranks(2, fresh_group=True)
def test_has_its_own_group(group):
    assert group not in groups and all_reduced(1) == 2
    groups.append(group)


@pytest.mark.ranks(2, backend="gloo")
def test_has_a_group_of_its_own_backend(group):
    assert dist.get_backend() == "gloo" and group not in groups and all_reduced(1) == 2


@pytest.mark.ranks(2)
@pytest.mark.xfail
def test_breaks_its_group(rank):
    groups.append("broken")
    assert all_reduced(rank) == 2


@pytest.mark.ranks(2)
def test_after_one_that_fails_has_new_processes():
    assert not groups and all_reduced(1) == 2
    groups.append("ended")


@pytest.mark.ranks(2)
def test_ends_its_group():
    dist.destroy_process_group()


@pytest.mark.ranks((1, 3))
def test_of_several_numbers(world_size):
    assert not groups and dist.get_world_size() == world_size and all_reduced(1) == world_size


@pytest.mark.ranks(n=[2])
def test_after_one_that_ends_its_group_has_new_processes(world_size):
    assert not groups and all_reduced(1) == world_size == 2


@pytest.mark.ranks(2)
def test_asks_no_name_server():
    assert os.environ["RES_OPTIONS"] == "attempts:0"


@pytest.mark.ranks(2)
def test_has_the_imports_of_the_configuration():
    assert "colorsys" in sys.modules


@pytest.mark.ranks(2)
def test_is_late(rank):
    if rank == 1:
        time.sleep(100)
