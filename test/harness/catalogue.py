"""Every operation: how each front end calls it, its inputs, and the results that it has to give.

A function of OPERATIONS runs an operation on this rank and compares the result with plain PyTorch.
The function has the name of TorchComm's method. Its Case has the front end, the device, the values,
and how the operation is issued.
"""

import functools
import math

import torch
import torch.distributed as dist

from harness import values
from harness.comms import torchcomms
from harness.values import data

LAYOUTS = ("contiguous", "transposed", "strided")
ALL_LAYOUTS = (*LAYOUTS, "offset", "inner")

# The functions of torch.distributed, with the arguments of TorchComm's methods.
DIST = {
    "all_reduce": dist.all_reduce,
    "broadcast": dist.broadcast,
    "reduce": dist.reduce,
    "all_gather": dist.all_gather,
    "all_gather_v": dist.all_gather,
    "all_gather_single": dist.all_gather_into_tensor,
    "reduce_scatter": dist.reduce_scatter,
    "reduce_scatter_v": dist.reduce_scatter,
    "reduce_scatter_single": dist.reduce_scatter_tensor,
    "all_to_all": dist.all_to_all,
    "all_to_all_single": dist.all_to_all_single,
    "all_to_all_v_single": dist.all_to_all_single,
    "gather": lambda outputs, tensor, root, **options: dist.gather(
        tensor, outputs or None, root, **options
    ),
    "scatter": lambda output, tensors, root, **options: dist.scatter(
        output, tensors or None, root, **options
    ),
    "barrier": dist.barrier,
}


def empty(shape, dtype=torch.float32, layout="contiguous", device="cpu"):
    """Returns an uninitialised tensor in one of ALL_LAYOUTS; each of LAYOUTS has other strides."""
    options = dict(dtype=dtype, device=device)
    if layout == "transposed":
        return torch.empty(shape[::-1], **options).permute(*range(len(shape))[::-1])
    if layout == "strided":
        return torch.empty((*shape[:-1], 2 * shape[-1]), **options)[..., ::2]
    if layout == "offset":
        return torch.empty(3 + math.prod(shape), **options)[3:].view(shape)
    if layout == "inner":
        return torch.empty([size + 2 for size in shape], **options)[(slice(1, -1),) * len(shape)]
    return torch.empty(shape, **options)


def place(values, layout="contiguous", device="cpu"):
    """Returns a copy of a CPU tensor on a device, in one of ALL_LAYOUTS."""
    return empty(tuple(values.shape), values.dtype, layout, device).copy_(values)


