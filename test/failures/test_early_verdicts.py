"""Verdicts that end nothing, before the deadline and on waits that are no collectives; the end of
a group on one rank, and what the other ranks then say."""

import contextlib
import datetime
import json
import os
import re
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

import torchcomms_pg
from harness.programs import run_python
from harness.ranks import Ranks, check, connect_store, meet, wait_for
from torchcomms_pg.status.__main__ import main
from torchcomms_pg.testing.rank import receive, report

pytestmark = pytest.mark.beyond_gloo
WATCHED = pytest.param(
    "gloo",
    marks=pytest.mark.skipif(torch.__version__ < "2.14", reason="c10d has hooks from 2.14 on"),
)
SOON = 20.0
AFTER = 1.5


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Returns a function that starts ranks, whose settings are those of the test's folder."""
    folder = str(tmp_path / "status")
    monkeypatch.setenv("TORCHCOMMS_PG_STATUS", folder)

    def start(world, **variables):
        places = {
            "TORCHCOMMS_PG_STATUS": folder,
            "TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "dump_"),
        }
        return Ranks(world, init=False, env=places | variables)

    return start


def join(args, world, backend, watch_timeout=300.0):
    store = connect_store(*args)
    if backend == "gloo":
        torchcomms_pg.watch(timeout=datetime.timedelta(seconds=watch_timeout))
    rank = int(os.environ["RANK"])
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    dist.all_reduce(torch.ones(7))
    return store, rank


def stays_away():
    report("away")
    receive()


def rank_1_is_late(args, world, backend):
    store, rank = join(args, world, backend, AFTER)
    if rank == 1:
        stays_away()
    value = torch.ones(1024)
    dist.all_reduce(value)
    assert value[0] == world
    dist.destroy_process_group()
    meet(store, "ended", world)


@pytest.mark.parametrize("backend", ["torchcomms", WATCHED])
def test_a_verdict_before_the_deadline_aborts_nothing_and_its_end_is_told(
    started, tmp_path, backend
):
    with started(3, TORCHCOMMS_PG_VERDICT_AFTER=str(AFTER)) as ranks:
        ranks.start(rank_1_is_late, ranks.store_args(), 3, backend)
        ranks.wait_report(1)
        verdict = r"(?m)^\[rank \d\] torchcomms_pg: verdict on group .*all_reduce #2 \(1024"
        for rank in range(3):
            assert wait_for(lambda: re.search(verdict, ranks.output(rank)), SOON), ranks.output(
                rank
            )
        assert wait_for(lambda: (tmp_path / "dump_0").exists(), SOON)
        ranks.tell(1, "go on")
        check(ranks.wait())
        # Every rank has destroyed the group at once: each says what it knows itself. The rank that
        # has asked knows when it has issued the operation.
        timed = 0
        for rank in range(3):
            line = r"the verdict on group '\w+' is over: (.*)\n"
            over = wait_for(lambda: re.search(line, ranks.output(rank)), SOON)
            assert over, ranks.output(rank)
            assert re.match(r"all_reduce #2 \(1024 x Float.*\) has ended", over[1]), over[1]
            timed += re.search(r"has ended, \S+ s after its issue on rank \d", over[1]) is not None
        assert timed


def test_one_variable_is_the_timeout_of_groups_that_name_none(monkeypatch):
    from torch.distributed import distributed_c10d as c10d

    known = c10d._get_default_timeout("gloo")
    monkeypatch.setenv("TORCHCOMMS_PG_TIMEOUT", "77.5")
    assert c10d._get_default_timeout("torchcomms") == datetime.timedelta(seconds=77.5)
    assert c10d._get_default_timeout("cpu:torchcomms,cuda:nccl").total_seconds() == 77.5
    assert c10d._get_default_timeout("gloo") == known
    monkeypatch.setenv("TORCHCOMMS_PG_TIMEOUT", "0")
    with pytest.raises(ValueError, match="TORCHCOMMS_PG_TIMEOUT='0': wanted a positive number"):
        c10d._get_default_timeout("torchcomms")


