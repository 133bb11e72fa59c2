"""Dumps of ranks that hang or disagree, and torch's tools that read them.

torch's analyser, ``torchfrtrace``, and the front end of its debug server are run as they are.
"""

import datetime
import json
import logging
import os
import pickle
import re

import pytest
import torch
import torch.distributed as dist

from harness.comms import torchcomms
from harness.programs import run_python
from harness.ranks import check, connect_store, init_default_group, wait_for
from harness.recorders import (
    LIMIT,
    SOON,
    TOGETHER,
    dumped,
    dumped_without_the_gil,
    fails,
    recorder,
    short_group,
)
from harness.stuck import keep_the_gil
from torchcomms_pg.testing.rank import receive, report
from torchcomms_pg.trace import load

pytestmark = [pytest.mark.beyond_gloo, pytest.mark.torch_version]
HERE = os.path.abspath(__file__)


def analyse(folder, world, *, healthy=False):
    """(what torch's analyser prints, its table of collectives)."""
    from torch.distributed.flight_recorder import fr_trace

    dumped(folder, world)
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("Flight Recorder")
    logger.addHandler(handler)
    try:
        fr_trace.main([str(folder), "-p", "trace_", "-o", f"{folder}/database"])
    finally:
        logger.removeHandler(handler)
    with open(f"{folder}/database", "rb") as file:
        _, database = pickle.load(file)
    text = "\n".join(lines)
    if healthy:
        assert all(collective.pass_check for collective in database.collectives), text
        assert not any(collective.missing_ranks for collective in database.collectives), text
    return text, database.collectives


def healthy_job():
    """All kinds of operations, on all ranks, in a subgroup, and messages in all orders."""
    rank, world, t = dist.get_rank(), dist.get_world_size(), torch.ones(6)
    lists = lambda: [torch.ones(2) for _ in range(world)]  # noqa: E731
    uneven = lambda: [torch.ones(r + 1) for r in range(world)]  # noqa: E731
    sub = dist.new_group([0, world - 1])
    dist.all_reduce(t)
    dist.broadcast(t, 1)
    dist.reduce(t, 1)
    dist.all_gather(lists(), torch.ones(2))
    dist.all_gather(uneven(), torch.ones(rank + 1))
    dist.all_gather_into_tensor(torch.ones(2 * world), torch.ones(2))
    dist.reduce_scatter(torch.ones(2), lists())
    dist.reduce_scatter(torch.ones(rank + 1), uneven())
    dist.reduce_scatter_tensor(torch.ones(2), torch.ones(2 * world))
    dist.all_to_all(lists(), lists())
    dist.all_to_all(
        [torch.ones(rank + 1) for _ in range(world)], [torch.ones(r + 1) for r in range(world)]
    )
    dist.all_to_all_single(torch.ones(world), torch.ones(world))
    dist.gather(torch.ones(2), lists() if rank == 1 else None, 1)
    dist.scatter(torch.ones(2), lists() if rank == 1 else None, 1)
    dist.all_gather_object([None] * world, {"rank": rank})
    with dist._coalescing_manager(device=torch.device("cpu")):
        dist.all_reduce(torch.ones(3))
        dist.all_reduce(torch.ones(4))
    # A pipeline, then a ring, then both directions of a pair at once.
    if rank > 0:
        dist.recv(t, rank - 1)
    if rank < world - 1:
        dist.send(t, rank + 1)
    ring = [
        dist.P2POp(dist.isend, t, (rank + 1) % world),
        dist.P2POp(dist.irecv, t.clone(), (rank - 1) % world),
    ]
    for _ in range(2):
        [work.wait() for work in dist.batch_isend_irecv(ring)]
    if rank in (0, world - 1):
        peer = world - 1 - rank
        works = [dist.isend(torch.ones(2 + rank), peer), dist.irecv(torch.ones(2 + peer), peer)]
        [work.wait() for work in works]
        dist.all_reduce(t, group=sub)
    if rank == 0:
        dist.send(t, 1)
    elif rank == 1:
        dist.recv(t)
    dist.barrier()
    hook = torchcomms().hooks.FlightRecorderHook()
    torchcomms()._C.process_recorder().write(f"{os.environ['TORCH_FR_DUMP_TEMP_FILE']}{rank}", True)
    del hook


def test_the_analyser_finds_nothing_in_a_healthy_job(recording, tmp_path):
    recording(3).run(healthy_job)
    text, collectives = analyse(tmp_path, 3, healthy=True)
    names = {c.collective_name.split()[0] for c in collectives}
    assert {"nccl:send", "nccl:coalesced", "nccl:all_to_all", "nccl:gather"} < names, names
    assert "mismatch" not in text.lower() and "missing" not in text.lower(), text


