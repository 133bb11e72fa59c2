"""The messages of Chakra's execution traces, made at run time by the package ``protobuf``.

Names and numbers are from MLCommons' published schema, ``schema/protobuf/et_def.proto`` in
https://github.com/mlcommons/chakra (Apache-2.0), version 0.0.4. Attributes have only the kinds of
values that `torchcomms_pg.plan.chakra` writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

VERSION = "0.0.4"
SEND, RECEIVE, COLLECTIVE = 5, 6, 7  # of the enumeration NodeType

# The enumeration CollectiveCommType, by the names of operations in recorders.
KINDS = {
    "all_reduce": 0,
    "all_reduce_barrier": 0,  # as NCCL has no barrier: torch's nccl reduces one number
    "reduce": 1,
    "all_gather": 2,
    "_all_gather_base": 2,
    "gather": 3,
    "scatter": 4,
    "broadcast": 5,
    "all_to_all": 6,
    "reduce_scatter": 7,
    "_reduce_scatter_base": 7,
}
# What ASTRA-sim simulates or, as broadcasts, passes over; it ends with an error at the others.
SIMULATED = {0, 2, 5, 6, 7}

_FIELDS = {
    "AttributeProto": (
        "1 name string",
        "2 doc_string string",
        "7 int32_val int32 value",
        "9 int64_val int64 value",
        "27 bool_val bool value",
        "29 string_val string value",
    ),
    "GlobalMetadata": ("1 version string", "2 attr *AttributeProto"),
    "Node": (
        "1 id uint64",
        "2 name string",
        "3 type int32",  # an enumeration, which is written alike
        "4 ctrl_deps *uint64",
        "5 data_deps *uint64",
        "10 attr *AttributeProto",
    ),
}
_PACKAGE = "ChakraProtoMsg"


class MissingPackageError(RuntimeError):
    """Raised if the package ``protobuf`` is not installed, or too old."""


@dataclass(frozen=True)
class Messages:
    """The classes of the messages."""

    attribute: Any
    metadata: Any
    node: Any


def messages() -> Messages:
    """Returns the classes of the messages.

    Raises:
        MissingPackageError: ``protobuf`` is not installed, or older than 4.25.
    """
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool
        from google.protobuf.message_factory import GetMessageClass
    except ImportError as error:
        raise MissingPackageError(
            "--chakra: the package protobuf, from 4.25 on, writes the trace, and it is not "
            f"installed ({error}); pip install 'torchcomms_pg[chakra]'"
        ) from None
    file: Any = descriptor_pb2.FileDescriptorProto(
        name="torchcomms_pg/et_def.proto", package=_PACKAGE, syntax="proto3"
    )
    for message, fields in _FIELDS.items():
        described = file.message_type.add(name=message)
        if any(field.endswith(" value") for field in fields):
            described.oneof_decl.add(name="value")
        for each in fields:
            number, name, kind, *choice = each.split()
            field = described.field.add(name=name, number=int(number))
            field.label = field.LABEL_REPEATED if kind[0] == "*" else field.LABEL_OPTIONAL
            kind = kind.lstrip("*")
            if kind in _FIELDS:
                field.type, field.type_name = field.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
            else:
                field.type = getattr(field, f"TYPE_{kind.upper()}")
            if choice:
                field.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()  # apart from a Chakra that the process may have
    pool.Add(file)
    found = [GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _FIELDS]
    return Messages(*found)
