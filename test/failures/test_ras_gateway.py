"""The gateway for NCCL's client of RAS without a job: its lines, formats, events, and its place."""

import contextlib
import json
import os
import re
import select
import socket
import subprocess
import sys
import threading

import pytest

from harness import limits
from torchcomms_pg.status.jobs import Job, NoAnswerError, Process, StatusError
from torchcomms_pg.status.ras import gateway, server
from torchcomms_pg.status.ras.dialogue import LIFECYCLE, LONGEST_LINE, TRACE, Dialogue
from torchcomms_pg.status.ras.events import Event, Peer, Peers, peers_of, text_of
from torchcomms_pg.status.ras.formats import as_json, as_text, merged

SOON = 20.0
KINDS = (
    "Broadcast",
    "Reduce",
    "AllGather",
    "ReduceScatter",
    "AllReduce",
    "AlltoAll",
    "Gather",
    "Scatter",
    "Barrier",
    "Other",
)


def member(rank, group=99, issued=4, failure=""):
    counts = {**dict.fromkeys(KINDS, 0), "AllReduce": issued}
    return {"id": str(group), "rank": rank, "issued": counts, "failure": failure}


def rank_of(number, *members):
    return {
        "rank": number,
        "pid": 1000 + number,
        "host": f"host{number // 8}",
        "state": "answers",
        "groups": list(members),
    }


def quiet(number, state, text):
    return {"rank": number, "pid": 1000 + number, "host": "host0", "state": state, "text": text}


def group_of(size, missing=(), verdict=None, identity=99):
    waits = None if verdict is None else {"verdict": verdict}
    return {
        "id": str(identity),
        "name": "world",
        "backend": "gloo",
        "ranks": list(range(size)),
        "missing": list(missing),
        "waits": waits,
    }


def status_of(groups, ranks, unreached=()):
    return {
        "torchcomms_pg": "1.2.3",
        "asked": {"pid": 1000},
        "store": "localhost:1",
        "took_s": 0.1,
        "groups": groups,
        "ranks": ranks,
        "unreached_hosts": list(unreached),
    }


def healthy(size=2):
    return status_of([group_of(size)], [rank_of(rank, member(rank)) for rank in range(size)])


# Lines


@pytest.mark.parametrize("piece", [1, 2, 7, 1000])
def test_lines_are_understood_in_whatever_pieces_they_come(piece):
    said = b"client PROTOCOL 2\nTIMEOUT 7\r\nset format JSON\nverbose status\nset format text\n"
    dialogue = Dialogue()
    answers = [dialogue.hear(said[begin : begin + piece]) for begin in range(0, len(said), piece)]
    assert "".join(answers) == "SERVER PROTOCOL 2\nOK\nOK\n"
    asked = dialogue.asked
    assert asked.as_json and asked.verbose and asked.wait == 7


def test_a_client_that_sets_nothing_gets_text_within_a_second():
    dialogue = Dialogue()
    assert dialogue.hear(b"STATUS\n") == ""
    assert not dialogue.asked.as_json and not dialogue.asked.verbose and dialogue.asked.wait < 1


@pytest.mark.parametrize(
    ("seconds", "wait"), [("0", 10), ("11", 10), ("9223372036854775807", 10), ("1", 1)]
)
def test_a_timeout_has_a_limit(seconds, wait):
    dialogue = Dialogue()
    assert dialogue.hear(f"timeout {seconds}\nstatus\n".encode()) == "OK\n"
    assert dialogue.asked.wait == wait


@pytest.mark.parametrize("seconds", ["", "x", "1 2", "-1", "9223372036854775808", "٣", "9" * 999])
def test_a_timeout_that_is_no_number_is_refused(seconds):
    assert Dialogue().hear(f"timeout {seconds}\n".encode()).startswith("ERROR: a timeout is")


def test_a_line_that_is_too_long_ends_the_dialogue():
    dialogue = Dialogue()
    assert dialogue.hear(b"x" * LONGEST_LINE) == ""
    assert dialogue.hear(b"x") is None
    assert Dialogue().hear(b"x" * (LONGEST_LINE + 1) + b"\n") is None


def test_clients_name_the_events_that_they_monitor():
    dialogue = Dialogue()
    assert dialogue.hear(b"monitor trace,\n").startswith("ERROR: events are")
    assert not dialogue.events
    for line, events in (
        (b"monitor\n", {LIFECYCLE}),
        (b"monitor TRACE\n", {TRACE}),
        (b"monitor lifecycle,trace\n", {LIFECYCLE, TRACE}),
        (b"MONITOR all\n", {LIFECYCLE, TRACE}),
    ):
        assert dialogue.hear(line) == "OK\n"
        assert dialogue.events == events
    assert dialogue.asked is None


