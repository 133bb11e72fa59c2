"""What `python -m torchcomms_pg.trace` says of dumps whose story is known."""

from __future__ import annotations

import io
import json
import pickle
import re
import sys
import time

import pytest

from harness.programs import run_python
from torchcomms_pg.trace import Analysis, DumpError, load
from torchcomms_pg.trace.__main__ import main

SECOND = 1_000_000_000
START = 1_700_000_000 * SECOND


class Recorder:
    """Writes the dump of one rank, with a clock that its operations advance."""

    def __init__(self, rank, groups):
        self.rank = rank
        self.groups = groups
        self.now = START
        self.seqs = {}
        self.entries = []
        self.details = []  # beside c10d's schema
        self.more = {}  # the same

    def call(
        self,
        op,
        group="0",
        *,
        numel=8,
        dtype="Float",
        done=True,
        takes=0.001,
        line=10,
        detail=None,
        **more,
    ):
        p2p = op.startswith(("send", "recv"))
        seq = self.seqs[group, p2p] = self.seqs.get((group, p2p), 0) + 1
        base = group.split(":")[0]
        op_id = self.seqs[base] = self.seqs.get(base, 0) + 1
        created, self.now = self.now, self.now + int(takes * SECOND)
        if detail is not None:
            self.details.append({"record_id": len(self.entries), **detail})
        self.entries.append(
            {
                "record_id": len(self.entries),
                "pg_id": list(self.groups).index(base),
                "process_group": (group, "undefined"),
                "collective_seq_id": 0 if p2p else seq,
                "p2p_seq_id": seq if p2p else 0,
                "op_id": op_id,
                "profiling_name": f"torchcomms:{op}",
                "time_created_ns": created,
                "input_sizes": [[numel]],
                "input_dtypes": [dtype],
                "output_sizes": [[numel]],
                "output_dtypes": [dtype],
                "state": "completed" if done else "started",
                "time_discovered_started_ns": created,
                "time_discovered_completed_ns": self.now if done else None,
                "retired": done,
                "timeout_ms": 600_000,
                "is_p2p": p2p,
                "frames": [
                    {"name": "all_reduce", "filename": "/x/torch/distributed/c.py", "line": 1},
                    {"name": "step", "filename": "train.py", "line": line},
                ],
                **more,
            }
        )
        return self

    def later(self, seconds):
        self.now += int(seconds * SECOND)
        return self

    def content(self):
        return {
            "version": "2.10",
            "pg_config": {
                name: {"name": name, "desc": "undefined", "ranks": str(ranks)}
                for name, ranks in self.groups.items()
            },
            "pg_status": {},
            "entries": self.entries,
            **({"details": self.details} if self.details else {}),
            **self.more,
        }

    def write(self, folder, form="pickle"):
        path = folder / f"dump_{self.rank}"
        if form == "pickle":
            path.write_bytes(pickle.dumps(self.content()))
        else:
            path.with_suffix(".json").write_text(json.dumps(self.content()))


def recorders(size, **groups):
    world = {"0": list(range(size)), **groups}
    return [Recorder(rank, world) for rank in range(size)]


def verdict(folder, ranks, form="pickle"):
    for rank in ranks:
        rank.write(folder, form)
    return Analysis(load(folder)).verdict()


@pytest.mark.parametrize("form", ["pickle", "json"])
def test_operations_that_all_finished_are_fine(tmp_path, form):
    ranks = recorders(3)
    for rank in ranks:
        rank.call("all_reduce").call("barrier")
    found = verdict(tmp_path, ranks, form)
    assert (found.kind, found.culprits) == ("fine", [])


def test_a_missing_rank_is_named_with_its_last_operation(tmp_path):
    ranks = recorders(3)
    for rank in ranks:
        rank.call("broadcast", line=7)
    ranks[0].call("all_reduce", numel=1024, done=False, line=41)
    ranks[2].call("all_reduce", numel=1024, done=False, line=41)
    found = verdict(tmp_path, ranks)
    assert (found.kind, found.culprits) == ("missing", [1])
    assert (found.place.group.name, found.place.seq) == ("0", 2)
    text = re.sub(r"\d\d:\d\d:\d\d", "TIME", str(found))
    assert text == (
        "rank 1 has not arrived at all_reduce (1024 x Float) #2 of group 0\n"
        "  rank 1 did last in this group: broadcast (8 x Float) #1, finished TIME.001"
        "  at train.py:7 in step\n"
        "  rank 1 is in no operation: it is busy elsewhere, or has ended\n"
        "  ranks 0, 2 wait in it, the first since TIME.001  at train.py:41 in step"
    )


def test_a_verdict_on_64_ranks_has_a_line_for_each_place_of_the_ranks_that_wait(tmp_path):
    ranks = recorders(64)
    for rank in ranks:
        if rank.rank != 37:
            rank.call("all_reduce", done=False, line=41 if rank.rank else 12)
    culprit, *rest = str(verdict(tmp_path, ranks)).splitlines()
    assert culprit.startswith("rank 37 has not arrived")
    texts = [re.sub(r"\d\d:\d\d:\d\d\.\d+", "TIME", line) for line in rest[-2:]]
    assert len(rest) == 4 and texts == [
        "  rank 0 waits in it since TIME  at train.py:12 in step",
        "  ranks 1-36, 38-63 wait in it, the first since TIME  at train.py:41 in step",
    ]


