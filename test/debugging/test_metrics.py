"""The file of metrics: its numbers are those of what the ranks have done, whenever it is read."""

import contextlib
import datetime
import multiprocessing
import os
import re
import resource
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from harness.comms import make, torchcomms
from harness.programs import run_python
from harness.ranks import Ranks, check, connect_store, init_default_group, on_own_ranks, wait_for
from torchcomms_pg.testing.rank import receive, report

pytestmark = pytest.mark.beyond_gloo
watched = pytest.mark.skipif(torch.__version__ < "2.14", reason="c10d has hooks from 2.14 on")
VARIABLE = "TORCHCOMMS_PG_METRICS_FILE"
OFTEN = datetime.timedelta(milliseconds=20)
NEVER = datetime.timedelta(hours=1)
SOON = 20.0


def write_to(path, interval):
    """Called in a rank before its first group: the file is renewed at this interval."""
    os.environ[VARIABLE] = str(path)
    torchcomms().metrics._INTERVAL = interval


def samples(path, **labels):
    """The file's samples that have these labels, by name and the other ones."""
    found = {}
    for family in text_string_to_metric_families(path.read_text()):
        assert family.documentation, family
        for sample in family.samples:
            if labels.items() <= sample.labels.items():
                rest = {key: v for key, v in sample.labels.items() if key not in labels}
                key = (sample.name.removeprefix("torchcomms_pg_"), *sorted(rest.values()))
                assert key not in found, f"twice: {key}"
                found[key] = sample.value
    return found


def shows(path, wanted, **labels):
    """Waits until the file has these values of the samples with these labels; all of them."""

    def there():
        return path.exists() and wanted.items() <= samples(path, **labels).items()

    assert wait_for(there, SOON), path.exists() and path.read_text()
    return samples(path, **labels)


def calls(rank, world):
    """Operations with the size of each, by name."""
    t, peer = torch.ones(100), 1 - rank
    for _ in range(5):
        dist.all_reduce(t)
    for work in [dist.all_reduce(torch.ones(7, dtype=torch.int64), async_op=True) for _ in "12"]:
        work.wait()
    dist.all_gather_into_tensor(torch.ones(10 * world), torch.ones(10))
    dist.broadcast(torch.ones(3, dtype=torch.int8), 0)
    dist.send(t, peer) if rank == 0 else dist.recv(t, peer)
    dist.recv(t, peer) if rank == 0 else dist.send(t, peer)
    dist.barrier()
    return {
        "all_reduce": (7, 5 * 400 + 2 * 56),
        "all_gather_single": (1, 40 * world),
        "broadcast": (1, 3),
        "send": (1, 400),
        "recv": (1, 400),
        "barrier": (1, 0),
    }


def counted(wanted):
    return {
        (name, operation): value
        for operation, (operations, size) in wanted.items()
        for name, value in (
            ("operations_total", operations),
            ("operation_bytes_total", size),
            ("operation_failures_total", 0),
        )
    }


@on_own_ranks(2, init=False)
def test_each_operation_is_counted_with_its_bytes_and_its_time(world, port, prefix, tmp_path):
    rank = int(os.environ["RANK"])
    write_to(tmp_path / "metrics.{rank}.prom", OFTEN)
    init_default_group(port, prefix, rank, world, 60)
    begun = time.monotonic()
    wanted = calls(rank, world)
    requests = [
        dist.P2POp(dist.isend, torch.ones(4), 1 - rank),
        dist.P2POp(dist.irecv, torch.ones(6, dtype=torch.int64)[:2], 1 - rank),
    ]
    if rank == 1:
        requests[0].tensor, requests[1].tensor = torch.ones(2, dtype=torch.int64), torch.ones(4)
    for request in dist.batch_isend_irecv(requests):
        request.wait()
    took = time.monotonic() - begun
    labels = dict(rank=str(rank), group="0", backend="torchcomms")
    path = tmp_path / f"metrics.{rank}.prom"
    batch = {("operation_bytes_total", "coalesced"): 4 * 4 + 2 * 8}
    found = shows(path, {("operations_in_flight",): 0, **counted(wanted), **batch}, **labels)
    assert found["group_failures_total",] == 0
    assert ("verdicts_total",) not in found
    for operation in wanted:  # two of which are in flight at once
        assert 0 < found["operation_seconds_total", operation] <= 2 * took, found
        assert 0 <= found["wait_seconds_total", operation] <= took, found
    assert found["wait_seconds_total", "all_reduce"] > 0  # a message may have come before its wait
    build = samples(path, rank=str(rank))
    versions = [torchcomms().__version__, ".".join(torch.__version__.split(".")[:2])]
    assert build[("build_info", *sorted(versions))] == 1


