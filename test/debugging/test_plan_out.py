"""What a plan is written as: Chakra's execution traces, and a page."""

import json
import re
import sys
from pathlib import Path

import pytest

from debugging.test_plan_roles import call, group_of, mesh, planned
from harness.programs import run_python
from torchcomms_pg.plan import Answer, Job, chakra
from torchcomms_pg.plan.chakra_schema import MissingPackageError
from torchcomms_pg.plan.page import html
from torchcomms_pg.plan.steps import step_of
from torchcomms_pg.trace.dumps import Frame
from torchcomms_pg.trace.hazards.hazard import Hazard, Hazards

# Names by the numbers of Chakra's published schema, et_def.proto; * is a repeated field.
NODE = {1: "id", 2: "name", 3: "type", 4: "*ctrl_deps", 5: "*data_deps", 10: "*attr"}
ATTRIBUTE = {1: "name", 2: "doc", 7: "value", 9: "value", 27: "value", 29: "value"}
SEND, RECEIVE, COLLECTIVE = 5, 6, 7


def answered(made, calls, size, *, steps=(), **job):
    roles, programs, dumps = planned(made, calls, size)
    for program in programs.values():
        program.steps = list(steps)
    name = Job(("/home/user/train.py",), size, 4, **job)
    return Answer(name, roles, programs, dumps, Hazards([], [], []))


def varint(content, at):
    value = shift = 0
    while True:
        value |= (content[at] & 127) << shift
        shift, at = shift + 7, at + 1
        if content[at - 1] < 128:
            return value, at


def decoded(content, names):
    """Returns the fields of a message of Protocol Buffers by name; fails for unknown numbers."""
    found = {name[1:]: [] for name in names.values() if name[0] == "*"}
    at = 0
    while at < len(content):
        key, at = varint(content, at)
        name = names[key >> 3]
        if key & 7 == 0:
            value, at = varint(content, at)
        else:
            assert key & 7 == 2, key
            length, at = varint(content, at)
            value, at = content[at : at + length], at + length
        if name[0] != "*":
            found[name] = value.decode() if isinstance(value, bytes) else value
        elif isinstance(value, bytes) and name != "*attr":  # packed numbers
            inner = 0
            while inner < len(value):
                number, inner = varint(value, inner)
                found[name[1:]].append(number)
        else:
            found[name[1:]].append(value)
    return found


def read(path):
    """Returns the nodes of a trace, each a dict with its attributes by name."""
    content, at, messages = path.read_bytes(), 0, []
    while at < len(content):
        length, at = varint(content, at)
        assert length, "readers take an empty message for the end"
        messages.append(content[at : at + length])
        at += length
    assert at == len(content)
    nodes = []
    for message in messages[1:]:
        node = decoded(message, NODE)
        for attribute in node.pop("attr"):
            each = decoded(attribute, ATTRIBUTE)
            node[each["name"]] = each["value"]
        nodes.append({"id": 0} | node)
    return nodes


def pipeline(made):
    """Returns what a rank of 4 stages x 4 calls: it receives, reduces with the others, sends."""

    def calls(rank):
        stage = rank // 4
        found = [call("all_reduce", group_of(made, rank, 1))]
        if stage > 0:
            found.insert(0, call("recv", group_of(made, rank, 0), stage - 1))
        if stage < 3:
            found.append(call("send", group_of(made, rank, 0), stage + 1))
        return [*found, call("all_reduce_barrier", 0)]

    return calls


def test_a_rank_that_was_not_run_has_a_trace_in_its_own_groups(tmp_path):
    made = mesh(4, 4)
    answer = answered(made, pipeline(made), 16)
    rank = 9  # the second of its four, in the third stage
    assert rank not in answer.programs
    trace = chakra.write(answer, tmp_path / "out")
    groups = json.loads((tmp_path / "out/train.groups.json").read_text())
    receive, reduce, send, barrier = read(tmp_path / f"out/train.{rank}.et")
    assert [node["type"] for node in (receive, reduce, send)] == [RECEIVE, COLLECTIVE, SEND]
    assert (receive["comm_src"], receive["comm_dst"]) == (5, 9)
    assert (send["comm_src"], send["comm_dst"], send["comm_size"]) == (9, 13, 32)
    assert groups[reduce["pg_name"]] == [8, 9, 10, 11] and groups[send["pg_name"]] == [1, 5, 9, 13]
    assert "pg_name" not in barrier and "0" not in groups  # the group of all ranks
    assert (barrier["comm_type"], barrier["comm_size"]) == (0, 4)
    assert not any(node["is_cpu_op"] for node in (receive, reduce, send, barrier))
    assert [node["id"] for node in (receive, reduce, send, barrier)] == [0, 1, 2, 3]
    assert [node["data_deps"] for node in (receive, reduce, send, barrier)] == [[], [0], [1], [2]]
    sizes = sum(file.stat().st_size for file in (tmp_path / "out").iterdir())
    assert len(trace.ranks) == 16 and trace.size == sizes