def finish():
    dist.destroy_process_group()


def step(number, rank, how):
    if how == "raise" and rank == 1 and number == 3:
        raise ValueError("sample 17 is broken")
    dist.all_reduce(torch.ones(1))


def rank_1_leaves(args, world, backend, how):
    store, rank = join(args, world, backend)
    os.environ["TORCHELASTIC_ERROR_FILE"] = f"{os.environ['TORCH_FR_DUMP_TEMP_FILE']}error{rank}"
    torchcomms_pg.diagnosis.settings.configure()
    said = "nothing"
    with contextlib.suppress(ValueError):
        try:
            for number in range(3 if how == "data" and rank == 1 else 5):
                step(number, rank, how)
        except RuntimeError as error:
            said = str(error)
        finally:
            finish()
    meet(store, "ended", world)
    return said


@pytest.mark.parametrize("how", ["data", "raise"])
@pytest.mark.parametrize("backend", ["torchcomms", WATCHED])
def test_a_rank_that_leaves_a_group_says_where_and_why(started, tmp_path, backend, how):
    with started(2) as ranks:
        ranks.start(rank_1_leaves, ranks.store_args(), 2, backend, how)
        outcomes = ranks.wait()
        check(outcomes)
        said = outcomes[0].value
        if backend == "gloo":  # whose own error says "Connection closed by peer"
            line = r"\[rank 0\] torchcomms_pg: all_reduce #5 .* of group '0' has failed; (.*)"
            found = re.search(line, ranks.output(0))
            assert found, ranks.output(0)
            said = found[1]
            assert wait_for((tmp_path / "dump_0").exists, SOON)
    word = (
        r"rank 1 destroyed the group at .*test_early_verdicts.py:\d+ in finish <- .*"
        r", after all_reduce #4 \(1 x Float"
    )
    if how == "raise":
        assert (tmp_path / "dump_1").exists()
        word = (
            r"rank 1 destroyed the group at .* in finish <- .*, handling ValueError: sample 17 is "
            r"broken, raised at .*test_early_verdicts.py:\d+ in step, after all_reduce #4"
        )
    assert re.search(word, said), said
    # torchrun's summary has it, too.
    failure = ProcessFailure(
        local_rank=0, pid=1, exitcode=1, error_file=str(tmp_path / "dump_error0")
    )
    assert re.search(word, failure.message["extraInfo"]["py_callstack"])
    assert failure.message["extraInfo"]["ranks"] == [1]
    assert abs(failure.timestamp - time.time()) < 600
    assert not (tmp_path / "dump_error1").exists()


def rank_1_is_killed(args, world):
    store, rank = join(args, world, "gloo")
    meet(store, "joined", world)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with contextlib.suppress(RuntimeError):
        dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()


@pytest.mark.skipif(torch.__version__ < "2.14", reason="c10d has hooks from 2.14 on")
def test_the_watch_says_that_a_rank_has_died_if_the_backend_ends_an_operation(started):
    with started(3) as ranks:
        ranks.start(rank_1_is_killed, ranks.store_args(), 3)
        check(ranks.wait(ranks=[0, 2]))
        said = r"all_reduce #2 .* of group '0' has failed; rank 1 \(pid \d+\) died"
        assert any(re.search(said, ranks.output(rank)) for rank in (0, 2)), ranks.output(0)


def rank_1_ends_the_program(args, world, backend, how):
    store, rank = join(args, world, backend)
    meet(store, "joined", world)
    try:
        for number in range(5):
            if how == "kill" and rank == 1 and number == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            step(number, rank, how)
    except (RuntimeError, ValueError) as error:
        sys.excepthook(type(error), error, error.__traceback__)
        if rank == 1:
            os._exit(1)
        return str(error)


