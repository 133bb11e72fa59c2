"""The flight recorder: what is recorded of which operation, and where dumps go."""

import ctypes
import datetime
import json
import os
import pickle
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from harness.comms import make, torchcomms
from harness.programs import run_python
from harness.ranks import wait_for
from harness.recorders import entries, process_entries, process_trace, recorder

pytestmark = [pytest.mark.beyond_gloo, pytest.mark.torch_version]
HERE = os.path.abspath(__file__)


@pytest.mark.ranks(2)
def test_what_the_schema_has_no_place_for_stands_beside_it():
    """The same in both forms of a dump, by the number of the entry."""
    comm, rank, op = make("details"), dist.get_rank(), torchcomms().ReduceOp
    hook, t = recorder(comm), torch.ones(3)
    comm.all_reduce(t, op.MAX, False)
    comm.broadcast(t, 1, False)
    comm.barrier(False)
    dist.barrier()
    for _ in range(2):
        batch = comm.batch_op_create()
        batch.send(t, 1 - rank)
        batch.recv(torch.ones(3), 1 - rank)
        batch.issue(False)
    if rank == 0:
        comm.send(t, 1, False)
    else:
        comm.recv(t, 0, False)
    found = json.loads(hook.dump_json())
    numbered = [{"record_id": i} for i in range(8)]
    cpu = {"device": "cpu"}
    message = {**cpu, "tag": 0, "from_any": 0}
    assert found["details"] == [
        {**numbered[0], **cpu, "reduce_op": "MAX"},
        {**numbered[1], **cpu, "root": 1},
        numbered[2],
        *({**numbered[i], **message, "batch": 1 if i < 5 else 3} for i in range(3, 7)),
        {**numbered[7], **message, "batch": 0},
    ]
    with open(hook.dump_file(), "rb") as file:
        details = pickle.load(file)["details"]
    # A pickle has stacks, and with them the instructions.
    assert all(each.pop("instructions") for each in details)
    assert details == found["details"]


@pytest.mark.ranks((2, 3))
def test_every_operation_has_its_entry(world):
    comm, rank, op = make("entries"), dist.get_rank(), torchcomms().ReduceOp
    hook, last = recorder(comm), world - 1
    t, many = torch.ones(2, 3), torch.ones(world * 2, 3)
    lists = lambda: [torch.ones(2, 3) for _ in range(world)]  # noqa: E731
    uneven = lambda: [torch.ones(r + 1) for r in range(world)]  # noqa: E731
    one, all_of = [[2, 3]], [[world * 2, 3]]
    joined, parts = [[world, 2, 3]], [[r + 1] for r in range(world)]
    part = [[rank + 1]]
    calls = [
        (lambda a: comm.all_reduce(t, op.SUM, a), "all_reduce", one, one),
        (lambda a: comm.broadcast(t, last, a), "broadcast", one, one),
        (lambda a: comm.reduce(t, last, op.SUM, a), "reduce", one, one),
        (lambda a: comm.all_gather(lists(), t, a), "all_gather", one, joined),
        (lambda a: comm.all_gather_single(many, t, a), "_all_gather_base", one, all_of),
        (lambda a: comm.reduce_scatter(t, lists(), op.SUM, a), "reduce_scatter", joined, one),
        (
            lambda a: comm.reduce_scatter_single(t, many, op.SUM, a),
            "_reduce_scatter_base", all_of, one,
        ),
        (lambda a: comm.all_to_all(lists(), lists(), a), "all_to_all", joined, joined),
        (lambda a: comm.all_to_all_single(many.clone(), many, a), "all_to_all", all_of, all_of),
        (
            lambda a: comm.gather(lists() if rank == last else [], t, last, a),
            "gather", one, joined if rank == last else [],
        ),
        (
            lambda a: comm.scatter(t, lists() if rank == last else [], last, a),
            "scatter", joined if rank == last else [], one,
        ),
        (
            lambda a: comm.all_gather_v(uneven(), torch.ones(rank + 1), a),
            "coalesced", part, parts,
        ),
        (
            lambda a: comm.reduce_scatter_v(torch.ones(rank + 1), uneven(), op.SUM, a),
            "coalesced", parts, part,
        ),
        (lambda a: comm.barrier(a), "all_reduce_barrier", [], []),
    ]  # fmt: skip
    seq = 0
    for async_op in (False, True):
        for call, name, inputs, outputs in calls:
            call(async_op).wait()
            seq += 1
            entry = entries(hook)[-1]
            told = {key: entry[key] for key in ("profiling_name", "input_sizes", "output_sizes")}
            assert told == dict(
                profiling_name=f"nccl:{name}", input_sizes=inputs, output_sizes=outputs
            )
            assert set(entry["input_dtypes"] + entry["output_dtypes"]) <= {"Float"}
            assert entry["collective_seq_id"] == entry["op_id"] == seq
            assert (entry["is_p2p"], entry["p2p_seq_id"]) == (False, 0)
            assert (entry["state"], entry["retired"]) == ("completed", True)
            assert entry["process_group"] == [comm.get_name(), "shm"]
            times = [
                entry[f"time_{what}_ns"]
                for what in ("created", "discovered_started", "discovered_completed")
            ]
            assert 0 < times[0] <= times[1] <= times[2]
            # Of a small asynchronous one nobody has seen the end: it is left to whoever waits.
            assert async_op or "duration_ms" in entry
            assert 0 <= entry.get("duration_ms", 0) < 1e4
            assert entry["timeout_ms"] == comm.get_options().timeout.total_seconds() * 1000
    trace = json.loads(hook.dump_json())
    assert trace["version"] == "2.10"
    assert trace["pg_config"] == {
        comm.get_name(): dict(name=comm.get_name(), desc="shm", ranks=str(list(range(world))))
    }
    told = {f"last_{what}_collective": str(seq) for what in ("enqueued", "started", "completed")}
    assert trace["pg_status"] == {"0": told}
    assert trace["nccl_comm_state"] == {comm.get_name(): dict(rank=str(rank), nRanks=str(world))}
    assert re.fullmatch(r"2\.\d+\.\d+", trace["comm_lib_version"])
    comm.finalize()


