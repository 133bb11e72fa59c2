"""Seeded inputs and plain PyTorch reference results."""

import functools
import operator

import torch
import torch.distributed as dist

# 0, 1, odd, just over a page, more than one step's staging buffer (1 MiB) in 32-bit types.
SIZES = (0, 1, 7, 1025, 300_001)
HUGE = 2_000_003

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
INTEGERS = (torch.uint8, torch.int8, torch.int32, torch.int64)  # NCCL reduces these
COMPLEX = (torch.complex64, torch.complex128)
MOVABLE = (*FLOATS, *FLOAT8, *INTEGERS, torch.int16, torch.bool, *COMPLEX)


def data(rank, shape, dtype=torch.float32, salt=0):
    """Returns the values of a rank, the same on all ranks, small enough to add and multiply."""
    generator = torch.Generator().manual_seed(1000 * salt + rank + 1)
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if dtype.is_complex:
        return torch.randn(shape, dtype=dtype, generator=generator)
    if dtype.is_floating_point:
        # Normal values of 32 bits take a sixth of the time of those of 64, and tests make many.
        values = torch.randn(shape, generator=generator)
        if dtype == torch.float64:
            values = values.double().add_(torch.rand(shape, generator=generator), alpha=2.0**-29)
        return values.clamp(-4, 4).to(dtype)
    low = 0 if dtype == torch.uint8 else -5
    return torch.randint(low, 6, shape, generator=generator).to(dtype)


def all_data(world, shape, dtype=torch.float32, salt=0):
    return [data(rank, shape, dtype, salt) for rank in range(world)]


def bits(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def assert_same(got, want, what=""):
    """Asserts that two tensors have the same shape, dtype and bits."""
    assert got.dtype == want.dtype, f"{what}: got {got.dtype}, expected {want.dtype}"
    assert got.shape == want.shape, f"{what}: got {got.shape}, expected {want.shape}"
    wrong = (bits(got) != bits(want)).nonzero()
    assert not len(wrong), (
        f"{what}: {len(wrong)} of {bits(got).numel()} bytes differ, the first at {int(wrong[0])}; "
        f"got {got.reshape(-1)[:4]}..., expected {want.reshape(-1)[:4]}..."
    )


def reduced(inputs, op=dist.ReduceOp.SUM):
    """Reduces `inputs`: integers in their type, floats in float64, complex in complex128."""
    dtype, world = inputs[0].dtype, len(inputs)
    op = dist.ReduceOp.RedOpType(getattr(op, "op", op))
    if dtype == torch.bool:
        both = op in (dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.BAND)
        combine = operator.and_ if both else operator.or_
        combine = operator.xor if op == dist.ReduceOp.BXOR else combine
        return functools.reduce(combine, inputs)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    if dtype.is_floating_point or dtype.is_complex:
        inputs = [x.to(wide) for x in inputs]
    combine = {
        dist.ReduceOp.SUM: operator.add,
        dist.ReduceOp.AVG: operator.add,
        dist.ReduceOp.PRODUCT: operator.mul,
        dist.ReduceOp.MIN: torch.minimum,
        dist.ReduceOp.MAX: torch.maximum,
        dist.ReduceOp.BAND: operator.and_,
        dist.ReduceOp.BOR: operator.or_,
        dist.ReduceOp.BXOR: operator.xor,
    }[op]
    result = functools.reduce(combine, inputs)
    if op == dist.ReduceOp.AVG:
        exact = dtype.is_floating_point or dtype.is_complex
        result = result / world if exact else torch.div(result, world, rounding_mode="trunc")
    return result.to(dtype)


def rounding(dtype):
    real = torch.empty(0, dtype=dtype).real.dtype if dtype.is_complex else dtype
    return torch.finfo(real).eps


def assert_reduced(got, inputs, op=dist.ReduceOp.SUM, what=""):
    """Asserts that a reduction is right, up to the rounding of any order of the additions."""
    want = reduced(inputs, op)
    dtype = want.dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        return assert_same(got, want, what)
    assert got.dtype == dtype and got.shape == want.shape, f"{what}: {got.dtype} {got.shape}"
    wide = torch.complex128 if dtype.is_complex else torch.float64
    error = (got.to(wide) - want.to(wide)).abs()
    # PRODUCT: a relative bound; SUM and AVG: relative to the sum of magnitudes.
    inputs = [x.to(wide).abs() for x in inputs]
    product = op == dist.ReduceOp.PRODUCT
    scale = functools.reduce(operator.mul if product else operator.add, inputs)
    tiny = 0.0 if dtype.is_complex else torch.finfo(dtype).tiny
    worst = (
        (error - (len(inputs) + 1) * rounding(dtype) * scale - tiny).max() if got.numel() else -1
    )
    assert worst <= 0, f"{what}: off by {error.max():.3g}, allowed about {scale.max():.3g} * eps"
