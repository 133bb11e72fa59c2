"""Each kind of hazard for NCCL, and what is not known, in dumps that are written by hand."""

import json

import pytest

from debugging.test_trace import pairs, recorders
from harness import scene_dumps, scenes, strict_order
from torchcomms_pg.trace import load, nccl_hazards
from torchcomms_pg.trace.__main__ import main
from torchcomms_pg.trace.dumps import Dumps, parse
from torchcomms_pg.trace.hazards import replay

CPU = {"device": "cpu"}


def hazards(ranks):
    return nccl_hazards(Dumps(parse(rank.content(), rank.rank) for rank in ranks))


def kinds(report):
    return [hazard.kind for hazard in report.found]


def message(rank, op, sender, receiver, number=1, *, tag=0, batch=0, from_any=0, **more):
    """Calls a send or receive, as this project's recorder writes it down."""
    low, high = sorted((sender, receiver))
    sides = {low: 0, high: 1}
    mine, other = (sender, receiver) if op == "send" else (receiver, sender)
    arrow = "->" if op == "send" else "<-"
    detail = {**CPU, "tag": tag, "batch": batch, "from_any": from_any}
    rank.call(
        f"{op} {sides[mine]}{arrow}{sides[other]}",
        f"0:{low}-{high}",
        collective_seq_id=2 * number - (sender < receiver),
        detail=detail,
        **more,
    )


# ---------------------------------------------------------------- orders


def ring(ranks, number, **more):
    """Each rank sends to the next, and then receives."""
    for rank in ranks:
        after, before = (rank.rank + 1) % len(ranks), (rank.rank - 1) % len(ranks)
        message(rank, "send", rank.rank, after, number, **more)
        message(rank, "recv", before, rank.rank, number, **more)


def test_a_ring_of_first_sends_hangs_whatever_their_size():
    """NCCL connects two ranks in a call of the host; later sends of small messages end at once."""
    ranks = recorders(3)
    ring(ranks, 1, line=1)
    ring(ranks, 2, line=2)
    first, later = hazards(ranks).found
    connecting = "a first message connects both ranks on the host"
    assert connecting in str(first) and "train.py:1 " in str(first)
    assert "larger than NCCL's buffer" in str(later) and "train.py:2 " in str(later)


def test_the_shortest_deadlock_is_reported_first_and_each_set_of_lines_once():
    ranks = recorders(3, a=[0, 1], b=[1, 2], c=[0, 2])
    for _ in range(4):
        for rank, (first, second) in zip(ranks, ("ac", "ba", "cb")):
            rank.call("all_reduce", first, line=1).call("all_reduce", second, line=2)
        ranks[0].call("all_reduce", line=3).call("broadcast", "a", line=4)
        ranks[1].call("broadcast", "a", line=5).call("all_reduce", line=6)
        ranks[2].call("all_reduce", line=7)
    report = hazards(ranks)
    assert [(each.ranks, each.times) for each in report.found] == [([0, 1, 2], 4), ([0, 1], 4)]
    assert "3 more times at these lines" in str(report)
    lines = str(report.found[1]).splitlines()
    assert lines[1] == "  rank 0: all_reduce (8 x Float) #1 of group 0  at train.py:3 in step"
    assert lines[2] == "          then broadcast (8 x Float) #2 of group a  at train.py:4 in step"
    assert lines[3] == "  rank 1: broadcast (8 x Float) #2 of group a  at train.py:5 in step"
    assert lines[4] == "          then all_reduce (8 x Float) #1 of group 0  at train.py:6 in step"


