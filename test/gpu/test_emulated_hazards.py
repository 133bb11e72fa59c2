"""What python -m torchcomms_pg.trace --nccl names does hang, or gives other data, over NCCL.

On the emulated NCCL, whose kernels run in the order of their launches (NCCL_LAUNCH_ORDER_IMPLICIT).
"""

import datetime
import json

import pytest

import emulated

if reason := emulated.available():
    pytest.skip(reason, allow_module_level=True)

import torch
import torch.distributed as dist

import torchcomms_pg
from harness import gpus, ranks
from harness.hazard_programs import PROGRAMS

pytestmark = [gpus.emulated_only, pytest.mark.torch_version]

DEADLINE = datetime.timedelta(seconds=3)
# How long a program may take that ends, and how long one is watched that hangs in torch's nccl.
ENDS, HANGS = 40.0, 8.0

BY_KERNELS = [name for name, each in PROGRAMS.items() if each.kind in ("order", "threads")]
BY_STREAM = [name for name, each in PROGRAMS.items() if each.kind == "messages"]
BY_HOST = [name for name, each in PROGRAMS.items() if each.kind in ("first message", "batch")]


def run_program(port, prefix, world, name, backend, warm, hangs):
    """Called in a rank: what the program gives, and whether one of its groups has failed.

    warm: each group has its communicator before the program begins. hangs: operations then have a
    short deadline.
    """
    gpus.start(backend, port, prefix, world)
    make, comms = dist.new_group, []

    def new_group(*args):
        group = make(*args)
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            prepare(group)
        return group

    def prepare(group):
        if warm:
            dist.all_reduce(torch.ones(1, device="cuda"), group=group)
            torch.cuda.synchronize()
        if backend == "torchcomms":
            comms.append(torchcomms_pg.get_comm(group, device="cuda"))
            if hangs:
                comms[-1].set_timeout(DEADLINE)

    dist.new_group = new_group
    prepare(dist.group.WORLD)
    try:
        result = PROGRAMS[name].body(gpus.current_device())
    except torchcomms_pg.CommError:
        return None, True
    torch.cuda.synchronize()
    return result, any(comm.is_aborted() for comm in comms)


def outcomes(name, backend, *, hangs, warm=True, **env):
    """What became of the program on each rank."""
    world = PROGRAMS[name].world
    with ranks.Ranks(world, init=False, env=env, started_with=gpus.environment) as own:
        own.start(run_program, *own.store_args(), world, name, backend, warm, hangs)
        return own.wait(HANGS if hangs and backend != "torchcomms" else ENDS)


def has_failed(found):
    """Whether a group has failed, at its deadline."""
    ranks.check(found)
    return any(outcome.value[1] for outcome in found)


@pytest.mark.parametrize(
    "name",
    [*BY_KERNELS[:2], *(pytest.param(name, marks=pytest.mark.slow) for name in BY_KERNELS[2:])],
)
def test_kernels_in_the_order_of_their_launches_wait_for_each_other(name):
    """Up to the deadline of their groups. Where streams alone order them, they do not."""
    assert has_failed(outcomes(name, "torchcomms", hangs=True, NCCL_LAUNCH_ORDER_IMPLICIT="1"))
    if PROGRAMS[name].kind == "order":  # threads share a stream, and so order what waits for it
        assert not has_failed(outcomes(name, "torchcomms", hangs=False))


@pytest.mark.rotation
@pytest.mark.parametrize("name", BY_STREAM)
def test_messages_in_one_stream_wait_for_each_other(name):
    assert has_failed(outcomes(name, "torchcomms", hangs=True))


@pytest.mark.slow  # waits long for an end that does not come
@pytest.mark.parametrize("name", BY_HOST)
def test_communicators_of_two_ranks_are_waited_for_by_the_host(name):
    """In torch's nccl before 2.15, which nccl-legacy is. Over one communicator the program ends."""
    backend = "nccl-legacy" if torch.__version__ >= "2.14" else "nccl"
    found = outcomes(name, backend, hangs=True, warm=PROGRAMS[name].kind == "batch")
    # On loaded cores the wait may be longer than that of the store, through which the ranks meet.
    stuck = [outcome.hung or "wait timeout" in outcome.error for outcome in found]
    assert all(stuck), [outcome.error or outcome.died for outcome in found]
    assert not has_failed(outcomes(name, "torchcomms", hangs=False))


@pytest.mark.parametrize("backend", ["nccl", "torchcomms"])
def test_messages_come_in_the_order_of_the_sends_whatever_their_tags(backend):
    found = outcomes("messages_in_the_order_of_their_tags", backend, hangs=False)
    assert not has_failed(found)
    assert found[1].value[0] == (1.0, 2.0), "their tags were looked at"


REFUSED = {
    "tensors of type Short": lambda mine: dist.all_reduce(mine.short()),
    "tensors of type UInt16": lambda mine: dist.broadcast(mine.to(torch.uint16), 0),
    "reductions by BAND": lambda mine: dist.all_reduce(mine, op=dist.ReduceOp.BAND),
    "reductions by BOR": lambda mine: dist.all_reduce(mine, op=dist.ReduceOp.BOR),
    "reductions by BXOR": lambda mine: dist.all_reduce(mine, op=dist.ReduceOp.BXOR),
    "a receive from any rank": lambda mine: dist.recv(mine),
    "a gather of complex tensors": lambda mine: gather(mine.to(torch.complex64)),
    "monitored_barrier": lambda mine: dist.monitored_barrier(),
}


def gather(mine):
    parts = [torch.empty_like(mine) for _ in range(2)]
    dist.gather(mine, parts if dist.get_rank() == 0 else None, 0)


@gpus.on_gpus(2, groups=[name for name in gpus.GROUPS if name != "torchcomms"])
@pytest.mark.parametrize("what", REFUSED)
def test_torchs_nccl_refuses_what_is_said_to_be_refused(what):
    mine = torch.ones(4, dtype=torch.int32, device="cuda")
    with pytest.raises((RuntimeError, ValueError, TypeError, NotImplementedError)):
        REFUSED[what](mine)


def captured():
    return json.loads(torchcomms_pg.hooks.process_recorder().dump_json()).get("captured", 0)


@gpus.on_ours(2)
def test_operations_in_graphs_are_counted_since_they_are_not_recorded():
    mine = torch.ones(4, device="cuda")
    dist.all_reduce(mine)
    torch.cuda.synchronize()
    before, graph = captured(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(mine)
        dist.all_reduce(mine)
    graph.replay()
    torch.cuda.synchronize()
    assert captured() == before + 2
