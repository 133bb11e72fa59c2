"""Every reduce op gives plain PyTorch's result for every dtype that it is defined for."""

import pytest
import torch
import torch.distributed as dist

from harness import catalogue
from harness.values import (
    COMPLEX,
    FLOAT8,
    FLOATS,
    INTEGERS,
    SIZES,
    all_data,
    assert_same,
    data,
    reduced,
    rounding,
)

pytestmark = pytest.mark.product
Op = dist.ReduceOp
ARITHMETIC = ("SUM", "PRODUCT", "MIN", "MAX")
BITWISE = ("BAND", "BOR", "BXOR")
beyond_gloo = pytest.mark.beyond_gloo


def short(value):
    return str(value).removeprefix("torch.")


def every(name, values):
    return pytest.mark.parametrize(name, values, ids=short)


def check(operations, world, dtype, *ops, **others):
    """Runs them with each of the ops, over tensors of all sizes."""
    for size in SIZES:
        case = catalogue.Case(world, size, row=(), dtype=dtype, ops=ops, **others)
        for name in operations:
            catalogue.run(catalogue.OPERATIONS[name], [case])


@pytest.mark.ranks((1, 2, 3, 4))
@every("dtype", FLOATS + INTEGERS)
def test_all_reduce(world, dtype):
    check(["all_reduce"], world, dtype, *ARITHMETIC)


@beyond_gloo
@pytest.mark.ranks((1, 2, 3, 4))
@every("dtype", FLOATS + INTEGERS)
def test_avg_divides_by_the_number_of_ranks_and_integers_truncate(world, dtype):
    check(["all_reduce"], world, dtype, "AVG")


@pytest.mark.ranks((2, 3))
@every("op", BITWISE)
@every("dtype", INTEGERS)
def test_bitwise_all_reduce_of_integers(world, dtype, op):
    if op == "BXOR" and dist.get_backend() == "gloo":
        pytest.skip("Gloo has BXOR for some types only")
    check(["all_reduce"], world, dtype, op)


@beyond_gloo
@pytest.mark.ranks((1, 2, 3, 4))
def test_bool_all_reduce_is_logical(world):
    """SUM and MAX are or, PRODUCT and MIN are and, and the result holds only 0 and 1."""
    check(["all_reduce"], world, torch.bool, *ARITHMETIC, *BITWISE)


@beyond_gloo
@pytest.mark.ranks((2, 3))
@every("dtype", COMPLEX)
def test_complex_sum_and_average(world, dtype):
    check(["all_reduce"], world, dtype, "SUM", "AVG")


@beyond_gloo
@pytest.mark.ranks((2, 3))
@every("dtype", FLOAT8)
@every("op", ("SUM", "MIN", "MAX"))
def test_float8_all_reduce_is_exact_where_the_result_is_representable(world, dtype, op):
    for size in SIZES:
        inputs = [data(r, size, torch.int8).clamp(-2, 2).to(dtype) for r in range(world)]
        tensor = inputs[dist.get_rank()].clone()
        dist.all_reduce(tensor, getattr(Op, op))
        want = reduced([x.float() for x in inputs], getattr(Op, op)).to(dtype)
        # -0 and 0 are equal
        assert_same(tensor.float() + 0.0, want.float() + 0.0, f"size {size}")


@beyond_gloo
@pytest.mark.ranks((3, 4))
@every("dtype", (torch.float16, torch.bfloat16))
def test_16_bit_floats_are_accumulated_in_32_bits(world, dtype):
    """1 + tiny + tiny + ... keeps the tiny ones, which 16-bit additions would drop one by one."""
    tiny = rounding(dtype) * 0.499
    tensor = torch.full((4097,), 1.0 if dist.get_rank() == 0 else tiny, dtype=dtype)
    inputs = [1.0] + [float(torch.tensor(tiny, dtype=dtype))] * (world - 1)
    dist.all_reduce(tensor)
    want = torch.full((4097,), sum(inputs)).to(dtype)
    assert want[0] > 1
    assert_same(tensor, want)


