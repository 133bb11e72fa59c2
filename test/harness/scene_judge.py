"""Judges a verdict on the dumps of a scene by what is true of the scene.

Dumps do not tell everything. `CLASSES` has what they lack, with the reason. A wrong or missing
statement of a verdict is counted under the class that explains it; without such a class it is a
complaint.
"""

from collections import Counter
from dataclasses import dataclass, field

from harness.scenes import reached_from

CLASSES = {
    "in flight": "No recorder tells a rank that waits in an operation from one that has called it "
    "with async_op and is busy elsewhere.",
    "unseen": "Whoever waits for the rank left no dump.",
    "gloo message": "Gloo's recorder has no messages: neither the ranks that wait in them, nor "
    "whom they wait for.",
    "gloo group": "Gloo's recorder does not tell the ranks of a group: one that has never used it "
    "is not missed.",
    "hook batch": "torch's hook tells the end of the last member of a batch only: the others look "
    "as if they were under way.",
    "forgotten": "The ring has forgotten what the rank did in a group, or the messages that would "
    "number the later ones.",
    "same name": "A dump has the ranks of one group of each name, and nobody else's dump has the "
    "other's.",
}


@dataclass
class Judgement:
    complaints: list[str] = field(default_factory=list)
    named: int = 0  # culprits, circles and mismatches that the verdict has right
    wrong: Counter = field(default_factory=Counter)  # number of wrong findings, by class
    silent: Counter = field(default_factory=Counter)  # number of missing findings, by class

    def is_wrong(self, what, *, unless):
        """Counts a wrong finding under the first class of ``unless`` that holds, or complains."""
        self._count(self.wrong, what, unless)

    def is_silent(self, what, *, unless):
        """Counts a missing finding under the first class of ``unless`` that holds, or complains."""
        self._count(self.silent, what, unless)

    def _count(self, counter, what, unless):
        reasons = [name for name, holds in unless.items() if holds]
        if reasons:
            assert CLASSES[reasons[0]]
            counter[reasons[0]] += 1
        else:
            self.complaints.append(what)


class Evidence:
    """The part of an outcome that dumps of one form can show."""

    def __init__(self, outcome, form, dumps):
        self.outcome, self.form = outcome, form
        self.dumped = set(outcome.calls) - outcome.without_dump
        self.open = {rank: [c for c in outcome.open(rank) if self.shows(c)] for rank in self.dumped}
        self.wrapped = any(
            dump["entries"] and dump["entries"][0]["record_id"] for dump in dumps.values()
        )
        batches = [c for rank in self.dumped for c in outcome.calls[rank] if c.batch]
        self.messages = any(c.is_message for calls in outcome.calls.values() for c in calls)
        self.hook_batch = form == "hook" and bool(batches)
        names = [group.name for group in outcome.scene.groups]
        self.same_name = {name for name in names if names.count(name) > 1}

    def shows(self, call):
        return not (self.form == "gloo" and call.is_message)

    def one_wait(self, rank):
        """True if the rank is blocked in all its open calls, so dumps show its wait."""
        doing = self.outcome.doing.get(rank)
        return isinstance(doing, list) and set(self.outcome.open(rank)) <= set(doing)

    def unknowable_group(self, rank, call):
        """True if the dumps cannot tell that the rank is in the call's group."""
        if self.form == "gloo" and call.group.description == "default_pg":
            return rank > max(self.dumped)
        if self.form == "gloo":
            return not any(c.group is call.group and self.shows(c) for c in self.calls(rank))
        return False

    def calls(self, rank):
        return self.outcome.calls[rank] if rank in self.dumped else []

    def blurred(self, call):
        """True if another group has the name of the call's group."""
        return call.group.name in self.same_name


def judge(outcome, form, dumps, verdict):
    """Compares a verdict with the truth, and returns the judgement."""
    seen = Evidence(outcome, form, dumps)
    result = Judgement()
    for finding in verdict.findings:
        _check_finding(outcome, seen, finding, result)
    _check_told(outcome, seen, verdict, result)
    clear = all(not outcome.open(rank) or seen.one_wait(rank) for rank in outcome.calls)
    blurred = any(seen.blurred(call) for calls in seen.open.values() for call in calls)
    if clear and not blurred and not seen.wrapped and not outcome.without_dump:
        _check_order(outcome, seen, verdict, result)
    return result


def _check_finding(outcome, seen, finding, result):
    kind, named = finding.kind, set(finding.culprits)
    text = f"{kind} {sorted(named)}"
    # In dumps of torch's hook, groups with one name look like one group.
    blurred = seen.form == "hook" and any(e.group.name in seen.same_name for e in finding.entries)
    messages = {"gloo message": seen.form == "gloo" and seen.messages}
    if kind == "fine":
        if any(seen.open.values()):
            result.complaints.append("fine, and operations have not ended")
    elif kind in ("missing", "message"):
        for rank in named - outcome.culprits():
            result.is_wrong(f"{text} accuses {rank}", unless={"same name": blurred})
        result.named += len(named & outcome.culprits())
    elif kind == "unknown":
        result.named += len(named & outcome.culprits())
        for rank in (named & seen.dumped) - outcome.culprits():
            unless = {"gloo message": messages["gloo message"], "forgotten": seen.wrapped}
            result.is_silent(f"{text} of {rank}", unless=unless)
    elif kind == "mismatch":
        _check_mismatch(outcome, finding, text, result, unless={"same name": blurred})
    elif kind == "order":
        knots = outcome.knots()
        if any(named <= knot for knot in knots):
            result.named += 1
            return
        doubt = any(not seen.one_wait(rank) for rank in named)
        doubt &= "async_op" in finding.lines[-2]
        result.is_wrong(
            f"{text} is no circle: {knots}",
            unless={
                "in flight": doubt,
                "forgotten": seen.wrapped,
                "same name": blurred,
                **messages,
            },
        )
    elif kind == "unfinished":
        running = any(not outcome.awaited(call) for calls in seen.open.values() for call in calls)
        if not running:
            result.is_silent(
                f"{text}: nothing is under way",
                unless={
                    "hook batch": seen.hook_batch,
                    "forgotten": seen.wrapped,
                    "gloo group": seen.form == "gloo"
                    and not (finding.entries[0].group.told and max(outcome.calls) in seen.dumped),
                    "same name": any(
                        seen.blurred(call) for calls in seen.open.values() for call in calls
                    ),
                },
            )