# Events


def test_what_happens_to_processes_is_told_once_and_not_of_the_first_look():
    peers = Peers()
    here, other = Peer("a", 1, "answers", ""), Peer("b", 1, "answers", "")
    stopped, silent, dead = (here._replace(state=state) for state in ("stopped", "silent", "dead"))

    def names(*seen):
        return [(event.peer.host, event.name, event.group) for event in peers.notice(seen)]

    assert names(here) == []
    assert names(here, other) == [("b", "PEER_NEW", LIFECYCLE)]
    assert names(stopped, other) == [("a", "PEER_UNRESPONSIVE", TRACE)]
    assert names(silent) == []  # the other host has not answered
    assert names(here, other) == [("a", "PEER_RECOVERED", TRACE)]
    assert names(dead, other) == [("a", "PEER_DEAD", LIFECYCLE)]
    assert names(dead, other) == []
    assert names(here, other) == [("a", "PEER_NEW", LIFECYCLE)]  # with the pid of the dead one


def test_an_event_is_one_line_of_text_or_json():
    event = Event(LIFECYCLE, "PEER_DEAD", Peer("a", 7, "dead", "its process is dead"))
    said = r"\[\d+-\d\d-\d\d [\d:]+\] PEER_DEAD: Process 7 on node a: its process is dead\n"
    assert re.fullmatch(said, text_of(event, as_json=False))
    told = json.loads(text_of(event, as_json=True))
    assert told.pop("timestamp")
    assert told == {
        "group": "LIFECYCLE",
        "event": "PEER_DEAD",
        "peer": {"host": "a", "pid": 7, "cuda_devs": [], "nvml_devs": []},
        "details": "its process is dead",
    }


def test_ranks_that_are_threads_are_one_process_and_unknown_ranks_are_none():
    threads = [{**rank_of(rank), "pid": 1} for rank in range(2)]
    unknown = {"rank": 3, "state": "unknown", "text": "no process tells of it"}
    status = status_of([], [*threads, quiet(2, "dead", "dead"), unknown])
    assert peers_of(status) == [
        Peer("host0", 1, "answers", ""),
        Peer("host0", 1002, "dead", "dead"),
    ]


# Formats


def test_the_rank_that_many_others_wait_for_is_behind_them():
    size = 64
    ranks = [rank_of(rank, member(rank, issued=3 if rank == 7 else 4)) for rank in range(size)]
    status = status_of([group_of(size, verdict="verdict: rank 7\n  at x.py:3\n")], ranks)
    text = as_text(status, verbose=True)
    assert "    0         1         8         8        64        64   RUNNING  MISMATCH\n" in text
    assert "#0-0 (0000000000000063) MISMATCH\n  Group 'world' (gloo), 64 ranks\n" in text
    assert "  AllReduce 3: rank 7\n  AllReduce 4: ranks 0, 1, 2, " in text
    assert text.endswith(
        "WAITS\n  Group 'world' (gloo), 64 ranks\n  verdict: rank 7\n    at x.py:3\n\n"
    )
    assert text.startswith(
        "NCCL version unknown (torchcomms_pg 1.2.3) compiled with CUDA unknown\n"
    )
    short = as_text(status, verbose=False)
    assert "  AllReduce 4: ranks 0, 1, 2, 3, 4, 5, 6, 8, 9, 10, ... (63 in all)\n" in short
    assert short.endswith("  verdict: rank 7\n\n")
    (communicator,) = json.loads(as_json(status))["communicators"]
    assert communicator["hash"] == "0x63"
    assert communicator["verdict"] == "verdict: rank 7\n  at x.py:3\n"
    counts = [rank["collective_counts"]["AllReduce"] for rank in communicator["ranks"]]
    assert counts == [4] * 7 + [3] + [4] * 56


def test_hosts_with_different_numbers_of_processes_have_a_table_of_their_own():
    text = as_text(healthy(20), verbose=False)
    assert "      2          8           -1\n      1          4           -1\n" in text
    assert "      3         20           -1\n" in text
    assert "    0         1         3       4-8        20        20   RUNNING      OK\n" in text


