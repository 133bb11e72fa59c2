"""Answers to NCCL's client of RAS for a job, by the gateway that its processes start."""

import contextlib
import datetime
import importlib.util
import json
import os
import pathlib
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

import torchcomms_pg
from harness import limits
from harness.comms import two_in_one_process
from harness.programs import PROGRAM_LIMIT, end_tree, run_program
from harness.ranks import Ranks, check, connect_store, meet, wait_for
from harness.stuck import all_keep_the_gil
from hosts.test_hosts import move
from torchcomms_pg.testing.rank import receive, report

pytestmark = pytest.mark.beyond_gloo
WATCHED = pytest.param(
    "gloo",
    marks=pytest.mark.skipif(torch.__version__ < "2.14", reason="c10d has hooks from 2.14 on"),
)
SOON = 20.0
FIELDS = {  # of NCCL 2.30
    "": "nccl_version cuda_runtime_version cuda_driver_version timestamp communicators_count "
    "communicators ras",
    "ras": "collection_time_sec timeouts_count",
    "communicator": "hash secondary_hash size ranks_count missing_ranks_count ranks missing_ranks",
    "rank": "rank host pid cuda_dev nvml_dev status collective_counts",
    "status": "init_state async_error finalize_called destroy_flag abort_flag",
    "collective_counts": "Broadcast Reduce AllGather ReduceScatter AllReduce",
    "missing": "rank host pid cuda_dev nvml_dev status",
    "status of missing": "unresponsive considered_dead",
}


