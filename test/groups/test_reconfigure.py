"""A group that goes on with other members: reconfigure, which torch has from 2.14 on."""

import datetime
import os
import threading

import pytest
import torch
import torch.distributed as dist

from harness.comms import make, torchcomms
from harness.parity import like_gloo, refused
from harness.ranks import (
    Ranks,
    init_default_group,
    on_own_ranks,
    time_limit,
    wait_for,
)
from harness.recorders import process_entries, recorder
from harness.values import all_data, assert_reduced, assert_same, data
from torchcomms_pg.testing.rank import report

pytestmark = [
    pytest.mark.torch_version,
    pytest.mark.beyond_gloo,
    pytest.mark.skipif(torch.__version__ < "2.14", reason="torch 2.14 brings reconfigure"),
]
CPU = torch.device("cpu")
SHORT = datetime.timedelta(seconds=4)  # whoever comes later than that is missing, too


def handle(group=None):
    return dist.distributed_c10d._get_reconfigure_handle(group)


def reconfigure(uuid, handles, group=None, **kwargs):
    return dist.distributed_c10d._reconfigure(uuid, handles, group, **kwargs)


def handles_of(ranks, turn, store=None):
    """The handles of these processes; all of them call it, with a new `turn` each time."""
    store = store or dist.distributed_c10d._get_default_store()
    store.set(f"handle/{turn}/{os.environ['RANK']}", handle())
    return [store.get(f"handle/{turn}/{rank}").decode() for rank in ranks]


def check_group(members, group=None):
    """All that a group does goes between these processes, in this order."""
    me = int(os.environ["RANK"])
    size, rank = len(members), members.index(me)
    pg = group or dist.group.WORLD
    assert (pg.rank(), pg.size()) == (rank, size)
    for length in (1, 1025, 100_001):
        inputs = {process: data(process, length) for process in members}
        tensor = inputs[me].clone()
        dist.all_reduce(tensor, group=group)
        assert_reduced(tensor, list(inputs.values()))
        output = torch.empty(size * length)
        dist.all_gather_into_tensor(output, inputs[me], group=group)
        assert_same(output, torch.cat(list(inputs.values())))
    tensor = data(me, 50)
    dist.broadcast(tensor, group_src=size - 1, group=group)
    assert_same(tensor, data(members[-1], 50))
    incoming = torch.empty(50)
    for work in dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, data(me, 50), group=group, group_peer=(rank + 1) % size),
            dist.P2POp(dist.irecv, incoming, group=group, group_peer=(rank - 1) % size),
        ]
    ):
        work.wait()
    assert_same(incoming, data(members[rank - 1], 50))
    work = dist.all_reduce(tensor := torch.ones(3), group=group, async_op=True)
    work.wait()
    assert tensor.tolist() == [size] * 3
    dist.barrier(group)


@like_gloo(3)
def test_the_order_of_the_handles_is_that_of_the_ranks():
    me, seen = dist.get_rank(), []

    def state():
        dist.broadcast(tensor := torch.tensor([me]), group_src=0)
        seen.append((dist.get_rank(), dist.get_world_size(), int(tensor)))

    assert dist.distributed_c10d._supports_reconfigure()
    state()
    for uuid, order in enumerate(([2, 0, 1], [1, 2, 0], [0, 1, 2])):
        assert reconfigure(uuid, handles_of(order, uuid)).wait()
        state()
    reconfigure(10, set(handles_of([2, 1, 0], 10))).wait()
    seen.append((dist.get_world_size(), sorted(object_of_all())))
    pair = handles_of([2, 0], 11)
    wrong = [
        refused(reconfigure, 12, []),
        refused(reconfigure, 13, [pair[0], pair[0]]),
        refused(reconfigure, 14, ["no handle"]),
        me == 1 and refused(reconfigure, 15, pair),
    ]
    store = dist.distributed_c10d._get_default_store()
    if me != 1:
        reconfigure(20, pair).wait()
        state()
    store.set(f"done/{me}", "")
    store.wait([f"done/{rank}" for rank in range(3)])
    reconfigure(21, handles_of([0, 1, 2], 21)).wait()  # and back, for the end of this test
    return seen, wrong