def _check_mismatch(outcome, finding, text, result, unless):
    if finding.entries[0].p2p:
        pairs = [{send.rank, recv.rank} for send, recv in outcome.misfits()]
        if set(finding.culprits) in pairs:
            result.named += 1
        else:
            result.is_wrong(f"{text}: no such message", unless=unless)
        return
    ranks = {entry.rank for entry in finding.entries}
    seq = finding.entries[0].seq
    for place in outcome.mismatches():
        calls = {rank: call for rank, call in place.items() if rank in ranks}
        if calls.keys() != ranks or next(iter(calls.values())).number != seq:
            continue
        counts = Counter(call.signature for call in calls.values())
        most, count = counts.most_common(1)[0]
        odd = {rank for rank, call in calls.items() if call.signature != most}
        if set(finding.culprits) == (odd if count > len(calls) / 2 else ranks):
            result.named += 1
            return
    result.is_wrong(f"{text}: no such collective", unless=unless)


def _check_told(outcome, seen, verdict, result):
    told = {}
    for finding in verdict.findings:
        told.setdefault(finding.kind, set()).update(finding.culprits)
    accused = told.get("missing", set()) | told.get("message", set())
    unknown = told.get("unknown", set())
    missed = {}  # {rank: the calls of ranks with a dump that await this rank}
    for rank in seen.dumped:
        for call in outcome.open(rank):
            for other in outcome.awaited(call):
                missed.setdefault(other, []).append(call)
    for rank in outcome.culprits() - accused - unknown:
        calls = [call for call in missed.get(rank, []) if seen.shows(call)]
        result.is_silent(
            f"{rank} is not told",
            unless={
                "unseen": rank not in missed,
                "in flight": bool(seen.open.get(rank)),
                "gloo message": not calls,
                "gloo group": all(seen.unknowable_group(rank, call) for call in calls),
                "hook batch": seen.hook_batch,
                "forgotten": seen.wrapped,
                "same name": all(map(seen.blurred, calls)),
            },
        )
    for circle in outcome.circles():
        told_it = any(f.kind == "order" and set(f.culprits) <= circle for f in verdict.findings)
        if told_it:
            continue
        members = [call for rank in circle for call in outcome.open(rank)]
        mixed = any(set(place) & circle for place in outcome.mismatches())
        mixed |= any({c.rank for c in pair} & circle for pair in outcome.misfits())
        if mixed:
            continue  # the verdict names the mismatch instead
        result.is_silent(
            f"the circle {circle} is not told",
            unless={
                "unseen": not circle <= seen.dumped,
                "in flight": not all(map(seen.one_wait, circle)),
                "gloo message": seen.form == "gloo" and any(c.is_message for c in members),
                "gloo group": any(
                    seen.unknowable_group(rank, call)
                    for call in members
                    for rank in outcome.awaited(call)
                ),
                "hook batch": seen.hook_batch,
                "forgotten": seen.wrapped,
                "same name": any(map(seen.blurred, members)),
            },
        )
    groups = set()
    for place in sorted(
        outcome.mismatches(), key=lambda place: min(c.number for c in place.values())
    ):
        calls = [call for rank, call in place.items() if rank in seen.dumped]
        group = next(iter(place.values())).group
        if group in groups or len({call.signature for call in calls}) < 2:
            continue
        groups.add(group)
        if not any(
            finding.kind == "mismatch"
            and not finding.entries[0].p2p
            and finding.entries[0].seq == calls[0].number
            and {entry.rank for entry in finding.entries} == {call.rank for call in calls}
            for finding in verdict.findings
        ):
            result.is_silent(
                f"the mismatch of {[call.rank for call in calls]} is not told",
                unless={"same name": seen.blurred(calls[0])},
            )


def _check_order(outcome, seen, verdict, result):
    """Complains, for ``ours``, unless findings that hold up more ranks come first."""
    waits = outcome.waits()
    held = []
    for finding in verdict.findings:
        if finding.kind in ("fine", "unfinished"):
            continue
        roots = set(finding.culprits)
        if finding.kind == "mismatch":
            roots = {entry.rank for entry in finding.entries if not entry.finished}
        held_up = {
            rank
            for rank in waits.keys() & seen.dumped
            if roots & ({rank} | reached_from(waits, rank))
        }
        held.append(len(held_up | (roots if finding.kind == "mismatch" else set())))
    if held != sorted(held, reverse=True) and seen.form == "ours":
        result.complaints.append(f"not the one that explains most first: {held}")