def over_watched_gloo(port, prefix, world, timeout):
    torchcomms().watch()
    rank = int(os.environ["RANK"])
    init_default_group(port, prefix, rank, world, timeout, backend="gloo")


def healthy_watched_job():
    """Operations that Gloo has, most of them in place, and messages."""
    rank, world, t = dist.get_rank(), dist.get_world_size(), torch.ones(6)
    lists = lambda: [torch.ones(2) for _ in range(world)]  # noqa: E731
    for _ in range(3):
        dist.all_reduce(t)
    dist.broadcast(t, 1)
    dist.reduce(t, 1)
    dist.all_gather(lists(), torch.ones(2))
    dist.all_gather_into_tensor(torch.ones(2 * world), torch.ones(2))
    dist.all_to_all_single(torch.ones(world), torch.ones(world))
    dist.gather(torch.ones(2), lists() if rank == 1 else None, 1)
    dist.scatter(torch.ones(2), lists() if rank == 1 else None, 1)
    ring = [
        dist.P2POp(dist.isend, t, (rank + 1) % world),
        dist.P2POp(dist.irecv, t.clone(), (rank - 1) % world),
    ]
    [work.wait() for work in dist.batch_isend_irecv(ring)]
    dist.barrier()
    ring = torchcomms()._C.process_recorder()
    assert wait_for(lambda: all(e["retired"] for e in json.loads(ring.json())["entries"]), SOON)
    ring.write(f"{os.environ['TORCH_FR_DUMP_TEMP_FILE']}{rank}", True)


@pytest.mark.skipif(torch.__version__ < "2.14", reason="c10d has hooks from torch 2.14 on")
def test_the_analyser_finds_nothing_in_a_healthy_watched_job(recording, tmp_path):
    """Hooks tell no outputs of an operation in place."""
    recording(3, over_watched_gloo).run(healthy_watched_job)
    text, collectives = analyse(tmp_path, 3, healthy=True)
    names = {c.collective_name.split()[0] for c in collectives}
    assert {"nccl:all_reduce", "nccl:broadcast", "nccl:reduce", "nccl:send"} < names, names
    assert "mismatch" not in text.lower() and "missing" not in text.lower(), text
    entries = load(tmp_path, "trace_")[0].entries
    in_place = ("all_reduce", "broadcast", "reduce")
    told = {entry.op: entry.what for entry in entries if entry.op in in_place}
    assert told == {op: f"{op} (6 x Float)" for op in in_place}


def healthy_job_of_derived_groups():
    """Operations of groups, and of those that are shrunk of, split off and merged of them."""
    rank, t, limit = dist.get_rank(), torch.ones(6), datetime.timedelta(seconds=30)
    cpu, names = torch.device("cpu"), []

    def use(group):
        backend = group._get_backend(cpu) if isinstance(group, dist.ProcessGroup) else group
        names.append(backend.options.group_name)
        for _ in range(2):
            backend.allreduce([t]).wait()

    whole = dist.new_group()
    use(whole)
    if rank != 1:
        for _ in range(2):
            use(whole._get_backend(cpu).shrink([1]))
    dist.barrier(whole)
    use(whole.split_group([0, 1] if rank < 2 else [2], timeout=limit))
    part = dist.new_group([0, 1] if rank < 2 else [2], use_local_synchronization=True)
    use(part)
    store = dist.PrefixStore("merged", dist.distributed_c10d._get_default_store())
    if hasattr(part, "merge_remote_group"):  # torch has it from 2.9 on
        use(part.merge_remote_group(store, 3, timeout=limit))
    if rank != 1:
        use(dist.shrink_group([1], whole))
    dist.barrier()
    torchcomms()._C.process_recorder().write(f"{os.environ['TORCH_FR_DUMP_TEMP_FILE']}{rank}", True)
    return names


@pytest.mark.skipif(
    torch.__version__ < "2.15",
    reason="before 2.15 torch describes split groups by what differs by rank",
)
def test_the_analyser_finds_nothing_where_groups_are_made_of_groups(recording, tmp_path):
    names = recording(3).run(healthy_job_of_derived_groups)
    text, _ = analyse(tmp_path, 3, healthy=True)
    assert "mismatch" not in text.lower() and "missing" not in text.lower(), text
    assert all(len(set(mine)) == len(mine) for mine in names), names
    assert names[0] == names[2][:3] + names[0][3:5] + names[2][5:], names