@on_own_ranks(2, init=False)
def test_what_is_in_flight_and_for_how_long_is_there_at_once(world, port, prefix, tmp_path):
    rank = int(os.environ["RANK"])
    write_to(tmp_path / "{rank}", OFTEN)
    store = connect_store(port, prefix)
    init_default_group(port, prefix, rank, world, 60)
    labels = dict(rank=str(rank), group="0", backend="torchcomms")
    if rank == 0:
        begun = time.monotonic()
        first = dist.all_reduce(torch.ones(3), async_op=True)
        second = dist.all_reduce(torch.ones(3), async_op=True)
        age = lambda: samples(tmp_path / "0", **labels)["oldest_operation_age_seconds",]  # noqa: E731
        found = shows(tmp_path / "0", {("operations_in_flight",): 2}, **labels)
        assert ("operations_total", "all_reduce") not in found
        assert wait_for(lambda: age() > 0.3, SOON)
        assert age() <= time.monotonic() - begun
        store.set("seen", "")
        first.wait(), second.wait()
    else:
        store.wait(["seen"])
        dist.all_reduce(torch.ones(3)), dist.all_reduce(torch.ones(3))
    wanted = {("operations_in_flight",): 0, ("oldest_operation_age_seconds",): 0}
    wanted["operations_total", "all_reduce"] = 2
    found = shows(tmp_path / str(rank), wanted, **labels)
    if rank == 0:
        assert found["operation_seconds_total", "all_reduce"] > 0.6, "both have waited for rank 1"
        assert (
            found["wait_seconds_total", "all_reduce"]
            < found["operation_seconds_total", "all_reduce"]
        )


def waits_for_nobody(args, world, path, ends):
    write_to(path, NEVER)
    rank = int(os.environ["RANK"])
    options = torchcomms().Backend.Options()
    options.abort_process_on_timeout_or_error = ends
    init_default_group(*args, rank, world, 60, pg_options=options)
    dist.barrier()
    dist.group.WORLD.set_timeout(datetime.timedelta(seconds=1))
    report("ready")
    if rank == 1:
        receive()
    elif ends:
        dist.all_reduce(torch.ones(3))
    else:
        with pytest.raises(torchcomms().CommError):
            dist.all_reduce(torch.ones(3))
        receive()


@pytest.mark.parametrize("ends", (False, True), ids=("raises", "ends the process"))
def test_a_failure_renews_the_file(ends, tmp_path):
    with Ranks(2, init=False) as ranks:
        ranks.start(waits_for_nobody, ranks.store_args(), 2, tmp_path / "{rank}", ends)
        labels = dict(rank="0", group="0", backend="torchcomms")
        if ends:
            assert ranks.exit_code(0, SOON) == 1
            assert samples(tmp_path / "0", **labels)["group_failures_total",] == 1
            return
        wanted = {("group_failures_total",): 1, ("operation_failures_total", "all_reduce"): 1}
        found = shows(tmp_path / "0", wanted, **labels)
        assert found["operations_total", "all_reduce"] == 1
        for rank in range(2):
            ranks.tell(rank, "go on")
        check(ranks.wait())


@on_own_ranks(1, init=False)
def test_who_reads_never_sees_half_a_file(world, port, prefix, tmp_path):
    write_to(tmp_path / "{rank}", datetime.timedelta(milliseconds=1))
    init_default_group(port, prefix, 0, world, 60)
    path, seen = tmp_path / "0", set()

    def whole():
        with contextlib.suppress(FileNotFoundError):  # before the first; later it is always there
            with path.open() as file:
                text = file.read()
                about = os.fstat(file.fileno())
                seen.add((about.st_ino, about.st_mtime_ns))  # a number of old may be used again
            assert text.endswith("# EOF\n"), text
            dist.all_reduce(torch.ones(3))
        return len(seen) > 20

    assert wait_for(whole, SOON)
    assert path.stat().st_mode & 0o777 == 0o666 & ~os.umask(0o022)


def lines(ranks):
    return [line for line in ranks.output(0).splitlines() if line.startswith("torchcomms_pg:")]


def computes_without_a_file(args, template, trouble):
    write_to(template, OFTEN)
    metrics = torchcomms().metrics
    tries = []
    write = metrics._Writer._write
    metrics._Writer._write = lambda self: (write(self), tries.append(1))
    if trouble == "package":
        sys.modules["prometheus_client"] = None
    init_default_group(*args, 0, 1, 60)
    dist.all_reduce(torch.ones(3))
    if trouble == "full":
        assert wait_for(template.with_name("0").exists, SOON)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))  # as on a disk with so much room
        tries.clear()
    if trouble in ("folder", "full"):
        assert wait_for(lambda: len(tries) > 3, SOON)
    if trouble == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    dist.all_reduce(torch.ones(3))
    dist.destroy_process_group()
    torchcomms()._C.end_metrics_writer()  # killed amid a file, a rank would leave a part of it
    for thread in threading.enumerate():
        if thread.name == "torchcomms_pg":
            thread.join(SOON)


