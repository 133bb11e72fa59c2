"""Programs that end over Gloo and torchcomms on a CPU, and break a rule of NCCL.

They are distilled from hangs of other projects: TorchRec 4149, Megatron-LM 1810, 5100, 5240 and
6955.
Each program is called on all ranks, with the device of its tensors, once the default group exists.
A report has to name the program's lines that end with MARK, and no others.
"""

import inspect
import tempfile
import threading
from dataclasses import dataclass

import torch
import torch.distributed as dist

MARK = "# named"
LARGE = 4 << 20  # elements; more than a library buffers


@dataclass(frozen=True)
class Program:
    """``kind`` is the hazard's, empty if there is none.

    If not ``hangs``, the program gives other data over NCCL.
    """

    body: object
    world: int
    kind: str
    hangs: bool = True

    @property
    def lines(self):
        """The numbers of the marked lines in this file."""
        source, first = inspect.getsourcelines(self.body)
        return {first + at for at, line in enumerate(source) if line.rstrip().endswith(MARK)}


PROGRAMS = {}
HEALTHY = {}  # programs that break no rule, and resemble those that do


def program(world, kind, **more):
    def add(body):
        (PROGRAMS if kind else HEALTHY)[body.__name__] = Program(body, world, kind, **more)
        return body

    return add


def finish(*works):
    for work in works:
        work.wait()


def tensor(device, numel=1000):
    return torch.full((numel,), float(dist.get_rank() + 1), device=device)


@program(2, "order")
def opposite_orders_of_two_groups(device):
    """Gradients and metrics, each in its own group."""
    metrics = dist.new_group()
    gradient, metric = tensor(device), tensor(device)
    if dist.get_rank() == 0:
        first = dist.all_reduce(gradient, async_op=True)  # named
        second = dist.all_reduce(metric, group=metrics, async_op=True)  # named
    else:
        first = dist.all_reduce(metric, group=metrics, async_op=True)  # named
        second = dist.all_reduce(gradient, async_op=True)  # named
    finish(first, second)


@program(3, "order")
def a_circle_of_three_groups(device):
    """Each pair of ranks shares one group, so no two ranks call two groups in opposite orders."""
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([1, 2]), dist.new_group([0, 2])]
    mine, before = pairs[rank], pairs[rank - 1]
    first = dist.all_reduce(tensor(device), group=mine, async_op=True)  # named
    second = dist.all_reduce(tensor(device), group=before, async_op=True)  # named
    finish(first, second)


