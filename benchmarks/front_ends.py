"""The ways to call a backend: each binds the arguments of one operation to its call.

Operations have the names and arguments of TorchComm's methods; every root is rank 0.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

import torchcomms_pg
from harness.catalogue import DIST
from torchcomms_pg.hooks import FlightRecorderHook

Issue = Callable[[], Any]
"""Starts the operation; returns its Work where it was started as asynchronous."""


class FrontEnd(Protocol):
    """A way to call a backend."""

    sum: Any
    """Its name for the reduction."""

    def bind(self, name: str, *args: Any) -> Issue:
        """Returns the call of an operation with these arguments."""
        ...


class Dist:
    """``torch.distributed``'s functions."""

    sum = dist.ReduceOp.SUM

    def __init__(self, group: dist.ProcessGroup, asynchronous: bool) -> None:
        self.group = group
        self.asynchronous = asynchronous

    def bind(self, name: str, *args: Any) -> Issue:
        """Binds a function of the catalogue's table, or a message."""
        if name in ("send", "recv"):
            function = getattr(dist, f"i{name}" if self.asynchronous else name)
            return partial(function, *args, self.group)
        return partial(DIST[name], *args, group=self.group, async_op=self.asynchronous)


class Direct:
    """The methods of the backend's own object, beneath ``torch.distributed``."""

    sum = dist.ReduceOp.SUM

    # The method, its options, and its tensors from the arguments. Roots and reductions are what
    # options have at first: rank 0 and SUM.
    METHODS: dict[str, tuple[str, Any, Callable[..., tuple[Any, ...]]]] = {  # noqa: RUF012
        "all_reduce": ("allreduce", dist.AllreduceOptions, lambda data, op: ([data],)),
        "broadcast": ("broadcast", dist.BroadcastOptions, lambda data, root: ([data],)),
        "reduce": ("reduce", dist.ReduceOptions, lambda data, root, op: ([data],)),
        "all_gather_single": ("_allgather_base", AllgatherOptions, lambda out, data: (out, data)),
        "reduce_scatter_single": (
            "_reduce_scatter_base",
            dist.ReduceScatterOptions,
            lambda out, data, op: (out, data),
        ),
        "all_to_all_single": (
            "alltoall_base",
            dist.AllToAllOptions,
            lambda out, data: (out, data, [], []),
        ),
        "gather": (
            "gather",
            dist.GatherOptions,
            lambda out, data, root: ([out] if out else [], [data]),
        ),
        "scatter": (
            "scatter",
            dist.ScatterOptions,
            lambda out, data, root: ([out], [data] if data else []),
        ),
        "barrier": ("barrier", dist.BarrierOptions, lambda: ()),
    }

    def __init__(self, group: dist.ProcessGroup, asynchronous: bool) -> None:
        self.backend: Any = group._get_backend(torch.device("cpu"))
        self.asynchronous = asynchronous

    def bind(self, name: str, *args: Any) -> Issue:
        """Binds a method with its options."""
        if name in ("send", "recv"):
            data, peer = args
            call = partial(getattr(self.backend, name), [data], peer, 0)
        else:
            method, make_options, tensors = self.METHODS[name]
            options = make_options()
            options.asyncOp = self.asynchronous
            call = partial(getattr(self.backend, method), *tensors(*args), options)
        return call if self.asynchronous else partial(finish, call)


def finish(call: Issue) -> None:
    """Calls an operation and waits for the Work that it returns, if any.

    A backend's method returns one for a synchronous call too, which dist.* waits for.
    """
    work = call()
    if work is not None:
        work.wait()


class ThroughComm:
    """The object API: TorchComm's methods, on a communicator that nobody watches."""

    sum = torchcomms_pg.ReduceOp.SUM

    def __init__(self, group: dist.ProcessGroup, asynchronous: bool) -> None:
        behind = torchcomms_pg.get_comm(group)  # which is recorded
        comm = behind.split(list(range(behind.get_size())), type(self).__name__)
        assert comm is not None
        self.comm = comm
        self.asynchronous = asynchronous

    def bind(self, name: str, *args: Any) -> Issue:
        """Binds a method."""
        return partial(getattr(self.comm, name), *args, self.asynchronous)


class Watched(ThroughComm):
    """The same under a flight recorder, an empty pre and an empty post hook."""

    def __init__(self, group: dist.ProcessGroup, asynchronous: bool) -> None:
        super().__init__(group, asynchronous)
        self.recorder = FlightRecorderHook()
        self.recorder.register_with_comm(self.comm)
        self.handles = [
            self.comm.register_pre_hook(nothing_with),
            self.comm.register_post_hook(nothing_with),
        ]


def nothing_with(args: object) -> None:
    """Is a hook."""


FRONT_ENDS: dict[str, Callable[[dist.ProcessGroup, bool], FrontEnd]] = {
    "dist": Dist,
    "backend": Direct,
    "torchcomm": ThroughComm,
    "watched": Watched,
}
