"""The status of a running job: asked from outside, whatever its ranks do."""

import contextlib
import datetime
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

import torchcomms_pg
from harness import ROOT, limits
from harness.comms import two_in_one_process
from harness.leaks import library_threads
from harness.programs import PROGRAM_LIMIT, end_tree, run_python
from harness.ranks import Ranks, check, connect_store, meet, wait_for
from harness.scarcity import no_more_descriptors, no_more_threads
from harness.stuck import all_keep_the_gil, keep_the_gil
from hosts.test_hosts import move
from torchcomms_pg import env
from torchcomms_pg.status.__main__ import main
from torchcomms_pg.status.jobs import LONGEST_WAIT, Job, NoAnswerError, Process
from torchcomms_pg.testing.rank import receive, report

pytestmark = pytest.mark.beyond_gloo
WATCHED = pytest.param(
    "gloo",
    marks=pytest.mark.skipif(torch.__version__ < "2.14", reason="c10d has hooks from 2.14 on"),
)
LATE = 0.5
SOON = 20.0


def within(seconds):
    """What a status may wait for, on this machine, as an argument."""
    return str(min(limits.grown(seconds), LONGEST_WAIT))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where the processes of one test have their sockets."""
    path = tmp_path / "status"
    monkeypatch.setenv("TORCHCOMMS_PG_STATUS", str(path))
    return path


def started(world, folder):
    return Ranks(world, init=False, env={"TORCHCOMMS_PG_STATUS": str(folder)})


@pytest.fixture
def ask(capsys):
    """The code, and what is printed, as JSON where it is that; ranks are waited for long."""

    def ask(*arguments, late=LATE, wait=15):
        capsys.readouterr()
        options = [
            "--json",
            "--late",
            str(late),
            "--wait",
            str(min(limits.grown(wait), LONGEST_WAIT)),
        ]
        code = main([*options, *map(str, arguments)])
        printed = capsys.readouterr()
        return code, json.loads(printed.out) if printed.out else printed.err

    return ask


def all_answer(answer):
    return all(rank["state"] == "answers" for rank in answer["ranks"])


def answered(ask, *arguments, holds=all_answer):
    """What is told once that holds of it: a rank may be stopped for a while."""
    told = []

    def once():
        told[:] = ask(*arguments)
        return isinstance(told[1], dict) and holds(told[1])

    assert wait_for(once, SOON), told
    return told


def join(args, world, backend="torchcomms"):
    """The store; a default group that has been used."""
    store = connect_store(*args)
    if backend == "gloo":
        torchcomms_pg.watch(timeout=datetime.timedelta(seconds=300))
    rank = int(os.environ["RANK"])
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    dist.all_reduce(torch.ones(7))
    return store


def waiting(answer):
    """What the first group with a waiting rank says; None: there is none."""
    if not isinstance(answer, dict):
        return None
    return next((group["waits"] for group in answer["groups"] if group["waits"]), None)


def stays_away():
    report("away")
    receive()


def one_skips_an_operation(args, world, backend):
    store = join(args, world, backend)
    if os.environ["RANK"] == "1":
        stays_away()
    dist.all_reduce(torch.ones(1024))
    meet(store, "done", world)
    report("done")
    receive()


@pytest.mark.parametrize("backend", ["torchcomms", WATCHED])
def test_who_is_waited_for_is_named_where_its_python_is_until_it_has_come(folder, ask, backend):
    with started(3, folder) as ranks:
        ranks.start(one_skips_an_operation, ranks.store_args(), 3, backend)
        ranks.wait_report(1)
        found = []

        def named():
            code, answer = ask()
            waits = waiting(answer)
            found[:] = [code, answer, waits]
            if not waits or waits["waits_for"] != [1] or "stays_away" not in waits["verdict"]:
                return False
            # A process that gets no core in time does not answer, or tells no line of its Python.
            return all_answer(answer) and answer["ranks"][0]["groups"][0]["oldest"][0]["called_at"]

        assert wait_for(named, SOON), found
        code, answer, waits = found
        assert code == 1 and not answer["healthy"]
        assert waits["behind"] == [1] and waits["rank"] in (0, 2)
        assert re.match(r"all_reduce #2 \(1024 x Float", waits["operation"])
        assert waits["since_s"] >= LATE
        assert "rank 1 has not arrived at all_reduce #2" in waits["verdict"]
        assert re.search(r"test_status.py:\d+ in stays_away", waits["verdict"])
        assert [rank["rank"] for rank in answer["ranks"]] == [0, 1, 2]
        assert sorted(rank["pid"] for rank in answer["ranks"]) == sorted(ranks.pids)
        first, second = (rank["groups"][0] for rank in answer["ranks"][:2])
        assert first["in_flight"] == 1 and first["oldest"][0]["awaited"]
        assert re.search(r"test_status.py:\d+ in one_skips", first["oldest"][0]["called_at"])
        assert second["last_completed"].startswith("all_reduce #1 (7 x Float")
        assert second["completed_collectives"] == 1 and second["in_flight"] == 0
        ranks.tell(1, "go on")
        for rank in range(3):
            ranks.wait_report(rank)
        # The end of a watched operation is seen a moment later.
        code, answer = answered(ask, holds=lambda answer: answer["healthy"])
        assert code == 0 and waiting(answer) is None, answer
        for rank in range(3):
            ranks.tell(rank, "end")
        check(ranks.wait())


def is_there(args, world, backend):
    join(args, world, backend)
    report("there")
    receive()


@pytest.mark.stops_ranks
@pytest.mark.parametrize("backend", ["torchcomms", WATCHED])
def test_ranks_that_are_stopped_or_dead_are_said_to_be(folder, ask, backend):
    with started(4, folder) as ranks:
        ranks.start(is_there, ranks.store_args(), 4, backend)
        for rank in range(4):
            ranks.wait_report(rank)
        ranks.kill(1, signal.SIGSTOP)
        ranks.kill(2)
        assert ranks.exit_code(2) == -9
        for asked in (ranks.pids[0], ranks.pids[1], ranks.pids[2]):
            code, answer = ask(asked)
            assert code == 1, answer
            states = {rank["rank"]: rank["state"] for rank in answer["ranks"]}
            assert states == {0: "answers", 1: "stopped", 2: "dead", 3: "answers"}
            texts = [rank.get("text", "") for rank in answer["ranks"]]
            assert any(f"its process is stopped (pid {ranks.pids[1]})" in text for text in texts)
            assert any(f"its process is dead (pid {ranks.pids[2]})" in text for text in texts)
            assert waiting(answer) is None  # nobody waits
        for rank in (0, 3):
            ranks.kill(rank)
            assert ranks.exit_code(rank) == -9
        code, said = ask()
        assert code == 1 and f"process {ranks.pids[1]} is stopped" in said
        ranks.kill(1)
        assert ranks.exit_code(1) == -9
        code, said = ask()
        assert code == 2 and "no job of yours on this host" in said
        assert not [name for name in os.listdir(folder) if "-" in name]


def raises_and_computes(args, world):
    join(args, world, "gloo")
    if os.environ["RANK"] == "1":
        with pytest.raises(RuntimeError):  # before the post hook
            dist.group.WORLD.allreduce([torch.ones(3), torch.ones(4)])
        stays_away()
    dist.all_reduce(torch.ones(3))
    report("done")
    receive()


@pytest.mark.skipif(torch.__version__ < "2.14", reason="c10d has hooks from 2.14 on")
def test_a_rank_whose_call_has_raised_is_not_said_to_be_in_it(folder, ask):
    with started(2, folder) as ranks:
        ranks.start(raises_and_computes, ranks.store_args(), 2)
        ranks.wait_report(1)
        said = []

        def missed():
            said[:] = [waiting(answered(ask)[1])]
            return said[0] and "rank 1 has not arrived at all_reduce #2" in said[0]["verdict"]

        assert wait_for(missed, SOON), said
        ranks.tell(1, "")
        ranks.kill(0)


def test_ranks_whose_python_is_stuck_answer(folder, ask, tmp_path):
    def where_it_is_stuck(answer):
        lines = ["\n".join(rank.get("python", {}).get("threads", [])) for rank in answer["ranks"]]
        return all(re.search(r"stuck.py:\d+ in keep_the_gil", line) for line in lines)

    with started(2, folder) as ranks, all_keep_the_gil(ranks, join, tmp_path):
        for _ in range(3):  # questions that Python cannot answer do not pile up
            code, answer = answered(ask, holds=where_it_is_stuck)
            assert code == 0, answer
            assert all(rank["python"]["silent_s"] >= 0.2 for rank in answer["ranks"])
        for pid in ranks.pids:
            names = [path.read_text() for path in pathlib.Path(f"/proc/{pid}/task").glob("*/comm")]
            assert names.count("tcpg_python\n") == 1, names


def drops_tensors_and_keeps_the_gil(args, world, pipe):
    join(args, world, "gloo")
    issue = lambda: dist.all_reduce(torch.ones(5), async_op=True)  # noqa: E731
    if os.environ["RANK"] == "0":
        for _ in range(3):
            issue()  # the Work alone has the tensor, which takes the GIL when it goes
        report("ready")
        receive()
        keep_the_gil(pipe)
    else:
        report("ready")
        receive()
        for _ in range(3):
            issue().wait()
    report("done")
    receive()


@pytest.mark.skipif(torch.__version__ < "2.14", reason="c10d has hooks from 2.14 on")
def test_operations_are_seen_to_end_while_python_is_stuck(folder, ask, tmp_path):
    os.mkfifo(pipe := str(tmp_path / "pipe"))
    with started(2, folder) as ranks:
        ranks.start(drops_tensors_and_keeps_the_gil, ranks.store_args(), 2, pipe)
        for rank in range(2):
            ranks.wait_report(rank)
        ranks.tell(0, "keep")
        with open(pipe, "rb") as held:
            ranks.tell(1, "go")
            ranks.wait_report(1)
            left = []

            def none_is_left():
                left[:] = [rank["groups"][0]["in_flight"] for rank in answered(ask)[1]["ranks"]]
                return left == [0, 0]

            assert wait_for(none_is_left, SOON), left
            held.read()
        ranks.wait_report(0)
        for rank in range(2):
            ranks.tell(rank, "end")
        check(ranks.wait())


def compiles(args, world):
    from torch._dynamo.callback import CallbackTrigger, callback_handler

    join(args, world)
    if os.environ["RANK"] == "1":
        with callback_handler.install_callbacks(CallbackTrigger.DYNAMO, "0/0"):
            stays_away()
    dist.all_reduce(torch.ones(3))


def test_a_rank_that_compiles_is_said_to(folder, ask):
    with started(2, folder) as ranks:
        ranks.start(compiles, ranks.store_args(), 2)
        ranks.wait_report(1)
        _, answer = answered(
            ask, holds=lambda told: told["ranks"][1].get("compiling_s") and waiting(told)
        )
        assert waiting(answer)["prolonged"] and waiting(answer)["waits_for"] == [1]
        assert "rank 1 has been compiling" in waiting(answer)["verdict"]
        assert answer["ranks"][1]["compiling_s"] > 0
        ranks.tell(1, "go on")
        check(ranks.wait())


def connect(folder):
    (path,) = folder.glob("*.socket")
    made = socket.socket(socket.AF_UNIX)
    made.settimeout(limits.grown(20))
    made.connect(str(path))
    return made


def test_an_answer_of_another_version_is_said_to_be_one(tmp_path):
    process = Process(str(tmp_path), os.getpid(), "1-1", frozenset())
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "1-1.socket"))
        server.listen()

        def answer():
            with contextlib.closing(server.accept()[0]):
                pass  # it has looked whether the process is there
            with contextlib.closing(server.accept()[0]) as client:
                assert client.recv(100) == b"job 1000 1000\n"
                client.sendall(b"ok 2\n1 ")

        with ThreadPoolExecutor(1) as thread:
            answered = thread.submit(answer)
            with pytest.raises(NoAnswerError, match="its torchcomms_pg has another version"):
                Job([process]).ask(1, 1)
            answered.result()


def test_clients_that_send_garbage_or_never_read_harm_nothing(folder, ask):
    with started(1, folder) as ranks:
        ranks.start(two_in_one_process, ranks.store_args())
        ranks.wait_report(0)
        with contextlib.ExitStack() as stack:
            for text in (b"\xff\x00\n", b"job\n", b"job 1 99999999\n", b"x" * 4096, b"job -1 1\n"):
                client = stack.enter_context(connect(folder))
                client.sendall(text)
                answer = b""
                with contextlib.suppress(ConnectionError):
                    while part := client.recv(4096):
                        answer += part
                assert answer in (b"", b"no this question is not known\n"), answer
            # More than it takes at a time: those that do not read, and those that do not even ask.
            for question in (b"job 1000 100\n", b""):
                clients = []

                def connected():
                    with contextlib.suppress(OSError):  # it takes them one after another
                        clients.append(stack.enter_context(connect(folder)))
                        clients[-1].sendall(question)
                    return len(clients) > 40

                assert wait_for(connected, SOON)
                assert wait_for(lambda: ask()[0] == 0, SOON * 2)
        ranks.tell(0, "go on")
        check(ranks.wait())


def test_ranks_that_are_threads_are_told_apart(folder, ask):
    with started(1, folder) as ranks:
        ranks.start(two_in_one_process, ranks.store_args())
        ranks.wait_report(0)
        code, answer = answered(ask)
        assert code == 0, answer
        assert [(rank["rank"], rank["pid"]) for rank in answer["ranks"]] == [
            (0, ranks.pids[0]),
            (1, ranks.pids[0]),
        ]
        ranks.tell(0, "go on")
        check(ranks.wait())


def has_nothing_to_spare(args, world, what):
    join(args, world)
    if os.environ["RANK"] == "0":
        report("ready")
        receive()
    elif what == "thread":
        no_more_threads()
        report("ready")
        receive()
    else:
        with no_more_descriptors():
            report("ready")
            receive()
        report("again")
        receive()


@pytest.mark.parametrize("what", ["thread", "descriptor"])
def test_a_rank_without_a_thread_or_descriptor_to_spare_has_less_of_a_status(folder, ask, what):
    with started(2, folder) as ranks:
        ranks.start(has_nothing_to_spare, ranks.store_args(), 2, what)
        for rank in range(2):
            ranks.wait_report(rank)
        found = []

        def told():
            _, answer = ask(ranks.pids[1], wait=0.5)
            if not isinstance(answer, dict):
                return False
            second = answer["ranks"][1]
            found[:] = answer["asked"]["pid"], second
            if what == "thread":
                threads = second.get("python", {}).get("threads") or [""]
                return threads[0].startswith("no thread can be started to ask")
            return second["state"] == "silent"

        assert wait_for(told, SOON), found
        assert found[0] == ranks.pids[0]
        if what == "descriptor":
            said = f"did not answer, though its socket is there (pid {ranks.pids[1]})"
            assert said in found[1]["text"]
            ranks.tell(1, "go on")
            ranks.wait_report(1)
            assert wait_for(lambda: ask(ranks.pids[1])[0] == 0, SOON)
        for rank in range(2):
            ranks.tell(rank, "end")
        check(ranks.wait())


def test_it_is_told_again_and_again_until_the_job_has_ended(folder):
    with started(2, folder) as ranks:
        ranks.start(is_there, ranks.store_args(), 2, "torchcomms")
        for rank in range(2):
            ranks.wait_report(rank)
        asks = subprocess.Popen(
            [sys.executable, "-m", "torchcomms_pg.status", "--json", "--watch", "0.1"]
            + ["--wait", within(15)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            text=True,
        )
        try:
            answers = 0
            while answers < 3:
                answer = json.loads(asks.stdout.readline())
                if all_answer(answer):  # none is stopped
                    assert answer["healthy"], answer
                    answers += 1
            for rank in range(2):
                ranks.tell(rank, "end")
            check(ranks.wait())
            ranks.close()
            _, said = asks.communicate(timeout=PROGRAM_LIMIT)
        finally:
            asks.kill()
            asks.wait()
        assert "the job has ended" in said


def makes_and_destroys_groups(args, world, seconds):
    join(args, world)
    report("there")
    store = connect_store(args[0], args[1] + "/end")
    begun = time.monotonic()
    goes_on = torch.ones(1)
    while goes_on.item():
        group = dist.new_group()
        work = dist.all_reduce(torch.ones(100), group=group, async_op=True)
        work.wait()
        dist.destroy_process_group(group)
        goes_on.fill_(float(time.monotonic() - begun < seconds))
        dist.broadcast(goes_on, 0)
    dist.destroy_process_group()
    meet(store, "end", world)
    del group, work
    assert wait_for(lambda: not library_threads(), 10), library_threads()


def test_groups_that_are_destroyed_while_they_are_asked_for_leave_nothing(folder, ask):
    with started(2, folder) as ranks:
        ranks.start(makes_and_destroys_groups, ranks.store_args(), 2, 3)
        ranks.wait_report(0)
        answers = 0
        begun = time.monotonic()
        while time.monotonic() - begun < 2:
            code, answer = ask(late=30)
            answers += isinstance(answer, dict)
        assert answers > 3
        check(ranks.wait())
        assert not [name for name in os.listdir(folder) if "-" in name]


def forks(args, world):
    join(args, world)
    child = os.fork()
    if child == 0:
        report("child")
        receive()
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_forked_child_does_not_keep_the_socket_of_its_parent(folder, ask):
    with started(2, folder) as ranks:
        ranks.start(forks, ranks.store_args(), 2)
        for rank in range(2):
            ranks.wait_report(rank)
            assert wait_for(lambda: not os.path.exists(f"/proc/{ranks.pids[rank]}/fd/0"), SOON)
        assert wait_for(lambda: ask()[0] == 2, SOON), ask()  # its socket goes a moment later
        for rank in range(2):
            ranks.tell(rank, "end")


# Lateness


def one_is_late(args, world, backend, folders, places):
    rank = int(os.environ["RANK"])
    os.environ["TORCHCOMMS_PG_STATUS"] = folders[places[rank] == "b"]
    if "b" in places:
        move(places)
    store = join(args, world, backend)
    equals = dist.new_group([0, 2])  # of which nobody is late
    dist.new_group([0, 1])  # of which nothing is known
    report("there")
    goes_on = torch.ones(1)
    while goes_on.item():
        time.sleep(0.12 if rank == 1 else 0.04)
        if rank != 1:
            dist.all_reduce(torch.ones(4), group=equals)
        goes_on.fill_(float(not store.check(["enough"])))
        dist.all_reduce(goes_on, op=dist.ReduceOp.MIN)
    report("done")
    receive()


@pytest.mark.rotation
@pytest.mark.timeout(240)
@pytest.mark.parametrize("places", ["aaa", "aab"], ids=["one host", "two hosts"])
@pytest.mark.parametrize("backend", ["torchcomms", WATCHED])
def test_which_rank_is_late_is_told_of_groups_that_know(
    folder, ask, tmp_path, monkeypatch, backend, places
):
    asked = tmp_path / "other" if "b" in places else folder
    monkeypatch.setenv("TORCHCOMMS_PG_STATUS", str(asked))
    printed = tmp_path / "printed"
    with started(3, folder) as ranks:
        args = ranks.store_args()
        ranks.start(one_is_late, args, 3, backend, [str(folder), str(asked)], places)
        for rank in range(3):
            ranks.wait_report(rank)
        with open(printed, "w") as output:
            asks = subprocess.Popen(
                [sys.executable, "-m", "torchcomms_pg.status", str(ranks.pids[2])]
                + [
                    "--watch",
                    "0.2",
                    "--late",
                    "600",
                    "--wait",
                    within(15),
                ],
                stdout=output,
                cwd=ROOT,
            )
        try:
            late = r"(?m)^  rank 1 is late: all others wait for it \d+ % of the time\. It comes "
            late += r"\d+\.\d ms later to a collective than the others, by the last \d+, which "
            late += r"took \d+ s$"
            assert wait_for(lambda: re.search(late, printed.read_text()), 4 * SOON), (
                printed.read_text()
            )
            found = []

            def named():
                found[:] = ask(late=600)
                code, answer = found
                if code != 0:  # a rank is stopped
                    return False
                everybody, equals = told_of(answer, [0, 1, 2]), told_of(answer, [0, 2])
                return everybody and everybody["late"] == 1 and equals

            assert wait_for(named, SOON), found
        finally:
            asks.kill()
            asks.wait()
        everybody = told_of(found[1], [0, 1, 2])
        assert everybody["collectives"] >= 16 and everybody["took_s"] > 1
        assert [each["rank"] for each in everybody["ranks"]] == [0, 1, 2]
        assert 0.02 < everybody["ranks"][1]["later_s"] < 0.12, everybody
        assert 0.2 < everybody["ranks"][1]["share"] < 0.9, everybody
        for other in (0, 2):
            assert everybody["ranks"][other]["share"] == 0
            assert everybody["ranks"][other]["later_s"] < 0.02, everybody
        assert told_of(found[1], [0, 2])["late"] is None
        assert told_of(found[1], [0, 1]) is None
        assert set(re.findall(r"(\d) is late", printed.read_text())) == {"1"}
        connect_store(*args).set("enough", "")
        for rank in range(3):
            ranks.wait_report(rank)
            ranks.tell(rank, "end")
        check(ranks.wait())


def told_of(answer, ranks):
    """What is known of the lateness of the group of these ranks."""
    (group,) = (each for each in answer["groups"] if each["ranks"] == ranks)
    return group["lateness"]


# The folder


def test_the_folder_is_the_users_alone(folder, ask):
    with started(2, folder) as ranks:
        ranks.start(is_there, ranks.store_args(), 2, "torchcomms")
        for rank in range(2):
            ranks.wait_report(rank)
        assert folder.stat().st_mode & 0o777 == 0o700
        folder.chmod(0o755)
        code, said = ask()
        assert code == 2 and "is open to other users" in said
        folder.chmod(0o700)
        if os.geteuid() == 0:
            os.chown(folder, 12345, -1)
            code, said = ask()
            os.chown(folder, 0, -1)
            assert code == 2 and "is another user's (number 12345)" in said
        for rank in range(2):
            ranks.tell(rank, "end")
        check(ranks.wait())


@pytest.mark.parametrize("wrong", ["a file", "open to others", "another user's", "a link"])
def test_a_folder_that_is_not_to_be_used_is_one_line_and_no_harm(folder, wrong):
    if wrong == "a file":
        folder.write_text("")
    elif wrong == "a link":
        (folder.parent / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(folder.parent / "elsewhere")
    else:
        folder.mkdir(mode=0o755 if wrong == "open to others" else 0o700)
        if wrong == "another user's":
            if os.geteuid() != 0:
                pytest.skip("to give a folder away needs root")
            os.chown(folder, 12345, -1)
    with started(2, folder) as ranks:
        ranks.start(is_there, ranks.store_args(), 2, "torchcomms")
        for rank in range(2):
            ranks.wait_report(rank)
            ranks.tell(rank, "end")
        check(ranks.wait())
        for rank in range(2):
            said = f"process {ranks.pids[rank]} has no status for python -m torchcomms_pg.status: "
            assert wait_for(lambda: said in ranks.output(rank)), ranks.output(rank)
            assert ranks.output(rank).count("has no status") == 1


def test_it_can_be_turned_off(folder, ask, monkeypatch):
    with Ranks(2, init=False, env={"TORCHCOMMS_PG_STATUS": "0"}) as ranks:
        ranks.start(is_there, ranks.store_args(), 2, "torchcomms")
        for rank in range(2):
            ranks.wait_report(rank)
            names = pathlib.Path(f"/proc/{ranks.pids[rank]}/task").glob("*/comm")
            assert "tcpg_status\n" not in [name.read_text() for name in names]
            ranks.tell(rank, "end")
        check(ranks.wait())
    assert ask()[0] == 2
    monkeypatch.setenv("TORCHCOMMS_PG_STATUS", "0")
    code, said = ask()
    assert code == 2 and "turns it off" in said


def test_unless_it_is_named_it_is_the_sessions_or_the_users(ask, tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHCOMMS_PG_STATUS")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    session = {"XDG_RUNTIME_DIR": str(tmp_path)}
    with Ranks(2, init=False, env=session, delete_env=["TORCHCOMMS_PG_STATUS"]) as ranks:
        ranks.start(is_there, ranks.store_args(), 2, "torchcomms")
        for rank in range(2):
            ranks.wait_report(rank)
        assert len(list((tmp_path / "torchcomms_pg").glob("*.socket"))) == 2
        code, answer = ask(ranks.pids[0])
        assert code == 0 and {rank["pid"] for rank in answer["ranks"]} == set(ranks.pids)
        for rank in range(2):
            ranks.tell(rank, "end")
        check(ranks.wait())
    users = f"/tmp/torchcomms_pg-{os.geteuid()}"
    assert env.status_folders() == [str(tmp_path / "torchcomms_pg"), users]
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert env.status_folders() == [users]


def test_what_dead_processes_have_left_is_removed(folder, ask):
    folder.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(folder / "4194304-1.socket"))
    (folder / "4194304-1.ranks").write_text("17 0\n")
    code, said = ask()
    assert code == 2 and "no job of yours on this host" in said
    assert not list(folder.iterdir())


def test_where_no_job_is_seen_the_four_reasons_why_are_told(folder, ask):
    code, said = ask()
    first, *reasons = said.splitlines()
    assert code == 2 and str(folder) in first and len(reasons) == 4
    for reason, word in zip(reasons, ("container", "user", "WATCH=1", "_STATUS"), strict=True):
        assert reason.startswith("  if ") and word in reason


def test_of_several_jobs_each_ones_state_is_shown_with_its_store_and_age(folder, ask, capsys):
    with started(2, folder) as one, started(2, folder) as other:
        one.start(one_skips_an_operation, one.store_args(), 2, "torchcomms")
        other.start(is_there, other.store_args(), 2, "torchcomms")
        assert one.wait_report(1) == "away"
        for rank in range(2):
            other.wait_report(rank)
        _, status = answered(ask, one.pids[0], holds=lambda told: waiting(told) is not None)
        capsys.readouterr()
        code = main(["--late", str(LATE), "--wait", within(15)])
        shown = capsys.readouterr().out
        assert code == 1 and shown.startswith("2 jobs of yours on this host\n")
        blocks = {pid: block for block in shown.split("\n\n") for pid in _pids(block)}
        mine, others = blocks[min(one.pids)], blocks[min(other.pids)]
        assert "rank 1 has not arrived at all_reduce #2" in mine and "nobody has waited" in others
        for block in (mine, others):
            assert f"store {status['store']}, 2 ranks on 1 host" in block
            assert re.search(r"\(2 processes, runs for \d+ s\): ", block), block
        main(["--all", "--late", str(LATE), "--wait", within(15)])
        shown = capsys.readouterr().out
        assert shown.count("job of the store") == 2 and "called at" in shown
        code, told = ask("--all")
        assert code == 1 and [len(each["ranks"]) for each in told] == [2, 2]
        one.tell(1, "on")
        for rank in range(2):
            assert one.wait_report(rank) == "done"
            one.tell(rank, "end")
            other.tell(rank, "end")
        for ranks in (one, other):
            check(ranks.wait())


def _pids(block):
    """The process by which a block of the text names its job."""
    return [int(pid) for pid in re.findall(r"^process (\d+) \(", block, re.MULTILINE)]


def test_arguments_that_name_no_job_are_told_from_others(folder, ask, capsys):
    code, said = ask("4194304")
    assert code == 2 and "there is no process 4194304" in said
    code, said = ask(os.getpid())
    assert code == 2 and f"process {os.getpid()} has no status" in said
    code, said = ask("127.0.0.1:1")
    assert code == 2 and "has its store at 127.0.0.1:1" in said
    for asked, most in (("--wait", 60), ("--late", 86400)):  # a process refuses a longer wait
        with pytest.raises(SystemExit) as ended:
            main([asked, str(most + 1)])
        assert ended.value.code == 2
        assert f"wanted more than 0, at most {most} seconds" in capsys.readouterr().err
    with started(2, folder) as one, started(2, folder) as other:
        for ranks in (one, other):  # of one store, under prefixes of their own
            ranks.start(is_there, ranks.store_args(), 2, "torchcomms")
        for ranks in (one, other):
            for rank in range(2):
                ranks.wait_report(rank)
        code, said = ask()
        assert code == 2 and "there are several jobs" in said
        assert str(min(one.pids)) in said and str(min(other.pids)) in said
        code, answer = answered(ask, other.pids[1])
        assert code == 0 and answer["asked"]["pid"] == other.pids[1]
        assert {rank["pid"] for rank in answer["ranks"]} == set(other.pids)
        for ranks in (one, other):
            for rank in range(2):
                ranks.tell(rank, "end")
            check(ranks.wait())


# Several hosts


def on_two_hosts(args, world, folders, backend):
    rank = int(os.environ["RANK"])
    os.environ["TORCHCOMMS_PG_STATUS"] = folders[min(rank, 1)]
    move("abb")
    return (one_skips_an_operation if world == 2 else is_there)(args, world, backend)


@pytest.mark.parametrize("backend", ["torchcomms", WATCHED])
def test_ranks_of_another_host_tell_by_the_store(folder, ask, tmp_path, monkeypatch, backend):
    folders = [str(folder), str(tmp_path / "other")]
    with started(2, folder) as ranks:
        ranks.start(on_two_hosts, ranks.store_args(), 2, folders, backend)
        ranks.wait_report(1)
        for each in folders:
            monkeypatch.setenv("TORCHCOMMS_PG_STATUS", each)
            found = []

            def named():
                found[:] = ask()
                waits = waiting(found[1])
                return waits and "stays_away" in waits["verdict"]

            assert wait_for(named, SOON), found
            _, answer = found
            assert waiting(answer)["behind"] == [1]
            assert [rank["host"] for rank in answer["ranks"]] == ["host-a", "host-b"]
            assert answer["asked"]["host"] == f"host-{'ab'[folders.index(each)]}"
            assert not answer["unreached_hosts"]
        ranks.tell(1, "go on")
        for rank in range(2):
            ranks.wait_report(rank)
            ranks.tell(rank, "end")
        check(ranks.wait())


@pytest.mark.stops_ranks
def test_where_a_process_is_stopped_another_answers_for_its_host(folder, ask, tmp_path):
    folders = [str(folder), str(tmp_path / "other")]
    with started(3, folder) as ranks:
        ranks.start(on_two_hosts, ranks.store_args(), 3, folders, "torchcomms")
        for rank in range(3):
            ranks.wait_report(rank)
        found = []

        def told():
            found[:] = [rank["state"] for rank in ask(wait=1)[1]["ranks"]]
            return found

        for stopped in (1, 2):  # one of them has answered so far
            ranks.kill(stopped, signal.SIGSTOP)
            assert wait_for(lambda: sorted(told()) == ["answers", "answers", "stopped"], SOON), (
                found
            )
            ranks.kill(stopped, signal.SIGCONT)
            assert wait_for(lambda: told() == ["answers"] * 3, SOON), found
        for rank in range(3):
            ranks.tell(rank, "end")
        check(ranks.wait())


def serves_a_store(_):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    report(store.port)
    receive()


@pytest.mark.stops_ranks
def test_a_store_that_does_not_answer_is_said_not_to_and_accuses_nobody(folder, ask, tmp_path):
    folders = [str(folder), str(tmp_path / "other")]
    with started(1, folder) as server, started(2, folder) as ranks:
        server.start(serves_a_store, None)
        port = server.wait_report(0)
        ranks.start(on_two_hosts, (port, "stopped"), 2, folders, "torchcomms")
        ranks.wait_report(1)
        server.kill(0, signal.SIGSTOP)
        for _ in range(3):
            code, answer = ask(late=0.001, wait=0.3)
            assert code == 1, answer
            (unreached,) = answer["unreached_hosts"]
            assert unreached["why"] == "the job's store has not answered"
            assert [rank["state"] for rank in answer["ranks"]] == ["answers", "unknown"]
            waits = waiting(answer)
            assert waits is None or "nobody knows whether it has arrived" in waits["verdict"]
        names = pathlib.Path(f"/proc/{ranks.pids[0]}/task").glob("*/comm")
        assert [name.read_text() for name in names].count("tcpg_hosts\n") == 1  # also after three
        server.kill(0, signal.SIGCONT)
        assert wait_for(lambda: len(ask()[1]["ranks"][1].get("groups", ())) > 0, SOON), ask()
        ranks.tell(1, "go on")
        for rank in range(2):
            ranks.wait_report(rank)
            ranks.tell(rank, "end")
        check(ranks.wait())
        server.tell(0, "end")


# Programs

PROGRAM = """
import sys, time
import torch
import torch.distributed as dist