@pytest.mark.parametrize("how", ["raise", "kill"])
@pytest.mark.parametrize("backend", ["torchcomms", WATCHED])
def test_an_error_that_ends_a_program_is_in_what_the_other_ranks_say(started, backend, how):
    with started(3) as ranks:
        ranks.start(rank_1_ends_the_program, ranks.store_args(), 3, backend, how)
        outcomes = ranks.wait(ranks=[0, 2])
        check(outcomes)
        said = [outcome.value for outcome in outcomes]
        if backend == "gloo":  # whose own error says "Connection closed by peer"
            said = [ranks.output(rank) for rank in (0, 2)]
            # A connection that is reset may take the end of #4 with it.
            failed = r"all_reduce #[45] \(1 x Float\) of group '0' has failed"
            assert re.search(failed, said[0]), said
    word = {
        "kill": r"rank 1 \(pid \d+\) died",
        "raise": r"rank 1 ended with ValueError: sample 17 is broken, raised at "
        r"\S*test_early_verdicts.py:\d+ in step, after all_reduce #4 \(1 x Float",
    }
    # Over Gloo the other rank's end may be the first that a rank sees.
    assert any(re.search(word[how], text) for text in said), said
    assert not any("rank 0 ended" in text or "rank 2 ended" in text for text in said), said


def rank_1_comes_late(args, world, backend, folder):
    rank = int(os.environ["RANK"])
    os.environ["TORCHELASTIC_ERROR_FILE"] = f"{folder}/error{rank}"
    store, _ = join(args, world, backend, AFTER)
    if rank == 1:
        stays_away()
    dist.all_reduce(torch.ones(1))
    meet(store, "done", world)


@pytest.mark.parametrize("backend", ["torchcomms", WATCHED])
def test_a_standing_verdict_is_in_the_launchers_file_until_the_operation_completes(
    started, tmp_path, backend
):
    files = [tmp_path / f"error{rank}" for rank in range(2)]
    with started(2, TORCHCOMMS_PG_VERDICT_AFTER=str(AFTER)) as ranks:
        ranks.start(rank_1_comes_late, ranks.store_args(), 2, backend, str(tmp_path))
        ranks.wait_report(1)
        for rank, file in enumerate(files):
            assert wait_for(file.exists, SOON), ranks.output(rank)
            told = ProcessFailure(local_rank=rank, pid=1, exitcode=1, error_file=str(file)).message
            assert "rank 1 has not arrived at all_reduce #2" in told["extraInfo"]["py_callstack"]
            assert told["extraInfo"]["ranks"] == [1]
        ranks.tell(1, "go on")
        check(ranks.wait())
        assert wait_for(lambda: not any(file.exists() for file in files), SOON), files


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < "2.14", reason="c10d has hooks from 2.14 on")
def test_torchruns_summary_names_the_rank_that_holds_up_a_watched_group(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import datetime, os, time\n"
        "import torch, torch.distributed as dist\n"
        "import torchcomms_pg\n"
        "dist.init_process_group('gloo', timeout=datetime.timedelta(seconds=8))\n"
        "if os.environ['RANK'] == '1':\n"
        "    time.sleep(1000)  # stays away\n"
        "dist.all_reduce(torch.ones(1))\n"
    )
    ended = run_python(
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        program,
        TORCHCOMMS_PG_WATCH="1",
        TORCHCOMMS_PG_WATCH_TIMEOUT="1",
        TORCHCOMMS_PG_STATUS=str(tmp_path / "status"),
        TORCH_FR_DUMP_TEMP_FILE=str(tmp_path / "dump_"),
    )
    assert ended.returncode == 1
    summary = ended.stderr.partition("Root Cause")[2]
    assert "rank 1 has not arrived at all_reduce #1" in summary, ended.stderr
    assert "program.py:6" in summary


def groups_in_another_order(args, world, backend, local):
    store, rank = join(args, world, backend, AFTER)
    if rank != 1:
        dist.new_group([0, 2], use_local_synchronization=local)
    report("joined")
    if rank == 1:  # a number is both groups' name: Gloo would connect who comes first
        receive()
    timeout = datetime.timedelta(seconds=300)
    dist.new_group([0, 1, 2], use_local_synchronization=local, timeout=timeout)
    dist.all_reduce(torch.ones(1), group=dist.new_group())