def object_of_all():
    objects = [None] * dist.get_world_size()
    dist.all_gather_object(objects, int(os.environ["RANK"]))
    return objects


@on_own_ranks(3, init=False)
def test_a_new_process_joins_two(port, prefix):
    me = int(os.environ["RANK"])
    if me == 2:
        init_default_group(port, prefix, me, 3, 30, enable_reconfigure=True)
        with pytest.raises(RuntimeError, match="enable_reconfigure; call reconfigure first"):
            dist.all_reduce(torch.ones(1))
    else:
        init_default_group(port, prefix, me, 2, 30)
        check_group([0, 1])
    before = dist.group.WORLD
    assert reconfigure(1, handles_of([0, 1, 2], "grow")).wait()
    assert dist.group.WORLD is before
    check_group([0, 1, 2])
    subgroup = dist.new_group([0, 2])
    if me != 1:
        check_group([0, 2], subgroup)
    dist.barrier()
    dist.destroy_process_group()


def go_on_without(victim):
    """Until the victim dies; then with the other two."""
    me, others = dist.get_rank(), [rank for rank in range(3) if rank != victim]
    handles = handles_of(range(3), "before")
    told = []
    backend = dist.group.WORLD._get_backend(CPU)
    backend.register_abort_hook(1, lambda: told.append(dist.get_rank()))
    check_group([0, 1, 2])
    report("running")
    with pytest.raises(torchcomms().CommError, match=rf"rank {victim}\b"):
        while True:
            dist.all_reduce(torch.ones(1000))
    assert backend.get_error().name != "SUCCESS" and told == [me]
    with time_limit(0, 15, "reconfigure"):
        reconfigure(7, [handles[rank] for rank in others]).wait()
    assert backend.get_error().name == "SUCCESS"
    check_group(others)
    assert told == [me]
    backend.abort()
    assert told == [me, others.index(me)], "hooks go on with the group"


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_two_members_go_on_once_the_third_is_dead_by_kill_9(victim):
    with Ranks(3) as ranks:
        ranks.start(go_on_without, victim)
        for rank in range(3):
            ranks.wait_report(rank)
        ranks.kill(victim)
        outcomes = ranks.wait()
        for outcome in outcomes:
            assert outcome.rank == victim or outcome.ok, outcome


@on_own_ranks(3)
def test_a_missing_member_is_named_at_the_timeout_and_the_group_stays(world):
    me = dist.get_rank()
    handles = handles_of(range(world), "late")
    store = dist.distributed_c10d._get_default_store()
    if me != 2:
        with time_limit(3.5, 15, "reconfigure"), pytest.raises(torchcomms().CommError) as raised:
            reconfigure(1, handles, timeout=SHORT)
        error = raised.value
        text = str(error)
        assert error.op == "reconfigure" and "to uuid 1: within 4 s" in text, text
        # Rank 0 knows who came; the other waits for rank 0, or knows as well.
        assert 2 in error.ranks or not error.ranks, error.ranks
        assert me or f"rank 2 ('{handles[2]}') did not come" in text, text
        assert "new uuid" in text and "as it was" in text, text
    store.set(f"tried/{me}", "")
    store.wait([f"tried/{rank}" for rank in range(world)])
    check_group([0, 1, 2])  # as it was
    reconfigure(2, handles[::-1]).wait()
    check_group([2, 1, 0])


@on_own_ranks(2)
def test_members_with_different_handles_do_not_meet():
    me = dist.get_rank()
    handles = handles_of(range(2), "different")
    with pytest.raises(torchcomms().CommError, match="the same handles in the same order"):
        reconfigure(1, handles if me == 0 else handles[::-1], timeout=SHORT)
    check_group([0, 1])