def absent_rank(args):
    """Rank 1 is busy elsewhere when the others reduce; it goes on when told."""
    store, group = connect_store(*args), short_group(TOGETHER)
    if dist.get_rank() == 1:
        report("busy")
        receive()
    else:
        fails(dist.all_reduce, torch.ones(5), group=group)
        store.add("done", 1)
    return group.group_name


def test_a_hang_is_dumped_on_all_ranks_and_names_the_missing_rank(recording, tmp_path):
    """Also by the rank that is late, which waits for nothing and raises nothing.

    The analyser says so from the command line, too.
    """
    ranks = recording(3)
    ranks.start(absent_rank, ranks.store_args())
    ranks.wait_report(1)
    outcomes = ranks.wait(ranks=[0, 2])
    check(outcomes)
    name = outcomes[0].value
    traces = dumped(tmp_path, 3)
    done = run_python("-m", "torch.distributed.flight_recorder.fr_trace", tmp_path)
    ranks.tell(1, "go on")
    check(ranks.wait())
    assert done.returncode == 0, done.stderr
    assert "missing ranks: {1}" in done.stderr
    text, collectives = analyse(tmp_path, 3)
    assert "Not all ranks joining collective, sequence number: 2" in text
    assert "missing ranks: {1}" in text and "collective: nccl:all_reduce" in text
    assert "absent_rank at " + HERE in text
    assert [c.missing_ranks for c in collectives if c.missing_ranks] == [{1}]
    for rank, trace in enumerate(traces):
        last = [e for e in trace["entries"] if e["process_group"][0] == name][-1]
        state = ("completed", "all_reduce_barrier") if rank == 1 else ("started", "all_reduce")
        assert (last["state"], last["profiling_name"]) == (state[0], f"nccl:{state[1]}")
    # For the timeline: how long the operation had lasted, and where the absent rank's Python was.
    dumps = load(tmp_path, "trace_")
    (waited,) = (entry for entry in dumps[0].entries if not entry.finished)
    assert dumps[0].time - waited.created >= TOGETHER * 1e9
    assert "absent_rank" in dumps[1].threads[0] and dumps[1].threads[0].startswith("MainThread: ")


def disagreement(kind):
    rank, store = dist.get_rank(), dist.group.WORLD.get_group_store()
    group = short_group(TOGETHER)

    def agreed():
        work = dist.all_reduce(torch.ones(5), group=group, async_op=True)
        store.set(f"issued {rank}", "")
        work.wait()

    if rank < 2:
        fails(agreed)
        return
    # Once the group has failed, nothing is issued any more.
    store.wait(["issued 0", "issued 1"])
    if kind == "operation":
        fails(dist.broadcast, torch.ones(5), 0, group=group)
    else:
        wrong = torch.ones(5, dtype=torch.int32) if kind == "dtype" else torch.ones(7)
        fails(dist.all_reduce, wrong, group=group)


@pytest.mark.parametrize(
    "kind, error, others, own",
    [
        ("operation", "COLLECTIVE_TYPE_MISMATCH", "all_reduce", "broadcast"),
        ("size", "SIZE_OR_SYNTAX_MISMATCH", "[[5]]", "[[7]]"),
        ("dtype", "COLLECTIVE_DTYPE_MISMATCH", "Float", "Int"),
    ],
)
def test_a_mismatch_names_the_rank_that_differs(recording, tmp_path, kind, error, others, own):
    """The analyser takes the first file it finds for right, and who differs from it for wrong."""
    recording(3).run(disagreement, kind)
    text, _ = analyse(tmp_path, 3)
    culprits = set(map(int, re.findall(r"Culprit rank (\d)", text)))
    assert culprits in ({2}, {0, 1}), text
    expected, found = (others, own) if culprits == {2} else (own, others)
    assert error in text and f"'{expected}'" in text.replace("{'", "'").replace("'}", "'"), text
    assert found in text, text


def lost_message():
    """Rank 0's first message arrives and its second does not; the others are fine."""
    group, rank, t = short_group(), dist.get_rank(), torch.ones(3)
    if rank == 0:
        dist.send(t, 2, group=group)
        fails(lambda: dist.irecv(t, 2, group=group).wait())
    else:
        if rank == 2:
            dist.recv(t, 0, group=group)
        wait_for(lambda: os.path.exists(f"{os.environ['TORCH_FR_DUMP_TEMP_FILE']}{rank}"), SOON)


