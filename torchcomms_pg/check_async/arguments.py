"""Which arguments of operations are tensors that they write, and which they only read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Roles:
    """The names of an operation's arguments with tensors.

    Attributes:
        name: of the operation, in reports.
        writes, reads: arguments, tensors or nested lists of them. An argument that an operation
            reads and writes is in `writes`.
        root: the argument with the only rank on which `rooted` holds, if there is one.
        rooted: "writes" if ranks other than the root only read `writes`; "reads" if the root does.
    """

    name: str
    writes: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    root: str = ""
    rooted: str = ""


# c10d's operators, by their names in torch's dispatcher.
C10D = {
    "allreduce_": Roles("all_reduce", ("tensors",)),
    "allreduce_coalesced_": Roles("all_reduce", ("tensors",)),
    "broadcast_": Roles("broadcast", ("tensors",), root="root_rank", rooted="reads"),
    "reduce_": Roles("reduce", ("tensors",), root="root_rank", rooted="writes"),
    "allgather_": Roles("all_gather", ("output_tensors",), ("input_tensors",)),
    "_allgather_base_": Roles("all_gather_into_tensor", ("output_tensor",), ("input_tensor",)),
    "allgather_coalesced_": Roles("all_gather", ("output_lists",), ("input_list",)),
    "allgather_into_tensor_coalesced_": Roles("all_gather_into_tensor", ("outputs",), ("inputs",)),
    "reduce_scatter_": Roles("reduce_scatter", ("output_tensors",), ("input_tensors",)),
    "_reduce_scatter_base_": Roles("reduce_scatter_tensor", ("output_tensor",), ("input_tensor",)),
    "reduce_scatter_tensor_coalesced_": Roles("reduce_scatter_tensor", ("outputs",), ("inputs",)),
    "gather_": Roles("gather", ("output_tensors",), ("input_tensors",)),
    "gather_into_tensor_": Roles("gather_single", ("output_tensor",), ("input_tensor",)),
    "scatter_": Roles("scatter", ("output_tensors",), ("input_tensors",)),
    "alltoall_": Roles("all_to_all", ("output_tensors",), ("input_tensors",)),
    "alltoall_base_": Roles("all_to_all_single", ("output",), ("input",)),
    "send": Roles("isend", (), ("tensors",)),
    "recv_": Roles("irecv", ("tensors",)),
    "recv_any_source_": Roles("irecv", ("tensors",)),
}

# The operators of functional collectives that issue an operation.
FUNCTIONAL = {
    "all_reduce",
    "all_reduce_",
    "all_reduce_coalesced",
    "all_reduce_coalesced_",
    "all_gather_into_tensor",
    "all_gather_into_tensor_out",
    "all_gather_into_tensor_coalesced",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_out",
    "reduce_scatter_tensor_coalesced",
    "all_to_all_single",
    "broadcast",
    "broadcast_",
}

# Methods of the native communicator, with the roles of their first arguments; async_op and the
# timeout are their last two.
COMMUNICATOR = {
    "send": ("reads",),
    "recv": ("writes",),
    "broadcast": ("writes",),
    "all_reduce": ("writes", "reads"),
    "reduce": ("writes",),
    "all_gather": ("writes", "reads"),
    "all_gather_single": ("writes", "reads"),
    "reduce_scatter": ("writes", "reads"),
    "reduce_scatter_single": ("writes", "reads"),
    "all_to_all_single": ("writes", "reads"),
    "all_to_all": ("writes", "reads"),
    "scatter": ("writes", "reads"),
    "gather": ("writes", "reads"),
    "gather_single": ("writes", "reads"),
}

# Of these, the root alone reads the tensor (true), or the other ranks do.
COMMUNICATOR_ROOTED = {"broadcast": True, "reduce": False}

# Operators of aten that read no data of their arguments: only sizes, or where the memory is.
_ONLY_SHAPES = {
    *(f"{kind}_like" for kind in ("empty", "zeros", "ones", "full", "rand", "randn", "randint")),
    *(f"new_{kind}" for kind in ("empty", "empty_strided", "zeros", "ones", "full")),
    "_unsafe_view",
    "_assert_tensor_metadata",
    "_reshape_alias",
    "detach_",
    "is_pinned",
    "is_same_size",
    "lift_fresh",
    "record_stream",
    "resize_",
    "resize_as_",
    "set_",
    "set_data",
    "sym_numel",
    "sym_size",
    "sym_storage_offset",
    "sym_stride",
}


def c10d_roles() -> dict[str, dict[str, Any]]:
    """Returns the roles of the arguments of c10d's operators, by position, for C++."""
    found = {}
    for name, roles in C10D.items():
        if not hasattr(torch.ops.c10d, name):  # of another version of torch
            continue
        schema = getattr(torch.ops.c10d, name).default._schema
        at = {argument.name: position for position, argument in enumerate(schema.arguments)}
        found[name] = {
            "name": roles.name,
            "writes": [at[each] for each in roles.writes],
            "reads": [at[each] for each in roles.reads],
            "group": at["process_group"],
            "async_op": at.get("async_op"),
            "root": at[roles.root] if roles.root else None,
            "root_reads": roles.rooted == "reads",
        }
    return found


def plan(operator: Any) -> tuple[tuple[int, str, bool], ...]:
    """Returns which arguments with tensors an operator of torch accesses.

    Each has its position, its name and whether the operator writes it. Views are left out, since
    they read and write nothing.
    """
    schema = operator._schema
    name = schema.name.partition("::")[2]
    if name in _ONLY_SHAPES or torch.Tag.inplace_view in operator.tags:
        return ()
    found = []
    for position, argument in enumerate(schema.arguments):
        if "Tensor" not in str(argument.type):
            continue
        alias = argument.alias_info
        if alias is None or alias.is_write:
            found.append((position, argument.name, alias is not None))
    return tuple(found)


def bound(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns all arguments of a call of an operator by name, with defaults."""
    arguments = operator._schema.arguments
    values = {each.name: each.default_value for each in arguments if each.has_default_value()}
    values.update(zip((each.name for each in arguments), args, strict=False))
    values.update(kwargs)
    return values


def plain(tensors: Iterable[Any]) -> bool:
    """Returns whether all tensors are on the CPU and have strides."""
    return all(
        tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.is_quantized
        for tensor in tensors
    )


def tensors_in(value: Any) -> Iterable[torch.Tensor]:
    """Yields the tensors of a tensor or of nested lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_in(each)


def mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Returns the value with each of its tensors changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return [mapped(each, change) for each in value]
    return value