@pytest.fixture
def ask(capsys):
    def ask():
        capsys.readouterr()
        code = main(["--json", "--late", "0.5", "--wait", "5"])
        printed = capsys.readouterr().out
        return code, json.loads(printed) if printed else {"waits": []}

    return ask


@pytest.mark.parametrize("local", [True, False], ids=["local", "by its members alone"])
@pytest.mark.parametrize("backend", ["torchcomms", WATCHED])
def test_ranks_that_wait_in_new_group_are_in_verdict_and_status(started, ask, backend, local):
    with started(3, TORCHCOMMS_PG_VERDICT_AFTER=str(AFTER)) as ranks:
        ranks.start(groups_in_another_order, ranks.store_args(), 3, backend, local)
        for rank in range(3):
            ranks.wait_report(rank)
        ranks.tell(1, "go on")
        found = []

        def named():
            found[:] = ask()
            verdicts = [wait["verdict"] for wait in found[1]["waits"] if wait["waits_for"] == [1]]
            return any("the same ranks under another name" in verdict for verdict in verdicts)

        assert wait_for(named, SOON), found
        assert found[0] == 1 and not found[1]["healthy"]
        said = r"verdict: the making of group '\w+' of ranks 0, 1, 2, begun .*\n  rank "
        assert wait_for(lambda: re.search(said, ranks.output(0)), SOON), ranks.output(0)
        assert re.search(r"test_early_verdicts.py:\d+ in groups_in_another", ranks.output(0))


def rank_1_misses_a_monitored_barrier(args, world, backend):
    store, rank = join(args, world, backend)
    if rank == 1:
        stays_away()
    dist.monitored_barrier(timeout=datetime.timedelta(seconds=300))
    meet(store, "done", world)


@pytest.mark.parametrize("backend", [WATCHED])
def test_ranks_that_wait_in_a_monitored_barrier_are_in_verdict_and_status(started, ask, backend):
    with started(3, TORCHCOMMS_PG_VERDICT_AFTER=str(AFTER)) as ranks:
        ranks.start(rank_1_misses_a_monitored_barrier, ranks.store_args(), 3, backend)
        ranks.wait_report(1)
        found = []

        def named():
            found[:] = ask()
            waits = [wait for wait in found[1]["waits"] if wait["waits_for"] == [1]]
            return any("in stays_away" in wait["verdict"] for wait in waits)

        assert wait_for(named, SOON), found
        (wait,) = found[1]["waits"]
        assert wait["operation"] == "monitored_barrier of group '0' of ranks 0, 1, 2"
        assert found[0] == 1, found
        said = r"verdict: monitored_barrier of group '0' .*: rank 1 has not come\n  rank 1: "
        assert wait_for(lambda: re.search(said, ranks.output(0)), SOON), ranks.output(0)
        ranks.tell(1, "go on")
        check(ranks.wait())
        over = "the verdict on monitored_barrier of group '0'"
        assert wait_for(lambda: over in ranks.output(0), SOON), ranks.output(0)


def waits_in_a_queue(args, world, backend):
    store, rank = join(args, world, backend)
    if rank == 1:
        with torchcomms_pg.waiting("shm_broadcast", for_ranks=[0]):
            stays_away()
    else:
        stays_away()
    meet(store, "done", world)


def test_a_librarys_own_wait_is_in_status_and_verdict(started, ask):
    with started(2, TORCHCOMMS_PG_VERDICT_AFTER=str(AFTER)) as ranks:
        ranks.start(waits_in_a_queue, ranks.store_args(), 2, "torchcomms")
        for rank in range(2):
            ranks.wait_report(rank)
        found = []

        def named():
            found[:] = ask()
            return any("in stays_away" in wait["verdict"] for wait in found[1]["waits"])

        assert wait_for(named, SOON), found
        (wait,) = found[1]["waits"]
        assert wait["operation"] == "shm_broadcast"
        assert wait["there"] == [1] and wait["waits_for"] == [0]
        said = r"verdict: shm_broadcast, begun \S+ s ago on rank 1, waits for rank 0\n  rank 0: "
        assert wait_for(lambda: re.search(said, ranks.output(1)), SOON), ranks.output(1)
        for rank in range(2):
            ranks.tell(rank, "go on")
        check(ranks.wait())
        over = "the verdict on shm_broadcast is over: it has ended"
        assert wait_for(lambda: over in ranks.output(1), SOON), ranks.output(1)
        with pytest.raises(ValueError, match="waiting: for_ranks is \\[\\], wanted"):
            with torchcomms_pg.waiting("nothing", for_ranks=[]):
                pass