@pytest.fixture
def port():
    """A port that is this test's: who says so may listen there, as the gateway does."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@pytest.fixture
def started(tmp_path, port, monkeypatch):
    """Makes ranks that have answers at the port, or at another address; "": they have none."""
    monkeypatch.setenv("TORCHCOMMS_PG_STATUS", str(tmp_path / "status"))

    def start(world, address=None, **env):
        env["TORCHCOMMS_PG_STATUS"] = env.get("TORCHCOMMS_PG_STATUS", str(tmp_path / "status"))
        env["TORCHCOMMS_PG_RAS_ADDR"] = f"127.0.0.1:{port}" if address is None else address
        return Ranks(world, init=False, env=env)

    return start


def connected(port, *lines):
    """A connection to the gateway, once there is one, and its file. `lines` have been sent, and
    have been agreed to."""
    end = time.monotonic() + limits.grown(SOON)
    while True:
        client = socket.socket()
        try:
            client.settimeout(1)
            client.connect(("127.0.0.1", port))
            client.sendall(b"CLIENT PROTOCOL 2\n")
            file = client.makefile("rb")
            answers = [file.readline()]
            client.settimeout(limits.grown(SOON))
            for line in lines:
                client.sendall(line.encode() + b"\n")
                answers.append(file.readline())
            if b"" in answers:
                raise ConnectionError("the gateway has ended, and another one comes")
            assert answers == [b"SERVER PROTOCOL 2\n"] + [b"OK\n"] * len(lines)
            return client, file
        except OSError:
            client.close()
            if time.monotonic() > end:
                raise


def ask(port, form="text", question="STATUS"):
    """The whole answer."""
    answer = []

    def told():  # unless the process ends meanwhile
        client, file = connected(port, f"SET FORMAT {form}", f"TIMEOUT {int(limits.grown(15))}")
        with client, contextlib.suppress(ConnectionError):
            client.sendall(question.encode() + b"\n")
            answer[:] = [file.read().decode()]
        return answer and answer[0]

    assert wait_for(told, SOON)
    return answer[0]


def communicators(port):
    """Those of the answer as JSON, whose form is checked; none if no rank has answered."""
    told = ask(port, "json")
    if told.startswith("ERROR: no rank of this host answers"):
        return [], {}
    answer = json.loads(told)
    assert set(FIELDS[""].split()) <= set(answer)
    assert set(FIELDS["ras"].split()) <= set(answer["ras"])
    time.strptime(answer["timestamp"], "%Y-%m-%d %H:%M:%S")
    assert answer["communicators_count"] == len(answer["communicators"])
    for each in answer["communicators"]:
        assert set(FIELDS["communicator"].split()) <= set(each)
        assert each["ranks_count"] == len(each["ranks"])
        assert each["missing_ranks_count"] == len(each["missing_ranks"])
        assert each["size"] == each["ranks_count"] + each["missing_ranks_count"]
        assert re.fullmatch("0x[0-9a-f]+", each["hash"])
        assert re.fullmatch("0x[0-9a-f]+:0x[0-9a-f]+", each["secondary_hash"])
        for rank in each["ranks"]:
            assert set(FIELDS["rank"].split()) <= set(rank)
            assert set(FIELDS["status"].split()) <= set(rank["status"])
            assert set(FIELDS["collective_counts"].split()) <= set(rank["collective_counts"])
        for rank in each["missing_ranks"]:
            assert set(FIELDS["missing"].split()) <= set(rank)
            assert set(FIELDS["status of missing"].split()) == set(rank["status"])
    return answer["communicators"], answer["ras"]


def complete(port):
    """The communicator that has done most, once all ranks have told: a group of gloo has two."""
    found = []

    def told():
        found[:] = communicators(port)[0]
        return found and not any(each["missing_ranks"] for each in found)

    assert wait_for(told, SOON), found
    return max(found, key=lambda each: sum(sum(rank.values()) for rank in counts(each)))


def counts(communicator):
    """Of each rank the numbers that are not 0."""
    return [
        {kind: count for kind, count in rank["collective_counts"].items() if count}
        for rank in communicator["ranks"]
    ]


def join(args, world, backend="torchcomms"):
    store = connect_store(*args)
    if backend == "gloo":
        torchcomms_pg.watch(timeout=datetime.timedelta(seconds=300))
    rank = int(os.environ["RANK"])
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    return store


def is_there(args, world, backend="torchcomms"):
    join(args, world, backend)
    dist.all_reduce(torch.ones(7))
    dist.broadcast(torch.ones(7), 0)
    dist.all_gather([torch.ones(1) for _ in range(world)], torch.ones(1))
    dist.all_reduce(torch.ones(7))
    dist.barrier()
    report("there")
    receive()


def in_a_running_job(ranks, backend="torchcomms"):
    ranks.start(is_there, ranks.store_args(), ranks.world, backend)
    for rank in range(ranks.world):
        ranks.wait_report(rank)


def ends(ranks):
    for rank in range(ranks.world):
        ranks.tell(rank, "end")
    check(ranks.wait())


@pytest.mark.parametrize("backend", ["torchcomms", WATCHED])
def test_a_healthy_job_is_shown_as_text_and_as_json(started, port, backend):
    with started(2) as ranks:
        in_a_running_job(ranks, backend)
        healthy = []

        def told():
            healthy[:] = [complete(port), ask(port)]
            # Of an operation that is watched, the end may be seen a moment later.
            return re.search(r"^ +0 +\d +1 +2 +2 +2 +RUNNING +OK$", healthy[1], re.MULTILINE)

        assert wait_for(told, SOON), healthy
        first, text = healthy
        done = {"Broadcast": 1, "AllGather": 1, "AllReduce": 2, "Barrier": 1}
        assert counts(first) == [done, done]
        assert [rank["rank"] for rank in first["ranks"]] == [0, 1]
        assert [rank["pid"] for rank in first["ranks"]] == ranks.pids
        assert first["backend"] == backend and first["verdict"] is None
        for rank in first["ranks"]:
            status = rank["status"]
            assert status["init_state"] == status["async_error"] == 0
            assert not (status["finalize_called"] or status["destroy_flag"] or status["abort_flag"])
            assert rank["host"] == socket.gethostname()
            assert rank["cuda_dev"] == rank["nvml_dev"] == -1  # which nobody knows
        lines = text.splitlines()
        assert lines[0].startswith("NCCL version unknown (torchcomms_pg ")
        assert re.fullmatch(r" +1 +2 +-1 +2 +-1", lines[lines.index("Job summary") + 5])
        assert any(re.fullmatch(r"Communicators\.\.\. \(\d+\.\d+s\)", line) for line in lines)
        assert lines[-6:] == ["Errors", "======", "", "Warnings", "========", ""]
        assert ask(port, question="VERBOSE STATUS").splitlines()[0] == lines[0]
        ends(ranks)


def one_does_not_come(args, world, backend):
    store = join(args, world, backend)
    dist.all_reduce(torch.ones(7))
    if os.environ["RANK"] == "1":
        report("away")
        receive()
    dist.all_reduce(torch.ones(1024))
    meet(store, "done", world)
    report("done")
    receive()


@pytest.mark.rotation
@pytest.mark.parametrize("backend", ["torchcomms", WATCHED])
def test_a_late_rank_is_behind_the_others_and_named(started, port, backend):
    with started(3) as ranks:
        ranks.start(one_does_not_come, ranks.store_args(), 3, backend)
        ranks.wait_report(1)
        assert wait_for(
            lambda: (
                counts(complete(port)) == [{"AllReduce": 2}, {"AllReduce": 1}, {"AllReduce": 2}]
            ),
            SOON,
        ), counts(complete(port))
        identity = re.escape(f"#0-0 ({int(complete(port)['hash'], 16):016x})")
        wanted = [
            r"^ +0 +1 +1 +3 +3 +3 +RUNNING +MISMATCH$",
            rf"^Warnings\n=+\n\n{identity} MISMATCH\n.*\n  AllReduce 1: rank 1\n"
            r"  AllReduce 2: ranks 0, 2\n",
            rf"^{identity} WAITS\n.*\n  verdict on .*: rank 1 has not arrived at all_reduce #2",
        ]
        places = r"test_ras.py:\d+ in one_does_not_come"
        for question, lines in (("STATUS", wanted), ("VERBOSE STATUS", [*wanted, places])):
            text = []

            def named(question=question, lines=lines, text=text):  # once each of them answers
                text[:] = [ask(port, question=question)]
                return all(re.search(line, text[0], re.MULTILINE) for line in lines)

            assert wait_for(named, SOON * 2), text[0]
            assert lines is not wanted or not re.search(places, text[0]), text[0]
        assert "rank 1 has not arrived" in complete(port)["verdict"]
        ranks.tell(1, "go on")
        for rank in range(3):
            ranks.wait_report(rank)
        done = [{"AllReduce": 2}] * 3
        assert wait_for(lambda: counts(complete(port)) == done, SOON), counts(complete(port))
        ends(ranks)


@pytest.mark.stops_ranks
def test_stopped_and_dead_ranks_are_missing_and_watchers_get_an_event(started, port):
    with started(4) as ranks, contextlib.ExitStack() as stack:
        in_a_running_job(ranks)
        complete(port)
        watching = {}
        for form, groups in (("text", ""), ("json", " lifecycle,trace")):
            client, file = connected(port, f"SET FORMAT {form}", f"MONITOR{groups}")
            watching[form] = file
            stack.enter_context(client)
        stopped, dead = 0, 1
        ranks.kill(stopped, signal.SIGSTOP)
        if not select.select([watching["json"]], [], [], limits.grown(5))[0]:
            # Nobody has looked at the processes before.
            ranks.kill(stopped, signal.SIGCONT)
            assert json.loads(watching["json"].readline())["event"] == "PEER_RECOVERED"
            ranks.kill(stopped, signal.SIGSTOP)
        event = json.loads(watching["json"].readline())
        assert (event["group"], event["event"]) == ("TRACE", "PEER_UNRESPONSIVE")
        assert event["peer"]["pid"] == ranks.pids[stopped]
        assert event["peer"]["cuda_devs"] == event["peer"]["nvml_devs"] == []
        assert "its process is stopped" in event["details"]
        ranks.kill(dead)
        assert ranks.exit_code(dead) == -9
        event = json.loads(watching["json"].readline())
        assert (event["group"], event["event"]) == ("LIFECYCLE", "PEER_DEAD")
        line = watching["text"].readline().decode()
        said = rf"\[\d+-\d+-\d+ [\d:]+\] PEER_DEAD: Process {ranks.pids[dead]} on node .*dead"
        assert re.match(said, line), line
        (communicator, *_), ras = communicators(port)
        missing = {rank["rank"]: rank for rank in communicator["missing_ranks"]}
        assert sorted(missing) == sorted([stopped, dead])
        assert missing[stopped]["status"] == {"unresponsive": True, "considered_dead": False}
        assert missing[dead]["status"] == {"unresponsive": True, "considered_dead": True}
        assert missing[dead]["pid"] == ranks.pids[dead]
        assert ras["timeouts_count"] == 0
        text = ask(port)
        assert re.search(r"^ +0 +1 +1 +2 +4 +2 +RUNNING +INCOMPLETE$", text, re.MULTILINE), text
        assert f"DEAD\n  Processes that are dead: 1\n  Process {ranks.pids[dead]} on " in text
        assert re.search(rf"  Rank {stopped} -- process {ranks.pids[stopped]} on .*stopped", text)
        ranks.kill(stopped, signal.SIGCONT)
        assert json.loads(watching["json"].readline())["event"] == "PEER_RECOVERED"
        for rank in set(range(4)) - {dead}:
            ranks.tell(rank, "end")
        check(ranks.wait(ranks=sorted(set(range(4)) - {dead})))


def test_ranks_whose_python_is_stuck_answer(started, port, tmp_path):
    with started(2) as ranks, all_keep_the_gil(ranks, join, tmp_path):
        assert complete(port)["size"] == 2


def leaves_or_stays(args, world):
    join(args, world)
    report("there")
    receive()
    dist.destroy_process_group()
    report("left")
    receive()


def test_where_a_process_leaves_the_others_answer_and_the_gateway_ends_with_the_last(started, port):
    with started(2) as ranks:
        ranks.start(leaves_or_stays, ranks.store_args(), 2)
        for rank in range(2):
            ranks.wait_report(rank)
        complete(port)
        ranks.tell(0, "leave")
        ranks.wait_report(0)
        found = []

        def told():
            found[:] = communicators(port)[0]
            return found and found[0]["missing_ranks_count"] == 1

        assert wait_for(told, SOON), found
        (missing,) = found[0]["missing_ranks"]
        assert (missing["rank"], missing["host"], missing["pid"]) == (0, "unknown", -1)
        ranks.tell(1, "leave")
        ranks.wait_report(1)
        assert wait_for(lambda: not listeners(port), SOON)
        ends(ranks)


# Where there is no answer


def listeners(port=None):
    """The inodes of sockets that listen on this port, or on any."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in pathlib.Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            own = int(fields[1].rpartition(":")[2], 16)
            if fields[3] == "0A" and port in (None, own):
                found.add(fields[9])
    return found


