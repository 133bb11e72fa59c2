"""What programs call on their CPU groups, as they write it, over each backend in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from harness.ranks import woken

from . import mpi_messages
from .plan import KB, MB
from .timing import timed

ROUNDS = 7
WAKE_UPS, US = "wake-ups", "us"
FASTER = ("gloo", "mpi")
Make = Callable[[dist.ProcessGroup], Callable[[], object]]
Run = Callable[[], object] | None


@dataclass(frozen=True)
class Call:
    """A call and its budgets."""

    name: str
    make: Make
    calls: int
    """In a round."""
    limits: Mapping[str, float] = field(default_factory=dict)
    """By what it is compared with. A backend of FASTER: at least so many times as fast as over that
    backend; WAKE_UPS: at most so many; US: at most so many microseconds; ``fake`` or another call:
    at most so many times as long."""
    ranks: int = 2
    mpi: mpi_messages.Make | None = None
    """The same through mpi4py."""


def data_parallel_sync(group: dist.ProcessGroup) -> Callable[[], object]:
    """vLLM, `_run_ar` in vllm/v1/worker/dp_utils.py: what each rank wants of the next step."""
    ranks, me = group.size(), group.rank()

    def call() -> None:
        tensor = torch.zeros(4, ranks, dtype=torch.int32)
        tensor[0][me] = 5
        dist.all_reduce(tensor, group=group)

    return call


def scheduler_sync(group: dist.ProcessGroup) -> Callable[[], object]:
    """SGLang, `MLPSyncBatchInfo.all_gather`: six numbers of each rank's batch."""
    local = torch.arange(6, dtype=torch.int64)
    everyone = torch.empty((group.size(), 6), dtype=torch.int64)
    return lambda: dist.all_gather_into_tensor(everyone.flatten(), local, group=group)


def gather_objects(group: dist.ProcessGroup) -> Callable[[], object]:
    """`all_gather_object` of a small dictionary."""
    everyone: list[Any] = [None] * group.size()
    return lambda: dist.all_gather_object(everyone, {"rank": 1}, group=group)


def broadcast_objects(group: dist.ProcessGroup) -> Callable[[], object]:
    """`broadcast_object_list` of a small dictionary."""
    return lambda: dist.broadcast_object_list([{"step": 1}], src=0, group=group)


def asynchronous(group: dist.ProcessGroup) -> Callable[[], object]:
    """An all-reduce that is waited for at once."""
    tensor = torch.zeros(1)
    return lambda: dist.all_reduce(tensor, group=group, async_op=True).wait()