@pytest.mark.ranks(2)
def test_operations_of_windows_have_their_sizes_in_groups_of_one_rank(world):
    comm, rank = make("recorded window"), dist.get_rank()
    hook, peer = recorder(comm), 1 - dist.get_rank()
    window = comm.new_window(torch.zeros(8))
    for async_op in (False, True):
        window.put(torch.ones(2, 3), peer, 0, async_op).wait()
        window.signal(peer, async_op).wait()
        window.wait_signal(peer, async_op).wait()
    window.tensor_deregister()
    found, trace = entries(hook), json.loads(hook.dump_json())
    assert [e["output_sizes"] for e in found if not e["p2p_seq_id"]] == [[], [[8]], []]
    name = comm.get_name()
    groups = [f"{name}:put {rank}->{peer}", f"{name}:signal {rank}->{peer}"]
    groups.append(f"{name}:wait_signal {rank}<-{peer}")
    told = [e for e in found if e["p2p_seq_id"]]
    assert [e["process_group"][0] for e in told] == groups * 2
    assert [e["input_sizes"] for e in told] == [[[2, 3]], [], []] * 2
    assert [e["p2p_seq_id"] for e in told] == [1, 2, 3, 4, 5, 6]
    assert [e["collective_seq_id"] for e in told] == [1, 1, 1, 2, 2, 2]
    assert {(e["state"], e["is_p2p"], e["profiling_name"]) for e in told} == {
        ("completed", False, "nccl:coalesced")
    }
    assert all(trace["pg_config"][group]["ranks"] == f"[{rank}]" for group in groups)
    comm.finalize()