def late():
    print("late", flush=True)
    time.sleep(600)

dist.init_process_group(sys.argv[1])
dist.all_reduce(torch.ones(2))
if dist.get_rank() == 1:
    late()
dist.all_reduce(torch.ones(5))
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_program_under_torchrun_is_asked_by_the_command_line(folder, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    with open(tmp_path / "output", "w") as output:
        launcher = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
            + [str(program), "torchcomms"],
            stdout=output,
            stderr=output,
            env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"},
        )
    try:
        said = (tmp_path / "output").read_text
        assert wait_for(lambda: "late" in said() or launcher.poll() is not None, PROGRAM_LIMIT / 2)
        assert launcher.poll() is None, said()
        run = []

        def named():
            run[:] = [run_python("-m", "torchcomms_pg.status", "--late", "0.5", "--wait", "5")]
            return "rank 1 has not arrived" in run[0].stdout and "in late" in run[0].stdout

        assert wait_for(named, SOON), run[0].stdout + run[0].stderr + said()
        assert run[0].returncode == 1
        assert re.search(r"program.py:\d+ in late", run[0].stdout)
        store = re.match(
            r"job of the store (\S+:\d+) \(run \S+\): 2 ranks on 1 host", run[0].stdout
        )
        assert store, run[0].stdout
        asked = [store[1], "--late", "100", "--wait", "15"]
        assert wait_for(lambda: main(asked) == 0, SOON)
    finally:
        end_tree(launcher.pid)
        launcher.wait()
    assert wait_for(lambda: main([]) == 2, SOON)  # the ranks may be about to end