def functional_of(size: int, dtype: torch.dtype) -> Make:
    """A functional all-reduce, as DTensor and tensor parallelism call it."""

    def make(group: dist.ProcessGroup) -> Callable[[], object]:
        tensor = torch.zeros(size // dtype.itemsize, dtype=dtype)
        return lambda: functional.wait_tensor(functional.all_reduce(tensor, "sum", group))

    return make


def all_reduce(group: dist.ProcessGroup) -> Callable[[], object]:
    """The smallest, beside which messages are judged."""
    tensor = torch.zeros(1)
    return lambda: dist.all_reduce(tensor, group=group)


def both_ways(size: int, exchange: Callable[..., None]) -> Make:
    """Messages of so many bytes between two ranks, one each way."""

    def make(group: dist.ProcessGroup) -> Callable[[], object]:
        peer = group.rank() ^ 1
        sent, received = torch.zeros(size // 4), torch.zeros(size // 4)
        return lambda: exchange(sent, received, peer, group)

    return make


def there_and_back(
    sent: torch.Tensor, received: torch.Tensor, peer: int, group: dist.ProcessGroup
) -> None:
    """One after the other."""
    if peer:
        dist.send(sent, peer, group)
    dist.recv(received, peer, group)
    if not peer:
        dist.send(sent, peer, group)


def in_a_batch(
    sent: torch.Tensor, received: torch.Tensor, peer: int, group: dist.ProcessGroup
) -> None:
    """Both at once, as `torch.distributed.pipelining` sends."""
    messages = [
        dist.P2POp(dist.isend, sent, peer, group),
        dist.P2POp(dist.irecv, received, peer, group),
    ]
    for work in dist.batch_isend_irecv(messages):
        work.wait()


def apart(sent: torch.Tensor, received: torch.Tensor, peer: int, group: dist.ProcessGroup) -> None:
    """Both at once, each with a Work of its own."""
    works = dist.isend(sent, peer, group), dist.irecv(received, peer, group)
    for work in works:
        assert work is not None
        work.wait()


def one_way(group: dist.ProcessGroup) -> Callable[[], object]:
    """From rank 0 to rank 1; a send does not wait for its receiver."""
    tensor = torch.zeros(1)
    if group.rank():
        return lambda: dist.recv(tensor, 0, group)
    return lambda: dist.send(tensor, 1, group)


def in_flight(count: int) -> Make:
    """So many messages of 4 B one way at once, each with a Work of its own."""

    def make(group: dist.ProcessGroup) -> Callable[[], object]:
        tensors = torch.zeros(count, 1).unbind()
        move, peer = (dist.irecv, 0) if group.rank() else (dist.isend, 1)

        def call() -> None:
            for work in [move(tensor, peer, group) for tensor in tensors]:
                assert work is not None
                work.wait()

        return call

    return make


def ring(size: int) -> Make:
    """A batch that sends so many bytes to the next rank, as context parallelism does."""

    def make(group: dist.ProcessGroup) -> Callable[[], object]:
        ranks, me = group.size(), group.rank()
        sent, received = torch.zeros(size // 4), torch.zeros(size // 4)

        def call() -> None:
            messages = [
                dist.P2POp(dist.isend, sent, (me + 1) % ranks, group),
                dist.P2POp(dist.irecv, received, (me - 1) % ranks, group),
            ]
            for work in dist.batch_isend_irecv(messages):
                work.wait()

        return call

    return make


def pipeline_step(group: dist.ProcessGroup) -> Callable[[], object]:
    """A training step of two stages, 1F1B with 4 microbatches, activations of 16 KB."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    stages, me = group.size(), group.rank()
    stage = PipelineStage(torch.nn.Linear(64, 64), me, stages, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, 4, loss_fn=torch.nn.functional.mse_loss)
    inputs = torch.zeros(256, 64)

    def call() -> None:
        if me == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=inputs, losses=[])

    return call


ALL_REDUCE = "all_reduce of 4 B"
CALLS = (
    Call(ALL_REDUCE, all_reduce, 60, mpi=mpi_messages.all_reduce),
    Call(
        "send and recv of 4 B, there and back",
        both_ways(4, there_and_back),
        60,
        {ALL_REDUCE: 2.2, "gloo": 20, WAKE_UPS: 0},
        mpi=mpi_messages.there_and_back(4),
    ),
    Call(
        "batch_isend_irecv of 4 B both ways",
        both_ways(4, in_a_batch),
        60,
        {ALL_REDUCE: 2.5, WAKE_UPS: 0},
        mpi=mpi_messages.at_once(4),
    ),
    Call("isend, irecv and wait() of 4 B", both_ways(4, apart), 60, mpi=mpi_messages.apart(4)),
    Call("send to recv of 4 B, one way", one_way, 60, mpi=mpi_messages.one_way),
    Call(
        "isend to irecv of 4 B, 512 in flight", in_flight(512), 2, mpi=mpi_messages.in_flight(512)
    ),
    Call(
        "batch_isend_irecv of 4 B, ring of 4 ranks",
        ring(4),
        20,
        ranks=4,
        mpi=mpi_messages.at_once(4),
    ),
    Call(
        "batch_isend_irecv of 64 KB both ways",
        both_ways(64 * KB, in_a_batch),
        60,
        mpi=mpi_messages.at_once(64 * KB),
    ),
    Call(
        "send and recv of 4 MB, there and back",
        both_ways(4 * MB, there_and_back),
        4,
        {"gloo": 5, "mpi": 0.8},
        mpi=mpi_messages.there_and_back(4 * MB),
    ),
    Call("1F1B step, 4 microbatches of 16 KB", pipeline_step, 6),
    Call("all_reduce, int32 4 x ranks (vLLM)", data_parallel_sync, 60, {"gloo": 25}),
    Call("all_gather_into_tensor, int64 x 6 (SGLang)", scheduler_sync, 60, {"gloo": 40}),
    Call("barrier", lambda group: lambda: dist.barrier(group=group), 60, {"gloo": 30}),
    Call("all_gather_object", gather_objects, 40, {"fake": 1.5}),
    Call("broadcast_object_list", broadcast_objects, 40, {"fake": 1.5}),
    Call("all_reduce of 4 B, async_op, wait()", asynchronous, 60, {US: 12}),
    Call("functional all_reduce of 8 KB", functional_of(8 * KB, torch.bfloat16), 60, {"fake": 1.3}),
    Call("functional all_reduce of 16 MB", functional_of(16 * MB, torch.bfloat16), 4),
)


def over(call: Call, groups: Mapping[str, dist.ProcessGroup]) -> dict[str, Run]:
    """Makes a call over each group, by the name of its backend."""
    made: dict[str, Run] = {}
    for name, group in groups.items():
        # What nobody sends cannot be unpickled; rank 0 gets its own. A pipeline's stages send
        # their shapes so.
        unpickles = call.make is pipeline_step or ("object" in call.name and group.rank() > 0)
        made[name] = None if name == "fake" and unpickles else call.make(group)
    return made


class Turns:
    """A call of CALLS over several backends in turns, on one rank.

    The ranks call each method together. `made` has the same backends on each, with None if this
    rank cannot make the call.
    """

    def __init__(self, call: Call, made: Mapping[str, Run], meet: Callable[[], None]) -> None:
        self.call, self.made, self.meet = call, made, meet
        self.times: dict[str, list[float]] = {name: [] for name in made}
        self.wake_ups = 0

    def round(self, counts: bool) -> None:
        """Makes the calls of a round, which does not count if it only warms up."""
        for name, run in self.made.items():
            self.meet()
            if run is None:
                continue
            before = woken()
            took = [timed(run) for _ in range(self.call.calls)]
            if counts:
                self.times[name] += took
                self.wake_ups += woken() - before if name == "torchcomms" else 0

    def found(self) -> dict[str, float]:
        """Returns the microseconds of a call by backend: medians.

        Beside the backends it has WAKE_UPS: how often a call over torchcomms wakes a thread of the
        library that runs operations.
        """
        found = {name: median(times) for name, times in self.times.items() if times}
        if calls := len(self.times.get("torchcomms", ())):
            found[WAKE_UPS] = self.wake_ups / calls
        return found