@pytest.mark.ranks(3)
def test_messages_are_numbered_in_a_group_of_their_two_ranks(world):
    """Their names are positions in it, as torch's analyser reads them."""
    group, rank, t = dist.new_group(), dist.get_rank(), torch.ones(4)
    if rank == 0:
        dist.send(t, 2, group=group)
        dist.isend(t[:2], 2, group=group).wait()
    elif rank == 2:
        dist.recv(t, 0, group=group)
        dist.irecv(t[:2], 0, group=group).wait()
        dist.isend(t, 1, group=group).wait()
    if rank == 1:
        dist.recv(t, None, group=group)
    dist.barrier(group)
    told = [
        [e["process_group"][0].split(":")[1], e["profiling_name"], e["collective_seq_id"]]
        + [e["p2p_seq_id"], e["is_p2p"], e["state"]]
        for e in process_entries(group)
        if e["is_p2p"]
    ]
    expected = {
        0: [
            ["0-2", "nccl:send 0->1", 1, 1, True, "completed"],
            ["0-2", "nccl:send 0->1", 3, 2, True, "completed"],
        ],
        1: [["1-2", "nccl:recv 0<-1", 2, 1, True, "completed"]],
        2: [
            ["0-2", "nccl:recv 1<-0", 1, 1, True, "completed"],
            ["0-2", "nccl:recv 1<-0", 3, 2, True, "completed"],
            ["1-2", "nccl:send 1->0", 2, 3, True, "completed"],
        ],
    }
    assert told == expected[rank]
    pairs = process_trace()["pg_config"]
    for pair, _, *_ in told:
        name = f"{group.group_name}:{pair}"
        assert pairs[name]["ranks"] == str([int(r) for r in pair.split("-")])


@pytest.mark.ranks(2)
def test_a_batch_of_messages_has_an_entry_for_each(world):
    group, rank = dist.new_group(), dist.get_rank()
    peer, t = 1 - rank, torch.ones(3)
    ops = [dist.P2POp(dist.isend, t, peer, group), dist.P2POp(dist.irecv, t.clone(), peer, group)]
    for _ in range(2):
        for work in dist.batch_isend_irecv(ops):
            work.wait()
    names = [(e["profiling_name"], e["collective_seq_id"]) for e in process_entries(group)]
    up, down = (1, 3), (2, 4)
    mine, other = (up, down) if rank == 0 else (down, up)
    assert names == [
        entry
        for turn in range(2)
        for entry in (
            (f"nccl:send {rank}->{peer}", mine[turn]),
            (f"nccl:recv {rank}<-{peer}", other[turn]),
        )
    ]
    assert [e["p2p_seq_id"] for e in process_entries(group)] == [1, 2, 3, 4]


@pytest.mark.ranks(2)
def test_a_batch_of_collectives_has_one_entry(world):
    group = dist.new_group()
    with dist._coalescing_manager(group, device=torch.device("cpu")):
        dist.all_reduce(torch.ones(3), group=group)
        dist.all_reduce(torch.ones(2, 2), group=group)
    (entry,) = process_entries(group)
    assert entry["profiling_name"] == "nccl:allreduce_coalesced"
    assert entry["input_sizes"] == entry["output_sizes"] == [[3], [2, 2]]


@pytest.mark.ranks(2)
def test_states_follow_the_operation(world):
    """Also of a synchronous call, which gives torch no Work to ask."""
    comm, rank = make("states"), dist.get_rank()
    comm.barrier(False)
    hook = recorder(comm)
    states = lambda: [e["state"] for e in entries(hook)]  # noqa: E731
    op = torchcomms().ReduceOp.SUM
    if rank == 0:
        works = [comm.all_reduce(torch.ones(2), op, True) for _ in range(2)]
        assert wait_for(lambda: states() == ["started", "scheduled"]), states()
        assert [e["retired"] for e in entries(hook, include_completed=False)] == [False] * 2
        assert not any("duration_ms" in e for e in entries(hook))
        dist.barrier()
        [work.wait() for work in works]
        assert entries(hook, include_completed=False) == []
    else:
        dist.barrier()
        seen = []
        handle = comm.register_pre_hook(lambda args: seen.append(states()))
        comm.all_reduce(torch.ones(2), op, False)
        comm.all_reduce(torch.ones(2), op, False)
        handle.remove()
        assert seen == [[], ["completed"]]
    assert states() == ["completed"] * 2
    comm.finalize()


