"""tools/bench measures, checks, stores and compares. How fast anything is, is not tested."""

import argparse
import collections
import contextlib
import json
import os
import pathlib
import queue
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

import emulated
from benchmarks import (
    bounds,
    budgets,
    compare,
    mpi,
    operations,
    parts,
    plan,
    programs,
    scale,
    table,
)
from benchmarks.results import OPERATIONS, Contender, Results, Row, summarise
from benchmarks.team import Team
from harness import ROOT, TESTS, network
from harness.programs import PROGRAM_LIMIT
from harness.ranks import RankFailure, wait_for


@contextlib.contextmanager
def started(*arguments):
    env = dict(os.environ, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    env["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT, TESTS)))
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks", *map(str, arguments)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.terminate()


def bench(*arguments, timeout=PROGRAM_LIMIT):
    with started(*arguments) as process:
        output = process.communicate(timeout=timeout)
    return subprocess.CompletedProcess(process.args, process.returncode, *output)


def row(time, *, bytes=4, backend="torchcomms", ranks=2, op="all_reduce", **also):
    return Row(Contender(op, bytes, backend, ranks, **also), time, 2 * time, 5, [time] * 5)


def store(file, *rows):
    file.write_text(json.dumps({"rows": [row.as_json() for row in rows]}))
    return file


@pytest.mark.slow
def test_every_operation_is_measured_checked_stored_and_compared(tmp_path):
    earlier = store(tmp_path / "earlier.json", row(0.01, bytes=1024))
    done = bench(
        *("--op", "all", "--sizes", "4,1K", "--seconds", "0.001", "--backends", "torchcomms,gloo"),
        *("--json", tmp_path / "now.json", "--compare", earlier),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    now = json.loads((tmp_path / "now.json").read_text())
    assert now["failures"] == []
    rows = [Row.from_json(values) for values in now["rows"]]
    wanted = {
        Contender(op, size, backend, 2)
        for op in OPERATIONS
        for size in ([0] if op == "barrier" else [4, 1024])
        for backend in ("torchcomms", "gloo")
    }
    assert {row.contender for row in rows} == wanted
    assert all(0 < row.median_us <= row.p99_us for row in rows)
    assert all(len(row.rounds_us) == 5 and row.calls >= 5 for row in rows)
    assert "all_reduce, 2 ranks, float32, sync, dist" in done.stdout
    assert "SLOWER" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--op", "all_reduced"], "'all_reduced' is not one of all, all_reduce, broadcast"),
        (["--sizes", "4,64X"], "'64X' is not a size such as 4, 64K or 16M"),
        (["--ranks", "2,x"], "'2,x' is not a list such as 2,4"),
    ],
)
def test_a_wrong_option_is_an_error_that_says_what_is_right(arguments, message, capsys):
    from benchmarks.__main__ import main

    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert message in capsys.readouterr().err


def test_a_file_that_is_no_result_is_an_error(tmp_path):
    (tmp_path / "other.json").write_text('{"answer": 42}')
    with pytest.raises(ValueError, match="is no result of tools/bench"):
        compare.load(tmp_path / "other.json")


def test_a_call_counts_as_its_slowest_rank():
    rounds = [[[1.0, 2.0, 3.0], [3.0, 1.0, 1.0]], [[5.0, 5.0, 5.0], [1.0, 1.0, 6.0]]]
    got = summarise(Contender("all_reduce", 4, "gloo", 2), rounds)
    assert got.rounds_us == [3.0, 5.0]
    assert (got.median_us, got.p99_us, got.calls) == (4.0, 6.0, 6)


@pytest.mark.parametrize(
    ("before", "now", "wanted"),
    [
        ([1.0, 1.2], [1.1, 1.3], ""),
        ([1.0, 1.2], [1.3, 1.4], "SLOWER"),
        ([1.3, 1.4], [1.0, 1.2], "faster"),
    ],
)
def test_a_difference_counts_where_the_rounds_do_not_overlap(before, now, wanted):
    old, new = row(1.0), row(1.0)
    old.rounds_us, new.rounds_us = before, now
    assert compare.verdict(new, old) == wanted


def test_a_budget_is_judged_by_the_worst_size_and_missing_ones_are_not():
    results = Results()
    for size, ours in ((4, 5.0), (64 * plan.KB, 10.0)):
        results.rows += [row(ours, bytes=size), row(150.0, bytes=size, backend="gloo")]
    judged = {budget.what: budget for budget in budgets.all_of(results)}
    assert judged["dist.all_reduce of 4 B, 2 ranks"].reached is True
    against_gloo = judged["all_reduce against Gloo, 2 ranks, 4 B to 64 KB"]
    assert against_gloo.reached is False
    assert against_gloo.measured == "15 x at 64 KB"
    assert judged["inside the library, 4 B, 2 ranks"].reached is None
    assert "MISSED" in budgets.as_text(judged.values())


def of_messages(**found):
    """Returns results with these times; `names` maps each keyword to a call of programs."""
    results = Results()
    names = {
        "reduce": "all_reduce of 4 B",
        "back": "send and recv of 4 B, there and back",
        "batch": "batch_isend_irecv of 4 B both ways",
        "large": "send and recv of 4 MB, there and back",
    }
    assert set(names.values()) <= {call.name for call in programs.CALLS}
    results.sections["programs"] = {names[name]: times for name, times in found.items()}
    return results


def judged_messages(results):
    return {
        (budget.what, budget.limit): (budget.reached, budget.measured)
        for budget in budgets.all_of(results)
        if "send" in budget.what
    }


BACK = "send and recv of 4 B, there and back, 2 ranks"
BATCH = "batch_isend_irecv of 4 B both ways, 2 ranks"
FOUR_MB = "send and recv of 4 MB, there and back, 2 ranks"


def test_messages_are_judged_beside_an_all_reduce_gloo_open_mpi_and_by_their_wake_ups():
    results = of_messages(
        reduce={"torchcomms": 5.0, "gloo": 150.0},
        back={"torchcomms": 11.0, "gloo": 110.0, "fake": 5.0, "wake-ups": 0.0},
        batch={"torchcomms": 15.0, "gloo": 150.0, "fake": 8.0, "wake-ups": 1 / 400},
        large={"torchcomms": 1000.0, "gloo": 5000.0, "mpi": 700.0, "wake-ups": 3.0},
    )
    assert judged_messages(results) == {
        (BACK, "<= 2.2 x all_reduce of 4 B"): (True, "2.20 x"),
        (BACK, ">= 20 x Gloo's speed"): (False, "10 x"),
        (BACK, "<= 0 wake-ups"): (True, "0 a call"),
        (BATCH, "<= 2.5 x all_reduce of 4 B"): (False, "3.00 x"),
        (BATCH, "<= 0 wake-ups"): (False, "0.0025 a call"),
        (FOUR_MB, ">= 5 x Gloo's speed"): (True, "5.00 x"),
        (FOUR_MB, ">= 0.8 x Open MPI's speed"): (False, "0.70 x"),
    }


def test_messages_are_judged_beside_what_was_measured_alone():
    results = of_messages(
        back={"gloo": 110.0}, large={"torchcomms": 1000.0, "gloo": 4000.0, "wake-ups": 3.0}
    )
    judged = judged_messages(results)
    assert judged.pop((FOUR_MB, ">= 5 x Gloo's speed")) == (False, "4.00 x")
    assert len(judged) == 6
    assert set(judged.values()) == {(None, "not measured")}


def test_messages_have_a_column_of_open_mpi_where_it_was_measured():
    found = {
        "there and back": {"torchcomms": 12.0, "gloo": 120.0, "mpi": 3.0, "fake": 5.0},
        "a step": {"torchcomms": 900.0, "gloo": 1800.0, "wake-ups": 0.0},
    }
    _, head, *lines = table.programs(found).splitlines()
    assert head.split("  ")[-1] == "wake-ups"
    assert head.split()[1:8] == ["torchcomms", "Gloo", "ratio", "Open", "MPI", "ratio", "fake"]
    assert lines[0].split()[3:] == ["12.0", "120", "10", "3.00", "0.25", "5.00", "-"]
    assert lines[1].split()[2:] == ["900", "1,800", "2.00", "-", "-", "-", "0.00"]
    del found["there and back"]["mpi"]
    _, head, *lines = table.programs(found).splitlines()
    assert head.split()[1:] == ["torchcomms", "Gloo", "ratio", "fake", "wake-ups"]
    assert lines[0].split()[3:] == ["12.0", "120", "10", "5.00", "-"]


def wire(rank, size, queues, sent):
    """Stands in for `mpi4py.MPI` on one rank: passes messages between threads and notes them."""

    def send(data, peer):
        sent.append((rank, peer, data.nbytes))
        queues[rank, peer].put(data.copy())

    def receive(data, peer):
        data[:] = queues[peer, rank].get(timeout=60)

    def reduce(place, data, op):
        assert (place, data.nbytes, op) == ("in place", 4, "sum")

    def started(data, peer):
        send(data, peer)
        return SimpleNamespace(Wait=lambda: None)

    comm = SimpleNamespace(
        rank=rank,
        size=size,
        Send=send,
        Recv=receive,
        Isend=started,
        Irecv=lambda data, peer: SimpleNamespace(Wait=lambda: receive(data, peer)),
        Allreduce=reduce,
    )
    request = SimpleNamespace(Waitall=lambda requests: [each.Wait() for each in requests])
    return SimpleNamespace(COMM_WORLD=comm, Request=request, IN_PLACE="in place", SUM="sum")


BOTH = [(0, 1), (1, 0)]


@pytest.mark.parametrize(
    ("name", "bytes", "pairs"),
    [
        ("all_reduce of 4 B", 4, []),
        ("send and recv of 4 B, there and back", 4, BOTH),
        ("batch_isend_irecv of 4 B both ways", 4, BOTH),
        ("isend, irecv and wait() of 4 B", 4, BOTH),
        ("send to recv of 4 B, one way", 4, BOTH[:1]),
        ("isend to irecv of 4 B, 512 in flight", 4, BOTH[:1] * 512),
        ("batch_isend_irecv of 4 B, ring of 4 ranks", 4, [(0, 1), (1, 2), (2, 3), (3, 0)]),
        ("batch_isend_irecv of 64 KB both ways", 64 * plan.KB, BOTH),
        ("send and recv of 4 MB, there and back", 4 * plan.MB, BOTH),
    ],
)
def test_open_mpi_gets_the_same_messages(name, bytes, pairs):
    (call,) = (call for call in programs.CALLS if call.name == name)
    queues, sent = collections.defaultdict(queue.Queue), []
    for pair in pairs:
        queues[pair]  # makes the queue, which each of two threads might make otherwise
    made = [call.mpi(wire(rank, call.ranks, queues, sent)) for rank in range(call.ranks)]
    with ThreadPoolExecutor(call.ranks) as ranks:
        for done in [ranks.submit(run) for run in made]:
            done.result(timeout=60)
    assert sorted(sent) == sorted((*pair, bytes) for pair in pairs)
    assert all(each.empty() for each in queues.values())


def test_every_form_of_message_has_one_over_open_mpi_and_nothing_else_but_an_all_reduce():
    assert {call.name for call in programs.CALLS if call.mpi} == {
        call.name
        for call in programs.CALLS
        if "send" in call.name or call.name == "all_reduce of 4 B"
    }


class Answers:
    """Stands in for a team: answers each call with `times`, or fails at the call `fails_at`."""

    def __init__(self, times, fails_at=""):
        self.times, self.fails_at, self.closed = times, fails_at, False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.closed = True

    def call(self, method, *arguments):
        if arguments == (self.fails_at,):
            self.closed = True
            raise RankFailure("out of luck")
        return [self.times]


def measured_programs(monkeypatch, start_mpi):
    monkeypatch.setattr(parts, "torch_team", lambda *_: Answers({"torchcomms": 10.0, "gloo": 90.0}))
    monkeypatch.setattr(mpi, "MpiTeam", start_mpi)
    results = Results()
    args = argparse.Namespace(backends=["torchcomms", "gloo", "mpi"], quick=False)
    parts.measure_programs(args, results)
    found = results.sections["programs"]
    assert list(found) == [call.name for call in programs.CALLS]
    assert all(times["torchcomms"] == 10.0 for times in found.values())
    return results, [name for name, times in found.items() if "mpi" in times]


def test_where_open_mpi_fails_its_column_alone_is_left_out(monkeypatch, capsys):
    def start(ranks):
        raise RankFailure("mpirun did not start them")

    results, over_mpi = measured_programs(monkeypatch, start)
    assert over_mpi == []
    assert results.failures == [
        f"programs over Open MPI, {ranks} ranks: mpirun did not start them" for ranks in (2, 4)
    ]
    assert "Open MPI" not in capsys.readouterr().out


def test_from_the_call_on_that_fails_over_open_mpi_programs_are_measured_without(monkeypatch):
    batch = "batch_isend_irecv of 4 B both ways"
    results, over_mpi = measured_programs(
        monkeypatch, lambda ranks: Answers({"mpi": 1.0}, fails_at=batch)
    )
    assert over_mpi[:2] == ["all_reduce of 4 B", "send and recv of 4 B, there and back"]
    assert over_mpi[2:] == ["batch_isend_irecv of 4 B, ring of 4 ranks"]  # has another team
    assert results.failures == ["programs over Open MPI, 2 ranks: out of luck"]


@pytest.mark.slow
def test_what_programs_call_is_measured_beside_gloo_and_open_mpi_where_that_is_installed(tmp_path):
    done = bench("--quick", "--only", "programs", "--budgets", "--json", tmp_path / "now.json")
    assert done.returncode == 0, done.stdout + done.stderr
    now = json.loads((tmp_path / "now.json").read_text())
    assert now["failures"] == []
    calls = [call for call in programs.CALLS if call.ranks == 2]
    assert list(now["programs"]) == [call.name for call in calls]
    for call in calls:
        times = now["programs"][call.name]
        assert times.pop("wake-ups") >= 0
        wanted = {"torchcomms", "gloo", "fake"}
        if call.name.startswith("1F1B"):
            wanted.remove("fake")
        assert times.keys() == wanted | ({"mpi"} if call.mpi and not mpi.missing() else set())
        assert min(times.values()) > 0
    assert (
        "Open MPI" in done.stdout.partition("What programs call")[2].partition("Budgets")[0]
    ) == (not mpi.missing())
    judged = [budget for budget in now["budgets"] if budget["what"] == BACK]
    assert [budget["reached"] is None for budget in judged] == [False] * 3


def test_bounds_count_every_byte_that_has_to_move():
    mb = 1 << 20
    copies = [
        {"copy_bytes": mb, "copiers": 1, "shared_gb_s": 10.0},
        {"copy_bytes": mb, "copiers": 2, "shared_gb_s": 5.0},
    ]
    # One receiver reads and writes the whole buffer at the speed of one core.
    assert bounds.microseconds("broadcast", "direct", mb, 2, copies) == pytest.approx(mb / 10e3)
    # Both ranks copy one buffer each, at the speed of cores that copy at once.
    assert bounds.microseconds("all_gather", "direct", mb, 2, copies) == pytest.approx(mb / 5e3)
    for op in OPERATIONS[:-1]:
        for ranks in (2, 4, 8):
            direct = bounds.traffic(op, "direct", ranks)
            staged = bounds.traffic(op, "staged", ranks)
            assert direct.busiest <= staged.busiest
            assert direct.total <= staged.total
    assert bounds.traffic("barrier", "direct", 2) is None


def test_tables_line_up():
    results = Results()
    results.rows = [row(5.0), row(100.0, backend="gloo"), row(2000.0, bytes=1 << 20)]
    lines = table.operations(results.rows).splitlines()
    assert lines[1].split() == ["size", "torchcomms", "p99", "Gloo", "p99", "ratio", "GB/s"]
    assert lines[2].split() == ["4", "B", "5.00", "10.0", "100", "200", "20", "-"]
    assert {len(line) for line in lines[1:]} == {len(lines[1])}


def test_a_result_of_before_there_were_hosts_is_still_read(tmp_path):
    values = row(5.0).as_json()
    assert values.pop("network") == ""
    (tmp_path / "earlier.json").write_text(json.dumps({"rows": [values]}))
    (read,) = compare.load(tmp_path / "earlier.json")
    assert read.contender == row(5.0).contender


def test_sums_of_ranks_that_are_no_power_of_two_are_rounded():
    got = torch.tensor([1e30, 1e30 * (1 + 1e-6)])
    assert operations.differs(got, 1e30).startswith("element 1 of 2")
    assert operations.differs(got, 1e30, rounding=1e-5) == ""
    assert operations.differs(got, float("inf"), rounding=1e-5).startswith("element 0 of 2")


def test_budgets_of_several_hosts_are_judged_apart_from_those_of_one():
    slow = "2 x 2, 1 Gbit/s"
    results = Results()
    results.rows = [
        row(0.7e6, bytes=64 * plan.MB, ranks=4, network=slow),
        row(0.9e6, bytes=64 * plan.MB, ranks=4, network=slow, backend="gloo"),
        row(9.0, bytes=4, ranks=4, network="2 x 2, unshaped"),
        row(10.0, bytes=4, ranks=4, network="2 x 2, unshaped", backend="gloo"),
    ]
    judged = {budget.what: budget for budget in budgets.of_hosts(results)}
    link = judged[f"all_reduce of 64 MB, {slow}"]
    assert (link.reached, link.measured) == (False, "1.30 x, 0.70 s")
    assert judged[f"all_reduce against Gloo, {slow}, 64 MB"].reached is False
    assert judged[f"all_reduce against Gloo, {slow}, 64 KB"].reached is None
    assert judged["all_reduce against Gloo, 2 x 2, unshaped, 4 B"].reached is True
    assert all(budget.reached is None for budget in budgets.all_of(results))


class Target:
    def __init__(self, rank):
        self.rank = rank

    def twice(self, value):
        return self.rank, 2 * value

    def fail(self):
        if self.rank == 1:
            raise ValueError("out of luck")
        self.hang()

    def hang(self):
        import time

        time.sleep(60)


@pytest.mark.slow
def test_a_team_answers_and_a_rank_that_fails_ends_it():
    with Team(2, Target) as ranks:
        assert ranks.call("twice", 21) == [(0, 42), (1, 42)]
        with pytest.raises(RankFailure, match=r"(?s)rank 1 error: .*out of luck"):
            ranks.call("fail")
        assert ranks.closed


def test_a_rank_that_does_not_answer_in_time_ends_the_team():
    with Team(2, Target) as ranks:
        with pytest.raises(RankFailure, match=r"(?s)rank 0 hung: .*rank 1 hung: "):
            ranks.call("hang", timeout=0.2)
        assert ranks.closed


def test_where_mpirun_starts_no_ranks_its_output_is_in_the_error(monkeypatch, tmp_path):
    (tmp_path / "mpirun").write_text("#!/bin/sh\necho no slots; exit 1\n")
    (tmp_path / "mpirun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(RankFailure, match="mpirun did not start 2 ranks: no slots"):
        mpi.MpiTeam(2)


@pytest.mark.slow
@pytest.mark.skipif(bool(emulated.available()), reason=emulated.available() or "it is there")
def test_operations_on_gpus_are_measured_beside_nccl_on_an_emulated_cuda(tmp_path):
    done = bench("--gpus", "emulated", "--json", tmp_path / "now.json")
    assert done.returncode == 0, done.stdout + done.stderr
    records = json.loads((tmp_path / "now.json").read_text())["gpus"]
    assert [record["case"] for record in records][:2] == ["all_reduce", "all_reduce async"]
    for record in records:
        assert min(record[side]["us"] for side in ("torchcomms", "nccl")) > 0
        assert record["torchcomms"]["calls"] < record["nccl"]["calls"]
        assert f"{record['ratio']:.2f}" in done.stdout


@pytest.fixture
def possible():
    if why := network.missing():
        pytest.skip(why)


@pytest.mark.slow
def test_groups_on_several_hosts_are_measured_beside_gloo(possible, tmp_path):
    done = bench("--quick", "--hosts", "--budgets", "--json", tmp_path / "now.json")
    assert done.returncode == 0, done.stdout + done.stderr
    now = json.loads((tmp_path / "now.json").read_text())
    place = "2 x 2, unshaped"
    assert {Row.from_json(values).contender for values in now["rows"]} == {
        Contender("all_reduce", size, backend, 4, network=place)
        for size in (4, plan.MB)
        for backend in ("torchcomms", "gloo")
    }
    assert f"all_reduce, {place}, float32, sync, dist" in done.stdout
    judged = {budget["what"] for budget in now["budgets"]}
    assert f"all_reduce against Gloo, {place}, 4 B to 1 MB" in judged
    assert "dist.all_reduce of 4 B, 2 ranks" not in judged


@pytest.mark.slow
def test_ranks_that_share_cores_are_counted_beside_gloo_and_a_call_of_the_scheduler(tmp_path):
    done = bench("--quick", "--only", "sharing", "--json", tmp_path / "now.json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "now.json").read_text())["sharing"]
    names = ["torchcomms", "gloo", "fake", "fake, sched_yield"]
    assert [row["backend"] for row in found["ranks"]] == names
    assert [row["backend"] for row in found["programs"]] == names[:2]
    assert all(row["time"] >= row["cpu"] / 2 > 0 for row in found["ranks"])
    assert all(row["cpu"] >= 2000 for row in found["programs"])
    assert "2 ranks beside ten busy programs" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize("hosts, each, steps", [(10, 2, 5), (2, 10, 1)])
def test_what_many_ranks_cost_grows_with_hosts_and_not_with_ranks(tmp_path, hosts, each, steps):
    if why := scale.missing():
        pytest.skip(why)
    done = bench("--scale", f"{hosts}x{each}", "--json", tmp_path / "now.json", timeout=140)
    assert done.returncode == 0, done.stdout + done.stderr
    of = {row["what"]: row for row in json.loads((tmp_path / "now.json").read_text())["scale"]}
    ranks = hosts * each
    group, small, large = (of[what] for what in ("the group", "all_reduce 4 B", "all_reduce 1 MB"))
    assert group["most"]["sockets"] == hosts - 1
    # Ranks look again if the group takes long.
    assert sum_of(group["most"]) <= 50 + 3 * each
    assert sum_of(group["first"]) <= 50 + 8 * ranks
    # Over more than eight hosts the operation is a tree.
    assert 1 <= small["steps"] <= steps and small["most"]["messages"] <= steps
    assert plan.MB < large["host_sent"] <= 1.04 * 2 * plan.MB * (hosts - 1) / hosts
    assert large["steps"] <= 2
    assert 0 < sum_of(of["a verdict"]["most"]) <= 50 + 4 * ranks


def sum_of(counts):
    return sum(n for what, n in counts["store"].items() if what not in ("wait", "look"))


def test_without_network_namespaces_it_is_said_why(monkeypatch, capsys, tmp_path):
    from benchmarks.__main__ import main

    monkeypatch.setenv("PATH", str(tmp_path))  # where iproute2 is not
    assert main(["--hosts"]) == 2
    assert capsys.readouterr().err == f"error: --hosts: {network.missing()}\n"


def namespaces_of(process):
    return [name for name in os.listdir("/run/netns") if name.startswith(f"tcpg-{process.pid}-")]


def children_of(pid):
    with contextlib.suppress(OSError):  # the process has just ended
        return pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return []


def ranks_of(process):
    return [rank for zygote in children_of(process.pid) for rank in children_of(zygote)]


def alive(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_an_interrupt_leaves_no_host_and_no_rank_behind(possible):
    # More work than there is time for.
    work = ("--op", "all_to_all", "--sizes", "64M", "--seconds", "30")
    with started("--hosts", *work) as bench:
        while len(ranks := ranks_of(bench)) < 4:
            assert bench.poll() is None, bench.communicate()
            time.sleep(0.01)
        assert namespaces_of(bench)
        bench.send_signal(signal.SIGTERM)  # SIGINT may be ignored where the tests run
        _, errors = bench.communicate(timeout=40)
        assert bench.returncode == 1
        assert "failed: run: interrupted" in errors
        assert namespaces_of(bench) == []
        # Ranks of hosts end with their namespaces, a moment later.
        assert wait_for(lambda: not any(map(alive, ranks)), 20)