def sockets(pid):
    found = set()
    for path in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found.update(re.findall(r"socket:\[(\d+)\]", os.readlink(path)))
    return found


def gateways(port):
    """The processes that listen at the port."""
    wanted, found = listeners(port), []
    for process in pathlib.Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            if process.name.isdecimal() and sockets(process.name) & wanted:
                found.append(int(process.name))
    return found


def test_no_port_is_open_unless_one_is_named_and_then_in_one_process_apart(started, port, tmp_path):
    with started(2) as ranks:
        in_a_running_job(ranks)
        complete(port)
        (pid,) = gateways(port)
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        parent, session = int(fields[1]), int(fields[3])
        assert parent not in (*ranks.pids, os.getpid())
        assert session not in {os.getsid(each) for each in (os.getpid(), *ranks.pids)}
        for each in ranks.pids:
            assert not sockets(each) & sockets(pid)
        for file in range(3):
            assert os.readlink(f"/proc/{pid}/fd/{file}") == os.devnull
        ends(ranks)
    assert wait_for(lambda: not pathlib.Path(f"/proc/{pid}").exists(), SOON)
    assert not list((tmp_path / "status").glob("*.ras"))
    with started(2, address="") as ranks:
        in_a_running_job(ranks)
        for pid in ranks.pids:
            assert not sockets(pid) & listeners()
        ends(ranks)


