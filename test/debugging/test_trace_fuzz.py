"""Whatever a file holds, `python -m torchcomms_pg.trace` ends soon: with a verdict, or one line."""

import copy
import json
import pickle
import random
import time

import pytest

from debugging.test_trace import recorders
from torchcomms_pg.trace.__main__ import main

BOUND = 50.0  # far below what the worst dumps once took, far above what a busy machine takes


def dumps():
    """Two ranks' dumps with an entry of each kind, as a pickle holds them."""
    ranks = recorders(2, **{"0:0-1": [0, 1], "0:signal 0->1": [0], "0:wait_signal 1<-0": [1]})
    for rank in ranks:
        rank.call("all_reduce").call("barrier", done=False, duration_ms=1.5)
    detail = {"device": "cpu", "tag": 1, "batch": 1, "from_any": 0}
    ranks[0].call("send 0->1", "0:0-1", done=False, collective_seq_id=1, detail=detail)
    ranks[1].call("recv 1<-?", done=False)
    ranks[0].call("coalesced", "0:signal 0->1")
    ranks[1].call("coalesced", "0:wait_signal 1<-0", done=False)
    return [rank.content() for rank in ranks]


def run(folder, contents, capsys):
    """The command's code for files with these contents, and what it printed."""
    folder.mkdir(exist_ok=True)
    for rank, content in enumerate(contents):
        (folder / f"dump_{rank}").write_bytes(content)
    began = time.monotonic()
    code = main([str(folder), "--html", str(folder / "page"), "--perfetto", str(folder / "trace")])
    assert time.monotonic() - began < BOUND
    out, err = capsys.readouterr()
    if code == 2:
        assert err.count("\n") == 1 and err.strip().isprintable() and not out, err
    else:
        assert code in (0, 1) and not err
        assert out.replace("\n", "").isprintable(), out
        page = (folder / "page").read_text(encoding="utf-8")
        data = page.split('type="application/json">')[1].split("</script>")[0]
        assert "<" not in data
        json.loads(data, parse_constant=lambda name: pytest.fail(f"the page cannot read {name}"))
    hazards = main([str(folder), "--nccl"])
    assert time.monotonic() - began < BOUND
    told, err = capsys.readouterr()
    assert (hazards == 2) == (code == 2) and hazards in (0, 1, 2)
    assert (told or err).replace("\n", "").isprintable(), told
    return code, out + err


HOSTILE = [
    None, True, -1, 0, 10**30, -(10**30), 1e308, float("nan"), float("inf"), "", "x" * 5000,
    "9" * 5000, "[" * 100_000, "\x1b[2J\r", "\ud800", "<!--<script>", "</script>", [], {}, [[]],
    [None], {"a": 1}, [2**62] * 70, [[2**62] * 64], ["send 0->0"], "nccl:send 0->99999999999",
    "nccl:recv 0<-0", "nccl:", "[0, 0]", "[1, 2, 3]", "1", "0:put 1->0", "completed",
]  # fmt: skip


def places(value, path=()):
    """The path to everything in a tree."""
    yield path
    if isinstance(value, (dict, list)):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


def replaced(value, path, other):
    changed = copy.deepcopy(value)
    if not path:
        return other
    *to, last = path
    inside = changed
    for key in to:
        inside = inside[key]
    if other is KeyError:
        del inside[last]
    else:
        inside[last] = other
    return changed


def write(content, form):
    if form == "json":
        return json.dumps(content).encode()
    return pickle.dumps(content, protocol=2 if form == "pickle 2" else None)


@pytest.mark.parametrize("form", ["json", "pickle"])
def test_every_field_may_hold_anything(tmp_path, capsys, form):
    first, second = json.loads(json.dumps(dumps()))  # lists in place of tuples
    other = write(second, form)
    chance = random.Random(7)
    for path in places(first):
        for value in (KeyError, chance.choice(HOSTILE)) if path else HOSTILE:
            run(tmp_path / "dumps", [write(replaced(first, path, value), form), other], capsys)


@pytest.mark.parametrize("form", ["json", "pickle"])
def test_bytes_may_be_damaged(tmp_path, capsys, form):
    first, second = (write(content, form) for content in dumps())
    chance = random.Random(8)
    codes = set()
    alone = set()
    for _ in range(100):
        damaged = bytearray(first)
        for _ in range(chance.choice([1, 1, 2, 8])):
            at = chance.randrange(len(damaged))
            kind = chance.randrange(4)
            if kind == 0:
                damaged[at] = chance.randrange(256)
            elif kind == 1:
                damaged[at:at] = bytes(chance.randrange(256) for _ in range(chance.randrange(9)))
            elif kind == 2:
                del damaged[at : at + chance.randrange(9)]
            else:
                damaged[at:at] = damaged[at // 2 : at // 2 + 40]
        if chance.randrange(10) == 0:
            del damaged[chance.randrange(len(damaged)) :]
        codes.add(run(tmp_path / "dumps", [bytes(damaged), second], capsys)[0])
        alone.add(run(tmp_path / "alone", [bytes(damaged)], capsys)[0])
    assert alone >= {1, 2}
    assert codes == {1}, "the other dump can be read"


def nested(make):
    """What names itself twice at each of 60 levels: whoever walks through it never returns."""
    value = make("end", "end")
    for _ in range(60):
        value = make(value, value)
    return value


def pair(a, b):
    return [a, b]


def as_key(value):
    """The pickle of ``{value: 1}``, without a hash of it."""
    return b"\x80\x02}" + pickle.dumps(value, protocol=2)[2:-1] + b"K\x01s."


def full(**fields):
    content, _ = dumps()
    content["entries"] = [dict(content["entries"][0], **fields)] * 60
    return content


def grouped(ranks):
    return {"version": "2.1", "pg_config": {"0": {"ranks": ranks}}}


FRAME = {"name": "f", "filename": "a.py", "line": 1}
ENDLESS = {
    "a place far away in the memo": b"\x80\x02}" + b"r\xff\xff\xff\x7f.",
    "deep lists": b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
    "deep tuples": b"\x80\x02" + b"(" * 100_000 + b"t" * 100_000 + b".",
    "a long text": b"\x80\x02X\xff\xff\xff\xffabc.",
    "a long number": b"\x80\x02\x8b\xff\xff\xff\x7f.",
    "code": b"\x80\x04cos\nsystem\n.",
    "deep JSON": b'{"version": ' + b"[" * 200_000,
    "JSON's long number": b'{"version": ' + b"9" * 5000 + b', "pg_config": {}}',
    "JSON that is no text": b'{"version": "2.1", "pg_config": "\xff"}',
    "nothing": b"",
    "a tuple for a key": as_key(nested(lambda a, b: (a, b))),
    "the version": {"version": nested(pair), "pg_config": {}},
    "deep ranks": grouped("[" * 200_000),
    "ranks' long number": grouped("[" + "9" * 5000 + "]"),
    "the entries": {"version": "2.1", "pg_config": {}, "entries": nested(pair)},
    "a name": full(profiling_name=nested(pair)),
    "frames": full(frames=[FRAME] * 10_000),
    "sizes": full(input_sizes=[[1]] * 10_000),
    "a frame's name": full(frames=[{**FRAME, "name": nested(pair)}]),
}


@pytest.mark.parametrize("what", ENDLESS)
def test_what_would_take_for_ever_is_refused(tmp_path, capsys, what):
    content = ENDLESS[what]
    content = content if isinstance(content, bytes) else pickle.dumps(content)
    code, text = run(tmp_path / "dumps", [content], capsys)
    assert code == 2 and "dump_0: " in text
    assert len(text) < 400, text