@program(4, "order")
def a_circle_of_experts_and_replicas(device):
    """A grid of two by two: its rows exchange tokens, its columns reduce gradients."""
    rank = dist.get_rank()
    experts = [dist.new_group(row) for row in ([0, 1], [2, 3])][rank // 2]
    replicas = [dist.new_group(column) for column in ([0, 2], [1, 3])][rank % 2]
    tokens, gradient = tensor(device), tensor(device)
    out = torch.empty_like(tokens)
    if rank in (0, 3):
        first = dist.all_to_all_single(out, tokens, group=experts, async_op=True)  # named
        second = dist.all_reduce(gradient, group=replicas, async_op=True)  # named
    else:
        first = dist.all_reduce(gradient, group=replicas, async_op=True)  # named
        second = dist.all_to_all_single(out, tokens, group=experts, async_op=True)  # named
    finish(first, second)


@program(3, "order")
def an_optional_collective_behind_a_branch(device):
    """Rank 0 reduces what it logs before the step, rank 1 after it; the numbers happen to match."""
    rank, loggers = dist.get_rank(), dist.new_group([0, 1])
    works = []
    if rank == 0:
        works.append(dist.all_reduce(tensor(device, 1), group=loggers, async_op=True))  # named
    works.append(dist.all_reduce(tensor(device), async_op=True))  # named
    if rank == 1:
        works.append(dist.all_reduce(tensor(device, 1), group=loggers, async_op=True))  # named
    finish(*works)


@program(2, "first message")
def a_first_message_between_collectives(device):
    """The two ranks have sent each other nothing before."""
    message = tensor(device)
    if dist.get_rank() == 0:
        first = dist.isend(message, 1)  # named
        second = dist.all_reduce(tensor(device), async_op=True)  # named
    else:
        first = dist.all_reduce(tensor(device), async_op=True)  # named
        second = dist.irecv(message, 0)  # named
    finish(first, second)


@program(2, "messages")
def crosswise_sends(device):
    """Each rank sends more than is buffered, and then receives."""
    other = 1 - dist.get_rank()
    sent = dist.isend(tensor(device, LARGE), other)  # named
    received = dist.irecv(tensor(device, LARGE), other)  # named
    finish(sent, received)


@program(2, "messages")
def receives_before_sends(device):
    """Each rank posts its receive before its send, as programs for MPI do."""
    other = 1 - dist.get_rank()
    received = dist.irecv(tensor(device), other)  # named
    sent = dist.isend(tensor(device), other)  # named
    finish(received, sent)


@program(2, "messages")
def an_uneven_pipeline(device):
    """The first stage runs two microbatches ahead, the second returns a gradient after one."""
    works = []
    if dist.get_rank() == 0:
        works.append(dist.isend(tensor(device, LARGE), 1))
        works.append(dist.isend(tensor(device, LARGE), 1))  # named
        works.append(dist.irecv(tensor(device, LARGE), 1))  # named
    else:
        works.append(dist.irecv(tensor(device, LARGE), 0))
        works.append(dist.isend(tensor(device, LARGE), 0))  # named
        works.append(dist.irecv(tensor(device, LARGE), 0))  # named
    finish(*works)


@program(2, "tags", hangs=False)
def messages_in_the_order_of_their_tags(device):
    """Returns what rank 1 has received as gradient and as activation."""
    if dist.get_rank() == 0:
        works = [
            dist.isend(torch.full((5,), 1.0, device=device), 1, tag=1),  # named
            dist.isend(torch.full((5,), 2.0, device=device), 1, tag=2),  # named
        ]
        finish(*works)
        return None
    gradient, activation = torch.zeros(5, device=device), torch.zeros(5, device=device)
    works = [
        dist.irecv(gradient, 0, tag=2),  # named
        dist.irecv(activation, 0, tag=1),  # named
    ]
    finish(*works)
    return gradient[0].item(), activation[0].item()


@program(2, "threads")
def two_threads_in_changing_order(device):
    """Each group has its thread; the two ranks start the threads in opposite orders."""
    metrics = dist.new_group()
    begun = threading.Event()

    def step():
        work = dist.all_reduce(tensor(device), async_op=True)  # named
        begun.set()
        work.wait()

    def log():
        work = dist.all_reduce(tensor(device), group=metrics, async_op=True)  # named
        begun.set()
        work.wait()

    threads = [threading.Thread(target=body) for body in (step, log)]
    for thread in threads if dist.get_rank() == 0 else threads[::-1]:
        begun.clear()
        thread.start()
        begun.wait()
    for thread in threads:
        thread.join()


@program(2, "batch")
def a_batch_on_one_rank_alone(device):
    """Rank 0 sends the shape alone, and rank 1 receives it in a batch."""
    shape = tensor(device)
    dist.barrier()  # makes the group's communicator
    if dist.get_rank() == 0:
        works = [dist.isend(shape, 1)]  # named
    else:
        works = dist.batch_isend_irecv([dist.P2POp(dist.irecv, shape, 0)])  # named
    finish(*works)


@program(3, "first batch")
def an_idle_rank_skips_the_first_batch(device):
    """Weights go from rank 0 to rank 1. Rank 2, a replica, has none to send, and goes on."""
    cpu, rank = dist.new_group(backend="gloo"), dist.get_rank()
    works = []
    if rank < 2:
        op = dist.isend if rank == 0 else dist.irecv
        works = dist.batch_isend_irecv([dist.P2POp(op, tensor(device), 1 - rank)])  # named
    finish(*works)
    dist.barrier(cpu)


@program(3, "")
def batches_of_sends_and_receives(device):
    """A ring, as of context parallelism, in several batches at one line."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # makes the group's communicator
    for _ in range(3):
        sent = dist.P2POp(dist.isend, tensor(device), (rank + 1) % world)
        received = dist.P2POp(dist.irecv, tensor(device), (rank - 1) % world)
        finish(*dist.batch_isend_irecv([sent, received]))


@program(2, "")
def a_checkpoint_that_is_saved_beside_the_training(device):
    """DCP's asynchronous save gathers in a thread, in a group that stays on the CPU."""
    from torch.distributed.checkpoint import async_save

    saving = dist.new_group(backend="gloo")
    with tempfile.TemporaryDirectory() as folder:
        where = [folder]
        dist.broadcast_object_list(where, src=0)
        state = {"x": torch.ones(100)}
        saved = async_save(state, checkpoint_id=where[0], process_group=saving)
        for _ in range(20):
            dist.all_reduce(tensor(device))
        saved.result()
        dist.barrier()


@program(3, "")
def gathers_behind_broadcasts_of_another_group(device):
    """Rank 2 serves. Rank 0 gathers each weight with rank 1, and sends it to the server.

    TRL 6798 hung, by the order of streams on rank 0. The order of the calls is one that NCCL bears.
    """
    training, transfer = dist.new_group([0, 1]), dist.new_group([0, 2])
    rank, weight = dist.get_rank(), tensor(device)
    shards = [torch.empty_like(weight) for _ in range(2)]
    for _ in range(4):
        if rank < 2:
            dist.all_gather(shards, weight, group=training)
        if rank != 1:
            dist.broadcast(weight, 0, group=transfer)
