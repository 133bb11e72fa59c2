"""The league: who names the rank, the line and the decision at fault in hangs whose truth is known.

    tools/league [--write FILE] [--only PART OF A CELL'S NAME] [--every NTH] [--scenes COUNT]

The cells are the faults of watched_matrix.py, the programs of the folder partings on three ranks,
each over torchcomms and over the watched backends that are there, and the scenes of
harness/scenes.py, of which there are dumps alone. harness/entrants.py has the entrants.
"""

import argparse
import contextlib
import datetime
import functools
import inspect
import io
import logging
import os
import pathlib
import pickle
import platform
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from typing import NamedTuple

import torch
import torch.distributed as dist

from failures import faults, watched_matrix
from failures.test_partings import FOLDER, PROGRAMS, TRUE, marked
from harness import gpus, lockstep, parting_rank, scene_dumps, scene_scores, scenes
from harness.entrants import ENTRANTS, PY_SPY, Answer, Evidence, py_spy, stacks_of, verdict
from harness.ranks import Ranks, close_all, connect_store, wait_for
from torchcomms_pg import _C

WORLD = faults.WORLD
OTHERS = [rank for rank in range(WORLD) if rank != faults.CULPRIT]
AFTER = faults.LIMIT  # seconds of a wait after which there are verdicts
SOON = 12  # seconds until there is a verdict
DIFFERENT = {
    "another operation",
    "another size",
    "another dtype",
    "another root",
    "a root of its own",
    "another message",
    "another order of groups",
}
# The function of faults.py in which rank 1 is.
STAYS = {
    "never calls": faults.stays_away,
    "no thread to spare": faults.stays_away,
    "no descriptor to spare": faults.stays_away,
    "holds the GIL": faults.native_code,
    "SIGSTOP for a while": faults.is_stopped,
}
HEALTHY = {fault for fault, said in watched_matrix.SAID.items() if said is None}
FAULTS = [f for f in watched_matrix.SAID if f not in HEALTHY | {"store server gone"}]
DUMPS_OF = {
    "ours": "dumps of torchcomms",
    "nccl": "dumps of nccl",
    "gloo": "dumps of gloo",
    "hook": "dumps of torch's hook",
}


# A barrier of torch's nccl is an all_reduce of one element, and so meets one.
NCCLS_BARRIER = {("all_reduce", 1), ("barrier", 0)}


class NotBegunError(Exception):
    """The ranks had no core, and have not made their group in time."""


class Truth(NamedTuple):
    ranks: set[int]  # the ranks at which waits end
    places: dict[int, set[tuple[str, int]]]  # by rank, lines of which one is right; may be empty
    # One or several lines, none if the ranks have not parted; None if it is not known.
    branch: list[tuple[str, int]] | None
    calls: frozenset = frozenset()  # the different calls at which a program's ranks hang


class Score(NamedTuple):
    """What an answer is worth; None if there is nothing to be right about."""

    rank: bool
    line: bool | None
    branch: bool | None
    wrong_rank: bool
    wrong_branch: bool
    seconds: float | None


def judge(answer, truth, seconds):
    wrong = bool(answer.accused - truth.ranks)
    known = {rank for rank in answer.named & truth.ranks if truth.places.get(rank)}
    line = None
    if any(truth.places.values()):
        line = bool(known) and all(truth.places[r] & answer.places.get(r, set()) for r in known)
    said = set(answer.branches)
    found = truth.branch is not None and bool(said & set(truth.branch))
    branch = found if truth.branch else None
    wrong_branch = truth.branch is not None and bool(said) and not found
    right = bool(answer.named) and answer.named <= truth.ranks
    return Score(right and not wrong, line, branch, wrong, wrong_branch, seconds)


def backends():
    found = ["torchcomms"]
    if torch.__version__ >= "2.14":
        found += ["gloo"] if gpus.missing() else ["gloo", "nccl"]
    return found


# ---------------------------------------------------------------- hangs of processes


def truth_of_fault(fault):
    if fault in DIFFERENT:
        return Truth(set(range(WORLD)), {}, None)
    places = {}
    if function := STAYS.get(fault):
        lines, first = inspect.getsourcelines(function)
        places = {faults.CULPRIT: {("faults.py", first + i) for i in range(len(lines))}}
    return Truth({faults.CULPRIT}, places, None)


@functools.cache
def truth_of_parting(path):
    """The truth of a program by its run on threads; None if it ends."""
    return lockstep.run(path, functools.partial(_truth_at_hang, path), WORLD, _last)


def _last(at):
    at.barrier()