def test_a_call_that_a_rank_has_skipped_long_before_is_named(tmp_path):
    ranks = recorders(3)
    for rank in ranks:
        for step in range(6):
            if not (rank.rank == 1 and step == 2):
                rank.call("all_reduce", line=20)
            rank.call("all_reduce", line=30)
        if rank.rank != 1:
            rank.entries[-1].update(state="started", time_discovered_completed_ns=None)
            rank.entries[-1]["retired"] = False
    text = str(verdict(tmp_path, ranks))
    since = "since all_reduce #5 the ranks have called from different lines (rank 1: train.py:30 in"
    assert f"{since} step, rank 0: train.py:20 in step)" in text


def test_ranks_that_always_call_from_different_lines_get_no_finding(tmp_path):
    ranks = recorders(2)
    for rank in ranks:
        for step in range(6):
            for line in (20, 30) if (rank.rank + step) % 2 else (30, 20):
                rank.call("all_reduce", line=line)
    ranks[0].call("all_reduce", line=40, done=False)
    text = str(verdict(tmp_path, ranks))
    assert "has not arrived" in text
    assert "different lines" not in text


def test_blame_goes_past_a_victim_to_the_rank_it_waits_for(tmp_path):
    """Rank 0 waits for rank 1 in the world, and rank 1 for rank 2 in a subgroup."""
    ranks = recorders(3, pair=[1, 2])
    ranks[0].call("all_reduce", done=False)
    ranks[1].later(1).call("barrier", "pair", done=False)
    found = verdict(tmp_path, ranks)
    assert (found.kind, found.culprits) == ("missing", [2])
    assert "rank 1" not in str(found).splitlines()[0]


def test_two_groups_called_in_different_orders_are_a_deadlock(tmp_path):
    ranks = recorders(2, other=[0, 1])
    ranks[0].call("all_reduce", done=False)
    ranks[1].call("all_reduce", "other", done=False)
    found = verdict(tmp_path, ranks)
    assert (found.kind, found.culprits) == ("order", [0, 1])
    assert "rank 0 is in all_reduce (8 x Float) #1 of group 0 and waits for rank 1" in str(found)
    assert "rank 1 is in all_reduce (8 x Float) #1 of group other and waits for rank 0" in str(
        found
    )


def test_ranks_that_wait_for_each_others_messages_are_a_circle(tmp_path):
    ranks = pairs(3)
    for rank in ranks:
        source = (rank.rank - 1) % 3
        pair = sorted((rank.rank, source))
        rank.groups[f"0:{pair[0]}-{pair[1]}"] = pair
        numbers = f"recv {pair.index(rank.rank)}<-{pair.index(source)}"
        rank.call(numbers, f"0:{pair[0]}-{pair[1]}", done=False, collective_seq_id=1)
    found = verdict(tmp_path, ranks)
    assert (found.kind, found.culprits) == ("order", [0, 1, 2])
    assert str(found).startswith("ranks 0, 1, 2 wait for each other")


def test_a_rank_in_an_operation_that_is_under_way_is_no_culprit(tmp_path):
    """All have come to the barrier of the pair, so it may be the transport that is stuck."""
    ranks = recorders(3, pair=[1, 2])
    ranks[0].call("all_reduce", done=False)
    for rank in ranks[1:]:
        rank.call("barrier", "pair", done=False)
    found = verdict(tmp_path, ranks)
    assert (found.kind, found.culprits) == ("unfinished", [])
    assert str(found).startswith("all ranks have arrived at barrier")


def test_every_culprit_is_named_and_first_the_one_that_holds_up_the_most(tmp_path):
    ranks = recorders(5, left=[0, 1], right=[2, 3, 4])
    ranks[0].call("all_reduce", "left", done=False)
    ranks[2].later(1).call("all_reduce", "right", done=False)
    ranks[3].later(1).call("all_reduce", "right", done=False)
    found = verdict(tmp_path, ranks)
    assert (found.kind, found.culprits) == ("missing", [4, 1])
    first, *_, second = [line for line in str(found).splitlines() if "not arrived" in line]
    assert first.startswith("rank 2 (global 4) has not arrived at all_reduce (8 x Float) #1")
    assert first.endswith("of group right") and "rank 1 has" in second


def test_groups_of_one_name_and_different_ranks_are_two(tmp_path):
    ranks = [Recorder(rank, {"tp": [0, 1] if rank < 2 else [2, 3]}) for rank in range(4)]
    for rank in ranks:
        rank.call("all_reduce", "tp", numel=8 if rank.rank < 2 else 5)
    ranks[0].call("all_reduce", "tp", done=False)
    for rank in ranks[2:]:
        rank.call("all_reduce", "tp", numel=5)
    found = verdict(tmp_path, ranks)
    assert (found.kind, found.culprits) == ("missing", [1])
    assert "#2 of group tp of ranks 0, 1" in str(found).splitlines()[0]