@pytest.mark.ranks(2)
def test_a_synchronous_operation_in_progress_has_started(world):
    group, store = dist.new_group(), dist.distributed_c10d._get_default_store()
    dist.barrier(group)
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(2), group=group)
    else:
        with ThreadPoolExecutor(1) as pool:
            dist.all_reduce(torch.ones(2), group=group)
            blocked = pool.submit(dist.all_reduce, torch.ones(2), group=group)
            last = lambda: process_entries(group)[-1]  # noqa: E731
            assert wait_for(lambda: last()["collective_seq_id"] == 3 and last()["state"])
            assert (last()["state"], last()["retired"]) == ("started", False)
            store.set("the recorder's test goes on", "")
            blocked.result()
            assert (last()["state"], last()["retired"]) == ("completed", True)
        return
    store.wait(["the recorder's test goes on"])
    store.delete_key("the recorder's test goes on")
    dist.all_reduce(torch.ones(2), group=group)


@pytest.mark.ranks(2)
def test_a_ring_keeps_the_latest_entries(world):
    comm = make("ring")
    hook = recorder(comm, max_entries=4)
    for _ in range(3):
        comm.barrier(False)
    assert (len(hook), [e["record_id"] for e in entries(hook)]) == (3, [0, 1, 2])
    for _ in range(7):
        comm.barrier(False)
    assert (len(hook), [e["record_id"] for e in entries(hook)]) == (4, [6, 7, 8, 9])
    assert [e["collective_seq_id"] for e in entries(hook)] == [7, 8, 9, 10]
    hook.reset()
    assert (len(hook), entries(hook)) == (0, [])
    comm.barrier(False)
    assert [e["collective_seq_id"] for e in entries(hook)] == [11]
    comm.finalize()


@pytest.mark.ranks(2)
def test_an_operation_outlives_its_entry(world):
    """It ends after its entry was overwritten or forgotten, and changes no other."""
    comm, rank = make("outlived"), dist.get_rank()
    small, forgetful = recorder(comm, max_entries=1), recorder(comm, max_entries=8)
    if rank == 0:
        works = [comm.all_reduce(torch.ones(1), torchcomms().ReduceOp.SUM, True) for _ in range(2)]
        forgetful.reset()
        dist.barrier()
        works[0].wait()
        assert [e["collective_seq_id"] for e in entries(small)] == [2]
        dist.barrier()
        works[1].wait()
        assert entries(forgetful) == []
        assert entries(small)[0]["state"] == "completed"
    else:
        for _ in range(2):
            dist.barrier()
            comm.all_reduce(torch.ones(1), torchcomms().ReduceOp.SUM, False)
    comm.finalize()


@pytest.mark.ranks(2)
def test_several_communicators_and_recorders(world):
    """One recorder may serve many communicators, and one communicator many recorders."""
    a, b = make("a"), make("b")
    both, only = recorder(a), recorder(a, max_entries=2)
    both.register_with_comm(b)
    both.register_with_comm(b)  # has no effect
    a.barrier(False), b.barrier(False), b.barrier(False)
    told = [(e["process_group"][0], e["collective_seq_id"]) for e in entries(both)]
    assert told == [(a.get_name(), 1), (b.get_name(), 1), (b.get_name(), 2)]
    assert [e["process_group"][0] for e in entries(only)] == [a.get_name()]
    both.unregister()
    both.unregister()
    a.barrier(False), b.barrier(False)
    assert (len(both), len(only)) == (3, 2)
    a.finalize(), b.finalize()


@pytest.mark.ranks(2)
def test_a_recorder_of_nothing(world):
    comm = make("nothing")
    hook = recorder(comm, max_entries=0)
    comm.barrier(False)
    assert (hook.is_enabled(), len(hook), entries(hook)) == (False, 0, [])
    assert recorder().is_enabled()
    with pytest.raises(ValueError, match="max_entries is -1"):
        recorder(max_entries=-1)
    hook.unregister()
    comm.finalize()


@pytest.mark.ranks(2)
def test_any_name_makes_valid_json(world):
    for name in ('quote " and \\ back', "ünïcödé €", "line\nbreak\x01"):
        comm = make(name)
        hook = recorder(comm)
        comm.barrier(False)
        assert entries(hook)[0]["process_group"][0] == comm.get_name()
        comm.finalize()


def libc_name(name):
    ctypes.CDLL(None).prctl(15, name, 0, 0, 0)  # PR_SET_NAME