def of_missing_ranks():
    """Rank 3 has left the group, rank 4 is silent, rank 5 is unknown, and rank 1 has failed."""
    missing = [
        {"rank": 3, "state": "elsewhere", "host": "host0", "pid": 1003, "text": "has left it"},
        {"rank": 4, "state": "silent", "host": "host0", "pid": 1004, "text": "did not answer"},
        {"rank": 5, "state": "unknown", "text": "no process tells of it"},
    ]
    ranks = [
        rank_of(0, member(0)),
        rank_of(1, member(1, failure="rank 5 died\nat once")),
        rank_of(2, member(2)),
        rank_of(3, member(0, group=100)),
        quiet(4, "silent", "did not answer"),
    ]
    other = group_of(1, identity=100)
    unreached = [{"host": "host1", "why": "has not answered in time"}]
    return status_of([group_of(6, missing), other], ranks, unreached)


def test_of_missing_ranks_json_says_whether_processes_are_silent_or_elsewhere():
    answer = json.loads(as_json(of_missing_ranks()))
    communicator, _ = answer["communicators"]
    missing = [
        (each["rank"], each["host"], each["pid"], each["status"]["unresponsive"])
        for each in communicator["missing_ranks"]
    ]
    assert missing == [
        (3, "host0", 1003, False),
        (4, "host0", 1004, True),
        (5, "unknown", -1, True),
    ]
    assert not any(each["status"]["considered_dead"] for each in communicator["missing_ranks"])
    failed = communicator["ranks"][1]
    assert failed["status"]["async_error"] == 6 and failed["status"]["abort_flag"]
    assert not communicator["ranks"][0]["status"]["abort_flag"]
    assert answer["ras"]["timeouts_count"] == 2


def test_of_missing_ranks_the_text_has_a_line_each():
    text = as_text(of_missing_ranks(), verbose=False)
    assert "         3     ABORT  INCOMPLETE,ERROR,MISMATCH\n" in text
    one = "INCOMPLETE\n  Processes that do not answer: 1\n  Process 1004 on node host0: "
    assert one in text
    assert "  Rank 4 -- process 1004 on node host0: did not answer\n  Rank 5: no process" in text
    assert "  Rank 1 -- process 1001 on node host0: rank 5 died\n\n" in text
    assert "TIMEOUT\n  host1: has not answered in time\n" in text
    assert "  NOCOMM: rank 3\n  RUNNING: ranks 0, 2\n  ABORT: rank 1\n" in text


def test_long_lists_are_cut_unless_the_question_is_verbose():
    ranks = [quiet(rank, "dead", "dead") for rank in range(12)]
    status = status_of([], [rank_of(20), *ranks])
    text = as_text(status, verbose=False)
    assert "DEAD\n  Processes that are dead: 12\n" in text and "  ... and 2 more\n" in text
    assert "There are none.\n" in text
    assert "more\n" not in as_text(status, verbose=True)


def test_jobs_of_one_address_are_shown_together():
    both = merged([healthy(2), status_of([group_of(3, identity=5)], [rank_of(9, member(0, 5))])])
    assert len(json.loads(as_json(both))["communicators"]) == 2
    assert "    0         1         1         1         3         1" in as_text(both, verbose=False)


# Clients


@contextlib.contextmanager
def serving(ask):
    """A function that connects to a server, which serves what `ask` returns."""
    listening = socket.create_server(("127.0.0.1", 0))
    address = listening.getsockname()
    served = server.Server(listening, ask)
    ended = threading.Event()

    def serve():
        while not ended.is_set():
            served.step(0.05)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield lambda: socket.create_connection(address, timeout=limits.grown(SOON))
    finally:
        ended.set()
        thread.join()
        served.close()


def read_all(client):
    with client, client.makefile("rb") as file:
        return file.read()


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"\n", rb"ERROR: no command of RAS protocol 2: \n"),
        (b"GET / HTTP/1.1\r\n", rb"ERROR: no command of RAS protocol 2: GET / HTTP/1.1\n"),
        (b"\xff\x00\x1b[2J\n", rb"ERROR: no command [^\x1b\0]*\n"),
        (b"timeout -1\ntimeout 99999999999999999999\n", rb"(ERROR: a timeout is .*\n){2}"),
        (b"set format xml\n", rb"ERROR: the format is text or json, not xml\n"),
        (b"monitor lifecycle,\n", rb"ERROR: events are lifecycle, trace or all, not \n"),
        (b"set format json\r\nstatus\n", rb'OK\n\{"nccl_version".*\}\n'),
    ],
)
def test_each_line_has_an_answer(sent, answer):
    with serving(lambda _: healthy()) as connect:
        client = connect()
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        assert re.fullmatch(answer, read_all(client))


