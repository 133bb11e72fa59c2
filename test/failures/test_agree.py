"""Values that all ranks of a group need: agree() says which rank has another one, and where."""

import contextlib
import inspect
import io
import re
import time

import pytest
import torch
import torch.distributed as dist

import torchcomms_pg
from harness.ranks import on_own_ranks

pytestmark = pytest.mark.beyond_gloo


def fails(group=None):
    """The message with which collectives of the group fail, at last."""
    while True:
        try:
            dist.all_reduce(torch.ones(1), group=group)
        except torchcomms_pg.CommError as error:
            return str(error)
        time.sleep(0.01)


@on_own_ranks(2, 3)
def test_values_that_are_equal_are_returned_and_nothing_fails(world):
    for step in range(20):
        value = (step, "a", [1.5, None], {"size": torch.Size([2])}, {"x", "y"})
        assert torchcomms_pg.agree(value) is value
        assert torchcomms_pg.agree(step, name="step") == step
        dist.all_reduce(torch.ones(1))
    time.sleep(1.5)  # for the threads to have compared, if they are quick
    dist.barrier()


@on_own_ranks(2, 3)
def test_all_ranks_fail_with_both_values_and_lines_if_one_rank_does_not_agree(world):
    last = dist.get_rank() == world - 1
    line = inspect.currentframe().f_lineno + 1
    torchcomms_pg.agree(3 if last else 4, name="micro batches")
    text = fails()
    values = re.search(
        r"do not agree about micro batches: rank (\d) agreed to (\d) at \S*test_agree.py:(\d+), "
        r"rank (\d) to (\d) at \S*test_agree.py:(\d+)",
        text,
    )
    assert values is not None, text
    assert {values[2], values[5]} == {"3", "4"}, text
    assert str(world - 1) in (values[1], values[4]), text
    assert values[3] == values[6] == str(line), text


@on_own_ranks(2)
def test_each_rank_of_a_group_of_another_backend_prints_who_does_not_agree(world):
    group = dist.new_group(backend="gloo")
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed):
        torchcomms_pg.agree("rank" + str(dist.get_rank()), group=group)
        while "do not agree: rank 0 agreed to 'rank0' at" not in printed.getvalue():
            time.sleep(0.01)
    dist.all_reduce(torch.ones(1), group=group)  # it does not fail


@on_own_ranks(2)
def test_a_value_that_cannot_be_compared_is_a_type_error(world):
    with pytest.raises(TypeError, match=r"a value of type torch\.Tensor cannot be compared"):
        torchcomms_pg.agree([torch.ones(1)])