def _truth_at_hang(path, group):
    arrived = [len(calls) > group.done for calls in group.calls]
    next_calls = {calls[group.done][:2] for calls in group.calls if len(calls) > group.done}
    everyone = set(range(group.size))
    ranks = everyone if all(arrived) or len(next_calls) > 1 else set()
    ranks |= {rank for rank in everyone if not arrived[rank]}
    stacks = _C.thread_stacks()
    places = {}
    for rank in everyone:
        if arrived[rank]:
            stack = group.calls[rank][group.done][3]
        else:
            stack = [(code, at) for code, at, _ in stacks.get(group.threads[rank], [])]
        # A notebook's cell has a name of its own, in the program's folder.
        own = [each for each in stack if pathlib.Path(each[0].co_filename).parent == path.parent]
        if own:
            code, at = own[0]
            line = list(code.co_positions())[at // 2][0]
            places[rank] = {(pathlib.Path(code.co_filename).name, line)}
    file = pathlib.Path(getattr(lockstep.load(path), "NAME", path)).name
    true = marked(path, TRUE) or marked(path)
    return Truth(ranks, places, [(file, line) for line in true], frozenset(next_calls))


class Hang:
    """A cell of processes: begun, then asked about, so that several can be under way together."""

    def __init__(self, kind, name, backend):
        self.name, self.backend = name, backend
        self.dumps = tempfile.TemporaryDirectory(prefix="torchcomms_pg-league-")
        env = {"TORCH_FR_DUMP_TEMP_FILE": f"{self.dumps.name}/trace_"}
        if backend == "torchcomms":
            env["TORCHCOMMS_PG_VERDICT_AFTER"] = str(AFTER)
        if kind == "parting":
            env["EMULATED_MISMATCHES_HANG"] = "1"
        on_gpus = gpus.environment if backend.startswith("nccl") else None
        self.ranks = Ranks(WORLD, init=False, env=env, started_with=on_gpus)
        args = self.ranks.store_args()
        self.begins = connect_store(*args)
        if kind == "fault":
            self.truth = truth_of_fault(name)
            patience = watched_matrix.PATIENCE
            self.ranks.start(watched_matrix.run, name, backend, args, None, patience)
        else:
            path = FOLDER / f"{name}.py"
            self.truth = truth_of_parting(path)
            if backend.startswith("nccl") and self.truth.calls == NCCLS_BARRIER:
                self.truth = self.truth._replace(places={})  # the ranks go on, and hang elsewhere
            limit = 60 if backend == "torchcomms" else AFTER
            self.ranks.start(parting_rank.run, str(path), backend, args, WORLD, [limit] * WORLD)

    def scores(self):
        """{entrant: Score}; None if the backend has ended the operation by itself."""
        try:
            found, answered = self._evidence()
        finally:
            self.ranks.busy = True
            self.ranks.close()
            self.dumps.cleanup()
        if found is None:
            return None
        scores = {}
        for entrant, ask in ENTRANTS.items():
            if ask is py_spy and not PY_SPY:
                continue
            answer, seconds = asked(ask, found)
            if ask is py_spy:
                seconds = self.stacks_took
            elif ask is verdict:
                seconds = answered
            scores[entrant] = judge(answer, self.truth, seconds)
            if scores[entrant].wrong_rank or scores[entrant].wrong_branch:
                print(
                    f"{self.name}: {entrant} is wrong:", *found.verdicts, sep="\n", file=sys.stderr
                )
        return scores

    def _evidence(self):
        """The evidence, and the seconds from the deadline to the verdict."""
        try:
            self.begins.wait(["it begins"], datetime.timedelta(seconds=60))
        except dist.DistStoreError as error:
            raise NotBegunError from error
        wait_for(lambda: self._verdicts() or self._ended(), AFTER + SOON)
        told = time.time()
        folder = pathlib.Path(self.dumps.name)
        wait_for(lambda: len(list(folder.iterdir())) == WORLD or self._ended(), 1)
        begun = time.monotonic()
        stacks = stacks_of(dict(enumerate(self.ranks.pids))) if PY_SPY else {}
        self.stacks_took = time.monotonic() - begun
        verdicts = self._verdicts()
        if not verdicts:
            ended = [outcome for rank in OTHERS if (outcome := self.ranks.outcome(rank))]
            if self.backend != "torchcomms" and any(o.failed or o.value for o in ended):
                return None, None
            failed = [outcome.error for outcome in ended if outcome.error]
            assert not failed, failed[0]
            verdicts = [str(outcome.value or "") for outcome in ended]
        dumps = {}
        for rank in range(WORLD):
            with contextlib.suppress(OSError, EOFError, pickle.UnpicklingError):
                dumps[rank] = pickle.loads((folder / f"trace_{rank}").read_bytes())
        waits = [
            entry["time_created_ns"]
            for dump in dumps.values()
            for entry in dump["entries"]
            if entry["state"] != "completed" and not entry["retired"]
        ]
        seconds = max(0, told - min(waits) / 1e9 - AFTER) if waits else None
        return Evidence(WORLD, verdicts, dumps, stacks), seconds

    def _verdicts(self):
        found = [text for rank in range(WORLD) for text in self.ranks.verdicts(rank)]
        return [text for text in found if "prints the rest" not in text]

    def _ended(self):
        return all(self.ranks.outcome(rank) for rank in OTHERS)


def asked(ask, evidence):
    """(answer, seconds); an error is no answer."""
    begun = time.monotonic()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            answer = ask(evidence)
    except Exception:  # after any exception the user has no answer
        answer = Answer()
    return answer, time.monotonic() - begun


def hangs():
    """The cells of processes: (kind, name, backend)."""
    for backend in backends():
        yield from (("fault", fault, backend) for fault in FAULTS)
        for path in PROGRAMS:
            if truth_of_parting(path):
                yield "parting", path.stem, backend


def play(cells):
    """Yields each cell with its scores. One after the other, since the seconds count."""
    for cell in cells:
        for _ in range(3):
            with contextlib.suppress(NotBegunError):
                yield cell, Hang(*cell).scores()
                break


# ---------------------------------------------------------------- scenes of which there are dumps


def scene_results(count):
    """Yields ("scene", seed, form) and the scores of those who read dumps."""
    readers = {name: ask for name, ask in ENTRANTS.items() if ask not in (verdict, py_spy)}
    for form in scene_dumps.FORMS:
        for seed in range(count):
            outcome = scenes.Outcome(scenes.make(seed, unique_names=form == "gloo"))
            if random.Random(seed).random() < 0.1:
                scenes.under_way(outcome, random.Random(seed))
            contents = scene_dumps.write(outcome, form, seed)
            truth = Truth(scene_scores.truth(outcome), {}, None)
            if contents and truth.ranks:
                evidence = Evidence(outcome.scene.size, [], contents, {})
                scores = {}
                for name, ask in readers.items():
                    answer, seconds = asked(ask, evidence)
                    scores[name] = judge(answer, truth, seconds)
                yield ("scene", str(seed), DUMPS_OF[form]), scores


# ---------------------------------------------------------------- the table


def table(results):
    """The rows of the table: a row for each kind, backend and entrant."""
    rows = defaultdict(list)
    ended = defaultdict(int)
    for (kind, _, backend), scores in results:
        if scores is None:
            ended[kind, backend] += 1
            continue
        for entrant, score in scores.items():
            rows[kind, backend, entrant].append(score)
    lines = [
        "| hangs | over | who is asked | right rank | right line | right branch | false blame "
        "| wrong branch | seconds |",
        "|---" * 9 + "|",
    ]
    for (kind, backend, entrant), scores in rows.items():
        told = [f"{kind}s", backend, entrant, _share([score.rank for score in scores])]
        told += [_share([score.line for score in scores])]
        told += [_share([score.branch for score in scores])]
        told += [str(sum(score.wrong_rank for score in scores))]
        told += [str(sum(score.wrong_branch for score in scores))]
        times = [score.seconds for score in scores if score.seconds is not None]
        told += [_seconds(statistics.median(times)) if times else "-"]
        lines.append("| " + " | ".join(told) + " |")
    for (kind, backend), count in ended.items():
        lines.append(
            f"\nLeft out, as {backend} ends them by an error of its own: {kind}s, {count}."
        )
    return "\n".join(lines)


def _seconds(median):
    return f"{median:.2f}" if median >= 0.01 else "< 0.01"


def _share(rights):
    counted = [right for right in rights if right is not None]
    return f"{sum(counted)} of {len(counted)}" if counted else "-"


BEGIN, END = "<!-- tools/league --write -->\n", "<!-- end -->\n"


def write(path, text):
    """Puts the table between the two marks of a page."""
    before, begin, rest = path.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{path}: wanted the lines {BEGIN!r} and {END!r}")
    path.write_text(before + begin + text + "\n" + end + after)


def heading(every):
    cores = len(os.sched_getaffinity(0))
    return (
        f"Measured on {datetime.date.today():%d %B %Y} on {cores} cores of {platform.machine()}, "
        f"load {os.getloadavg()[2]:.0f}, "
        f"without a GPU, torch {torch.__version__.partition('+')[0]}, Python "
        f"{platform.python_version()}"
        + (f", with one of {every} faults and partings" if every > 1 else "")
        + ".\n\n"
    )


def main():
    parser = argparse.ArgumentParser(prog="tools/league")
    parser.add_argument("--only", default="", help="part of the names of the cells")
    parser.add_argument("--scenes", type=int, default=300, help="generated scenes of each recorder")
    parser.add_argument("--every", type=int, default=1, help="take every so many of the cells")
    parser.add_argument("--write", type=pathlib.Path, help="page that has the table")
    options = parser.parse_args()
    logging.disable()
    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(TimeoutError()))
    cells = [cell for cell in hangs() if options.only in " / ".join(cell)]
    cells = cells[:: options.every]
    results = []
    for cell, scores in play(cells):
        results.append((cell, scores))
        for entrant, score in (scores or {"": None}).items():
            print(f"{' / '.join(cell)}: {entrant}: {score}", file=sys.stderr, flush=True)
    if not options.only:
        results += scene_results(options.scenes)
    text = heading(options.every) + table(results)
    if options.write:
        write(options.write, text)
    else:
        print(text)


if __name__ == "__main__":
    from failures import league

    try:
        league.main()
    finally:
        close_all()
