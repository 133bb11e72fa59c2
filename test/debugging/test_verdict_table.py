"""The verdicts of ``test/verdicts.txt`` over dumps; the live ones have to give them, too."""

from pathlib import Path

import pytest

from harness import scene_dumps, scenes
from torchcomms_pg.trace.analysis import Analysis
from torchcomms_pg.trace.dumps import Dumps, parse

TABLE = Path(__file__).parents[1] / "verdicts.txt"
KINDS = {
    "missing": "missing",
    "message": "missing",
    "unknown": "missing",
    "order": "deadlock",
    "mismatch": "mismatch",
}


def read_call(words, rank, groups):
    """The calls of "send 1 g2 async": one, or the two of a batch."""
    mode = "async" if "async" in words else "sync"
    named = [word for word in words if word[0] == "g"]
    group = groups[int(named[0][1:]) if named else 0]
    peers = [int(word) for word in words[1:] if word.isdigit()]
    if words[0] == "swap":
        batch = [
            scenes.Call(rank, op, group, peer=peer, mode=mode)
            for op, peer in zip(("send", "recv"), peers)
        ]
        for call in batch:
            call.batch = batch
        return batch
    peer = peers[0] if words[0] in ("send", "recv") else -1
    return scenes.Call(rank, words[0], group, peer=peer, mode=mode)


def read_cases():
    """{what has happened: (scene, kind, ranks)}."""
    cases = {}
    for line in TABLE.read_text().splitlines():
        word, _, rest = line.partition(" ")
        if not word or word == "#":
            continue
        if word == "case":
            name, scene = rest, scenes.Scene(0, 0, [], [])
        elif word == "group":
            ranks = [int(rank) for rank in rest.split()]
            number = len(scene.groups)
            scene.groups.append(
                scenes.Group(str(number), ranks, "undefined" if number else "default_pg")
            )
            scene.size = len(scene.groups[0].ranks)
            scene.programs = [[] for _ in range(scene.size)]
        elif word in KINDS.values():
            cases[name] = scene, word, {int(rank) for rank in rest.split()}
        else:
            for call in rest.split(";"):
                words = call.split()
                if words[0] in scenes.ENDS:
                    scene.ends[int(word)] = words[0]
                else:
                    scene.programs[int(word)].append(read_call(words, int(word), scene.groups))
    return cases


NAMES = list(read_cases())


@pytest.mark.parametrize("form", ("ours", "nccl"))
@pytest.mark.parametrize("name", NAMES)
def test_the_verdicts_of_the_table_are_given(name, form):
    scene, kind, ranks = read_cases()[name]
    outcome = scenes.Outcome(scene)
    contents = scene_dumps.write(outcome, form)
    verdict = Analysis(Dumps(parse(content, rank) for rank, content in contents.items())).verdict()
    assert verdict.findings
    assert {KINDS[finding.kind] for finding in verdict.findings} == {kind}, verdict.findings
    assert set().union(*(finding.culprits for finding in verdict.findings)) == ranks


def test_the_truth_of_the_table_is_that_of_its_scenes():
    for name, (scene, kind, ranks) in read_cases().items():
        outcome = scenes.Outcome(scene)
        if kind == "deadlock":
            assert set().union(*outcome.circles()) == ranks, name
        elif kind == "missing":
            assert outcome.culprits() == ranks, name
        else:
            assert outcome.mismatches(), name