def test_hazards_of_the_same_lines_are_reported_once_for_all_ranks(monkeypatch):
    """Such as those of each of the parts of the world that do the same."""
    ranks = recorders(6, a=[0, 1], b=[2, 3], c=[4, 5])
    for rank in ranks:
        for _ in range(5):
            groups = ["0", "abc"[rank.rank // 2]]
            for group in groups if rank.rank % 2 else groups[::-1]:
                rank.call("all_reduce", group, line=5)
    report = hazards(ranks)
    assert [(each.ranks, each.times) for each in report.found] == [([0, 1], 15)]
    assert "14 more times at these lines, also on ranks 2, 3, 4, 5" in str(report)
    monkeypatch.setattr(replay, "_MOST_CIRCLES", 3)
    monkeypatch.setattr(replay, "_MOST_OF_ALL_RANKS", 0)
    report = hazards(ranks)
    assert report.found[0].times == 3
    assert any("orders of later operations" in line for line in report.not_covered)


def test_of_two_deadlocks_at_once_the_one_of_fewer_ranks_comes_first():
    ranks = recorders(5, a=[0, 1], b=[1, 2], c=[0, 2], d=[3, 4], e=[3, 4])
    for rank, (first, second) in zip(ranks, ("ac", "ba", "cb", "de", "ed")):
        rank.call("all_reduce", first, line=rank.rank).call("all_reduce", second, line=rank.rank)
    assert [hazard.ranks for hazard in hazards(ranks).found] == [[3, 4], [0, 1, 2]]


def test_a_message_to_oneself_outside_a_batch_waits_for_itself():
    (rank,) = recorders(1, **{"0:0-0": [0]})
    for op, arrow, seq in (("send", "->", 1), ("recv", "<-", 1)):
        detail = {**CPU, "tag": 0, "batch": 0, "from_any": 0}
        rank.call(f"{op} 0{arrow}0", "0:0-0", collective_seq_id=seq, detail=detail)
    report = hazards([rank])
    assert kinds(report) == ["messages"] and "needs itself" in str(report)
    for detail in rank.details:
        detail["batch"] = 1
    assert kinds(hazards([rank])) == []


# ---------------------------------------------------------------- messages


@pytest.mark.parametrize("tags,found", [((1, 2), []), ((2, 1), ["tags"]), ((1, 3), ["tags"])])
def test_tags_are_compared_in_the_order_of_the_messages(tags, found):
    ranks = recorders(2, **{"0:0-1": [0, 1]})
    for number in (1, 2):
        message(ranks[0], "send", 0, 1, number, tag=number, line=number)
        message(ranks[1], "recv", 0, 1, number, tag=tags[number - 1], line=number)
    report = hazards(ranks)
    assert sorted(set(kinds(report))) == found


@pytest.mark.parametrize("more", [dict(numel=9), dict(dtype="Double")])
def test_sizes_and_types_of_a_message_are_the_same_on_both_ranks(more):
    ranks = recorders(2, **{"0:0-1": [0, 1]})
    message(ranks[0], "send", 0, 1)
    message(ranks[1], "recv", 0, 1, **more)
    assert kinds(hazards(ranks)) == ["sizes"]


def test_a_rank_missing_from_a_groups_first_batch_is_named():
    ranks = recorders(3, **{"0:0-1": [0, 1]})
    message(ranks[0], "send", 0, 1, batch=1)
    message(ranks[1], "recv", 0, 1, batch=1)
    report = hazards(ranks)
    assert kinds(report) == ["first batch"] and "rank 2 never comes to" in str(report)
    ranks[2].call("barrier")
    assert kinds(hazards(ranks)) == []


def test_a_rank_whose_ring_has_lost_operations_is_not_called_missing():
    ranks = recorders(3, **{"0:0-1": [0, 1], "other": [2]})
    message(ranks[0], "send", 0, 1, batch=1)
    message(ranks[1], "recv", 0, 1, batch=1)
    ranks[2].call("barrier").call("barrier", "other")
    del ranks[2].entries[0]
    assert kinds(hazards(ranks)) == []


def test_a_batch_is_reported_with_the_number_of_its_messages():
    ranks = recorders(2, **{"0:0-1": [0, 1], "other": [0, 1]})
    for rank in ranks:
        rank.call("barrier")
    ranks[1].call("all_reduce", "other")
    for number in (1, 2):
        message(ranks[0], "send", 0, 1, number, batch=1)
        message(ranks[1], "recv", 0, 1, number, batch=1)
    ranks[0].call("all_reduce", "other")
    (told,) = map(str, hazards(ranks).found)
    assert "rank 0: a batch of 2, with send" in told and "then a batch of 2, with recv" in told


def test_a_message_in_a_batch_on_one_rank_alone_is_reported_in_full():
    ranks = recorders(2, **{"0:0-1": [0, 1]})
    for rank in ranks:
        rank.call("all_reduce", line=1)
    message(ranks[0], "send", 0, 1, batch=1, line=2)
    message(ranks[1], "recv", 0, 1, line=3)
    report = hazards(ranks)
    assert kinds(report) == ["batch"]
    title, sent, received, why, *_ = str(report.found[0]).splitlines()
    assert title.endswith("are in a batch on rank 0 alone")
    assert sent.startswith("  rank 0: send") and sent.endswith("at train.py:2 in step")
    assert received.startswith("  rank 1: recv") and received.endswith("at train.py:3 in step")
    assert why.startswith("  over torch's nccl before 2.15") and "more times" not in str(report)


def test_messages_of_which_no_dump_tells_the_batch_are_not_judged():
    """Those of groups of other backends that are watched."""
    ranks = recorders(2, **{"0:0-1": [0, 1]})
    for rank in ranks:
        other = 1 - rank.rank
        message(rank, "send", rank.rank, other, tag=1)
        message(rank, "recv", other, rank.rank, tag=2)
        for detail in rank.details:
            del detail["tag"], detail["batch"]
    report = hazards(ranks)
    assert not report.found
    assert any(line.startswith("4 messages") for line in report.not_covered)


def test_messages_that_a_receive_from_any_rank_may_take_are_not_judged():
    """Their numbers are those of their coming."""
    ranks = recorders(2, **{"0:0-1": [0, 1]})
    message(ranks[0], "send", 0, 1, 1, tag=1)
    message(ranks[0], "send", 0, 1, 2, tag=2)
    message(ranks[1], "recv", 0, 1, 2, tag=1)
    message(ranks[1], "recv", 0, 1, 1, tag=2, from_any=1)
    report = hazards(ranks)
    assert kinds(report) == ["refused"]
    assert any(line.startswith("4 messages") for line in report.not_covered)


# ---------------------------------------------------------------- collectives


REFUSED = {
    "tensors of type Short": dict(dtype="Short"),
    "tensors of type UInt32": dict(dtype="UInt32"),
    "reductions by BXOR": dict(detail={**CPU, "reduce_op": "BXOR"}),
    "a gather of complex tensors": dict(op="gather", dtype="ComplexFloat"),
    "monitored_barrier": dict(
        frames=[{"name": "monitored_barrier", "filename": "/x/torch/d.py", "line": 1}]
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_torchs_nccl_refuses_is_reported_once_for_all_ranks_of_a_line(what):
    ranks = recorders(2)
    for rank in ranks:
        for _ in range(3):
            rank.call(**{"op": "all_reduce", **REFUSED[what]})
    report = hazards(ranks)
    assert kinds(report) == ["refused"] and report.found[0].times == 3
    assert f"torch's nccl refuses {what}: ranks 0, 1" in str(report)


@pytest.mark.parametrize(
    "mine,theirs",
    [
        (dict(op="all_reduce"), dict(op="broadcast")),
        (dict(op="all_reduce"), dict(op="all_reduce", numel=9)),
        (dict(op="broadcast", detail={"root": 0}), dict(op="broadcast", detail={"root": 1})),
        (
            dict(op="all_reduce", detail={"reduce_op": "SUM"}),
            dict(op="all_reduce", detail={"reduce_op": "MAX"}),
        ),
    ],
    ids=["operations", "sizes", "roots", "reductions"],
)
def test_calls_that_cannot_be_one_collective_are_named_although_they_have_ended(mine, theirs):
    ranks = recorders(2)
    ranks[0].call(**mine)
    ranks[1].call(**theirs)
    assert kinds(hazards(ranks)) == ["mismatch"]


def crossed(threads):
    """Two lines that each rank calls, in another order; by these threads of rank 0."""
    ranks = recorders(2)
    ranks[0].call("all_reduce", line=1, thread_id=threads[0])
    ranks[0].call("all_reduce", line=2, thread_id=threads[1])
    ranks[1].call("all_reduce", line=2, thread_id="7").call("all_reduce", line=1, thread_id="7")
    return hazards(ranks)


def test_lines_that_met_by_chance_are_shown_and_are_no_hazard():
    report = crossed(("1", "1"))
    assert not report.found and [hazard.kind for hazard in report.doubts] == ["lines"]
    assert "met from different lines" in str(report)


def test_threads_whose_order_is_another_on_another_rank_are_a_hazard():
    report = crossed(("1", "2"))
    assert kinds(report) == ["threads"] and not report.doubts
    assert "rank 0 called them from two threads" in str(report)
    assert "issue from one thread, or let each have its own group" in str(report)


def test_lines_that_met_by_chance_are_reported_once_for_all_ranks():
    ranks = recorders(3)
    for rank in ranks:
        for line in (1, 2) if rank.rank == 0 else (2, 1):
            rank.call("all_reduce", line=line)
    assert [(hazard.kind, hazard.times) for hazard in hazards(ranks).doubts] == [("lines", 2)]
    assert "issue from one thread" not in str(hazards(ranks))


def test_a_branch_for_the_root_is_no_doubt():
    """Each rank has its own line, or the operation has a root."""
    ranks = recorders(2)
    for _ in range(2):
        ranks[0].call("all_reduce", line=1)
        ranks[1].call("all_reduce", line=2)
    for root in range(2):
        for rank in ranks:
            line = 3 if rank.rank == root else 4
            rank.call("broadcast", line=line, detail={**CPU, "root": root})
    report = hazards(ranks)
    assert not report.found and not report.doubts


def test_a_group_with_tensors_on_two_devices_is_shown():
    ranks = recorders(2)
    for rank in ranks:
        rank.call("all_reduce", detail=CPU).call("all_reduce", detail={"device": "cuda"})
    report = hazards(ranks)
    assert not report.found and [hazard.kind for hazard in report.doubts] == ["device"]
    assert not any(line.startswith("tensors: all were on the CPU") for line in report.not_covered)


# ---------------------------------------------------------------- what is not known


def opposite(size=2):
    ranks = recorders(size, other=list(range(size)))
    for rank in ranks:
        groups = ("0", "other") if rank.rank == 0 else ("other", "0")
        for group in groups:
            rank.call("all_reduce", group)
    return ranks


def test_of_some_ranks_dumps_what_they_say_is_said(tmp_path, capsys):
    for rank in opposite(4)[:2]:
        rank.write(tmp_path)
    assert main([str(tmp_path), "--nccl"]) == 1
    out = capsys.readouterr().out
    assert "ranks 0, 1 call operations" in out and "ranks 2, 3: no dump" in out


@pytest.mark.parametrize("size,told", [(9, "1, 2, 3, 4, 5, 6, 7, 8: no"), (10, "7, 8, ...: no")])
def test_of_many_ranks_without_a_dump_the_first_are_named(size, told):
    (first, *_) = recorders(size)
    first.call("all_reduce")
    assert any(told in line for line in hazards([first]).not_covered)


def test_of_one_rank_nothing_is_said(tmp_path, capsys):
    opposite(12)[0].write(tmp_path)
    assert main([str(tmp_path), "--nccl"]) == 0
    assert "ranks 1, 2, 3, 4, 5, 6, 7, 8, ...: no dump" in capsys.readouterr().out


def test_dumps_that_cannot_be_read_are_named(tmp_path, capsys):
    ranks = opposite(3)
    for rank in ranks:
        rank.write(tmp_path, "json")
    old = {**ranks[1].content(), "version": "1.5"}
    (tmp_path / "dump_1.json").write_text(json.dumps(old))
    (tmp_path / "dump_2.json").write_text("{")
    assert main([str(tmp_path), "--nccl"]) == 0
    out = capsys.readouterr().out
    assert "dump_1.json: the dump is of version 1.5" in out and "dump_2.json: neither JSON" in out
    (tmp_path / "dump_0.json").unlink()
    assert main([str(tmp_path), "--nccl"]) == 2


def test_a_dump_of_an_earlier_run_is_left_out(tmp_path):
    ranks = recorders(2)
    ranks[0].call("all_reduce")
    ranks[1].later(3600).call("all_reduce", numel=9).call("all_reduce")
    for rank in ranks:
        rank.write(tmp_path)
    report = nccl_hazards(load(tmp_path))
    assert not report.found and "dump_0 is left out" in report.not_covered[0]


def test_what_a_ring_and_a_graph_keep_to_themselves_is_counted():
    ranks = opposite()
    ranks[0].entries = ranks[0].entries[1:]
    contents = {rank.rank: rank.content() for rank in ranks}
    contents[1]["captured"] = 5
    report = nccl_hazards(Dumps(parse(content, rank) for rank, content in contents.items()))
    assert not report.found
    assert any("rank 0: 1 operations that its ring has lost" in e for e in report.not_covered)
    assert "rank 1: 5 operations in graphs, and their replays" in report.not_covered


def opposite_groups(first, second):
    """Two ranks call two groups, of these backends, in opposite orders."""
    ranks = recorders(2, other=[0, 1])
    for rank in ranks:
        groups = [("0", first), ("other", second)]
        for name, backend in groups if rank.rank else groups[::-1]:
            rank.call("all_reduce", name, detail={**CPU, "backend": backend})
    return hazards(ranks)


@pytest.mark.parametrize("other", ["torchcomms", "nccl", ""])
def test_a_group_of_gloo_beside_another_backend_stays_on_the_cpu_and_is_not_judged(other):
    report = opposite_groups(other, "gloo")
    assert not report.found and not report.doubts, str(report)
    name = other or "a TorchComm"
    assert f"2 operations of group other, of gloo beside {name}: on the CPU" in "\n".join(
        report.not_covered
    )
    assert kinds(opposite_groups(other, other)) == ["order"]


def test_where_every_group_is_of_gloo_it_stands_for_nccl():
    assert kinds(opposite_groups("gloo", "gloo")) == ["order"]


def test_what_dcp_saves_asynchronously_stays_on_the_cpu():
    saves = {"name": "main", "filename": "/x/torch/distributed/checkpoint/", "line": 3}
    saves["filename"] += "_async_thread_executor.py"
    ranks = recorders(2, other=[0, 1])
    for rank in ranks:
        calls = [{"group": "0"}, {"group": "other", "frames": [saves]}]
        for call in calls if rank.rank else calls[::-1]:
            rank.call("all_reduce", detail=CPU, **call)
    report = hazards(ranks)
    assert not report.found and "2 operations of DCP's asynchronous save" in str(report)


def test_a_rank_that_skips_the_first_batch_and_comes_with_another_call_is_doubted():
    ranks = pairs(3)
    message(ranks[0], "send", 0, 1, batch=1, line=4)
    message(ranks[1], "recv", 0, 1, batch=1, line=4)
    for rank in ranks:
        rank.call("barrier", line=9)
    report = hazards(ranks)
    assert not report.found
    (doubt,) = report.doubts
    assert str(doubt).startswith("rank 2 skipped the first call of group 0, a batch of messages")
    assert "train.py:4 in step" in str(doubt) and "train.py:9 in step" in str(doubt)


def test_threads_that_issue_in_several_groups_are_reported():
    ranks = recorders(2, other=[0, 1])
    for rank in ranks:
        rank.call("all_reduce", thread_id="1").call("all_reduce", "other", thread_id="2")
    report = hazards(ranks)
    assert not report.found
    assert sum("2 threads issued in 2 groups" in line for line in report.not_covered) == 2


def test_what_has_not_ended_and_what_is_on_windows_is_reported():
    ranks = recorders(2, **{"0:signal 0->1": [0]})
    for rank in ranks:
        rank.call("all_reduce", done=False)
    ranks[0].call("coalesced", "0:signal 0->1")
    told = hazards(ranks).not_covered
    assert "1 operations on windows" in told
    assert any(line.startswith("2 operations that had not ended") for line in told)


@pytest.mark.parametrize(
    "form,line",
    [
        ("gloo", "rank 0: messages, which Gloo's recorder does not have"),
        ("hook", "messages whose other side, or whose batch, is not known"),
        ("nccl", "rank 0: tags, reductions and devices, which its recorder does not tell"),
    ],
)
def test_what_another_recorder_leaves_out_is_reported(form, line):
    for seed in range(100):
        outcome = scenes.Outcome(strict_order.make(seed))
        if {call.op for call in outcome.calls[0]} == {"send", "recv", "all_reduce"}:
            break
    contents = scene_dumps.write(outcome, form, seed)
    report = nccl_hazards(Dumps(parse(content, rank) for rank, content in contents.items()))
    assert any(line in told for told in report.not_covered), report.not_covered


def test_a_page_of_hazards_is_refused(tmp_path, capsys):
    for other in ("--html", "--perfetto"):
        with pytest.raises(SystemExit) as ended:
            main([str(tmp_path), "--nccl", other, str(tmp_path / "page")])
        assert ended.value.code == 2
        assert "--nccl prints a report, and writes no page" in capsys.readouterr().err
