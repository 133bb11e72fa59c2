"""TorchComm on GPU tensors beside plain values: every operation, batches, groups, windows."""

import datetime
import functools

import pytest
import torch
import torch.distributed as dist

from harness import gpus
from harness.comms import make
from harness.gpus import on_ours
from harness.values import assert_reduced, assert_same, data
from torchcomms_pg import ReduceOp

if reason := gpus.missing():
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.torch_version

ROWS = 1000
WINDOW_SIZES = (1, 1025, 300_000)


def new_comm(name):
    patience = datetime.timedelta(minutes=1)
    return make(name, "auto", gpus.current_device(), timeout=patience)


@functools.cache
def comm():
    return new_comm("operations")


class Case(gpus.Case):
    """The operations in one mode and layout."""

    def __init__(self, world, async_op, layout):
        super().__init__(world, ROWS, layout)
        self.comm, self.async_op = comm(), async_op
        # Of rank r for rank p.
        self.uneven = [
            [data(r, (r + 2 * p + 1, 3), salt=p) for p in range(world)] for r in range(world)
        ]

    def all_reduce(self):
        """In place and to an output."""
        tensor = self.mine()
        self.comm.all_reduce(tensor, ReduceOp.SUM, self.async_op).wait()
        assert_reduced(tensor.cpu(), self.inputs)
        output, tensor = self.empty(), self.mine()
        self.comm.all_reduce(tensor, ReduceOp.MAX, self.async_op, output=output).wait()
        assert_reduced(output.cpu(), self.inputs, dist.ReduceOp.MAX)
        assert_same(tensor.cpu(), self.inputs[self.rank], "the input")

    def broadcast(self):
        """From every root."""
        for root in range(self.world):
            tensor = self.mine()
            self.comm.broadcast(tensor, root, self.async_op).wait()
            assert_same(tensor.cpu(), self.inputs[root])

    def reduce(self):
        """To every root; elsewhere the tensor stays as it is."""
        for root in range(self.world):
            tensor = self.mine()
            self.comm.reduce(tensor, root, ReduceOp.SUM, self.async_op).wait()
            if self.rank == root:
                assert_reduced(tensor.cpu(), self.inputs)
            else:
                assert_same(tensor.cpu(), self.inputs[self.rank])

    def all_gather(self):
        """To a list."""
        outputs = [self.empty() for _ in self.inputs]
        self.comm.all_gather(outputs, self.mine(), self.async_op).wait()
        assert_same(torch.cat([x.cpu() for x in outputs]), torch.cat(self.inputs))

    def all_gather_v(self):
        """To a list of tensors of different sizes."""
        inputs = [parts[0] for parts in self.uneven]
        outputs = [self.empty(len(x)) for x in inputs]
        self.comm.all_gather_v(outputs, self.place(inputs[self.rank]), self.async_op).wait()
        assert_same(torch.cat([x.cpu() for x in outputs]), torch.cat(inputs))

    def all_gather_single(self):
        """To one tensor."""
        output = self.empty(self.world * ROWS)
        self.comm.all_gather_single(output, self.mine(), self.async_op).wait()
        assert_same(output.cpu(), torch.cat(self.inputs))

    def reduce_scatter(self):
        """From a list."""
        output = self.empty()
        self.comm.reduce_scatter(output, self.my_parts(), ReduceOp.SUM, self.async_op).wait()
        assert_reduced(output.cpu(), self.column())

    def reduce_scatter_v(self):
        """From a list of tensors of different sizes."""
        parts = [
            [data(r, (p + 1, 3), salt=p) for p in range(self.world)] for r in range(self.world)
        ]
        output = self.empty(self.rank + 1)
        tensors = [self.place(part) for part in parts[self.rank]]
        self.comm.reduce_scatter_v(output, tensors, ReduceOp.SUM, self.async_op).wait()
        assert_reduced(output.cpu(), [x[self.rank] for x in parts])

    def reduce_scatter_single(self):
        """From one tensor."""
        output, tensor = self.empty(), self.place(self.parts[self.rank].flatten(0, 1))
        self.comm.reduce_scatter_single(output, tensor, ReduceOp.SUM, self.async_op).wait()
        assert_reduced(output.cpu(), self.column())

    def all_to_all(self):
        """From a list to another."""
        outputs = [self.empty() for _ in self.parts]
        self.comm.all_to_all(outputs, self.my_parts(), self.async_op).wait()
        assert_same(torch.cat([x.cpu() for x in outputs]), torch.cat(self.column()))

    def all_to_all_single(self):
        """From one tensor to another."""
        output = self.empty(self.world * ROWS)
        tensor = self.place(self.parts[self.rank].flatten(0, 1))
        self.comm.all_to_all_single(output, tensor, self.async_op).wait()
        assert_same(output.cpu(), torch.cat(self.column()))

    def all_to_all_v_single(self):
        """The same in parts of different sizes."""
        takes = [parts[self.rank] for parts in self.uneven]
        gives = self.uneven[self.rank]
        output = self.empty(sum(map(len, takes)))
        splits = [len(x) for x in takes], [len(x) for x in gives]
        tensor = self.place(torch.cat(gives))
        self.comm.all_to_all_v_single(output, tensor, *splits, self.async_op).wait()
        assert_same(output.cpu(), torch.cat(takes))

    def gather(self):
        """To a list, on every root."""
        for root in range(self.world):
            outputs = [self.empty() for _ in self.inputs] if self.rank == root else []
            self.comm.gather(outputs, self.mine(), root, self.async_op).wait()
            if outputs:
                assert_same(torch.cat([x.cpu() for x in outputs]), torch.cat(self.inputs))

    def gather_single(self):
        """To one tensor, on every root."""
        for root in range(self.world):
            shape = (self.world * ROWS, 3)  # contiguous in every layout
            output = gpus.empty(shape) if self.rank == root else None
            self.comm.gather_single(output, self.mine(), root, self.async_op).wait()
            if output is not None:
                assert_same(output.cpu(), torch.cat(self.inputs))

    def scatter(self):
        """From every root."""
        for root in range(self.world):
            output = self.empty()
            tensors = [self.place(x) for x in self.parts[root]] if self.rank == root else []
            self.comm.scatter(output, tensors, root, self.async_op).wait()
            assert_same(output.cpu(), self.parts[root][self.rank])

    def messages(self):
        """Round a ring in a batch, also where the ring is one rank; and one by one."""
        right, left = (self.rank + 1) % self.world, (self.rank - 1) % self.world
        tensor, got = self.mine(), self.empty()
        batch = self.comm.batch_op_create()
        batch.send(tensor, right)
        batch.recv(got, left)
        batch.issue(self.async_op).wait()
        assert_same(got.cpu(), self.inputs[left])
        if self.world > 1:
            steps = [
                (self.comm.send, tensor, right),
                (self.comm.recv, got.zero_(), left),
            ]
            for step, where, peer in steps if self.rank == 0 else steps[::-1]:
                step(where, peer, self.async_op).wait()
            assert_same(got.cpu(), self.inputs[left])

    def group(self):
        """Operations that are launched as one."""
        first, second = self.mine(), self.mine()
        with self.comm.group() as launch:
            self.comm.all_reduce(first, ReduceOp.SUM, self.async_op)
            self.comm.all_reduce(second, ReduceOp.SUM, self.async_op)
        launch.work.wait()
        for tensor in (first, second):
            assert_reduced(tensor.cpu(), self.inputs)

    def barrier(self):
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