def depends(calls, waits=None):
    made = mesh(4)
    answer = answered(made, lambda rank: calls(group_of(made, rank, 0)), 4)
    program = answer.programs[0]
    program.waits = waits or {}
    return chakra.dependencies(answer.dumps[0].entries, program)


def test_messages_of_a_batch_do_not_follow_each_other():
    def calls(group):
        batch = [call("send", group, 1, batch=1), call("recv", group, 1, batch=1)]
        return [call("all_reduce", group), *batch, call("all_reduce", group)]

    assert depends(calls) == [([], []), ([0], []), ([0], []), ([1, 2], [])]


def test_an_operation_follows_what_was_waited_for_and_its_communicator():
    def calls(group):  # the second and the third are asynchronous, waited for before the last
        return [call("all_reduce", made) for made in (group, group, 0, 0, group, 0)]

    found = depends(calls, {1: 5, 2: 5})
    assert found == [([], []), ([0], []), ([0], []), ([0], [2]), ([3], [1]), ([1, 2, 4], [])]


def test_a_step_has_what_is_called_between_two_steps_of_the_optimizers():
    made = mesh(4)
    group = group_of(made, 0, 0)
    many = [call("all_reduce", group, numel=number) for number in range(1, 7)]
    answer = answered(made, lambda rank: many, 4, steps=(3, 5))
    numels = {
        step: [entry.numel_in for entry in step_of(answer, step).entries[3]]
        for step in (1, 2, None)
    }
    assert numels == {1: [1, 2, 3], 2: [4, 5], None: [4, 5]}
    assert str(step_of(answer)) == "step 2 of 2"
    with pytest.raises(ValueError, match="the step is 3, wanted one of 1 to 2: ranks 0-3"):
        step_of(answer, 3)
    whole = answered(made, lambda rank: many, 4)
    assert len(step_of(whole).entries[0]) == 6
    with pytest.raises(ValueError, match="step no optimizer"):
        step_of(whole, 1)


def test_of_a_large_plan_the_ranks_that_were_run_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr(chakra, "_MOST", 20)
    made = mesh(4, 8)
    answer = answered(made, lambda rank: [call("all_reduce", group_of(made, rank, 0))], 32)
    trace = chakra.write(answer, tmp_path / "some")
    assert trace.ranks == sorted(answer.programs) and len(trace.ranks) < 32
    assert "ranks that were not run are left out; --chakra-ranks all writes all" in str(trace)
    assert chakra.write(answer, tmp_path / "all", ranks=range(32)).ranks == list(range(32))
    chosen = chakra.write(answer, tmp_path / "two", ranks=[3, 9])
    assert sorted(file.name for file in (tmp_path / "two").glob("*.et")) == [
        "train.3.et",
        "train.9.et",
    ]
    assert "ranks 3, 9" in str(chosen)
    with pytest.raises(ValueError, match="wanted some of ranks 0-31"):
        chakra.write(answer, tmp_path / "none", ranks=[32])


def test_what_a_simulator_does_not_find_is_reported(tmp_path):
    made = mesh(4)
    group = group_of(made, 0, 0)
    many = [call("reduce", group, root=0), call("recv", group, -1), call("all_gather", group)]
    answer = answered(made, lambda rank: many, 4)
    for dump in answer.dumps.values():
        dump.entries[2].input_sizes = dump.entries[2].output_sizes = ()
    text = str(chakra.write(answer, tmp_path))
    assert "4 of reduce, which ASTRA-sim does not simulate" in text
    assert "4 receives from any rank are left out" in text
    assert "4 operations have 1 byte, since their size depends on data" in text
    assert [node["comm_size"] for node in read(tmp_path / "train.0.et")] == [32, 1]


def test_a_folder_with_files_is_refused(tmp_path):
    (tmp_path / "train.99.et").touch()
    with pytest.raises(ValueError, match="is no empty folder"):
        chakra.check(tmp_path)


def test_a_missing_protobuf_is_an_error_with_the_command_that_installs_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "google.protobuf", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'torchcomms_pg\[chakra\]'"):
        chakra.check(tmp_path)