@pytest.mark.ranks(1)
def test_what_is_wrong_in_the_arguments_is_named(world):
    group = dist.new_group()
    mine, other = handle(group), "torchcomms:1:0123456789abcdef"
    for arguments, text in [
        ([1, []], "handles is empty, wanted one handle for each member"),
        ([1, [mine, "gloo:1:-1:1:"]], "'gloo:1:-1:1:' is not a handle"),
        ([1, [mine, "torchcomms:x:1"]], "'torchcomms:x:1' is not a handle"),
        ([1, [mine, mine]], f"handles has '{mine}' twice"),
        ([1, [other]], f"this member's handle '{mine}' is not among handles"),
        ([1, {other}], f"this member's handle '{mine}' is not among handles"),
    ]:
        with pytest.raises(ValueError, match=text):
            reconfigure(*arguments, group)
    with pytest.raises(ValueError, match="timeout must be positive, got 0 ms"):
        reconfigure(1, [mine], group, timeout=datetime.timedelta(0))
    reconfigure(1, [mine], group, hints={"for": "another backend"}).wait()
    with pytest.raises(ValueError, match="uuid 1 was used before"):
        reconfigure(1, [mine], group)
    check_group([0], group)
    dist.destroy_process_group(group)


@on_own_ranks(2, env=dict(TORCH_FR_BUFFER_SIZE="100"))
def test_hooks_recorders_and_timing_stay():
    """Hooks, recorders and timing that were there before."""
    me, hooks = dist.get_rank(), torchcomms().hooks
    handles = handles_of(range(2), "watched")
    group, seen, done = dist.group.WORLD, [], []
    comm = torchcomms().get_comm(group)
    pre = comm.register_pre_hook(lambda args: seen.append(args.name))
    own = recorder(comm)
    group._register_on_completion_hook(lambda info: done.append(info.seq))
    dist.all_reduce(torch.ones(1))
    reconfigure(1, handles[::-1]).wait()
    dist.all_reduce(torch.ones(1))
    dist.broadcast(torch.ones(1), group_src=0)
    assert seen == [hooks.OpName.all_reduce] * 2 + [hooks.OpName.broadcast], seen
    group._wait_for_pending_works()
    assert done == [1, 1, 2], done
    work = dist.all_reduce(torch.ones(1), async_op=True)
    work.wait()
    assert work._get_duration() > 0
    pre.remove()
    dist.barrier()
    assert len(seen) == 4, seen
    recorded = [entry["profiling_name"] for entry in process_entries(group)]
    want = ["all_reduce", "all_reduce", "broadcast", "all_reduce", "all_reduce_barrier"]
    assert recorded == [f"nccl:{name}" for name in want], recorded
    assert str(own.dump_json()).count("nccl:all_reduce") == 4
    ranks = [entry["collective_seq_id"] for entry in process_entries(group)]
    assert ranks == [1, 1, 2, 3, 4], ranks
    with pytest.raises(RuntimeError, match="has been shut down"):
        comm.barrier(False)  # of the old communicator; get_comm gives the new one
    assert torchcomms().get_comm(group).get_rank() == 1 - me


@on_own_ranks(2, env=dict(TORCH_FR_BUFFER_SIZE="100"))
def test_operations_in_flight_fail_and_blocked_callers_are_released():
    """In messages that nobody sends."""
    me = dist.get_rank()
    handles = handles_of(range(2), "blocked")
    check_group([0, 1])
    errors = []

    def receive():
        try:
            dist.recv(torch.ones(1), group_src=1 - me)
        except torchcomms().CommError as error:
            errors.append(str(error))

    thread = threading.Thread(target=receive)
    thread.start()
    work = dist.irecv(torch.ones(1), group_src=1 - me, tag=3)
    assert wait_for(lambda: len(in_flight()) == 2), in_flight()
    with time_limit(0, 15, "reconfigure"):
        reconfigure(1, handles).wait()
    thread.join(15)
    assert not thread.is_alive() and len(errors) == 1
    with pytest.raises(torchcomms().CommError, match=r"reconfigure\(\)"):
        work.wait()
    check_group([0, 1])