@beyond_gloo
@pytest.mark.ranks((2, 3))
@every("dtype", FLOATS)
@every("factor", ("scalar", "tensor"))
def test_premul_sum_multiplies_before_it_adds(world, dtype, factor):
    factor = 0.25 if factor == "scalar" else torch.tensor([0.25], dtype=dtype)
    check(["all_reduce", "reduce_scatter_single"], world, dtype, "PREMUL_SUM", factor=factor)


@beyond_gloo
@pytest.mark.ranks(2)
def test_premul_sum_uses_each_ranks_own_factor(world):
    factor = dist.get_rank() + 2.0
    tensor = torch.ones(1025)
    dist.all_reduce(tensor, dist._make_nccl_premul_sum(factor))
    assert_same(tensor, torch.full((1025,), 5.0))


@pytest.mark.ranks((1, 2, 3, 4))
@every("dtype", (torch.float32, torch.float64, torch.int32, torch.uint8))
def test_reduce(world, dtype):
    check(["reduce"], world, dtype, *ARITHMETIC)


@beyond_gloo
@pytest.mark.ranks((1, 2, 3, 4))
@every("dtype", (torch.float32, torch.bfloat16, torch.int64))
def test_reduce_scatter(world, dtype):
    check(["reduce_scatter_single", "reduce_scatter"], world, dtype, *ARITHMETIC, "AVG")


@beyond_gloo
@pytest.mark.ranks((2, 3))
def test_bitwise_reduce_and_reduce_scatter(world):
    check(["reduce", "reduce_scatter_single"], world, torch.int32, *BITWISE)


@beyond_gloo
@pytest.mark.ranks((2, 3))
def test_special_float_values_follow_ieee(world):
    """inf - inf is nan, nan stays nan in a sum."""
    inf, nan = float("inf"), float("nan")
    mine = [inf, nan, inf, 0.0] if dist.get_rank() == 0 else [-inf, 1.0, 1.0, -0.0]
    for dtype in FLOATS:
        tensor = torch.tensor(mine, dtype=dtype)
        dist.all_reduce(tensor)
        assert tensor.isnan().tolist() == [True, True, False, False], dtype
        assert tensor[2] == inf and tensor[3] == 0


REFUSED = [
    (torch.float32, "BAND"),
    (torch.float32, "BXOR"),
    (torch.complex64, "PRODUCT"),
    (torch.complex64, "MAX"),
    (torch.bool, "AVG"),
    (torch.float8_e4m3fnuz, "SUM"),
]


@beyond_gloo
@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype, op", REFUSED, ids=[f"{short(d)}-{o}" for d, o in REFUSED])
def test_an_op_without_a_meaning_for_the_dtype_is_refused_and_nothing_is_enqueued(world, dtype, op):
    """Only rank 0 makes the mistake; the next all_reduce pairs with rank 1's."""
    if dist.get_rank() == 0:
        tensor = torch.ones(4, dtype=dtype)
        with pytest.raises((TypeError, ValueError, RuntimeError), match="(?i)all_?reduce") as error:
            dist.all_reduce(tensor, getattr(Op, op))
        assert not isinstance(error.value, dist.DistBackendError)
        name = {"complex64": "complex", "float32": "[Ff]loat"}.get(short(dtype), short(dtype))
        error.match(f"(?i){name}|{short(dtype)}")
        error.match(op)
        assert_same(tensor, torch.ones(4, dtype=dtype))
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    assert_same(tensor, torch.full((4,), 2.0))


@beyond_gloo
@pytest.mark.ranks(2)
def test_int16_which_nccl_lacks_is_reduced_right_or_refused_by_name(world):
    inputs = all_data(world, 1025, torch.int16)
    tensor = inputs[dist.get_rank()].clone()
    try:
        dist.all_reduce(tensor)
    except (TypeError, ValueError, RuntimeError) as error:
        assert "int16" in str(error).lower() or "short" in str(error).lower(), error
    else:
        assert_same(tensor, reduced(inputs))