@pytest.mark.ranks(1)
def test_a_thread_may_be_called_anything(world, tmp_path):
    comm, names = make("threads"), []
    hook = recorder(comm)

    def run(name):
        libc_name(name)
        comm.barrier(False)

    for name in (b"worker 7", "\u00fc\u20ac\U0001f600".encode(), b"broken \xff\xc3\xa0\xed\xa0"):
        thread = threading.Thread(target=run, args=(name,))
        thread.start()
        thread.join()
    with dumps_at(tmp_path / "trace_"), open(hook.dump_file(), "rb") as file:
        pickled = pickle.load(file)["entries"]
    for dumped in (entries(hook), pickled):
        names = [entry["thread_name"] for entry in dumped]
        assert names == ["worker 7", "\u00fc\u20ac\U0001f600", "broken \ufffd\u00e0\ufffd\ufffd"]
    comm.finalize()


def dumps_at(prefix):
    return mock.patch.dict(os.environ, TORCHCOMM_FR_DUMP_TEMP_FILE=str(prefix))


def this_function_is_in_the_stack(comm):
    comm.barrier(False)


@pytest.mark.ranks(1)
def test_the_pickle_has_the_stacks_of_python(world, tmp_path):
    comm = make("stacks")
    hook = recorder(comm)
    this_function_is_in_the_stack(comm)
    with dumps_at(tmp_path / "new" / "trace_"):
        path = hook.dump_file(rank=comm.get_rank())
    assert path == str(tmp_path / "new" / "trace_0")
    assert os.listdir(tmp_path / "new") == ["trace_0"]
    with open(path, "rb") as file:
        trace = pickle.load(file)
    frames = {f["name"]: f for f in trace["entries"][0]["frames"]}
    frame = frames["this_function_is_in_the_stack"]
    assert frame["filename"] == HERE
    assert "comm.barrier" in open(HERE).readlines()[frame["line"] - 1]
    assert "frames" not in entries(hook)[0]
    comm.finalize()


@pytest.mark.ranks(1)
def test_what_another_process_of_this_pid_has_left_is_no_hindrance(world, tmp_path):
    """As in containers, which count their processes from 1."""
    comm = make("same pid")
    hook = recorder(comm)
    for count in range(300):  # more than this process has written
        (tmp_path / f".flight-{os.getpid()}-{count}").write_text("left")
    with dumps_at(tmp_path / "trace_"):
        path = hook.dump_file(0)
    assert path in map(str, tmp_path.iterdir()) and len(os.listdir(tmp_path)) == 301
    comm.finalize()


@pytest.mark.ranks(2)
def test_the_ring_of_the_process_can_be_dumped_by_hand(world, tmp_path):
    group = dist.new_group()
    dist.all_reduce(torch.ones(3), group=group)
    ring = torchcomms().hooks.process_recorder()
    assert ring.is_enabled() and len(ring) > 0
    mine = [e for e in entries(ring) if e["process_group"][0] == group.group_name]
    assert [e["profiling_name"] for e in mine] == ["nccl:all_reduce"]
    with dumps_at(tmp_path / "trace_"):
        path = ring.dump_file()
    assert path == str(tmp_path / f"trace_{dist.get_rank()}")
    with open(path, "rb") as file:
        trace = pickle.load(file)
    assert trace["nccl_comm_state"][group.group_name]["nRanks"] == "2"
    assert trace["entries"][-1]["frames"] and trace["comm_lib_version"]


def test_a_process_without_a_group_writes_no_dump_at_its_end(tmp_path):
    """Such as torchrun, which imports torch: its file would take the place of rank 0's."""
    program = """
        import sys, torch.distributed as dist, torchcomms_pg
        from torchcomms_pg.hooks import flight_recorder
        flight_recorder.configure()
        if sys.argv[1:]:
            dist.init_process_group("torchcomms", store=dist.HashStore(), rank=0, world_size=1)
            dist.barrier()
        """
    there = {"TORCHCOMMS_PG_DUMP_AT_EXIT": "1", "TORCHCOMM_FR_DUMP_TEMP_FILE": str(tmp_path / "d_")}
    for arguments, files in ((["group"], ["d_0"]), ([], [])):
        for file in tmp_path.iterdir():
            file.unlink()
        done = run_python("-c", program, *arguments, **there)
        assert (done.returncode, os.listdir(tmp_path)) == (0, files), done.stderr