SAID = "nothing answers ncclras at TORCHCOMMS_PG_RAS_ADDR="


def refusals(ranks):
    """How often each rank has said that nothing answers."""
    return [ranks.output(rank).count(SAID) for rank in range(ranks.world)]


def test_an_address_that_others_reach_is_one_line_and_no_harm(started, port):
    with started(2, address=f"0.0.0.0:{port}") as ranks:
        in_a_running_job(ranks)
        assert wait_for(lambda: refusals(ranks) == [1, 1], SOON), ranks.output(0)
        assert f"{SAID}0.0.0.0:{port}: it is not of this host alone" in ranks.output(0)
        assert not listeners(port)
        ends(ranks)


def test_a_port_that_another_program_has_is_one_line_and_answered_once_it_is_free(started, port):
    with started(2, address=f"localhost:{port}") as ranks:
        with socket.create_server(("127.0.0.1", port)):
            in_a_running_job(ranks)
            assert wait_for(lambda: sum(refusals(ranks)) == 1, SOON), refusals(ranks)
            told = ranks.output(0) + ranks.output(1)
            assert f"localhost:{port}: another user or program has it; name another port" in told
        assert complete(port)["size"] == 2
        assert sum(refusals(ranks)) == 1
        ends(ranks)


def test_without_a_status_there_is_one_line(started, port):
    with started(2, TORCHCOMMS_PG_STATUS="0") as ranks:
        in_a_running_job(ranks)
        assert wait_for(lambda: refusals(ranks) == [1, 1], SOON), ranks.output(0)
        assert "TORCHCOMMS_PG_STATUS turns off" in ranks.output(0)
        assert not listeners(port)
        ends(ranks)