def test_a_line_without_an_end_is_cut_off():
    with serving(lambda _: healthy()) as connect, contextlib.suppress(ConnectionError):
        client = connect()
        client.sendall(b"x" * 100_000)
        assert read_all(client) == b""


def test_a_client_gets_all_of_its_answer_whatever_it_sends_after_its_question():
    status = healthy()
    status["ranks"][1]["groups"][0]["failure"] = "x" * (8 << 20)
    with serving(lambda _: status) as connect, contextlib.ExitStack() as stack:
        monitors, never_reads = stack.enter_context(connect()), stack.enter_context(connect())
        monitors.sendall(b"MONITOR all\n")
        never_reads.sendall(b"STATUS\n")
        for _ in range(4):
            client = connect()
            client.sendall(b"VERBOSE STATUS\n" + b"y" * 10_000)
            answer = read_all(client)
            assert len(answer) > 8 << 20 and answer.endswith(b"\n\n")
        assert monitors.recv(100) == b"OK\n"


def test_why_nobody_answers_is_told():
    def ask(_):
        raise NoAnswerError("process 3 is stopped")

    with serving(ask) as connect:
        client = connect()
        client.sendall(b"STATUS\n")
        assert read_all(client) == b"ERROR: process 3 is stopped\n"


def test_clients_that_monitor_get_the_events_of_their_groups(monkeypatch):
    monkeypatch.setattr(server, "_LOOK", 0.05)
    looks = []

    def ask(_):
        looks.append(None)
        status = healthy()
        if len(looks) > 1:
            status["ranks"].append(quiet(5, "dead", "its process is dead"))
        return status

    with serving(ask) as connect, connect() as client, connect() as other:
        other.sendall(b"MONITOR trace\n")
        client.sendall(b"SET FORMAT json\nMONITOR\n")
        with client.makefile("rb") as file:
            assert [file.readline(), file.readline()] == [b"OK\n", b"OK\n"]
            assert json.loads(file.readline())["event"] == "PEER_DEAD"
        assert other.recv(100) == b"OK\n"
        assert not select.select([other], [], [], 0.2)[0]


def test_clients_that_do_not_ask_or_never_read_keep_nobody_from_the_status(monkeypatch):
    monkeypatch.setattr(server, "_ASKING", 0.5)
    monkeypatch.setattr(server, "_READING", 0.5)
    status = healthy()
    status["ranks"][1]["groups"][0]["failure"] = "x" * (8 << 20)
    with serving(lambda _: status) as connect, contextlib.ExitStack() as stack:
        for question in (b"VERBOSE STATUS\n", b"x\n" * 10_000, b"MONITOR\n", b""):
            for _ in range(12):
                client = stack.enter_context(connect())
                client.setblocking(False)
                with contextlib.suppress(OSError):
                    client.sendall(question)
        last = connect()
        last.settimeout(limits.grown(60))
        last.sendall(b"STATUS\n")
        assert b"Job summary" in read_all(last)


# The address and the gateway's place


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("0.0.0.0:1", "it is not of this host alone"),
        ("192.0.2.1:1", "it is not of this host alone"),
        ("[::]:1", "it is not of this host alone"),
        ("::1:1", "it is not of this host alone"),
        ("28100", "it is not of this host alone"),
        ("localhost:0", "its port is no number from 1 to 65535"),
        ("localhost:65536", "its port is no number from 1 to 65535"),
        ("localhost:ras", "its port is no number from 1 to 65535"),
        ("localhost:²", "its port is no number from 1 to 65535"),
    ],
)
def test_an_address_that_others_reach_or_that_is_none_is_refused(address, why):
    with pytest.raises(gateway.AddressError, match=re.escape(why)):
        gateway.parse_address(address)


def test_loopback_addresses_are_taken():
    assert gateway.parse_address("localhost:28100") == ("127.0.0.1", 28100)
    assert gateway.parse_address("127.0.0.2:1") == ("127.0.0.2", 1)
    assert gateway.parse_address("[::1]:65535") == ("::1", 65535)


def test_an_address_that_another_program_has_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as other:
        with pytest.raises(gateway.AddressError, match="another user or program has it"):
            gateway.listen(*other.getsockname())


def name_of(pid):
    return f"{pid}-{os.stat('/proc/self/ns/pid').st_ino & 0xFFFFFFFF}"


