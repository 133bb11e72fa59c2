"""The operations by which tensors are reduced."""

from __future__ import annotations

import enum
from typing import ClassVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _make_nccl_premul_sum


class RedOpType(enum.Enum):
    """The kind of a `ReduceOp`, without the factor."""

    SUM = enum.auto()
    """The sum."""
    PRODUCT = enum.auto()
    """The product."""
    MIN = enum.auto()
    """The least element."""
    MAX = enum.auto()
    """The greatest element."""
    BAND = enum.auto()
    """And of the bits."""
    BOR = enum.auto()
    """Or of the bits."""
    BXOR = enum.auto()
    """Exclusive or of the bits."""
    PREMUL_SUM = enum.auto()
    """The sum of the tensors, each multiplied by its rank's factor."""
    AVG = enum.auto()
    """The sum, divided by the number of ranks."""


class ReduceOp:
    """A reduction of the tensors of all ranks to one tensor.

    ``SUM``, ``PRODUCT``, ``MIN``, ``MAX`` and ``AVG`` take floating point and integer tensors, and
    some of them also bool and complex tensors. ``BAND``, ``BOR`` and ``BXOR`` take integers and
    bools. ``PREMUL_SUM(factor)`` multiplies each rank's tensor by the rank's factor, a number or a
    tensor of one element, before it adds; for float16, bfloat16, float32 and float64.

    Collectives also take torch.distributed's own ``ReduceOp``.

    Args:
        type: the kind of reduction.
        factor: the factor of PREMUL_SUM, which requires one; the other kinds take none.

    Attributes:
        native: torch.distributed's form of the reduction; None before its first use.

    Raises:
        TypeError, ValueError: `type` is no RedOpType, or `factor` does not fit `type`.

    Example:
        >>> tensor = torch.ones(1)
        >>> work = comm.all_reduce(tensor, ReduceOp.PREMUL_SUM(0.5))
        >>> tensor.item()
        1.0
    """

    SUM: ClassVar[ReduceOp]
    """The sum."""
    PRODUCT: ClassVar[ReduceOp]
    """The product."""
    MIN: ClassVar[ReduceOp]
    """The least element."""
    MAX: ClassVar[ReduceOp]
    """The greatest element."""
    BAND: ClassVar[ReduceOp]
    """And of the bits."""
    BOR: ClassVar[ReduceOp]
    """Or of the bits."""
    BXOR: ClassVar[ReduceOp]
    """Exclusive or of the bits."""
    AVG: ClassVar[ReduceOp]
    """The sum, divided by the number of ranks."""

    __slots__ = ("factor", "native", "type")

    def __init__(self, type: RedOpType, factor: float | torch.Tensor | None = None) -> None:
        if not isinstance(type, RedOpType):
            raise TypeError(f"ReduceOp: type is {type!r}, wanted a RedOpType such as RedOpType.SUM")
        self.type = type
        self.factor = factor
        self.native: dist.ReduceOp | None = None  # c10d's form, made on first use
        if type is RedOpType.PREMUL_SUM:
            if not isinstance(factor, (int, float, torch.Tensor)) or isinstance(factor, bool):
                raise TypeError(
                    f"ReduceOp.PREMUL_SUM: factor is {factor!r}, wanted a number or a tensor of "
                    "one element"
                )
            if isinstance(factor, torch.Tensor) and factor.numel() != 1:
                raise ValueError(
                    f"ReduceOp.PREMUL_SUM: factor has {factor.numel()} elements, wanted 1"
                )
        elif factor is not None:
            raise TypeError(f"ReduceOp: {type.name} takes no factor, got {factor!r}")

    @staticmethod
    def PREMUL_SUM(factor: float | torch.Tensor) -> ReduceOp:  # noqa: N802
        """Returns the reduction that multiplies each rank's tensor by its `factor` and adds."""
        return ReduceOp(RedOpType.PREMUL_SUM, factor)

    def make_native(self) -> dist.ReduceOp:
        """Sets `native` and returns it."""
        if self.type is RedOpType.PREMUL_SUM:
            assert self.factor is not None  # see __init__
            factor = float(self.factor) if isinstance(self.factor, int) else self.factor
            self.native = _make_nccl_premul_sum(factor)
        else:
            self.native = dist.ReduceOp(getattr(dist.ReduceOp, self.type.name))
        return self.native

    def __repr__(self) -> str:
        return f"ReduceOp.{self.type.name}" + ("" if self.factor is None else f"({self.factor!r})")


_PLAIN = ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "AVG")
for _type in _PLAIN:
    setattr(ReduceOp, _type, ReduceOp(RedOpType[_type]))


def native_op(what: str, op: object) -> dist.ReduceOp:
    """Returns c10d's form of a reduce op of this package or of c10d. `what`: named in errors."""
    if isinstance(op, ReduceOp):
        return op.native or op.make_native()
    if isinstance(op, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
        return dist.ReduceOp(op) if isinstance(op, dist.ReduceOp.RedOpType) else op
    raise TypeError(
        f"{what}: op is {op!r}, wanted a torchcomms_pg.ReduceOp such as ReduceOp.SUM"
        + (", or call ReduceOp.PREMUL_SUM with its factor" if callable(op) else "")
    )


def op_name(what: str, op: object) -> tuple[str, float]:
    """Returns name and factor (1 if it has none) of a reduce op, for ``torch.compile``."""
    if isinstance(op, ReduceOp):
        if op.factor is None:
            return op.type.name, 1.0
        if isinstance(op.factor, torch.Tensor):
            raise TypeError(
                f"{what}: inside torch.compile the factor of PREMUL_SUM has to be a number"
            )
        return op.type.name, float(op.factor)
    for name in _PLAIN:
        if op is getattr(dist.ReduceOp, name):  # torch 2.11's Dynamo does not support == for these
            return name, 1.0
    for name in _PLAIN:
        if op == getattr(dist.ReduceOp, name):
            return name, 1.0
    raise TypeError(f"{what}: inside torch.compile op has to be a torchcomms_pg.ReduceOp")
