"""Scores analysers by scenes: how often each names the ranks at fault, no rank, or another rank.

python -m harness.scene_scores [SCENES]     prints the rows of the table in docs/failures.md
"""

import argparse
import copy
import logging
import random
import signal
import sys
from collections import Counter

from torch.distributed.flight_recorder.components.builder import build_db

from harness import scene_dumps, scenes
from torchcomms_pg.trace.analysis import Analysis
from torchcomms_pg.trace.dumps import Dumps, parse


def truth(outcome):
    """Returns the ranks at fault: culprits, ranks that block each other or whose calls differ."""
    ranks = set(outcome.culprits())
    ranks.update(*outcome.knots())
    for place in outcome.mismatches():
        ranks |= place.keys()
    for send, receive in outcome.misfits():
        ranks |= {send.rank, receive.rank}
    return ranks


def by_viewer(contents):
    """Returns (the ranks accused, all ranks named) by this project's analysis."""
    dumps = Dumps(parse(content, rank) for rank, content in contents.items())
    findings = Analysis(dumps).verdict().findings
    accused = [each.culprits for each in findings if each.kind != "unknown"]
    return set().union(*accused), set().union(*(each.culprits for each in findings))


def by_torchfrtrace(contents):
    """Returns both sets by torch's analyser, which accuses every rank that it names."""
    details = {
        f"trace_{rank}": {"host_name": "", "rank": rank, **copy.deepcopy(content)}
        for rank, content in contents.items()
    }
    options = argparse.Namespace(
        verbose=False, just_print_entries=False, allow_incomplete_ranks=True, mismatch_cap=10
    )
    signal.alarm(5)
    try:
        database = build_db(details, options, "2.10")
    finally:
        signal.alarm(0)
    named = set()
    for collective in database.collectives:
        named |= set(collective.missing_ranks or ()) | set(collective.mismatch_collectives or ())
    return named, named


def score(analyser, outcome, contents):
    wanted = truth(outcome)
    try:
        accused, named = analyser(contents)
    except Exception:  # after any exception the user has no answer
        return "fails"
    if accused - wanted:
        return "wrong"
    return "right" if named <= wanted and (named or not wanted) else "silent"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("scenes", type=int, nargs="?", default=1000)
    count = parser.parse_args().scenes
    logging.disable()
    print("| dumps of | analyser | right | silent | wrong | fails |")
    print("|---|---|---|---|---|---|")
    for form in scene_dumps.FORMS:
        scores = {by_viewer: Counter(), by_torchfrtrace: Counter()}
        for seed in range(count):
            outcome = scenes.Outcome(scenes.make(seed, unique_names=form == "gloo"))
            if random.Random(seed).random() < 0.1:
                scenes.under_way(outcome, random.Random(seed))
            contents = scene_dumps.write(outcome, form, seed)
            for analyser, found in scores.items():
                if contents:
                    found[score(analyser, outcome, contents)] += 1
        for analyser, found in scores.items():
            total = sum(found.values())
            cells = [
                f"{100 * found[key] / total:.1f}%" for key in ("right", "silent", "wrong", "fails")
            ]
            print(f"| {form} | {analyser.__name__[3:]} | {' | '.join(cells)} |")


if __name__ == "__main__":
    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(TimeoutError()))
    sys.exit(main())