class Case:
    """The inputs of an operation, and how it is issued and waited for.

    Attributes:
        rows: how many rows of the shape `row` each rank, or each pair of ranks, has.
        how: "sync", "async", or "future", which waits for the work's future.
        layout: one of ALL_LAYOUTS.
        comm: a TorchComm; None for torch.distributed.
        roots: the ranks that are the root of an operation in turn.
        splits: `splits[r][p]` is how many rows rank r has for rank p, if sizes differ.
        ops: the names of the reduce ops that a reduction is run with.
        factor: of PREMUL_SUM; a number, or a tensor of one element.

    The constructor accepts every attribute by its name.
    """

    device = "cpu"
    comm = None
    dtype = torch.float32
    row = (3,)
    ops = ("SUM", "MAX")
    op = ""  # the one of `ops` that is being run; empty if none
    factor = 0.5
    options = {}  # noqa: RUF012  (further arguments of each call over torch.distributed)

    def __init__(self, world, rows, how="sync", layout="contiguous", **others):
        self.world, self.rank, self.rows = world, dist.get_rank(), rows
        self.how, self.layout = how, layout
        self.roots = range(world)
        self.splits = [[rows + r + 2 * p for p in range(world)] for r in range(world)]
        for name, value in others.items():
            setattr(self, name, value)

    def __str__(self):
        words = (self.how, f"{(self.rows, *self.row)} of {self.dtype}", self.layout, self.op)
        return ", ".join(filter(None, words))

    def over(self, ways, layouts=("contiguous",)):
        """Yields this case in each way and layout, always with the same inputs."""
        for self.how in ways:
            for self.layout in layouts:
                yield self

    # ------------------------------------------------------------ the call

    def issue(self, name, *args, **kwargs):
        function = getattr(self.comm, name) if self.comm else DIST[name]
        options = {} if self.comm else self.options
        return function(*args, async_op=self.how != "sync", **options, **kwargs)

    def finish(self, name, work):
        if self.comm is None:
            assert (work is None) == (self.how == "sync"), f"a {self.how} {name} returned {work}"
        if self.how == "future":
            work.get_future().wait()
        elif work is not None:
            work.wait()

    def call(self, name, *args, **kwargs):
        """Calls the operation with the arguments of TorchComm's method, and waits."""
        self.finish(name, self.issue(name, *args, **kwargs))

    def to_global(self, root):
        """Returns the number by which the front end names this rank of the group."""
        return root

    def each_op(self):
        """Yields the front end's object for each of `ops`."""
        plain = torchcomms().ReduceOp if self.comm else dist.ReduceOp
        scaled = plain.PREMUL_SUM if self.comm else dist._make_nccl_premul_sum
        for op in self.ops:
            self.op = op
            yield scaled(self.factor) if op == "PREMUL_SUM" else getattr(plain, op)
        self.op = ""

    # ------------------------------------------------------------ values and their check

    def values(self, rank, rows, salt=0):
        return data(rank, (rows, *self.row), self.dtype, salt)

    @functools.cached_property
    def inputs(self):
        """The input of each rank."""
        return [self.values(rank, self.rows) for rank in range(self.world)]

    @functools.cached_property
    def parts(self):
        """`parts[r][p]` is what rank r has for rank p, all of one size."""
        everyone = range(self.world)
        return [[self.values(r, self.rows, salt=1 + p) for p in everyone] for r in everyone]

    @functools.cached_property
    def uneven(self):
        """`uneven[r][p]` is what rank r has for rank p, in the sizes of `splits`."""
        everyone = range(self.world)
        return [[self.values(r, self.splits[r][p], salt=p) for p in everyone] for r in everyone]

    def column(self):
        """Returns the part that each rank has for this rank."""
        return [parts[self.rank] for parts in self.parts]

    def check(self, got, want, what=""):
        values.assert_same(got.cpu(), want, what)

    def of_plain_values(self, inputs):
        """Returns inputs and a plain reduce op that give the result of `op` on these inputs."""
        if self.op == "PREMUL_SUM":
            return [each * float(self.factor) for each in inputs], dist.ReduceOp.SUM
        return inputs, getattr(dist.ReduceOp, self.op)

    def check_reduced(self, got, inputs):
        values.assert_reduced(got.cpu(), *self.of_plain_values(inputs))

    # ------------------------------------------------------------ tensors on the device

    def place(self, values):
        return self.room_for(values).copy_(values)

    def place_all(self, tensors):
        return [self.place(tensor) for tensor in tensors]

    def room_for(self, values):
        """Returns an uninitialised tensor on the device, in the shape of these values."""
        return empty(tuple(values.shape), values.dtype, self.layout, self.device)

    def rooms_for(self, tensors):
        return [self.room_for(tensor) for tensor in tensors]

    def mine(self):
        return self.place(self.inputs[self.rank])


def all_reduce(case):
    """Reduces in place, and over TorchComm also to an output."""
    for op in case.each_op():
        tensor = case.mine()
        case.call("all_reduce", tensor, op)
        case.check_reduced(tensor, case.inputs)
        if case.comm:
            output, tensor = case.room_for(tensor), case.mine()
            case.call("all_reduce", tensor, op, output=output)
            case.check_reduced(output, case.inputs)
            case.check(tensor, case.inputs[case.rank], "the input")


def broadcast(case):
    for root in case.roots:
        tensor = case.mine()
        case.call("broadcast", tensor, case.to_global(root))
        case.check(tensor, case.inputs[root])


def reduce(case):
    """Reduces to each root; over TorchComm the other ranks' tensors stay as they are."""
    for op in case.each_op():
        for root in case.roots:
            tensor = case.mine()
            case.call("reduce", tensor, case.to_global(root), op)
            if case.rank == root:
                case.check_reduced(tensor, case.inputs)
            elif case.comm:
                case.check(tensor, case.inputs[case.rank])


def all_gather(case):
    outputs = case.rooms_for(case.inputs)
    case.call("all_gather", outputs, case.mine())
    case.check(torch.cat(outputs), torch.cat(case.inputs))


def all_gather_v(case):
    inputs = [parts[0] for parts in case.uneven]
    outputs = case.rooms_for(inputs)
    case.call("all_gather_v", outputs, case.place(inputs[case.rank]))
    case.check(torch.cat(outputs), torch.cat(inputs))