def test_of_two_groups_of_one_name_on_a_rank_other_ranks_tell_the_first(tmp_path):
    """A dump has the ranks of one group of each name: those of the last."""
    ranks = [Recorder(rank, {"tp": [0, 1] if rank < 1 else [1, 2]}) for rank in range(3)]
    ranks[0].call("all_reduce", "tp", done=False)
    ranks[1].call("all_reduce", "tp", done=False, pg_id=0)
    ranks[1].call("broadcast", "tp", done=False, pg_id=1, op_id=1, collective_seq_id=1)
    found = verdict(tmp_path, ranks)
    assert (found.kind, found.culprits) == ("missing", [2])
    assert "at broadcast (8 x Float) #1 of group tp of ranks 1, 2" in str(found).splitlines()[0]


def test_ranks_of_a_group_that_no_dump_tells_are_not_accused(tmp_path):
    ranks = [Recorder(rank, {"tp": [0, 1, 2]}) for rank in range(3)]
    ranks[1].call("all_reduce", "tp", done=False)
    ranks[0].call("broadcast", "tp", done=False, pg_id=0)  # of another group named tp
    ranks[0].call("all_reduce", "tp", done=False, pg_id=1, op_id=1, collective_seq_id=1)
    found = verdict(tmp_path, ranks)
    assert (found.kind, found.culprits) == ("unfinished", [])
    assert "no dump tells the ranks of its group" in str(found)


def test_a_group_that_is_made_again_counts_anew(tmp_path):
    ranks = recorders(2)
    for rank in ranks:
        rank.call("all_reduce").call("broadcast")
        rank.seqs.clear()
        rank.call("all_reduce", pg_id=1)
    ranks[0].call("barrier", pg_id=1, done=False)
    found = verdict(tmp_path, ranks)
    assert (found.kind, found.culprits) == ("missing", [1])
    assert "at barrier (8 x Float) #2" in str(found)


@pytest.mark.parametrize(
    "other",
    [("all_gather", {}), ("all_reduce", dict(numel=9)), ("all_reduce", dict(dtype="Half"))],
    ids=["operation", "size", "dtype"],
)
def test_a_mismatch_names_the_one_rank_that_differs_with_both_calls(tmp_path, other):
    ranks = recorders(3)
    op, how = other
    for rank in ranks:
        rank.call("barrier")
    ranks[0].call("all_reduce", done=False)
    ranks[1].call(op, done=False, **how)
    ranks[2].call("all_reduce", done=False)
    found = verdict(tmp_path, ranks)
    assert (found.kind, found.culprits) == ("mismatch", [1])
    assert (found.place.group.name, found.place.seq) == ("0", 2)
    assert "rank 1 called something else as operation #2 of group 0" in str(found)
    assert "rank 0: all_reduce (8 x Float)  at train.py:10 in step" in str(found)
    assert f"rank 1: {op} (" in str(found)


def test_a_mismatch_of_two_ranks_names_both(tmp_path):
    ranks = recorders(2)
    ranks[0].call("all_reduce", done=False)
    ranks[1].call("broadcast", done=False)
    found = verdict(tmp_path, ranks)
    assert (found.kind, found.culprits) == ("mismatch", [0, 1])


@pytest.mark.parametrize("op", ["all_to_all", "all_to_all_v_single", "all_to_allv"])
def test_sizes_that_differ_by_design_are_no_mismatch(tmp_path, op):
    ranks = recorders(2)
    ranks[0].call(op, numel=3, done=False)
    ranks[1].call(op, numel=5, done=False)
    assert verdict(tmp_path, ranks).kind == "unfinished"


def test_a_missing_message_names_the_rank_that_has_not_posted_it(tmp_path):
    ranks = recorders(3, pair=[2, 0])
    # In names of operations ranks are those of the group: 0 is rank 2 here.
    ranks[2].call("send 0->1", "pair", done=False)
    ranks[1].call("recv 1<-0")
    ranks[0].call("send 0->1")
    found = verdict(tmp_path, ranks)
    assert (found.kind, found.culprits) == ("message", [0])
    assert "rank 1 (global 0) has not arrived at send 0->1 (8 x Float) #1 of group pair" in str(
        found
    )
    assert "rank 0 (global 2) waits in it since" in str(found)


def pairs(size):
    """Recorders whose messages are in groups of their two ranks, as torchcomms_pg has them."""
    return recorders(size, **{"0:0-1": [0, 1]})