def forks(args, world):
    join(args, world)
    child = os.fork()
    if child == 0:
        report("child")
        receive()
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_forked_child_does_not_answer(started, port):
    with started(2) as ranks:
        ranks.start(forks, ranks.store_args(), 2)
        for rank in range(2):
            ranks.wait_report(rank)
            assert wait_for(
                lambda rank=rank: not os.path.exists(f"/proc/{ranks.pids[rank]}/fd/0"), SOON
            )
        assert wait_for(lambda: not listeners(port), SOON)
        for rank in range(2):
            ranks.tell(rank, "end")


def test_a_gateway_that_is_killed_is_no_harm_and_one_is_there_for_the_next_groups(started, port):
    with started(2) as ranks:
        ranks.start(leaves_and_comes_back, ranks.store_args(), 2)
        for rank in range(2):
            ranks.wait_report(rank)
        complete(port)
        (pid,) = gateways(port)
        os.kill(pid, signal.SIGKILL)
        # That of the other rank may come only now.
        assert wait_for(lambda: pid not in gateways(port), SOON)
        for rank in range(2):
            ranks.tell(rank, "go on")
        for rank in range(2):
            ranks.wait_report(rank)
        assert complete(port)["size"] == 2
        ends(ranks)


def leaves_and_comes_back(args, world):
    store = join(args, world)
    report("there")
    receive()
    dist.destroy_process_group()
    again = dist.PrefixStore("again", store)
    dist.init_process_group(
        "torchcomms", store=again, rank=int(os.environ["RANK"]), world_size=world
    )
    dist.all_reduce(torch.ones(7))
    report("there again")
    receive()


def test_a_user_can_start_a_gateway_for_a_job_that_names_no_address(started, port):
    with contextlib.ExitStack() as stack:
        with started(1, address="") as ranks:
            ranks.start(two_in_one_process, ranks.store_args())
            ranks.wait_report(0)
            command = [sys.executable, "-m", "torchcomms_pg.status", "--ras", f"localhost:{port}"]
            by_hand = subprocess.Popen([*command, str(ranks.pids[0])])
            stack.callback(by_hand.wait)
            stack.callback(by_hand.terminate)
            assert len(complete(port)["ranks"]) == 2
            ends(ranks)
        # It is there for the next job.
        assert wait_for(lambda: ask(port).startswith("ERROR: "), SOON)
    assert by_hand.returncode == -signal.SIGTERM


# Hosts and programs


def serves_a_store(_):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    report(store.port)
    receive()


