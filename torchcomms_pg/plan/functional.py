"""Functional collectives of tensors on `meta`, which torch does not give to the group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import _functional_collectives
from torch.distributed import distributed_c10d as c10d

from torchcomms_pg.plan.recorder import current

# For each operation: its name in records, and whether its second argument is a reduction or a root.
_OPERATIONS = {
    "all_reduce": ("all_reduce", "reduction"),
    "all_reduce_": ("all_reduce", "reduction"),
    "all_reduce_coalesced": ("all_reduce", "reduction"),
    "all_reduce_coalesced_": ("all_reduce", "reduction"),
    "all_gather_into_tensor": ("_all_gather_base", ""),
    "all_gather_into_tensor_out": ("_all_gather_base", ""),
    "all_gather_into_tensor_coalesced": ("_all_gather_base", ""),
    "reduce_scatter_tensor": ("_reduce_scatter_base", "reduction"),
    "reduce_scatter_tensor_out": ("_reduce_scatter_base", "reduction"),
    "reduce_scatter_tensor_coalesced": ("_reduce_scatter_base", "reduction"),
    "all_to_all_single": ("all_to_all", ""),
    "broadcast": ("broadcast", "root"),
    "broadcast_": ("broadcast", "root"),
}
_library: list[torch.library.Library] = []


def install() -> None:
    """Records functional collectives on `meta`. What is traced for a compiler is not recorded."""
    library = torch.library.Library("_c10d_functional", "IMPL")
    _library.append(library)  # its kernels last as long as it
    for name, (op, second) in _OPERATIONS.items():
        old = _kernel(name)
        if old is not None:
            library.impl(name, _recorded(old, op, second), "Meta", allow_override=True)


def _kernel(name: str) -> Callable[..., Any] | None:
    """Returns torch's kernel for `meta` of a functional collective."""
    for middle in ("_native", ""):
        kernel = getattr(_functional_collectives, f"_{name}{middle}_meta", None)
        if kernel is not None:
            return kernel  # type: ignore[no-any-return]
    return None


def _recorded(old: Callable[..., Any], op: str, second: str) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        result = old(*args, **kwargs)
        if torch.compiler.is_compiling() or torch._guards.TracingContext.try_get() is not None:
            return result
        group: Any = c10d._resolve_process_group(kwargs.get("group_name", args[-1]))
        more: dict[str, Any] = {}
        if second == "reduction":
            more["reduce_op"] = str(args[1]).upper()
        elif second == "root":
            more["root"] = args[1]
        inputs, outputs = (
            list(value) if isinstance(value, (list, tuple)) else [value]
            for value in (args[0], result)
        )
        for value, output in zip(inputs, outputs, strict=True):
            current().call(op, group.made, [value], [output], **more)
        return result

    return kernel