@pytest.mark.parametrize(
    "trouble, template, said",
    (
        ("folder", "missing/{rank}", "metrics of rank 0 are not written: .*No such file"),
        ("full", "{rank}", "metrics of rank 0 are not written: .*File too large"),
        ("package", "{rank}", r"pip install 'torchcomms_pg\[metrics\]'"),
        ("place", "metrics.prom", "neither {rank} nor {pid}"),
    ),
    ids=("no folder", "a full disk", "no package", "no place"),
)
def test_what_keeps_the_file_from_being_written_is_one_line(trouble, template, said, tmp_path):
    with Ranks(1, init=False) as ranks:
        ranks.run(computes_without_a_file, ranks.store_args(), tmp_path / template, trouble)
        (line,) = lines(ranks)
        assert re.search(said, line), line
    assert [path.name for path in tmp_path.iterdir()] == (["0"] if trouble == "full" else [])


def does_nothing():
    assert dist.is_initialized()


def computes_alone(results, folder):
    """In a forked child, which has no group yet: that of its parent is the parent's."""
    comm = torchcomms().new_comm("shm", "cpu", "child", store=dist.HashStore(), rank=0, size=1)
    assert wait_for((folder / str(os.getpid())).exists, SOON)  # the rest is for its end to write
    comm.all_reduce(torch.ones(5), torchcomms().ReduceOp.SUM, async_op=False)
    comm.finalize()
    results.put(os.getpid())


@on_own_ranks(1, init=False)
def test_a_forked_child_writes_its_own_groups_alone(world, port, prefix, tmp_path):
    write_to(tmp_path / "{pid}", NEVER)
    init_default_group(port, prefix, 0, world, 60)
    own = tmp_path / str(os.getpid())
    assert wait_for(own.exists, SOON)
    before = own.stat().st_ino
    dist.all_reduce(torch.ones(3))
    forking = multiprocessing.get_context("fork")
    idle = forking.Process(target=does_nothing)
    idle.start(), idle.join()
    assert idle.exitcode == 0
    assert list(tmp_path.iterdir()) == [own] and own.stat().st_ino == before
    results = forking.SimpleQueue()
    busy = forking.Process(target=computes_alone, args=(results, tmp_path))
    busy.start(), busy.join()
    assert busy.exitcode == 0
    child = tmp_path / str(results.get())
    assert sorted(tmp_path.iterdir()) == sorted([own, child]) and own.stat().st_ino == before
    assert samples(child, operation="all_reduce") == {
        ("operations_total", "0", "child", "torchcomms"): 1,
        ("operation_failures_total", "0", "child", "torchcomms"): 0,
        ("operation_bytes_total", "0", "child", "torchcomms"): 20,
        **{
            key: value
            for key, value in samples(child, operation="all_reduce").items()
            if "seconds" in key[0]
        },
    }


def test_the_end_of_a_program_writes_it_and_without_the_variable_nothing_is_imported(tmp_path):
    program = """
        import sys
        import torch, torchcomms_pg
        import torch.distributed as dist
        dist.init_process_group("torchcomms", store=dist.HashStore(), rank=0, world_size=1)
        assert "prometheus_client" not in sys.modules
        dist.destroy_process_group()
        import datetime, os, pathlib, time, warnings
        torchcomms_pg.metrics._INTERVAL = datetime.timedelta(hours=1)
        path = pathlib.Path(sys.argv[1])
        os.environ["TORCHCOMMS_PG_METRICS_FILE"] = str(path.with_name("metrics.{rank}.prom"))
        dist.init_process_group("torchcomms", store=dist.HashStore(), rank=0, world_size=1)
        while not path.exists():
            time.sleep(0.01)
        written = path.stat().st_ino
        with warnings.catch_warnings(action="ignore"):  # that it has threads
            child = os.fork()
        if child == 0:
            sys.exit()
        os.waitpid(child, 0)
        assert path.stat().st_ino == written, "written by the child"
        for _ in range(9):
            dist.all_reduce(torch.ones(3))
        """
    path = tmp_path / "metrics.0.prom"
    run = run_python("-c", program, str(path))
    assert run.returncode == 0 and not run.stderr, run.stderr
    found = samples(path, rank="0", operation="all_reduce")
    assert sum(v for key, v in found.items() if key[0] == "operations_total") == 9