@pytest.mark.parametrize("receives", ["recv 1<-0", "recv 1<-?"])
def test_messages_that_do_not_meet_are_both_named(tmp_path, receives):
    """Such as by their tags, which dumps do not have."""
    ranks = pairs(2)
    ranks[0].call("send 0->1", "0:0-1", done=False, collective_seq_id=1, line=41)
    group, number = ("0", 0) if "?" in receives else ("0:0-1", 1)
    ranks[1].call(receives, group, done=False, collective_seq_id=number, line=42)
    found = verdict(tmp_path, ranks)
    assert (found.kind, found.culprits) == ("unfinished", [])
    source = "?" if "?" in receives else "0"
    first = str(found).splitlines()[0]
    assert first.startswith("send 0->1 (8 x Float) #1 of rank 0 and ")
    assert f"and recv {source}->1 (8 x Float) #1 of rank 1, of group 0, have not met" in first
    assert "at train.py:41" in str(found) and "at train.py:42" in str(found)


def test_messages_of_different_sizes_are_both_named(tmp_path):
    ranks = pairs(2)
    ranks[0].call("send 0->1", "0:0-1", done=False, collective_seq_id=1)
    ranks[1].call("recv 1<-0", "0:0-1", done=False, numel=5, collective_seq_id=1)
    found = verdict(tmp_path, ranks)
    assert (found.kind, found.culprits) == ("mismatch", [0, 1])
    assert "send 0->1 (8 x Float)" in str(found) and "recv 0->1 (5 x Float)" in str(found)


def test_a_rank_that_has_sent_its_message_is_not_missing(tmp_path):
    """A send of little data ends at once, also where the receive is for another tag."""
    ranks = pairs(2)
    ranks[0].call("send 0->1", "0:0-1", collective_seq_id=1)
    ranks[1].call("recv 1<-0", "0:0-1", done=False, collective_seq_id=1)
    found = verdict(tmp_path, ranks)
    assert (found.kind, found.culprits) == ("unfinished", [])
    assert "rank 0 did last with rank 1: send 0->1 (8 x Float) #1, finished" in str(found)


def test_a_missing_sender_is_named_with_its_last_send(tmp_path):
    ranks = pairs(2)
    ranks[0].call("send 0->1", "0:0-1", collective_seq_id=1)
    ranks[1].call("recv 1<-0", "0:0-1", collective_seq_id=1)
    ranks[1].call("recv 1<-0", "0:0-1", done=False, collective_seq_id=3)
    found = verdict(tmp_path, ranks)
    assert (found.kind, found.culprits) == ("message", [0])
    assert "rank 0 has not arrived at recv 0->1 (8 x Float) #2" in str(found)
    assert "rank 0 did last with rank 1: send 0->1 (8 x Float) #1, finished" in str(found)
    assert "nothing" not in str(found)


def test_a_receive_from_any_rank_accuses_none_of_them(tmp_path):
    ranks = pairs(3)
    ranks[0].call("send 0->1", "0:0-1", collective_seq_id=1)
    ranks[1].call("recv 1<-0", "0:0-1", collective_seq_id=1).call("recv 1<-?", done=False)
    found = verdict(tmp_path, ranks)
    assert (found.kind, found.culprits) == ("unknown", [0, 2])
    assert str(found).startswith("no message is under way to rank 1, which waits in recv ?->1 (8")
    assert "rank 0 did last with rank 1: send 0->1" in str(found)
    assert "rank 2 has no send with rank 1 in its record" in str(found)


@pytest.mark.parametrize("signalled", [False, True])
def test_a_missing_signal_names_its_sender(tmp_path, signalled):
    ranks = recorders(2, **{"0:signal 0->1": [0], "0:wait_signal 1<-0": [1]})
    if signalled:
        ranks[0].call("coalesced", "0:signal 0->1")
    ranks[1].call("coalesced", "0:wait_signal 1<-0", done=False)
    found = verdict(tmp_path, ranks)
    assert found.culprits == ([] if signalled else [0])
    assert "wait_signal 0->1" in str(found).splitlines()[0]


def batch(rank, *members, done, p2p_seq_id=1):
    """Records a batch of messages as torch's nccl does."""
    more = {"collective_seq_id": 0, "p2p_seq_id": p2p_seq_id, "is_p2p": True}
    for member in members:
        rank.call(member, state="scheduled", retired=False, **more)
        rank.entries[-1].update(time_discovered_started_ns=None, time_discovered_completed_ns=None)
    rank.call("coalesced", done=done, **more)
    rank.entries[-1]["op_id"] = rank.entries[-2]["op_id"]
    rank.seqs["0"] -= 1


def test_members_of_a_batch_end_with_it(tmp_path):
    ranks = recorders(2)
    for rank in ranks:
        batch(rank, f"send {rank.rank}->{1 - rank.rank}", f"recv {rank.rank}<-0", done=True)
    assert verdict(tmp_path, ranks).kind == "fine"


def test_a_batch_waits_for_the_ranks_whose_side_is_not_there(tmp_path):
    """Rank 2's messages have met those of rank 0 in their batch, which waits for rank 1."""
    ranks = recorders(3)
    batch(ranks[0], "send 0->1", "recv 0<-2", done=False)
    batch(ranks[2], "send 2->0", done=True)
    found = verdict(tmp_path, ranks)
    assert (found.kind, found.culprits) == ("message", [1])