def in_flight():
    """What the process's recorder has as not finished."""
    messages = [entry for entry in process_entries(dist.group.WORLD) if entry["is_p2p"]]
    return [entry for entry in messages if not entry["retired"]]


@on_own_ranks(2)
def test_what_was_replaced_leaves_no_threads_and_no_files():
    handles = handles_of(range(2), "often")
    turns, counts = 20, []
    count = lambda: [len(os.listdir(f"/proc/self/{what}")) for what in ("task", "fd")]  # noqa: E731
    for turn in range(turns):
        reconfigure(turn, handles[:: 1 if turn % 2 else -1]).wait()
        work = dist.all_reduce(tensor := torch.ones(10_000), async_op=True)
        work.wait()
        assert tensor[0] == 2
        counts.append(count())
    # Of the last, something may still be ending.
    most = [max(each) for each in zip(*counts[: turns // 2])]
    assert wait_for(lambda: all(now <= then for now, then in zip(count(), most))), counts
    dist.barrier()


@pytest.mark.ranks(3)
def test_subgroups_and_shrunk_groups_can_be_reconfigured_too(world):
    store = dist.distributed_c10d._get_default_store()
    me = dist.get_rank()
    group = dist.new_group([0, 2])
    if me != 1:
        store.set(f"sub/{me}", handle(group))
        reconfigure(1, [store.get(f"sub/{rank}").decode() for rank in (2, 0)], group).wait()
        check_group([2, 0], group)
        shrunk = group._get_backend(CPU).shrink([0], 0, None) if me == 0 else None
        if shrunk is not None:
            shrunk.reconfigure(options(2, [shrunk.get_reconfigure_handle()])).wait()
            assert (shrunk.rank(), shrunk.size()) == (0, 1)
        dist.destroy_process_group(group)
    dist.barrier()


def options(uuid, handles):
    made = dist.distributed_c10d.ReconfigureOptions()
    made.uuid, made.handles = uuid, handles
    return made


@on_own_ranks(2, init=False)
@pytest.mark.parametrize("chosen", (False, True))
def test_whether_a_failure_ends_the_process_stays(port, prefix, chosen):
    options = torchcomms().Backend.Options()
    options.abort_process_on_timeout_or_error = chosen
    rank, more = int(os.environ["RANK"]), dict(enable_reconfigure=True, pg_options=options)
    init_default_group(port, prefix, rank, 2, 30, **more)
    seen = []
    for uuid in range(2):
        reconfigure(uuid, handles_of(range(2), uuid)).wait()
        seen.append(torchcomms().get_comm().get_options().abort_process_on_timeout_or_error)
    dist.barrier()
    dist.destroy_process_group()
    assert seen == [chosen] * 2


@pytest.mark.ranks(1)
def test_the_group_of_a_torchcomm_refuses(world):
    comm = make("apart")
    group = torchcomms().get_process_group(comm)
    assert not group.supports_reconfigure
    with pytest.raises(RuntimeError, match="is that of a TorchComm"):
        handle(group)
    dist.destroy_process_group(group)
    comm.finalize()


@on_own_ranks(2, init=False)
def test_ddp_trains_on_with_a_reconfigured_group(port, prefix):
    """Steps of DistributedDataParallel, with a new wrapper after each change of the members."""
    me = int(os.environ["RANK"])
    init_default_group(port, prefix, me, 2, 30, enable_reconfigure=True)
    handles = handles_of(range(2), "train")
    torch.manual_seed(3)
    net, uuids = torch.nn.Linear(4, 2), (5, 6, 7)
    for uuid in uuids:
        reconfigure(uuid, handles[:: 1 if uuid % 2 else -1]).wait()
        wrapped = torch.nn.parallel.DistributedDataParallel(net)
        wrapped(data(me, (3, 4))).sum().backward()
    want = sum(x.sum(0) for x in all_data(2, (3, 4))) / 2
    torch.testing.assert_close(net.weight.grad, len(uuids) * want.expand(2, 4))
    dist.barrier()
    dist.destroy_process_group()