@on_own_ranks(1)
def test_groups_that_have_ended_keep_their_sums_the_oldest_under_one_name(tmp_path):
    def one(name, size):
        comm = make(name)
        comm.all_reduce(torch.ones(size), torchcomms().ReduceOp.SUM, async_op=False)
        comm.finalize()

    write_to(tmp_path / "{rank}", OFTEN)
    one("again", 1)
    for number in range(64 + 5):
        one(f"group {number}", 2)
    one("group 68", 2)
    path, labels = tmp_path / "0", dict(rank="0", backend="torchcomms", operation="all_reduce")
    # Those of before are "again", and the first five.
    wanted = {("operations_total", "(others)"): 6, ("operations_total", "group 68"): 2}
    found = shows(path, wanted, **labels)
    assert found["operation_bytes_total", "(others)"] == 4 + 5 * 8
    groups = [key[1] for key in found if key[0] == "operations_total"]
    assert sorted(groups) == sorted(["(others)", *(f"group {n}" for n in range(5, 69))])
    assert not any(key[0] == "operations_in_flight" and key[1] != "0" for key in samples(path))


def watches(args, world, path):
    write_to(path, NEVER)
    rank = int(os.environ["RANK"])
    torchcomms().watch(timeout=datetime.timedelta(seconds=1))
    store = connect_store(*args)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    calls(rank, world)
    report("ready")
    receive()
    before = time.monotonic()
    dist.all_reduce(torch.ones(1000))
    took = time.monotonic() - before
    dist.destroy_process_group()
    (group,) = torchcomms()._C.process_totals().groups
    return took, {
        each.name: (each.ended, each.bytes, each.failures, each.seconds, each.waited)
        for each in group.operations
    }


@watched
def test_a_watched_group_of_gloo_is_counted_and_a_verdict_renews_the_file(tmp_path):
    with Ranks(2, init=False) as ranks:
        ranks.start(watches, ranks.store_args(), 2, tmp_path / "{rank}")
        for rank in range(2):
            ranks.wait_report(rank)
        ranks.tell(0, "go")
        labels = dict(rank="0", group="0", backend="gloo")
        found = shows(tmp_path / "0", {("verdicts_total",): 1}, **labels)
        assert found["operations_in_flight",] == 1
        assert found["oldest_operation_age_seconds",] > 0.9
        assert ("group_failures_total",) not in found
        ranks.tell(1, "go")
        outcomes = ranks.wait()
        check(outcomes)
    took, totals = outcomes[0].value
    wanted = {"all_reduce": (8, 5 * 400 + 2 * 56 + 4000), "all_gather_single": (1, 80)}
    wanted |= {"broadcast": (1, 3), "send": (1, 400), "recv": (1, 400), "barrier": (1, 0)}
    assert {name: each[:2] for name, each in totals.items()} == wanted
    assert all(failures == 0 for _, _, failures, _, _ in totals.values())
    # Ends are asked for, at most 50 ms late: what is told is what it has lasted at least.
    *_, seconds, waited = totals["all_reduce"]
    assert 0.9 < waited <= seconds <= took + 1, (took, totals)


@watched
@on_own_ranks(1, init=False)
def test_a_watched_operation_counts_no_longer_than_it_has_lasted(world, port, prefix):
    """Its end is asked for 20 times a second, which is long after that of a short one."""
    torchcomms().watch()
    dist.init_process_group("gloo", store=connect_store(port, prefix), rank=0, world_size=1)
    took = 0.0
    for _ in range(15):
        begun = time.monotonic()
        dist.all_reduce(torch.ones(3))
        took += time.monotonic() - begun
        time.sleep(0.06)  # longer than between two questions
    (group,) = torchcomms()._C.process_totals().groups
    (operation,) = group.operations
    assert (operation.name, operation.ended) == ("all_reduce", 15)
    assert operation.waited <= operation.seconds <= took


@on_own_ranks(3, init=False)
def test_rank_0_writes_how_late_each_rank_of_its_group_is(world, port, prefix, tmp_path):
    rank = int(os.environ["RANK"])
    write_to(tmp_path / "{rank}", OFTEN)
    init_default_group(port, prefix, rank, world, 60)
    labels = dict(rank=str(rank), group="0", backend="torchcomms")

    def lateness(name):
        path = tmp_path / str(rank)
        found = samples(path, **labels) if path.exists() else {}
        return [found.get((f"lateness_{name}", str(of))) for of in range(world)]

    def judged():
        later = lateness("seconds")
        return None not in later and max(later) == later[1]

    for _ in range(500):  # it is judged every two seconds while there are collectives
        time.sleep(0.06 if rank == 1 else 0.02)
        dist.all_reduce(seen := torch.tensor([float(rank == 0 and judged())]))
        if seen:
            break
    assert seen, lateness("seconds")
    if rank == 0:
        assert all(0 <= share <= 1 for share in lateness("ratio"))
        assert min(lateness("seconds")) < 0, "they are sooner than rank 1"
    else:
        assert lateness("ratio") == lateness("seconds") == [None] * world