def on_two_hosts(args, world, folders):
    os.environ["TORCHCOMMS_PG_STATUS"] = folders[int(os.environ["RANK"])]
    move("ab")
    join(args, world)
    dist.all_reduce(torch.ones(2))
    report("there")
    receive()


@pytest.mark.stops_ranks
def test_a_store_that_does_not_answer_is_a_timeout_and_accuses_nobody(
    started, port, tmp_path, monkeypatch
):
    folders = [str(tmp_path / name) for name in ("one", "other")]
    with started(1, address="") as server, started(2) as ranks:
        server.start(serves_a_store, None)
        place = (server.wait_report(0), "stopped")
        ranks.start(on_two_hosts, place, 2, folders)
        for rank in range(2):
            ranks.wait_report(rank)
        assert sorted(rank["host"] for rank in complete(port)["ranks"]) == ["host-a", "host-b"]
        server.kill(0, signal.SIGSTOP)
        client, file = connected(port, "SET FORMAT json", "TIMEOUT 1")
        with client:
            client.sendall(b"STATUS\n")
            answer = json.loads(file.read())
        (communicator,) = answer["communicators"]
        (missing,) = communicator["missing_ranks"]
        assert (missing["host"], missing["pid"]) == ("unknown", -1)
        assert missing["status"] == {"unresponsive": True, "considered_dead": False}
        assert answer["ras"]["timeouts_count"] == 1 and communicator["verdict"] is None
        client, file = connected(port, "TIMEOUT 1")
        with client:
            client.sendall(b"STATUS\n")
            assert "\nTIMEOUT\n  other hosts: the job's store has not answered\n" in (
                file.read().decode()
            )
        server.kill(0, signal.SIGCONT)
        assert wait_for(lambda: not communicators(port)[0][0]["missing_ranks"], SOON)
        ends(ranks)
        server.tell(0, "end")


PROGRAM = """
import time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(2))
if dist.get_rank() == 1:
    print("late", flush=True)
    time.sleep(600)
dist.all_reduce(torch.ones(5))
"""


def ncclras():
    """The path of NCCL's client; None: it is not installed."""
    nvidia = importlib.util.find_spec("nvidia")
    places = list(nvidia.submodule_search_locations) if nvidia else []
    places = [os.path.join(place, "nccl", "bin") for place in places]
    return shutil.which("ncclras", path=os.pathsep.join([*places, os.environ["PATH"]]))


@pytest.mark.timeout(120)
@pytest.mark.skipif(torch.__version__ < "2.14", reason="c10d has hooks from 2.14 on")
def test_an_unchanged_program_under_torchrun_is_shown(tmp_path, port, monkeypatch):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    monkeypatch.setenv("TORCHCOMMS_PG_STATUS", str(tmp_path / "status"))
    with open(tmp_path / "output", "w") as output:
        launcher = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
            + [str(program)],
            stdout=output,
            stderr=output,
            env={
                **os.environ,
                "TORCH_DEVICE_BACKEND_AUTOLOAD": "1",
                "TORCHCOMMS_PG_WATCH": "1",
                "TORCHCOMMS_PG_RAS_ADDR": f"localhost:{port}",
            },
        )
    try:
        said = (tmp_path / "output").read_text
        assert wait_for(lambda: "late" in said() or launcher.poll() is not None, PROGRAM_LIMIT / 2)
        assert launcher.poll() is None, said()
        behind = [{"AllReduce": 2}, {"AllReduce": 1}]
        assert wait_for(lambda: counts(complete(port)) == behind, SOON), counts(complete(port))
        if client := ncclras():
            command = [client, "-h", "localhost", "-p", str(port), "-t", "30"]
            options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            asked = run_program([*command, "-f", "json"], **options)
            assert asked.returncode == 0, asked.stderr
            assert counts(json.loads(asked.stdout)["communicators"][0]) == behind
            asked = run_program([*command, "-v"], **options)
            assert asked.returncode == 0, asked.stderr
            assert "AllReduce 1: rank 1" in asked.stdout
    finally:
        end_tree(launcher.pid)
        launcher.wait()
    assert wait_for(lambda: not listeners(port), SOON)