def test_an_operation_that_failed_waited(tmp_path):
    ranks = recorders(2)
    ranks[0].call("all_reduce", done=False, retired=True)
    found = verdict(tmp_path, ranks)
    assert (found.kind, found.culprits) == ("missing", [1])


def gloo(rank, size):
    """Makes a recorder's content what torch's Gloo would have written."""
    for entry in rank.entries:
        entry["profiling_name"] = entry["profiling_name"].replace("torchcomms", "gloo")
        entry["process_group"] = (entry["process_group"][0], "default_pg")
        entry.update(state="scheduled", time_discovered_started_ns=None)
        entry["time_discovered_completed_ns"] = None
    rank.groups = {"": list(range(size))}


def test_entries_of_gloo_have_ended_when_they_are_retired(tmp_path):
    ranks = recorders(2)
    for rank in ranks:
        rank.call("all_reduce")
    ranks[0].call("all_reduce", done=False)
    for rank in ranks:
        gloo(rank, 2)
    found = verdict(tmp_path, ranks)
    assert (found.kind, found.culprits) == ("unknown", [1])
    assert "rank 1 has not arrived at all_reduce (8 x Float) #2 of group 0" in str(found)
    assert "or waits in a message (Gloo's recorder has none)" in str(found)
    ranks[0].entries.pop()
    assert verdict(tmp_path, ranks).kind == "fine"


@pytest.mark.parametrize("number", ["op_id", "record_id"])
def test_a_rank_whose_dump_has_gaps_is_not_proven_to_hold_up_others(tmp_path, number):
    """What lies between may wait; TORCH_INCLUDE_ONLY_ACTIVE leaves out what has ended."""
    ranks = recorders(2)
    ranks[0].call("barrier").call("all_reduce", done=False)
    ranks[1].call("barrier").call("barrier", "0", **{number: 5})
    ranks[1].entries[-1]["collective_seq_id"] = 1
    found = verdict(tmp_path, ranks)
    assert (found.kind, found.culprits) == ("unknown", [1])
    assert "not all of its operations are recorded" in str(found)


GLOO = """
    import os, pickle, sys, time
    os.environ["TORCH_FR_BUFFER_SIZE"] = "100"
    import torch
    import torch.distributed as dist

    def rank(me, folder):
        store = dist.FileStore(folder + "/store", 2)
        dist.init_process_group("gloo", store=store, rank=me, world_size=2)
        dist.barrier()
        trace = torch._C._distributed_c10d._dump_fr_trace
        write = lambda name: open(f"{folder}/{name}_{me}", "wb").write(trace())
        # An entry is retired soon after the operation has returned.
        while not all(entry["retired"] for entry in pickle.loads(trace())["entries"]):
            time.sleep(0.01)
        write("healthy")
        if me == 0:
            work = dist.all_reduce(torch.ones(4), async_op=True)
        write("hung")
        store.set(f"done {me}", "")
        store.wait([f"done {1 - me}"])
        os._exit(0)

    children = []
    for me in range(2):
        children.append(os.fork())
        if children[-1] == 0:
            try:
                rank(me, sys.argv[1])
            finally:
                os._exit(1)
    assert all(os.waitpid(child, 0)[1] == 0 for child in children)
"""


@pytest.mark.slow
@pytest.mark.torch_version
def test_dumps_that_torchs_gloo_has_written_are_understood(tmp_path):
    run = run_python("-c", GLOO, tmp_path, GLOO_SOCKET_IFNAME="lo")
    assert run.returncode == 0, run.stderr
    assert Analysis(load(tmp_path, "healthy_")).verdict().kind == "fine"
    found = Analysis(load(tmp_path, "hung_")).verdict()
    assert (found.kind, found.culprits) == ("unknown", [1])
    assert "rank 1 has not arrived at all_reduce (4 x Float) #2 of group 0" in str(found)


def test_a_rank_with_a_missing_dump_is_unknown(tmp_path):
    ranks = recorders(2)
    ranks[0].call("all_reduce", done=False)
    found = verdict(tmp_path, ranks[:1])
    assert (found.kind, found.culprits) == ("unknown", [1])
    assert "rank 1 left no dump" in str(found)


def test_ranks_with_a_missing_dump_are_named_after_proven_culprits(tmp_path):
    ranks = recorders(3)
    ranks[0].call("all_reduce", done=False)
    found = verdict(tmp_path, ranks[:2])
    assert (found.kind, found.culprits) == ("missing", [1])
    assert "rank 2 left no dump" in str(found)


def old_run(size, earlier):
    """Recorders of a run that began ``earlier`` seconds before the others."""
    ranks = recorders(size)
    for rank in ranks:
        rank.later(-earlier)
        rank.call("all_reduce").call("all_reduce").call("barrier", done=False)
    return ranks