def data_of(page):
    """Returns the data of a page; fails if it needs another file, or its script an element."""
    assert not re.findall(r"@[A-Z]+@", page)
    assert not re.findall(r'(?:src|href)="', page), "the page needs something else"
    elements = set(re.findall(r'id="(\w+)"', page))
    assert set(re.findall(r'get\("(\w+)"\)', page)) <= elements
    return json.loads(re.search(r'type="application/json">(.*?)</script>', page, re.DOTALL)[1])


def spread(ranges):
    return [rank for first, last, step in ranges for rank in range(first, last + 1, step)]


def test_a_page_has_roles_findings_and_calls_in_order():
    made = mesh(4, 4)
    answer = answered(made, pipeline(made), 16)
    answer.programs[0].meshes.append(((4, 4), ("pp", "dp")))
    found = Hazard("missing", [4, 5, 6, 7], ["ranks 4-7 are <missing>", "  at train.py:10"])
    answer.hazards.found.append(found)
    data = data_of(html(answer))
    assert data["mesh"] == [["pp", 4], ["dp", 4]] and data["bad"]
    roles = [spread(role["ranks"]) for role in data["roles"]]
    assert roles == [list(range(4)), list(range(4, 12)), list(range(12, 16))]
    run = [rank for role in data["roles"] for rank in spread(role["run"])]
    assert sorted(run) == sorted(answer.programs)
    (finding,) = data["findings"]
    assert finding["text"] == str(found) and spread(finding["ranks"]) == [4, 5, 6, 7]
    calls = [[data["calls"][call][0] for call in role["calls"]] for role in data["roles"]]
    assert calls[1] == [
        "recv -1 (8 x Float)",
        "all_reduce (8 x Float)",
        "send +1 (8 x Float)",
        "all_reduce_barrier (8 x Float)",
    ]
    families = [data["families"][data["calls"][call][1]] for call in data["roles"][1]["calls"]]
    assert families == ["0", "1", "0", "default_pg"]
    assert {name for name, ranges in data["groups"] if 5 in spread(ranges)} == {"0", "1"}
    assert data["volume"][0][0] == "dimension" and len(data["volume"]) == 4


def test_a_page_of_many_ranks_that_all_differ_is_below_two_megabytes():
    made = mesh(64, 64)
    answer = answered(made, lambda rank: [call("all_reduce", 0)], 4096)
    for rank, dump in answer.dumps.items():  # each calls others than the rest
        entry = dump.entries[0]
        entry.frames = tuple(
            Frame(f"step_{rank}_{line}", "/home/user/a/long/path/to/train.py", line)
            for line in range(8)
        )
        dump.entries = [entry] * (3000 if rank < 70 else 1)
    answer.roles.ranks = {(rank,): [rank] for rank in range(4096)}
    answer.programs = {rank: answer.programs.get(rank, answer.programs[0]) for rank in range(4096)}
    page = html(answer)
    data = data_of(page)
    assert len(page.encode()) < 2_000_000
    assert len(data["roles"]) == 4096 and data["roles"][0]["count"] == 3000
    assert sum(bool(role["calls"]) for role in data["roles"]) == 64


@pytest.mark.timeout(300)
def test_a_step_of_a_program_is_written_by_the_command(tmp_path):
    program, out = Path(__file__).with_name("planned_steps.py"), tmp_path / "out"
    page = tmp_path / "page.html"
    run = run_python(
        *("-m", "torchcomms_pg.plan", "--world-size", "8", "--ranks", "0,7"),
        *("--step", "2", "--html", page, "--chakra", out, program),
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "Chakra trace of step 2 of 3: ranks 0, 7, " in run.stdout
    assert f"--workload-configuration={out}/planned_steps " in run.stdout
    first, last = (read(out / f"planned_steps.{rank}.et") for rank in (0, 7))
    names = ["all_reduce", "send", "recv", "_all_gather_base", "all_reduce", "all_reduce"]
    assert [node["name"] for node in first] == names
    names[1:3] = ["recv", "send"]
    assert [node["name"] for node in last] == names
    assert [node["comm_size"] for node in last] == [64, 32, 32, 16, 4, 4]
    # The gathering is asynchronous, and waited for before the last.
    assert [node["data_deps"] for node in last] == [[], [0], [1], [2], [2], [3, 4]]
    data = data_of(page.read_text())
    assert data["step"] == "step 2 of 3" and data["mesh"] == [["pp", 2], ["dp", 4]]
    assert [role["count"] for role in data["roles"]] == [6, 6]
