"""Hazards for NCCL in dumps whose truth is known, of thousands of random programs and by hand."""

from __future__ import annotations

import os
import re

import pytest
import torch

from harness import scene_dumps, scenes, strict_order
from harness.comms import torchcomms
from harness.hazard_programs import HEALTHY, PROGRAMS
from harness.ranks import init_default_group
from torchcomms_pg.trace import dumps, hazards, load, nccl_hazards
from torchcomms_pg.trace.dumps import Dumps, parse
from torchcomms_pg.trace.hazards import replay

COUNT = int(os.environ.get("SCENES", 3000))
CIRCLES = {"order", "messages", "first message", "threads"}


def judged(contents):
    return nccl_hazards(Dumps(parse(content, rank) for rank, content in contents.items()))


def circles(report):
    return [hazard for hazard in report.found if hazard.kind in CIRCLES]


def calls_of(outcome):
    return [call for calls in outcome.calls.values() for call in calls]


def batch_on_one_side(outcome):
    """Whether one rank has a message in a batch, and the other its other side alone."""
    messages = [call for call in calls_of(outcome) if call.is_message]
    return any(bool(call.batch) != bool(outcome.other_side(call).batch) for call in messages)


def first_batch_without_all(outcome):
    """Whether a rank comes first with a batch to a group's communicator, and another never does."""
    for group in outcome.scene.groups:
        firsts = [
            next(
                (c for c in outcome.calls[r] if c.group is group and (c.batch or not c.is_message)),
                0,
            )
            for r in group.ranks
        ]
        if 0 in firsts and any(call and call.is_message for call in firsts):
            return True
    return False


def wrong_circle(outcome, hazard):
    """What is not true of a circle; empty if all of it is."""
    half = len(hazard.entries) // 2
    calls = [outcome.calls[entry.rank][entry.record] for entry in hazard.entries]
    now, later = calls[:half], calls[half:]
    for place, call in enumerate(now):
        steps = strict_order.steps(outcome, call.rank)
        mine = [[each in step for step in steps].index(True) for each in (call, later[place])]
        if later[place].rank != call.rank or mine[0] >= mine[1]:
            return f"{call} is not called before {later[place]}"
        asked = now[place - 1]
        others = [
            o for each in asked.batch or [asked] for o in strict_order.partners(outcome, each)
        ]
        if not set(others) & set(later[place].batch or [later[place]]):
            return f"{asked} does not wait for {later[place]}"
    return ""


def complaint(outcome, form, seed):
    """What is wrong with what is said of a program; empty if nothing is."""
    contents = scene_dumps.write(outcome, form, seed)
    blocked = strict_order.blocked(outcome)
    report = judged(contents)
    found = circles(report)
    if found and not blocked:
        return f"a false alarm: {report}"
    if form not in TOLD:
        return ""
    for hazard in found:
        if form == "ours" and (wrong := wrong_circle(outcome, hazard)):
            return wrong
    if any(dump["entries"] and dump["entries"][0]["record_id"] for dump in contents.values()):
        return ""  # a ring has lost operations
    truth = {"batch": batch_on_one_side(outcome), "first batch": first_batch_without_all(outcome)}
    others = {hazard.kind for hazard in report.found} - CIRCLES
    if blocked and not found:
        return f"ranks {blocked} are blocked: {report}"
    return "" if others == {kind for kind in truth if truth[kind]} else f"{truth}: {report}"


# The recorders whose dumps tell what is asked for. Those of the others may not raise an alarm.
TOLD = ("ours", "nccl")
SHARES = {"ours": 0.55, "nccl": 0.25, "gloo": 0.1, "hook": 0.1}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("form", scene_dumps.FORMS)
def test_what_blocks_under_the_rule_of_nccl_is_found_and_nothing_else(form):
    blocked, seeds = 0, range(int(COUNT * SHARES[form]))
    for seed in seeds:
        outcome = scenes.Outcome(strict_order.make(seed))
        assert all(call.done for call in calls_of(outcome))
        assert not (said := complaint(outcome, form, seed)), f"program {seed}: {said}"
        blocked += bool(strict_order.blocked(outcome))
    assert 0.2 < blocked / len(seeds) < 0.8