def all_gather_single(case):
    want = torch.cat(case.inputs)
    output = case.room_for(want)
    case.call("all_gather_single", output, case.mine())
    case.check(output, want)


def _reduce_scatter(case, name, tensor, inputs):
    for op in case.each_op():
        output = case.room_for(inputs[0])
        case.call(name, output, tensor, op)
        case.check_reduced(output, inputs)


def reduce_scatter(case):
    parts = case.place_all(case.parts[case.rank])
    _reduce_scatter(case, "reduce_scatter", parts, case.column())


def reduce_scatter_v(case):
    everyone = range(case.world)
    sizes = case.splits[0]  # the rows of the part for each rank
    parts = [[case.values(r, sizes[p], salt=p) for p in everyone] for r in everyone]
    inputs = [each[case.rank] for each in parts]
    _reduce_scatter(case, "reduce_scatter_v", case.place_all(parts[case.rank]), inputs)


def reduce_scatter_single(case):
    whole = case.place(torch.cat(case.parts[case.rank]))
    _reduce_scatter(case, "reduce_scatter_single", whole, case.column())


def all_to_all(case):
    outputs = case.rooms_for(case.column())
    case.call("all_to_all", outputs, case.place_all(case.parts[case.rank]))
    case.check(torch.cat(outputs), torch.cat(case.column()))


def all_to_all_single(case):
    want = torch.cat(case.column())
    output = case.room_for(want)
    case.call("all_to_all_single", output, case.place(torch.cat(case.parts[case.rank])))
    case.check(output, want)


def all_to_all_v_single(case):
    gives, takes = case.uneven[case.rank], [parts[case.rank] for parts in case.uneven]
    want = torch.cat(takes)
    output, tensor = case.room_for(want), case.place(torch.cat(gives))
    case.call("all_to_all_v_single", output, tensor, list(map(len, takes)), list(map(len, gives)))
    case.check(output, want)


def gather(case):
    for root in case.roots:
        outputs = case.rooms_for(case.inputs) if case.rank == root else []
        case.call("gather", outputs, case.mine(), case.to_global(root))
        if outputs:
            case.check(torch.cat(outputs), torch.cat(case.inputs))


def gather_single(case):
    """Gathers into one tensor, which is contiguous in every layout."""
    want = torch.cat(case.inputs)
    for root in case.roots:
        output = torch.empty_like(want, device=case.device) if case.rank == root else None
        case.call("gather_single", output, case.mine(), case.to_global(root))
        if output is not None:
            case.check(output, want)


def scatter(case):
    for root in case.roots:
        parts = case.parts[root]
        output = case.room_for(parts[case.rank])
        tensors = case.place_all(parts) if case.rank == root else []
        case.call("scatter", output, tensors, case.to_global(root))
        case.check(output, parts[case.rank])


def barrier(case):
    case.call("barrier")


def messages(case):
    """Sends round the ring of all ranks in a batch, and with several ranks also one by one."""
    right, left = (case.rank + 1) % case.world, (case.rank - 1) % case.world
    tensor, async_op = case.mine(), case.how != "sync"
    got = case.room_for(tensor)
    batch = case.comm.batch_op_create()
    batch.send(tensor, right)
    batch.recv(got, left)
    batch.issue(async_op).wait()
    case.check(got, case.inputs[left])
    if case.world > 1:
        steps = [
            (case.comm.send, tensor, right),
            (case.comm.recv, got.zero_(), left),
        ]
        for step, where, peer in steps if case.rank == 0 else steps[::-1]:
            step(where, peer, async_op).wait()
        case.check(got, case.inputs[left])


TORCHCOMM = {
    operation.__name__: operation
    for operation in (
        *(all_reduce, broadcast, reduce, all_gather, all_gather_v, all_gather_single),
        *(reduce_scatter, reduce_scatter_v, reduce_scatter_single),
        *(all_to_all, all_to_all_single, all_to_all_v_single),
        *(gather, gather_single, scatter, barrier, messages),
    )
}
OPERATIONS = {name: operation for name, operation in TORCHCOMM.items() if name in DIST}


def run(operation, cases):
    """Runs an operation in each case; a failure names its case."""
    for case in cases:
        try:
            operation(case)
        except Exception as error:
            raise AssertionError(f"{case}: {error}") from error