def rank_0_never_sets_a_key(args, world):
    store, rank = join(args, world, "torchcomms")
    if rank == 0:
        stays_away()
        store.set("weights", "1")
    else:
        store.wait(["weights"], datetime.timedelta(seconds=300))
    meet(store, "done", world)


def test_a_wait_for_a_key_of_the_store_is_in_verdict_and_status(started, ask):
    with started(3, TORCHCOMMS_PG_VERDICT_AFTER=str(AFTER)) as ranks:
        ranks.start(rank_0_never_sets_a_key, ranks.store_args(), 3)
        ranks.wait_report(0)
        found = []

        def named():
            found[:] = ask()
            return any(
                wait["there"] == [1, 2] and "in stays_away" in wait["verdict"]
                for wait in found[1]["waits"]
            )

        assert wait_for(named, SOON), found
        (wait,) = found[1]["waits"]
        assert wait["operation"] == "the store's wait(['weights'])" and wait["waits_for"] == []
        assert found[0] == 1
        assert re.search(r"called at .*test_early_verdicts.py:\d+ in rank_0_never", wait["verdict"])
        said = r"verdict: the store's wait\(\['weights'\]\), begun .*: no process has set it\n"
        assert wait_for(lambda: re.search(said, ranks.output(1)), SOON), ranks.output(1)
        assert "verdict" not in ranks.output(0)
        ranks.tell(0, "go on")
        check(ranks.wait())


def test_one_of_the_ranks_in_a_wait_prints_where_all_are_and_the_others_name_it(started):
    said = "verdict: the store's wait(['weights']), begun "
    for _ in range(3):  # a rank that is stopped does not show that it waits
        with started(3, TORCHCOMMS_PG_VERDICT_AFTER=str(AFTER)) as ranks:
            ranks.start(rank_0_never_sets_a_key, ranks.store_args(), 3)
            ranks.wait_report(0)
            for rank in (1, 2):
                assert wait_for(lambda rank=rank: said in ranks.output(rank), SOON)
            ranks.tell(0, "go on")
            check(ranks.wait())
            whole = re.search(r"no process has set it\n.* rank 0: ", ranks.output(1), re.DOTALL)
            rest = r"no process has set it \(the rest: the output of rank 1, or python -m .*\)\n"
            if whole and re.search(rest, ranks.output(2)):
                break
    else:
        pytest.fail(f"{ranks.output(1)}\n{ranks.output(2)}")


def rank_0_makes_a_group_alone(args, world):
    store, rank = join(args, world, "torchcomms")
    if rank == 1:
        stays_away()
    dist.new_group([0])
    meet(store, "done", world)


def test_the_barrier_after_the_making_of_a_group_names_the_rank_that_has_not_made_it(started):
    settings = {"TORCHCOMMS_PG_VERDICT_AFTER": str(AFTER), "TORCH_DIST_INIT_BARRIER": "1"}
    with started(2, **settings) as ranks:
        ranks.start(rank_0_makes_a_group_alone, ranks.store_args(), 2)
        ranks.wait_report(1)
        said = (
            r"verdict: the barrier after the making of group '\w+', begun \S+ s ago on rank 0: "
            r"rank 1 has not come\n  rank 1: in no operation"
        )
        assert wait_for(lambda: re.search(said, ranks.output(0)), SOON), ranks.output(0)
        ranks.kill(0, signal.SIGKILL)