def no_messages(patch):
    patch.setattr(replay, "judged_messages", lambda analysis: set())


def members_of_a_batch_apart(patch):
    add = dumps._add_details

    def mutant(entry, detail):
        add(entry, {**detail, "batch": detail["batch"] and entry.record + 1})

    patch.setattr(dumps, "_add_details", mutant)


def no_circles(patch):
    patch.setattr(replay.Replay, "_circle", lambda self: None)


def the_last_call_is_awaited(patch):
    circle = replay.Replay._circle

    def mutant(self):
        found = circle(self)
        if found is not None:
            found.later = [self.calls[call.rank][-1] for call in found.later]
        return found

    patch.setattr(replay.Replay, "_circle", mutant)


def batches_are_not_compared(patch):
    patch.setattr(hazards, "messages", lambda analysis: [])


def all_come_to_a_first_batch(patch):
    patch.setattr(hazards, "first_batches", lambda analysis: ([], []))


BROKEN = [
    no_messages,
    members_of_a_batch_apart,
    no_circles,
    the_last_call_is_awaited,
    batches_are_not_compared,
    all_come_to_a_first_batch,
]


@pytest.mark.parametrize("rule", BROKEN, ids=lambda rule: rule.__name__)
def test_a_rule_that_is_broken_is_found(monkeypatch, rule):
    rule(monkeypatch)
    outcomes = (scenes.Outcome(strict_order.make(seed)) for seed in range(COUNT))
    assert any(complaint(outcome, "ours", seed) for seed, outcome in enumerate(outcomes))


# ---------------------------------------------------------------- programs


def run_program(name):
    """Called in a rank: what the program gives, and its dump."""
    result = (PROGRAMS | HEALTHY)[name].body("cpu")
    torchcomms().hooks.process_recorder().dump_file()
    return result


def lines_of_programs(text):
    """The lines of hazard_programs.py that a text names."""
    return {int(line) for line in re.findall(r"hazard_programs\.py:(\d+) ", text)}


def over_torchcomms(port, prefix, world, timeout, backend="torchcomms"):
    torchcomms().as_gloo.install()  # as --check-nccl does
    init_default_group(port, prefix, int(os.environ["RANK"]), world, timeout, backend=backend)


def over_torchcomms_called_gloo(port, prefix, world, timeout):
    over_torchcomms(port, prefix, world, timeout, backend="gloo")


def over_watched_gloo(port, prefix, world, timeout):
    torchcomms().watch()
    rank = int(os.environ["RANK"])
    init_default_group(port, prefix, rank, world, timeout, backend="gloo")


WATCHED = pytest.mark.skipif(torch.__version__ < "2.14", reason="older torches have no hooks")
NAMES = {
    "torchcomms": over_torchcomms,
    "gloo": over_torchcomms_called_gloo,
    "watched": over_watched_gloo,
}


@pytest.mark.parametrize("how", [*NAMES][:2] + [pytest.param("watched", marks=WATCHED)])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_that_ends_on_a_cpu_is_named_with_its_lines(recording, tmp_path, name, how):
    program = PROGRAMS[name]
    recording(program.world, NAMES[how]).run(run_program, name)
    report = nccl_hazards(load(tmp_path))
    if (how, program.kind) == ("watched", "tags"):
        assert not report.found and "tags of 4 messages" in report.not_covered, str(report)
        return
    assert {hazard.kind for hazard in report.found} == {program.kind}, str(report)
    assert lines_of_programs("\n".join(map(str, report.found))) == program.lines, str(report)
    assert not report.doubts, str(report)


@pytest.mark.parametrize("how", [*NAMES][:2] + [pytest.param("watched", marks=WATCHED)])
@pytest.mark.parametrize("name", HEALTHY)
def test_a_program_without_hazards_is_not_accused_under_any_name(recording, tmp_path, name, how):
    recording(HEALTHY[name].world, NAMES[how]).run(run_program, name)
    report = nccl_hazards(load(tmp_path))
    assert not report.found and not report.doubts, str(report)
