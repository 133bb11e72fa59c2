"""Every operation of torch.distributed, on tensors of the device, against plain values."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from values import assert_reduced, assert_same, data

from gpu.here import LAYOUTS, Here, finish


class Case(NamedTuple):
    """One call of an operation."""

    here: Here
    async_op: bool
    rows: int
    layout: str

    @property
    def inputs(self) -> list[torch.Tensor]:
        """The values of all ranks."""
        return [data(rank, (self.rows, 3)) for rank in range(self.here.ranks)]

    @property
    def parts(self) -> list[torch.Tensor]:
        """Of all ranks, one part for every rank."""
        shape = (self.here.ranks, self.rows, 3)
        return [data(rank, shape, salt=1) for rank in range(self.here.ranks)]

    def place(self, values: torch.Tensor) -> torch.Tensor:
        """Copies values to the device, in the layout of the case."""
        return self.here.place(values, self.layout)

    def empty(self, rows: int | None = None) -> torch.Tensor:
        """Makes room for a result, in the layout of the case."""
        return self.here.empty((self.rows if rows is None else rows, 3), layout=self.layout)

    def finish(self, work: dist.Work | None) -> None:
        """Waits for an asynchronous operation."""
        if self.async_op:
            finish(work)
        else:
            assert work is None, "a synchronous operation returned a work"


def all_reduce(case: Case) -> None:
    """In place."""
    inputs, rank = case.inputs, case.here.rank
    tensor = case.place(inputs[rank])
    case.finish(dist.all_reduce(tensor, async_op=case.async_op))
    assert_reduced(tensor.cpu(), inputs)


def broadcast(case: Case) -> None:
    """From every root."""
    inputs, rank = case.inputs, case.here.rank
    for root in range(case.here.ranks):
        tensor = case.place(inputs[rank])
        case.finish(dist.broadcast(tensor, root, async_op=case.async_op))
        assert_same(tensor.cpu(), inputs[root])


def reduce(case: Case) -> None:
    """To every root."""
    inputs, rank = case.inputs, case.here.rank
    for root in range(case.here.ranks):
        tensor = case.place(inputs[rank])
        case.finish(dist.reduce(tensor, root, async_op=case.async_op))
        if rank == root:
            assert_reduced(tensor.cpu(), inputs)


def all_gather(case: Case) -> None:
    """To a list of tensors; also of different sizes."""
    inputs, rank = case.inputs, case.here.rank
    outputs = [case.empty() for _ in inputs]
    case.finish(dist.all_gather(outputs, case.place(inputs[rank]), async_op=case.async_op))
    assert_same(torch.cat([x.cpu() for x in outputs]), torch.cat(inputs))
    inputs = [data(r, (case.rows + r, 3)) for r in range(case.here.ranks)]
    outputs = [case.empty(len(x)) for x in inputs]
    case.finish(dist.all_gather(outputs, case.place(inputs[rank]), async_op=case.async_op))
    assert_same(torch.cat([x.cpu() for x in outputs]), torch.cat(inputs))


def all_gather_into_tensor(case: Case) -> None:
    """To one tensor."""
    inputs, here = case.inputs, case.here
    output = case.empty(here.ranks * case.rows)
    tensor = case.place(inputs[here.rank])
    case.finish(dist.all_gather_into_tensor(output, tensor, async_op=case.async_op))
    assert_same(output.cpu(), torch.cat(inputs))


def reduce_scatter(case: Case) -> None:
    """From a list of tensors; also of different sizes."""
    parts, rank = case.parts, case.here.rank
    output = case.empty()
    tensors = [case.place(part) for part in parts[rank]]
    case.finish(dist.reduce_scatter(output, tensors, async_op=case.async_op))
    assert_reduced(output.cpu(), [x[rank] for x in parts])
    ranks = range(case.here.ranks)
    uneven = [[data(r, (case.rows + p, 3), salt=p) for p in ranks] for r in ranks]
    output = case.empty(case.rows + rank)
    tensors = [case.place(part) for part in uneven[rank]]
    case.finish(dist.reduce_scatter(output, tensors, async_op=case.async_op))
    assert_reduced(output.cpu(), [x[rank] for x in uneven])


def reduce_scatter_tensor(case: Case) -> None:
    """From one tensor."""
    parts, rank = case.parts, case.here.rank
    output = case.empty()
    tensor = case.place(parts[rank].flatten(0, 1))
    case.finish(dist.reduce_scatter_tensor(output, tensor, async_op=case.async_op))
    assert_reduced(output.cpu(), [x[rank] for x in parts])


def all_to_all(case: Case) -> None:
    """From a list of tensors to another."""
    parts, rank = case.parts, case.here.rank
    outputs = [case.empty() for _ in parts]
    tensors = [case.place(part) for part in parts[rank]]
    case.finish(dist.all_to_all(outputs, tensors, async_op=case.async_op))
    assert_same(torch.stack([x.cpu() for x in outputs]), torch.stack([x[rank] for x in parts]))


def all_to_all_single(case: Case) -> None:
    """From one tensor to another, in equal and in different parts."""
    parts, here = case.parts, case.here
    rank, ranks = here.rank, range(here.ranks)
    output = case.empty(here.ranks * case.rows)
    tensor = case.place(parts[rank].flatten(0, 1))
    case.finish(dist.all_to_all_single(output, tensor, async_op=case.async_op))
    assert_same(output.cpu(), torch.cat([x[rank] for x in parts]))
    # Rank r sends r + p more rows to rank p.
    splits = [[case.rows + r + p for p in ranks] for r in ranks]
    sent = [data(r, (sum(splits[r]), 3)) for r in ranks]
    takes = [splits[r][rank] for r in ranks]
    output, tensor = case.empty(sum(takes)), case.place(sent[rank])
    work = dist.all_to_all_single(output, tensor, takes, splits[rank], async_op=case.async_op)
    case.finish(work)
    assert_same(output.cpu(), torch.cat([sent[r].split(splits[r])[rank] for r in ranks]))


def gather(case: Case) -> None:
    """To every root."""
    inputs, rank = case.inputs, case.here.rank
    for root in range(case.here.ranks):
        outputs = [case.empty() for _ in inputs] if rank == root else None
        tensor = case.place(inputs[rank])
        case.finish(dist.gather(tensor, outputs, root, async_op=case.async_op))
        if outputs is not None:
            assert_same(torch.cat([x.cpu() for x in outputs]), torch.cat(inputs))


def scatter(case: Case) -> None:
    """From every root."""
    parts, rank = case.parts, case.here.rank
    for root in range(case.here.ranks):
        output = case.empty()
        tensors = [case.place(part) for part in parts[root]] if rank == root else None
        case.finish(dist.scatter(output, tensors, root, async_op=case.async_op))
        assert_same(output.cpu(), parts[root][rank])


def coalesced(case: Case) -> None:
    """Several operations launched as one."""
    inputs, here = case.inputs, case.here
    tensors = [case.place(inputs[here.rank]) for _ in range(3)]
    with dist._coalescing_manager(device=here.device, async_ops=case.async_op) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    if case.async_op:
        manager.wait()
    for tensor in tensors:
        assert_reduced(tensor.cpu(), inputs)


def messages(case: Case) -> None:
    """Round a ring, one by one and in a batch."""
    here, inputs = case.here, case.inputs
    if here.ranks == 1:
        return  # torch.distributed refuses messages to oneself
    right, left = (here.rank + 1) % here.ranks, (here.rank - 1) % here.ranks
    tensor, got = case.place(inputs[here.rank]), case.empty()

    def send() -> None:
        if case.async_op:
            finish(dist.isend(tensor, right))
        else:
            dist.send(tensor, right)

    def receive() -> None:
        if case.async_op:
            finish(dist.irecv(got, left))
        else:
            dist.recv(got, left)

    # Unbatched messages of NCCL run in their order: somebody has to receive first.
    for step in (send, receive) if here.rank == 0 else (receive, send):
        step()
    assert_same(got.cpu(), inputs[left])
    got = case.empty()
    operations = [dist.P2POp(dist.isend, tensor, right), dist.P2POp(dist.irecv, got, left)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert_same(got.cpu(), inputs[left])


def functional(case: Case) -> None:
    """What torch.compile and DTensor call."""
    here, inputs, parts = case.here, case.inputs, case.parts
    group = here.group
    tensor, everything = case.place(inputs[here.rank]), case.place(parts[here.rank].flatten(0, 1))
    total = funcol.all_reduce(tensor, "sum", group)
    gathered = funcol.all_gather_tensor(tensor, 0, group)
    scattered = funcol.reduce_scatter_tensor(everything, "sum", 0, group)
    exchanged = funcol.all_to_all_single(everything, None, None, group)
    assert_reduced(total.cpu(), inputs)
    assert_same(gathered.cpu(), torch.cat(inputs))
    assert_reduced(scattered.cpu(), [x[here.rank] for x in parts])
    assert_same(exchanged.cpu(), torch.cat([x[here.rank] for x in parts]))


def barrier(case: Case) -> None:
    """Of the device's own communicator."""
    case.finish(dist.barrier(async_op=case.async_op, device_ids=[case.here.device.index]))


OPERATIONS: list[Callable[[Case], None]] = [
    *(all_reduce, broadcast, reduce, all_gather, all_gather_into_tensor),
    *(reduce_scatter, reduce_scatter_tensor, all_to_all, all_to_all_single, gather, scatter),
    *(coalesced, messages, functional, barrier),
]


def cases(here: Here) -> list[Case]:
    """Every mode, size and layout."""
    sizes = (0, 1, 1000) if here.check.shares_a_gpu else (0, 1, 1000, 100_003)
    return [
        Case(here, async_op, rows, layout)
        for async_op in (False, True)
        for layout in LAYOUTS
        for rows in (sizes if layout == "contiguous" else (7,))
    ]


def check(here: Here) -> str:
    """All of them."""
    here.start()
    every = cases(here)
    for operation in OPERATIONS:
        for case in every:
            try:
                operation(case)
            except Exception as error:
                mode = "async" if case.async_op else "sync"
                raise AssertionError(
                    f"{operation.__name__}, {mode}, {case.rows} x 3, {case.layout}: {error}"
                ) from error
    here.stop()
    return f"{len(OPERATIONS)} operations, {len(OPERATIONS) * len(every)} cases"