@pytest.mark.parametrize("earlier", [20, 86_400])
def test_the_old_dump_of_a_rank_that_was_killed_is_named_and_left_out(tmp_path, capsys, earlier):
    """Its rank had been in the barrier that now misses it."""
    verdict(tmp_path, old_run(3, earlier))
    ranks = recorders(3)
    for rank in ranks:
        rank.call("all_reduce").call("all_reduce")
    for rank in ranks[:2]:
        rank.call("barrier", done=False).write(tmp_path)
    assert main([str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert out.startswith("rank 2 left no dump that is of use, and has probably not arrived at bar")
    assert "dump_2 is left out, since it is older than the others: all_reduce #1 of group 0" in out
    assert main([str(tmp_path), "--stale"]) == 1
    assert "left out" not in capsys.readouterr().out


def test_a_dump_without_what_others_have_done_with_its_rank_is_left_out(tmp_path):
    """No operation is in both dumps, since the ring of the later one is full."""
    ranks = old_run(2, 60)
    verdict(tmp_path, ranks)
    for _ in range(100):
        ranks[0].call("all_reduce")
    ranks[0].call("barrier", done=False)
    del ranks[0].entries[:50]
    ranks[0].write(tmp_path)
    dumps = load(tmp_path)
    assert (set(dumps), set(dumps.left_out)) == ({0}, {1})
    assert Analysis(dumps).verdict().kind == "unknown"


def test_a_rank_that_is_late_has_no_old_dump(tmp_path):
    ranks = recorders(2)
    for rank in ranks:
        rank.call("all_reduce").call("broadcast", done=rank.rank == 0)
    ranks[0].later(1000).call("all_reduce", done=False)
    assert verdict(tmp_path, ranks).culprits == []
    assert not load(tmp_path).left_out


def test_one_file_that_cannot_be_read_does_not_stop_the_rest(tmp_path, capsys):
    ranks = recorders(3)
    ranks[0].call("all_reduce", done=False)
    verdict(tmp_path, ranks)
    (tmp_path / "dump_2").write_bytes(b"half a du")
    assert main([str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert out.startswith("rank 1 has not arrived at all_reduce")
    assert "rank 2 left no dump that is of use" in out and "dump_2: neither JSON nor" in out


def test_the_help_has_the_exit_codes(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert re.search("0 if every.*1 if not.*2 if no dump", text, re.DOTALL)


def test_operations_that_a_full_ring_forgot_are_not_missed(tmp_path):
    ranks = recorders(2)
    for _ in range(5):
        ranks[0].call("all_reduce")
        ranks[1].call("all_reduce")
    ranks[0].entries[2].update(state="started", time_discovered_completed_ns=None)
    del ranks[1].entries[:4]
    assert verdict(tmp_path, ranks).kind == "unfinished"


def test_a_late_rank_is_first_in_the_list_with_its_delay(tmp_path):
    ranks = recorders(3)
    for turn in range(4):
        for rank in ranks:
            rank.now = START + turn * SECOND
        ranks[1].later(0.25)
        for rank in ranks:
            rank.call("all_reduce", takes=0.01)
    verdict(tmp_path, ranks)
    first = Analysis(load(tmp_path)).stragglers()[0]
    assert (first.rank, first.collectives, first.last) == (1, 4, 4)
    assert first.late_ms == pytest.approx(1000)
    assert first.worst_ms == pytest.approx(250)


def test_the_most_expensive_operation_is_first_with_its_times(tmp_path):
    ranks = recorders(2)
    for rank in ranks:
        rank.call("broadcast", takes=0.5)
        for duration in (0.1, 0.2, 0.6):
            rank.call("all_reduce", numel=99, takes=duration)
        rank.call("barrier", done=False)
    verdict(tmp_path, ranks)
    cost = Analysis(load(tmp_path)).costs()[0]
    assert (cost.group, cost.what, len(cost.times)) == ("0", "all_reduce (99 x Float)", 6)
    assert (cost.total, cost.median) == (pytest.approx(1800), pytest.approx(200))


def test_the_command_prints_the_verdict_and_writes_page_and_trace(tmp_path, capsys):
    ranks = recorders(2)
    ranks[0].call("all_reduce", dtype="</script>").call("barrier", done=False)
    ranks[1].call("all_reduce", dtype="</script>")
    dumps = tmp_path / "dumps"
    dumps.mkdir()
    verdict(dumps, ranks)
    page, trace = tmp_path / "page.html", tmp_path / "trace.json"
    assert main([str(dumps), "--html", str(page), "--perfetto", str(trace)]) == 1
    out = capsys.readouterr().out
    assert out.startswith("rank 1 has not arrived at barrier")
    assert re.search(r"all_reduce .*\s0\s+2\s+2\.0\s+1\.000\s+1\.000", out), out

    data = data_of(page)
    assert data["ranks"] == [0, 1] and data["culprits"] == [1]
    operations = [bar for bar in data["bars"] if data["lanes"][bar[0]][1] >= 0]
    assert not any(bar[4] for bar in operations)  # rank 0 waits, and holds up nobody
    assert [bar[4] for bar in data["bars"] if bar not in operations] == [True]
    assert not re.findall(r'(?:src|href)="', page.read_text()), "the page needs something else"

    events = json.loads(trace.read_text())["traceEvents"]
    bars = [event for event in events if event["ph"] == "X" and event["tid"]]
    assert [(bar["pid"], bar["args"]["seq"]) for bar in bars] == [(0, 1), (0, 2), (1, 1)]
    assert bars[0]["dur"] == pytest.approx(1000)


def data_of(page):
    """The data of a page, with the page's elements that its script names."""
    text = page.read_text(encoding="utf-8")
    for name in re.findall(r'get\("(\w+)"\)', text):
        assert f'id="{name}"' in text, name
    return json.loads(re.search(r'type="application/json">(.*?)</script>', text, re.DOTALL)[1])


def pages(tmp_path, ranks):
    """Data of the page, and slices of the trace for Perfetto, of these ranks' dumps."""
    dumps, page, trace = (tmp_path / name for name in ("dumps", "page.html", "trace.json"))
    dumps.mkdir()
    for rank in ranks:
        rank.write(dumps)
    main([str(dumps), "--html", str(page), "--perfetto", str(trace)])
    events = json.loads(trace.read_text())["traceEvents"]
    return data_of(page), [event for event in events if event["ph"] == "X"]


def a_hang():
    """Rank 1 of three does not come to an all_reduce; dumps are written four seconds later."""
    ranks = recorders(3, pair=[0, 2])
    for rank in ranks:
        rank.call("all_reduce", takes=0.1)
        rank.more["threads"] = ["MainThread: train.py:7 in load", "saver: save.py:3 in run"]
    for rank in ranks[::2]:
        rank.call("broadcast", "pair", takes=0.1).call("all_reduce", done=False, line=41)
    for rank in ranks:
        rank.more["dumped"] = START + int(4.2 * SECOND)
    return ranks


def test_what_has_not_ended_is_drawn_to_the_time_of_the_dump(tmp_path):
    data, slices = pages(tmp_path, a_hang())
    open_ = [bar for bar in data["bars"] if not bar[3] and data["lanes"][bar[0]][1] >= 0]
    assert [(bar[1], bar[2]) for bar in open_] == [(200, 4200)] * 2 and data["end"] == 4200
    longest = [each for each in slices if each["name"].endswith("not ended")]
    assert [each["dur"] for each in longest] == [4e6, 4e6]


def test_a_rank_in_no_operation_has_its_line_of_python(tmp_path, capsys):
    data, slices = pages(tmp_path, a_hang())
    (idle,) = (bar for bar in data["bars"] if data["lanes"][bar[0]] == [1, -1])
    assert idle[5][0] == "in no operation: MainThread: train.py:7 in load" and idle[4]
    assert (idle[1], idle[2]) == (100, 4200) and "saver: save.py:3" in data["stacks"][idle[6]]
    assert [each["pid"] for each in slices if each["name"].startswith("MainThread")] == [1]
    assert "rank 1 is in no operation, but at train.py:7 in load" in capsys.readouterr().out


def test_each_group_of_a_rank_has_its_lane_and_the_axis_has_the_clock_of_the_verdict(tmp_path):
    data, _ = pages(tmp_path, a_hang())
    names = [(rank, data["groups"][group] if group >= 0 else "") for rank, group in data["lanes"]]
    assert names == [
        (rank, lane)
        for rank, lanes in enumerate(
            (["group 0", "group pair"], ["", "group 0"], ["group 0", "group pair"])
        )
        for lane in lanes
    ]
    at = time.strftime("%H:%M:%S", time.gmtime(data["clock"] / 1e3))
    assert f"the first since {at}.200" in data["verdict"]
    assert "train.py:41 in step" in data["stacks"][data["bars"][-1][6]]


def test_each_rank_has_the_lanes_of_its_groups_in_one_order_the_largest_first(tmp_path):
    ranks = recorders(4, tp_0=[0, 1], tp_1=[2, 3], dp_0=[0, 2], dp_1=[1, 3])
    for rank in ranks:
        names = [f"tp_{rank.rank // 2}", f"dp_{rank.rank % 2}", "0"]
        for name in names if rank.rank % 2 else reversed(names):
            rank.call("all_reduce", name)
    data, _ = pages(tmp_path, ranks)
    names = [data["groups"][group] for _, group in data["lanes"]]
    assert [name.partition("_")[0] for name in names] == ["group 0", "group dp", "group tp"] * 4


def test_a_page_is_written_though_nobody_reads_what_is_printed(tmp_path, monkeypatch):
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    for rank in a_hang():
        rank.write(tmp_path)
    page = tmp_path / "page.html"
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", Closed())
        assert main([str(tmp_path), "--html", str(page)]) == 2
    assert data_of(page)["culprits"] == [1]


def test_a_page_forgets_its_search_with_the_text_of_the_field(tmp_path):
    pages(tmp_path, a_hang())
    keys = (tmp_path / "page.html").read_text().partition('event.target === get("search")')[2]
    steps = re.findall(r'get\("search"\)\.value = ""|search\(\)|box\.focus\(\)|return', keys)
    assert steps[:4] == ['get("search").value = ""', "search()", "box.focus()", "return"]


def test_a_page_opens_at_the_rank_that_holds_up_others_and_its_tables_do_not_wrap(tmp_path):
    pages(tmp_path, a_hang())
    text = (tmp_path / "page.html").read_text()
    assert "showLane(data.lanes.findIndex(([rank]) => bad.has(rank)))" in text
    assert "white-space: nowrap" in re.search(r"^th, td \{.*", text, re.MULTILINE)[0]


def test_where_all_is_fine_nobody_is_shown_in_no_operation_and_the_end_is_the_last_operations(
    tmp_path,
):
    ranks = recorders(2)
    for rank in ranks:
        rank.call("all_reduce", takes=0.5)
        rank.more["dumped"] = START + 60 * SECOND
    data, _ = pages(tmp_path, ranks)
    assert data["lanes"] == [[0, 0], [1, 0]] and data["end"] == 500


def test_names_neither_blank_the_page_nor_move_the_cursor(tmp_path, capsys):
    ranks = recorders(2, **{"<!--<script>\x1b[2J\u202e\ud800": [0, 1]})
    for rank in ranks:
        rank.call("all_reduce", "<!--<script>\x1b[2J\u202e\ud800", dtype="Ünïcode\r")
    ranks[0].call("barrier", "<!--<script>\x1b[2J\u202e\ud800", done=False)
    (tmp_path / "dumps").mkdir()
    verdict(tmp_path / "dumps", ranks, "json")
    page = tmp_path / "page.html"
    assert main([str(tmp_path / "dumps"), "--html", str(page)]) == 1
    out = capsys.readouterr().out
    assert out.replace("\n", "").isprintable() and "<!--<script>\\x1b[2J\\u202e\\ud800" in out
    text = page.read_text(encoding="utf-8")
    data = re.search(r'type="application/json">(.*?)</script>', text, re.DOTALL)[1]
    texts = [bar[5][0] for bar in json.loads(data)["bars"]]
    assert "<" not in data and "all_reduce (8 x Ünïcode\\r) #1" in texts


def test_a_page_that_cannot_be_written_is_one_line(tmp_path, capsys):
    recorders(1)[0].call("barrier").write(tmp_path)
    assert main([str(tmp_path), "--html", str(tmp_path / "none" / "page")]) == 2
    assert re.search("No such file.*page'\n$", capsys.readouterr().err)


def test_the_command_ends_with_zero_when_all_is_fine(tmp_path):
    recorders(1)[0].call("barrier").write(tmp_path)
    run = run_python("-m", "torchcomms_pg.trace", tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("Every recorded operation has finished.")


class Danger:
    def __reduce__(self):
        return (print, ("a dump ran code",))


@pytest.mark.parametrize(
    "content, wanted",
    [
        (b"nonsense", "neither JSON nor a pickle"),
        (pickle.dumps([1, 2]), "no flight recorder's dump"),
        (pickle.dumps({"version": "3.0", "pg_config": {}}), "version 3.0, wanted 2.x"),
        (pickle.dumps({"version": "2.1", "pg_config": {}, "entries": [{}]}), "process_group"),
        (pickle.dumps(Danger()), "operation 0x93 at byte 30"),
    ],
    ids=["nonsense", "other data", "other version", "empty entry", "code"],
)
def test_a_file_that_is_no_dump_is_named_and_runs_nothing(tmp_path, capsys, content, wanted):
    (tmp_path / "dump_0").write_bytes(content)
    assert main([str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert wanted in err and "dump_0" in err
    assert out == ""


def test_before_a_dump_is_written_the_trace_says_when_one_is(tmp_path, capsys):
    for folder in (tmp_path, tmp_path / "made later"):
        assert main([str(folder)]) == 2
        err = capsys.readouterr().err
        assert f"{folder}: no dump has been written yet" in err and "Traceback" not in err
        assert "its timeout has passed" in err and "python -m torchcomms_pg.status" in err
    recorders(1)[0].call("barrier").write(tmp_path)
    assert main([str(tmp_path), "--prefix", "rank_"]) == 2
    assert "no file has the name rank_RANK" in capsys.readouterr().err


def test_the_empty_dump_of_a_process_without_a_group_is_named_and_accuses_nobody(tmp_path, capsys):
    ranks = recorders(2)
    for rank in ranks:
        rank.call("all_reduce")
    assert verdict(tmp_path, ranks).kind == "fine"
    empty = {"version": "2.10", "pg_config": {}, "pg_status": {}}
    (tmp_path / "dump_0").write_bytes(pickle.dumps(empty))
    assert main([str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "dump_0: the dump is empty: its process has had no operation of a group" in out
    assert "left no dump that is of use" in out or "not arrived" not in out


def test_dumps_that_cannot_be_told_apart_are_refused(tmp_path):
    rank = recorders(1)[0].call("barrier")
    rank.write(tmp_path)
    rank.write(tmp_path, "json")
    with pytest.raises(DumpError, match="both of rank 0"):
        load(tmp_path)
    (tmp_path / "dump_0.json").rename(tmp_path / "other_0.json")
    assert set(load(tmp_path, prefix="dump_")) == {0}
