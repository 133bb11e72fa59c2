"""Process groups that move nothing, and record what is called on them.

An output gets this rank's own contribution if it has that size, otherwise it keeps its contents.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from torchcomms_pg.plan import waits
from torchcomms_pg.plan.recorder import current, reduction

NAME = "torchcomms_pg_plan"
_ProcessGroup: Any = dist.ProcessGroup  # whose overloads for callers a class for c10d does without
_work: Any = getattr(_distributed_c10d, "_create_work_from_future")  # noqa: B009 - not in its stub


def _done(result: object) -> dist.Work:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(result)
    work: dist.Work = _work(future)
    waits.made(work)
    return work


def _fill(output: torch.Tensor, value: torch.Tensor) -> None:
    if output is value or output.numel() == 0 or not output.is_contiguous():
        return
    with torch._C._AutoDispatchBelowAutograd():
        if output.numel() == value.numel():
            output.copy_(value.reshape(output.shape))
        elif value.numel() and output.numel() % value.numel() == 0:
            # An output of the whole group: each part is this rank's own. The value may be one of
            # the parts, as FSDP2's is.
            output.view(-1, value.numel()).copy_(value.clone().reshape(1, -1))
        elif output.numel() and value.numel() % output.numel() == 0:
            output.copy_(value.reshape(-1)[: output.numel()].reshape(output.shape))


class PlanGroup(_ProcessGroup):
    """A group of a rank, with the rank's number in it and its size.

    torch calls some methods from Python and others from C++, the latter by the names that its class
    for groups in Python overrides; so an operation may have two names.
    """

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    def __init__(self, rank: int, size: int, made: int, name: str, description: str) -> None:
        super().__init__(rank, size)
        self.made = made
        self._name = name
        self._description = description
        self.bound_device_id = None

    def getBackendName(self) -> str:  # noqa: N802
        """Returns the name of this backend; C++ calls it."""
        return NAME

    def getGroupName(self) -> str:  # noqa: N802
        """Returns the group's name; C++ calls it."""
        return self._name

    def getGroupDesc(self) -> str:  # noqa: N802
        """Returns the group's description; C++ calls it."""
        return self._description

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Sets the group's name; C++ calls it."""
        self._name = name

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Sets the group's description; C++ calls it."""
        self._description = description

    @property
    def group_name(self) -> str:
        """The group's name."""
        return self._name

    @property
    def group_desc(self) -> str:
        """The group's description, such as ``mesh_tp``."""
        return self._description

    def name(self) -> str:
        """Returns the name of this backend."""
        return NAME

    def _get_backend(self, device: torch.device) -> PlanGroup:
        return self

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Returns False: tensors are allocated as elsewhere."""
        return False

    def _start_coalescing(self, device: torch.device) -> None:
        current().begin_batch()
        waits.begin_batch()

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        current().end_batch()
        waits.end_batch()
        return _done([])

    def _set_sequence_number_for_group(self) -> None:
        pass

    def abort(self) -> None:
        """Does nothing, as no operation is under way."""

    def shutdown(self) -> None:
        """Does nothing, as no operation is under way."""

    def _call(
        self,
        op: str,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        **more: Any,
    ) -> None:
        current().call(op, self.made, inputs, outputs, **more)
        waits.called()

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        """Keeps the tensors."""
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        op = getattr(opts, "reduceOp", opts) if opts is not None else dist.ReduceOp.SUM
        for tensor in tensors:
            self._call("all_reduce", [tensor], [tensor], reduce_op=reduction(op))
        return _done(tensors)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        """Keeps the tensors."""
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        """Keeps the tensors."""
        self._call("broadcast", tensors, tensors, root=opts.rootRank)
        return _done(tensors)

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        """Keeps the tensors."""
        op = reduction(opts.reduceOp)
        self._call("reduce", tensors, tensors, root=opts.rootRank, reduce_op=op)
        return _done(tensors)

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        """Gives each output the input."""
        for some, value in zip(outputs, inputs, strict=True):
            self._call("all_gather", [value], some)
            for output in some:
                _fill(output, value)
        return _done(outputs)

    def _allgather_base(
        self, output: torch.Tensor, value: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        self._call("_all_gather_base", [value], [output])
        _fill(output, value)
        return _done([output])

    all_gather_single = _allgather_base

    def allgather_into_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        """Gives each part of an output its input."""
        for output, value in zip(outputs, inputs, strict=True):
            self._allgather_base(output, value)
        return _done(outputs)

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def reduce_scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None
    ) -> dist.Work:
        """Gives each output this rank's own part."""
        op = reduction(opts.reduceOp if opts is not None else dist.ReduceOp.SUM)
        for output, some in zip(outputs, inputs, strict=True):
            self._call("reduce_scatter", some, [output], reduce_op=op)
            _fill(output, some[self.rank()])
        return _done(outputs)

    def _reduce_scatter_base(
        self, output: torch.Tensor, value: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        op = reduction(opts.reduceOp if opts is not None else dist.ReduceOp.SUM)
        self._call("_reduce_scatter_base", [value], [output], reduce_op=op)
        _fill(output, value)
        return _done([output])

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        """Gives each output a part of its input."""
        for output, value in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(output, value, opts)
        return _done(outputs)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def alltoall_base(
        self,
        output: torch.Tensor,
        value: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> dist.Work:
        """Gives the output the input if their sizes are equal."""
        self._call("all_to_all", [value], [output])
        if output.numel() == value.numel():
            _fill(output, value)
        return _done([output])

    all_to_all_single = alltoall_base

    def alltoall(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        """Gives the outputs the inputs of equal size."""
        self._call("all_to_all", inputs, outputs)
        for output, value in zip(outputs, inputs, strict=True):
            if output.numel() == value.numel():
                _fill(output, value)
        return _done(outputs)

    def gather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any
    ) -> dist.Work:
        """Gives each output of the root the input."""
        some = outputs[0] if outputs else []
        self._call("gather", inputs, some, root=opts.rootRank)
        for output in some:
            _fill(output, inputs[0])
        return _done(outputs)

    def scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any
    ) -> dist.Work:
        """Gives the root's output its own part."""
        some = inputs[0] if inputs else []
        self._call("scatter", some, outputs, root=opts.rootRank)
        if some:
            _fill(outputs[0], some[self.rank()])
        return _done(outputs)

    def barrier(self, opts: Any = None) -> dist.Work:
        """Returns at once."""
        self._call("all_reduce_barrier", [], [])
        return _done([])

    def monitored_barrier(self, *args: Any, **kwargs: Any) -> None:
        """Returns at once."""
        self._call("all_reduce_barrier", [], [])

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> dist.Work:
        """Returns at once."""
        self._call("send", tensors, [], peer=peer, tag=tag)
        return _done(tensors)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> dist.Work:
        """Keeps the tensors."""
        self._call("recv", [], tensors, peer=peer, tag=tag)
        return _done(tensors)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> dist.Work:
        """Keeps the tensors."""
        self._call("recv", [], tensors, peer=-1, tag=tag)
        return _done(tensors)