@pytest.mark.ranks(1)
def test_a_file_that_cannot_be_written_is_an_error(world, tmp_path):
    (tmp_path / "file").write_text("")
    wanted = pytest.raises(RuntimeError, match="cannot write .*trace_3: Not a directory")
    with dumps_at(tmp_path / "file" / "trace_"), wanted:
        recorder().dump_file(3)


def test_variables_of_torch_and_of_the_document(monkeypatch):
    env = torchcomms().env
    for variable in env.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    assert env.recorder_size() == 2000 and env.dump_on_failure() and env.dump_stacks()
    assert not env.recorder_cpp_stacks() and not env.dump_only_active()
    assert env.dump_patience() == datetime.timedelta(seconds=15)
    assert env.dump_prefix() == os.path.expanduser("~/.cache/torch/comm_lib_trace_rank_")
    assert env.dump_pipe() == ""
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert env.dump_prefix() == "/cache/torch/comm_lib_trace_rank_"
    pipe = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "TORCH_FR_DEBUG_INFO_PIPE_FILE"
    settings = [
        ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE", env.recorder_size, "7", "0"),
        ("TORCH_NCCL_TRACE_CPP_STACK", "TORCH_FR_CPP_STACK", env.recorder_cpp_stacks, "1", "0"),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_FR_DUMP_ON_TIMEOUT", env.dump_on_failure, "0", "1"),
        ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_FR_DUMP_TEMP_FILE", env.dump_prefix, "a", "b"),
        ("TORCH_FR_DUMP_TEMP_FILE", "TORCHCOMM_FR_DUMP_TEMP_FILE", env.dump_prefix, "b", "c"),
        (*pipe, env.dump_pipe, "a", "b"),
    ]
    for older, newer, read, first, second in settings:
        monkeypatch.setenv(older, first)
        assert read() == type(read())(int(first) if first.isdigit() else first)
        monkeypatch.setenv(newer, second)
        assert read() == type(read())(int(second) if second.isdigit() else second)
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "many")
    with pytest.raises(ValueError, match="TORCH_FR_BUFFER_SIZE='many'"):
        env.recorder_size()


@pytest.mark.ranks(2)
def test_nothing_is_recorded_twice(world):
    """From torch 2.14 on torch attaches a recorder of its own to backends that have none."""
    group = dist.new_group()
    dist.all_reduce(torch.ones(1), group=group)
    dist.all_reduce(torch.ones(1), group=group, async_op=True).wait()
    dist.barrier(group)
    names = [e["profiling_name"] for e in process_entries(group)]
    assert names == ["nccl:all_reduce", "nccl:all_reduce", "nccl:all_reduce_barrier"]
    attached = getattr(dist.distributed_c10d._world, "pg_flight_recorder_hooks", {})
    assert group not in attached
    hook = recorder(torchcomms().get_comm(group))
    dist.barrier(group)
    assert len(process_entries(group)) == 4 and len(hook) == 1
    hook.unregister()
    dist.barrier(group)
    assert len(process_entries(group)) == 5 and len(hook) == 1


@pytest.mark.skipif(torch.__version__ < "2.15", reason="needs an accelerator before torch 2.15")
@pytest.mark.ranks(2)
def test_groups_made_by_splitting_are_recorded(world):
    half = dist.split_group(split_ranks=[[0, 1]])
    dist.all_reduce(torch.ones(1), group=half)
    assert [e["state"] for e in process_entries(half)] == ["completed"]


@pytest.mark.parametrize("collectives, stacks", [(True, True), (True, False), (False, True)])
@pytest.mark.ranks(1)
def test_a_dump_has_what_it_is_asked_for(world, collectives, stacks):
    group = dist.new_group()
    dist.all_reduce(torch.ones(1), group=group)
    ring = torchcomms().hooks.process_recorder()
    told = json.loads(ring.dump_json(include_collectives=collectives))
    path = ring.dump_file(include_collectives=collectives, include_stack_traces=stacks)
    with open(path, "rb") as file:
        dumped = pickle.load(file)
    assert ("entries" in told) == ("entries" in dumped) == collectives
    assert "pg_status" in told and "pg_status" in dumped
    if collectives:
        assert ("frames" in dumped["entries"][-1]) == stacks
    dist.destroy_process_group(group)
