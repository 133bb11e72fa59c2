"""Verdicts on the dumps of thousands of scenes, whose truth is known.

``SCENES`` and ``SCENES_SEED`` in the environment say how many, and where they begin: a seed is the
number of a scene, so a failure names what to run again.
"""

import os
import random
import time
from collections import Counter

import pytest

from harness import scene_dumps, scenes
from harness.scene_judge import judge
from torchcomms_pg.trace import analysis, blame, dumps, groups
from torchcomms_pg.trace.analysis import Analysis, Finding, Verdict
from torchcomms_pg.trace.dumps import Dumps, Entry, parse

COUNT = int(os.environ.get("SCENES", 10_000))
SEED = int(os.environ.get("SCENES_SEED", 0))


def play(seed, form):
    """(truth, what the dumps hold) of one scene."""
    outcome = scenes.Outcome(scenes.make(seed, unique_names=form == "gloo"))
    chance = random.Random(seed)
    if chance.random() < 0.1:
        scenes.under_way(outcome, chance)
    return outcome, scene_dumps.write(outcome, form, seed)


def verdict(contents):
    return Analysis(Dumps(parse(content, rank) for rank, content in contents.items())).verdict()


def judgements(form, seeds):
    for seed in seeds:
        outcome, contents = play(seed, form)
        if contents:
            yield seed, judge(outcome, form, contents, verdict(contents))


# What is not told, or wrong, since no dump of the form tells it: at most so often as what is told.
SILENT = {"ours": 0.12, "nccl": 0.1, "gloo": 2.0, "hook": 0.7}
WRONG = {"ours": 0.02, "nccl": 0.02, "gloo": 0.02, "hook": 0.04}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("form", scene_dumps.FORMS)
def test_no_rank_that_waits_is_accused_and_every_culprit_is_named(form):
    began = time.process_time()
    named, silent, wrong = 0, Counter(), Counter()
    for seed, result in judgements(form, range(SEED, SEED + COUNT // len(scene_dumps.FORMS))):
        assert not result.complaints, f"scene {seed} as {form}: {result.complaints}"
        named += result.named
        silent += result.silent
        wrong += result.wrong
    took = time.process_time() - began
    print(f"{form}, seed {SEED}: {took:.1f} s, right {named}, ", end="")
    print(f"silent {dict(silent)}, wrong {dict(wrong)}")
    assert named > COUNT // len(scene_dumps.FORMS) // 4
    assert sum(silent.values()) < SILENT[form] * named
    assert sum(wrong.values()) < WRONG[form] * named


def groups_by_name(patch):
    settle = groups.settle

    def mutant(of):
        settle(of)
        first = {}
        for dump in of.values():
            for entry in dump.entries:
                entry.group = first.setdefault(entry.group.name, entry.group)

    patch.setattr(dumps, "settle", mutant)


def members_apart(patch):
    patch.setattr(dumps._OpenBatch, "add", lambda self, entry, raw: None)


def no_numbers(patch):
    patch.setattr(dumps, "_number_messages", lambda entries: None)


def ended_if_completed(patch):
    patch.setattr(Entry, "finished", property(lambda entry: entry.state == "completed"))


def retired_is_ended(patch):
    finished = property(lambda entry: entry.state == "completed" or entry.retired)
    patch.setattr(Entry, "finished", finished)


def one_finding(patch):
    all_of_them = Analysis.verdict
    patch.setattr(Analysis, "verdict", lambda self: Verdict(all_of_them(self).findings[:1]))


def least_first(patch):
    all_of_them = Analysis.verdict
    patch.setattr(Analysis, "verdict", lambda self: Verdict(all_of_them(self).findings[::-1]))


def calls_are_not_counted(patch):
    patch.setattr(blame, "_count", lambda entry, counts: None)


def members_of_a_batch_wait_alone(patch):
    patch.setattr(blame, "_waits", lambda unfinished, met: [[entry] for entry in unfinished])


def no_dump_is_proof(patch):
    patch.setattr(Analysis, "_is_proven", lambda self, rank, missed: True)


def gloo_is_proof(patch):
    proven = Analysis._is_proven

    def mutant(self, rank, missed):
        self._gloo = False
        return proven(self, rank, missed)

    patch.setattr(Analysis, "_is_proven", mutant)


def a_circle_has_a_culprit(patch):
    circle = Analysis._circle

    def mutant(self, *of):
        found = circle(self, *of)
        return Finding("missing", found.culprits[:1], found.lines, found.entries)

    patch.setattr(Analysis, "_circle", mutant)


def circles_are_silent(patch):
    circle = Analysis._circle

    def mutant(self, *of):
        return Finding("unknown", sorted(circle(self, *of).culprits), [])

    patch.setattr(Analysis, "_circle", mutant)


def uneven_is_mismatch(patch):
    patch.setattr(analysis, "_UNEVEN_PREFIXES", ("none",))


def sizes_are_equal(patch):
    patch.setattr(analysis, "signature", lambda entry: (entry.op, entry.dtype))


def most_are_wrong(patch):
    mismatch = Analysis._mismatch

    def mutant(self, place):
        found = mismatch(self, place)
        found.culprits = sorted(set(self.collectives[place]) - set(found.culprits))
        return found

    patch.setattr(Analysis, "_mismatch", mutant)


def messages_never_meet(patch):
    patch.setattr(Analysis, "met", lambda self, entry: None)


def untold_groups_are_guessed(patch):
    told = groups._find_ranks

    def mutant(name, own, of):
        told(name, own, of)
        for each in (each for of_rank in own.values() for each in of_rank):
            each.ranks = each.ranks or tuple(sorted(own))
        return True

    patch.setattr(groups, "_find_ranks", mutant)


# Which form shows that a rule is broken. The other dumps do not have what it is about.
BROKEN = {
    groups_by_name: "ours",
    members_apart: "nccl",
    no_numbers: "nccl",
    ended_if_completed: "gloo",
    retired_is_ended: "ours",
    one_finding: "ours",
    least_first: "ours",
    calls_are_not_counted: "ours",
    members_of_a_batch_wait_alone: "ours",
    no_dump_is_proof: "ours",
    gloo_is_proof: "gloo",
    a_circle_has_a_culprit: "ours",
    circles_are_silent: "ours",
    uneven_is_mismatch: "ours",
    sizes_are_equal: "ours",
    most_are_wrong: "ours",
    messages_never_meet: "ours",
    untold_groups_are_guessed: "ours",
}


@pytest.mark.slow
@pytest.mark.parametrize("rule", BROKEN, ids=lambda rule: rule.__name__)
def test_a_rule_that_is_broken_is_found(monkeypatch, rule):
    rule(monkeypatch)
    for at, (_, result) in enumerate(judgements(BROKEN[rule], range(COUNT))):
        if result.complaints:
            print(f"{rule.__name__}: {at + 1} scenes, {result.complaints[0]}")
            return
    pytest.fail(f"{COUNT} scenes do not show it")
