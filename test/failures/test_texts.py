"""What users read when something is wrong, word for word: a change of a text is seen and meant.

``EXPECTTEST_ACCEPT=1 tools/test test/failures/test_texts.py`` writes the present texts into this file.
"""

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline

from harness.ranks import Ranks, pool

pytestmark = pytest.mark.beyond_gloo


def text_of(function, *args, **kwargs):
    """Type and text of what a call raises."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    else:
        return "nothing was raised"
    # What ranks do meanwhile differs: the verdict's own tests are in test_verdicts.py.
    return text.split("\nverdict on")[0]


def mistakes():
    def all_to_all():
        dist.all_to_all_single(torch.zeros(4), torch.zeros(4), [1, 3], [2, 1])

    def reduce_scatter():
        dist.reduce_scatter_tensor(torch.zeros(3), torch.zeros(5))

    def reduce_op():
        dist.all_reduce(torch.zeros(2), dist.ReduceOp.BAND)

    def overlapping():
        dist.all_reduce(torch.zeros(1).expand(3))

    dist.barrier()
    return [text_of(body) for body in (all_to_all, reduce_scatter, reduce_op, overlapping)]


def test_the_texts_of_a_callers_mistakes():
    all_to_all, reduce_scatter, reduce_op, overlapping = pool(2).run(mistakes)[0]
    assert_expected_inline(
        all_to_all,
        """ValueError: all_to_all_single: input_split_sizes add up to 3, wanted the first dimension of input, 4""",
    )
    assert_expected_inline(
        reduce_scatter,
        """ValueError: reduce_scatter_single: input has 5 elements (shape [5]), wanted 6""",
    )
    assert_expected_inline(
        reduce_op,
        """ValueError: all_reduce: reduce op BAND takes integer or bool tensors, got Float""",
    )
    assert_expected_inline(
        overlapping,
        """ValueError: all_reduce: tensor (shape [3], strides [0]) has elements that overlap in memory, as expand() makes; pass tensor.clone()""",
    )


def mismatch():
    rank = dist.get_rank()
    dist.all_reduce(torch.zeros(2))
    return text_of(dist.all_reduce, torch.zeros(8 + rank))


def test_the_texts_of_mismatches():
    with Ranks(2) as ranks:
        text, other = ranks.run(mismatch)
    assert_expected_inline(
        text,
        """\
CommError: all_reduce #2 (8 x Float, SUM) of group '0' on rank 0: mismatched collectives on one communicator: rank 0 calls all_reduce(count=8, float32, sum), rank 1 calls all_reduce(count=9, float32, sum)""",
    )
    assert_expected_inline(
        other,
        """\
CommError: all_reduce #2 (9 x Float, SUM) of group '0' on rank 1: mismatched collectives on one communicator: rank 0 calls all_reduce(count=8, float32, sum), rank 1 calls all_reduce(count=9, float32, sum)""",
    )
