"""Finds the rank that sends NaN before the others have it too."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torchcomms_pg._C import OpName, PreHookArgs, RemovableHandle

if TYPE_CHECKING:
    from torchcomms_pg.comm import TorchComm

# Operations whose input only one rank sends.
_FROM_ROOT = (OpName.broadcast, OpName.scatter)


class NanCheckHook:
    """Refuses operations that would send NaN.

    Looks at what this rank sends and at nothing else: the tensors of a broadcast or scatter on
    its root, what a receive will overwrite never. Floating point and complex tensors are looked
    at; the others cannot hold a NaN.

    A rank that is refused does not take part in the operation: its peers wait for it until their
    timeout, or until this rank's process ends.
    """

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []

    def register_with_comm(self, comm: TorchComm) -> None:
        """Checks every operation of `comm` from the next one on, until `unregister`.

        The operation then raises RuntimeError, naming itself, the rank and the tensor, and
        nothing is sent.
        """
        rank = comm.get_rank()
        self._handles.append(comm.register_pre_hook(lambda args: _check(args, rank)))

    def unregister(self) -> None:
        """Stops checking, on all communicators. Idempotent."""
        while self._handles:
            self._handles.pop().remove()


def _check(args: PreHookArgs, rank: int) -> None:
    for member in args.ops:
        _check(member, rank)
    # A batch's tensors are those of its members, some of which only receive.
    if args.ops or (args.name in _FROM_ROOT and args.root != rank):
        return
    for position, tensor in enumerate(args.inputs):
        if not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        count = int(torch.isnan(tensor).sum())
        if count:
            raise RuntimeError(
                f"{args.name.name} (op_id {args.op_id}) on rank {rank}: input {position} of shape "
                f"{list(tensor.shape)} holds {count} NaN in {tensor.numel()} elements; "
                "it was not sent"
            )