def test_a_message_that_never_comes_names_its_sender(recording, tmp_path):
    recording(3).run(lost_message)
    text, collectives = analyse(tmp_path, 3)
    assert "nccl:recv 0<-1" in text and "missing ranks: {2}" in text, text
    assert [c.missing_ranks for c in collectives if c.missing_ranks] == [{2}], text
    assert text.count("Not all ranks joining") == 1, text


def hang_in_subgroup():
    """Rank 0 waits for rank 1. Rank 2 is not in their group, and has not used the world's."""
    group, rank = short_group(ranks=[0, 1]), dist.get_rank()
    if rank == 0:
        fails(dist.all_reduce, torch.ones(5), group=group)
    return group.group_name if rank < 2 else None


def test_a_hang_in_a_subgroup_is_dumped_on_all_ranks_and_names_its_rank(recording, tmp_path):
    ranks = recording(3)
    name = ranks.run(hang_in_subgroup)[1]
    text, collectives = analyse(tmp_path, 3)
    assert f"group info: {name}\n" in text and "missing ranks: {1}" in text, text
    assert [c.missing_ranks for c in collectives if c.missing_ranks] == [{1}]


def timeout_of_torchcomm(args):
    store, rank = connect_store(*args), dist.get_rank()
    comm = torchcomms().new_comm(
        "shm", "cpu", "recorded", store=store, rank=rank, size=2,
        timeout=datetime.timedelta(seconds=30), abort_process_on_timeout_or_error=False,
    )  # fmt: skip
    hook = recorder(comm)
    comm.barrier(False)
    comm.set_timeout(datetime.timedelta(seconds=LIMIT))
    if rank == 0:
        fails(comm.barrier, False)
        hook.unregister()
        comm.finalize()
        return
    wait_for(lambda: os.path.exists(f"{os.environ['TORCH_FR_DUMP_TEMP_FILE']}1"), SOON)
    comm.finalize()


def test_a_torchcomm_with_a_recorder_is_dumped_too(recording, tmp_path):
    ranks = recording(2)
    ranks.run(timeout_of_torchcomm, ranks.store_args())
    traces = dumped(tmp_path, 2)
    mine = [[e for e in t["entries"] if e["process_group"][0] == "recorded"] for t in traces]
    states = [[entry["state"] for entry in entries] for entries in mine]
    assert states == [["completed", "started"], ["completed"]]


def fails_without_dump():
    group = short_group()
    if dist.get_rank() == 0:
        with pytest.raises(torchcomms().CommError):
            dist.all_reduce(torch.ones(5), group=group)
    return torchcomms()._C.process_recorder() is None


def test_no_dump_where_none_is_wanted(recording, tmp_path):
    assert recording(2, TORCH_FR_DUMP_ON_TIMEOUT="0").run(fails_without_dump) == [False, False]
    assert recording(2, TORCH_FR_BUFFER_SIZE="0").run(fails_without_dump) == [True, True]
    assert os.listdir(tmp_path) == []


def aborted_by_itself():
    group = short_group()
    torchcomms().get_comm(group).abort()
    dist.distributed_c10d._abort_process_group(group)


def test_no_dump_of_an_abort_that_was_asked_for(recording, tmp_path):
    recording(1).run(aborted_by_itself)
    assert os.listdir(tmp_path) == []


def nobody_lets_go_of_the_gil(pipe):
    group, rank = short_group(TOGETHER), dist.get_rank()
    if rank == 1:
        return
    work = dist.all_reduce(torch.ones(5), group=group, async_op=True)
    keep_the_gil(pipe)
    with pytest.raises(torchcomms().CommError):
        work.wait()


def test_a_dump_does_not_wait_for_the_gil(recording, tmp_path, pipe):
    ranks = recording(2, TORCH_FR_WAIT_TIMEOUT_DUMP_MILSEC="200")
    ranks.start(nobody_lets_go_of_the_gil, pipe)
    with open(pipe, "rb") as holder:
        dumped_without_the_gil(ranks, holder, tmp_path / "trace_0")


def only_active():
    group = short_group()
    if dist.get_rank() == 0:
        fails(dist.all_reduce, torch.ones(5), group=group)


def test_a_dump_may_leave_out_what_has_completed(recording, tmp_path):
    env = dict(TORCH_INCLUDE_ONLY_ACTIVE="1", TORCH_INCLUDE_STACK_TRACE="0")
    recording(2, **env).run(only_active)
    with open(tmp_path / "trace_0", "rb") as file:
        (entry,) = pickle.load(file)["entries"]
    assert entry["profiling_name"] == "nccl:all_reduce" and "frames" not in entry