@pytest.mark.parametrize("async_op", (False, True), ids=("sync", "async"))
@pytest.mark.parametrize("operation", [operation.__name__ for operation in OPERATIONS])
@on_ours(1, 2, 3)
def test_operations_are_those_of_plain_values(world, operation, async_op):
    for layout in gpus.LAYOUTS:
        try:
            getattr(Case(world, async_op, layout), operation)()
        except Exception as error:
            raise AssertionError(f"{layout}: {error}") from error


@on_ours(1, 2, 3)
def test_split_makes_a_communicator_of_some_ranks(world):
    rank = dist.get_rank()
    members = [0] if rank == 0 else list(range(1, world))
    part = comm().split(members, f"part{members[0]}")
    tensor = torch.full((100,), rank + 1.0, device="cuda")
    part.all_reduce(tensor, ReduceOp.SUM, True).wait()
    assert (tensor.cpu() == sum(member + 1 for member in members)).all()
    part.finalize()


@on_ours(1, 2)
def test_what_is_put_into_a_window_is_there_when_its_signal_is(world):
    rank, made = dist.get_rank(), new_comm("windows")
    after, before = (rank + 1) % world, (rank - 1) % world
    try:
        window = made.new_window(torch.zeros(max(WINDOW_SIZES), device="cuda"))
    except (NotImplementedError, RuntimeError) as error:
        made.finalize()
        # An older NCCL, or ranks that share a GPU through sockets.
        lacking = isinstance(error, NotImplementedError) or "cannot map" in str(error)
        if lacking and not gpus.EMULATED:
            pytest.skip(str(error))
        raise
    for async_op in (False, True):
        for size in WINDOW_SIZES:
            window.put(data(rank, size).cuda(), after, 0, async_op)
            window.signal(after, async_op)
            window.wait_signal(before, async_op).wait()
            got = window.get_tensor()
            assert_same(got[:size].cpu(), data(before, size), f"{size} elements")
            window.signal(before, async_op)  # has read them
            window.wait_signal(after, async_op).wait()
    mapped = window.map_remote_tensor(after)
    assert_same(mapped[: WINDOW_SIZES[-1]].cpu(), data(rank, WINDOW_SIZES[-1]), "mapped")
    window.tensor_deregister()
    made.finalize()