def test_one_gateway_has_the_place_and_leaves_no_file(tmp_path):
    one, other = (gateway.Members(str(tmp_path), "127.0.0.1:1") for _ in range(2))
    elsewhere = gateway.Members(str(tmp_path), "127.0.0.1:2")
    assert one.take_place() and not other.take_place() and elsewhere.take_place()
    one.leave_place()
    elsewhere.leave_place()
    assert list(tmp_path.iterdir()) == []
    assert other.take_place() and not one.take_place()


def test_a_place_whose_file_is_removed_while_it_is_taken_is_taken_anew(tmp_path, monkeypatch):
    one, other = (gateway.Members(str(tmp_path), "127.0.0.1:1") for _ in range(2))
    flock = gateway.fcntl.flock

    def late(file, how):
        monkeypatch.undo()
        (tmp_path / "127.0.0.1:1.ras").unlink()
        flock(file, how)

    monkeypatch.setattr(gateway.fcntl, "flock", late)
    assert one.take_place() and not other.take_place()


def test_a_member_counts_while_it_has_a_socket_and_lives(tmp_path):
    members = gateway.Members(str(tmp_path), "127.0.0.1:1")
    ended = subprocess.Popen([sys.executable, "-S", "-c", ""])
    ended.wait()
    names = [name_of(os.getpid()), name_of(ended.pid), "1-2"]
    for name in names:
        members.add(name)
        (tmp_path / f"{name}.socket").touch()
    # A process of another namespace may live.
    assert members.names() == {name_of(os.getpid()), "1-2"}
    assert not gateway.Members(str(tmp_path), "127.0.0.1:2").any()

    def job(name):
        return Job([Process(str(tmp_path), 1, name, frozenset())])

    assert members.are_in(job(name_of(os.getpid()))) and not members.are_in(job("3-4"))
    for name in names:
        (tmp_path / f"{name}.socket").unlink()
    assert not members.any()
    assert list(tmp_path.iterdir()) == []


def test_a_member_that_comes_back_while_it_is_removed_stays(tmp_path, monkeypatch):
    members = gateway.Members(str(tmp_path), "127.0.0.1:1")
    members.add(name_of(os.getpid()))
    unlink = os.unlink

    def comes_back(path):
        (tmp_path / f"{name_of(os.getpid())}.socket").touch()
        members.add(name_of(os.getpid()))
        unlink(path)

    monkeypatch.setattr(gateway.os, "unlink", comes_back)
    assert members.any()
    monkeypatch.undo()
    assert members.any()


def test_a_gateway_ends_with_the_last_socket_and_goes_on_for_one_that_comes_meanwhile(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(gateway, "_LOOK", 0.01)
    monkeypatch.setattr(gateway, "_be_silent", lambda: None)
    mine = tmp_path / f"{name_of(os.getpid())}.socket"
    mine.touch()
    served = []

    def serve(goes_on, *_):
        assert goes_on()
        served.append(None)
        mine.unlink()
        assert not goes_on()
        if len(served) == 1:  # a process comes, and finds the place taken
            mine.touch()
            members = gateway.Members(str(tmp_path), "127.0.0.1:9")
            members.add(name_of(os.getpid()))
            assert not members.take_place()

    monkeypatch.setattr(gateway, "_serve_while", serve)
    monkeypatch.setattr(os, "chdir", lambda _: None)
    gateway.serve_job("localhost:9", str(tmp_path), name_of(os.getpid()))
    assert len(served) == 2


def test_a_process_that_did_not_answer_is_not_asked_first_again(monkeypatch):
    asked = []

    class OneJob(Job):
        pids = (1, 2)

        def ask(self, late, wait, asked_first=None):
            asked.append((late, wait, asked_first))
            return {**healthy(), "asked": {"pid": 2}}

    monkeypatch.setattr(gateway, "known_jobs", lambda folders: [OneJob()])
    jobs = gateway.Jobs(["folder"], lambda job: True)
    jobs.ask(3)
    assert jobs.ask(3)["groups"] == healthy()["groups"]
    assert asked == [(10, 3, None), (10, 3, 2)]


def test_a_gateway_without_a_job_says_so(monkeypatch):
    monkeypatch.setattr(gateway, "known_jobs", lambda folders: [Job()])
    with pytest.raises(StatusError, match="there is no such job"):
        gateway.Jobs(["folder"], lambda job: False).ask(1)
    monkeypatch.setattr(Job, "ask", lambda *_: healthy())
    with pytest.raises(StatusError, match="there is no such job"):
        gateway.Jobs(["folder"], lambda job: True, lambda status: status["store"] == "x:2").ask(1)
