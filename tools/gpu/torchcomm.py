"""Every operation of TorchComm, on tensors of the device, against plain values."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from values import all_data, assert_reduced, assert_same, data

import torchcomms_pg
from gpu.here import LAYOUTS, Here
from torchcomms_pg import ReduceOp

ROWS = 1000


def new_comm(here: Here, name: str, timeout: float = 60.0) -> torchcomms_pg.TorchComm:
    """Makes a communicator of all ranks that raises what fails."""
    return torchcomms_pg.new_comm(
        "auto",
        here.device,
        name,
        store=here.store,
        rank=here.rank,
        size=here.ranks,
        timeout=timedelta(seconds=timeout),
        abort_process_on_timeout_or_error=False,
    )


def check(here: Here) -> str:
    """All of them, synchronous and asynchronous, in every layout."""
    comm = new_comm(here, "operations")
    count = 0
    for layout in LAYOUTS:
        for async_op in (False, True):
            case = Case(here, comm, async_op, layout)
            for operation in OPERATIONS:
                try:
                    operation(case)
                except Exception as error:
                    mode = "async" if async_op else "sync"
                    what = f"{operation.__name__}, {mode}, {layout}"
                    raise AssertionError(f"{what}: {error}") from error
                count += 1
    _split(here, comm)
    comm.finalize()
    return f"{len(OPERATIONS)} operations, {count} cases; split"


class Case:
    """The operations in one mode and layout."""

    def __init__(
        self, here: Here, comm: torchcomms_pg.TorchComm, async_op: bool, layout: str
    ) -> None:
        self.here, self.comm, self.async_op, self.layout = here, comm, async_op, layout
        self.rank, self.ranks = here.rank, here.ranks
        self.inputs = all_data(here.ranks, (ROWS, 3))
        self.parts = all_data(here.ranks, (here.ranks, ROWS, 3), salt=1)
        # Of rank r for rank p.
        self.uneven = [
            [data(r, (r + 2 * p + 1, 3), salt=p) for p in range(here.ranks)]
            for r in range(here.ranks)
        ]

    def place(self, values: torch.Tensor) -> torch.Tensor:
        """Copies values to the device."""
        return self.here.place(values, self.layout)

    def empty(self, rows: int = ROWS) -> torch.Tensor:
        """Makes room for a result."""
        return self.here.empty((rows, 3), layout=self.layout)

    def mine(self) -> torch.Tensor:
        """This rank's input."""
        return self.place(self.inputs[self.rank])

    def my_parts(self) -> list[torch.Tensor]:
        """This rank's part for every rank."""
        return [self.place(part) for part in self.parts[self.rank]]

    def column(self) -> list[torch.Tensor]:
        """What all ranks have for this one."""
        return [parts[self.rank] for parts in self.parts]

    def all_reduce(self) -> None:
        """In place and to an output."""
        tensor = self.mine()
        self.comm.all_reduce(tensor, ReduceOp.SUM, self.async_op).wait()
        assert_reduced(tensor.cpu(), self.inputs)
        output, tensor = self.empty(), self.mine()
        self.comm.all_reduce(tensor, ReduceOp.MAX, self.async_op, output=output).wait()
        assert_reduced(output.cpu(), self.inputs, dist.ReduceOp.MAX)
        assert_same(tensor.cpu(), self.inputs[self.rank], "the input")

    def broadcast(self) -> None:
        """From every root."""
        for root in range(self.ranks):
            tensor = self.mine()
            self.comm.broadcast(tensor, root, self.async_op).wait()
            assert_same(tensor.cpu(), self.inputs[root])

    def reduce(self) -> None:
        """To every root; elsewhere the tensor stays as it is."""
        for root in range(self.ranks):
            tensor = self.mine()
            self.comm.reduce(tensor, root, ReduceOp.SUM, self.async_op).wait()
            if self.rank == root:
                assert_reduced(tensor.cpu(), self.inputs)
            else:
                assert_same(tensor.cpu(), self.inputs[self.rank])

    def all_gather(self) -> None:
        """To a list."""
        outputs = [self.empty() for _ in self.inputs]
        self.comm.all_gather(outputs, self.mine(), self.async_op).wait()
        assert_same(torch.cat([x.cpu() for x in outputs]), torch.cat(self.inputs))

    def all_gather_v(self) -> None:
        """To a list of tensors of different sizes."""
        inputs = [parts[0] for parts in self.uneven]
        outputs = [self.empty(len(x)) for x in inputs]
        self.comm.all_gather_v(outputs, self.place(inputs[self.rank]), self.async_op).wait()
        assert_same(torch.cat([x.cpu() for x in outputs]), torch.cat(inputs))

    def all_gather_single(self) -> None:
        """To one tensor."""
        output = self.empty(self.ranks * ROWS)
        self.comm.all_gather_single(output, self.mine(), self.async_op).wait()
        assert_same(output.cpu(), torch.cat(self.inputs))

    def reduce_scatter(self) -> None:
        """From a list."""
        output = self.empty()
        self.comm.reduce_scatter(output, self.my_parts(), ReduceOp.SUM, self.async_op).wait()
        assert_reduced(output.cpu(), self.column())

    def reduce_scatter_v(self) -> None:
        """From a list of tensors of different sizes."""
        parts = [
            [data(r, (p + 1, 3), salt=p) for p in range(self.ranks)] for r in range(self.ranks)
        ]
        output = self.empty(self.rank + 1)
        tensors = [self.place(part) for part in parts[self.rank]]
        self.comm.reduce_scatter_v(output, tensors, ReduceOp.SUM, self.async_op).wait()
        assert_reduced(output.cpu(), [x[self.rank] for x in parts])

    def reduce_scatter_single(self) -> None:
        """From one tensor."""
        output, tensor = self.empty(), self.place(self.parts[self.rank].flatten(0, 1))
        self.comm.reduce_scatter_single(output, tensor, ReduceOp.SUM, self.async_op).wait()
        assert_reduced(output.cpu(), self.column())

    def all_to_all(self) -> None:
        """From a list to another."""
        outputs = [self.empty() for _ in self.parts]
        self.comm.all_to_all(outputs, self.my_parts(), self.async_op).wait()
        assert_same(torch.cat([x.cpu() for x in outputs]), torch.cat(self.column()))

    def all_to_all_single(self) -> None:
        """From one tensor to another."""
        output = self.empty(self.ranks * ROWS)
        tensor = self.place(self.parts[self.rank].flatten(0, 1))
        self.comm.all_to_all_single(output, tensor, self.async_op).wait()
        assert_same(output.cpu(), torch.cat(self.column()))

    def all_to_all_v_single(self) -> None:
        """The same in parts of different sizes."""
        takes = [parts[self.rank] for parts in self.uneven]
        gives = self.uneven[self.rank]
        output = self.empty(sum(map(len, takes)))
        splits = [len(x) for x in takes], [len(x) for x in gives]
        tensor = self.place(torch.cat(gives))
        self.comm.all_to_all_v_single(output, tensor, *splits, self.async_op).wait()
        assert_same(output.cpu(), torch.cat(takes))

    def gather(self) -> None:
        """To a list, on every root."""
        for root in range(self.ranks):
            outputs = [self.empty() for _ in self.inputs] if self.rank == root else []
            self.comm.gather(outputs, self.mine(), root, self.async_op).wait()
            if outputs:
                assert_same(torch.cat([x.cpu() for x in outputs]), torch.cat(self.inputs))

    def gather_single(self) -> None:
        """To one tensor, on every root."""
        for root in range(self.ranks):
            shape = (self.ranks * ROWS, 3)  # contiguous in every layout
            output = self.here.empty(shape) if self.rank == root else None
            self.comm.gather_single(output, self.mine(), root, self.async_op).wait()
            if output is not None:
                assert_same(output.cpu(), torch.cat(self.inputs))

    def scatter(self) -> None:
        """From every root."""
        for root in range(self.ranks):
            output = self.empty()
            tensors = [self.place(x) for x in self.parts[root]] if self.rank == root else []
            self.comm.scatter(output, tensors, root, self.async_op).wait()
            assert_same(output.cpu(), self.parts[root][self.rank])

    def messages(self) -> None:
        """Round a ring in a batch, also where the ring is one rank; and one by one."""
        right, left = (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks
        tensor, got = self.mine(), self.empty()
        batch = self.comm.batch_op_create()
        batch.send(tensor, right)
        batch.recv(got, left)
        batch.issue(self.async_op).wait()
        assert_same(got.cpu(), self.inputs[left])
        if self.ranks > 1:
            steps: list[Any] = [
                (self.comm.send, tensor, right),
                (self.comm.recv, got.zero_(), left),
            ]
            for step, where, peer in steps if self.rank == 0 else steps[::-1]:
                step(where, peer, self.async_op).wait()
            assert_same(got.cpu(), self.inputs[left])

    def group(self) -> None:
        """Operations that are launched as one."""
        first, second = self.mine(), self.mine()
        with self.comm.group() as launch:
            self.comm.all_reduce(first, ReduceOp.SUM, self.async_op)
            self.comm.all_reduce(second, ReduceOp.SUM, self.async_op)
        launch.work.wait()
        for tensor in (first, second):
            assert_reduced(tensor.cpu(), self.inputs)

    def barrier(self) -> None:
        """Stops the host."""
        self.comm.barrier(self.async_op).wait()


OPERATIONS = (
    *(Case.all_reduce, Case.broadcast, Case.reduce),
    *(Case.all_gather, Case.all_gather_v, Case.all_gather_single),
    *(Case.reduce_scatter, Case.reduce_scatter_v, Case.reduce_scatter_single),
    *(Case.all_to_all, Case.all_to_all_single, Case.all_to_all_v_single),
    *(Case.gather, Case.gather_single, Case.scatter),
    *(Case.messages, Case.group, Case.barrier),
)


def _split(here: Here, comm: torchcomms_pg.TorchComm) -> None:
    """A communicator of the last ranks, and one of the first."""
    first = [0]
    members = first if here.rank in first else list(range(1, here.ranks))
    part = comm.split(members, f"part{members[0]}")
    assert part is not None
    tensor = torch.full((100,), float(here.rank + 1), device=here.device)
    part.all_reduce(tensor, ReduceOp.SUM, True).wait()
    assert (tensor.cpu() == sum(rank + 1 for rank in members)).all(), "all_reduce after split"
    part.finalize()
