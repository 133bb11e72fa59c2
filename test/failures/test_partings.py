"""Where ranks have parted: the decision that has sent them to different operations."""

import contextlib
import itertools
import pathlib
import re
import sys

import pytest
import torch

from failures.test_watch import LIMIT, SOON
from harness import gpus, lockstep, parting_rank
from harness.ranks import Ranks, wait_for
from torchcomms_pg import _C
from torchcomms_pg.parting import branches, inquiry, positions

FOLDER = pathlib.Path(__file__).parent / "partings"
# The line, or one of several that the positions allow, of which one is the line.
MARKS = ("  # parted", "  # perhaps", "  # parted, perhaps")
# The line, also if it does not follow from the positions of a rank that waits.
TRUE = ("  # parted", "  # parted, perhaps", "  # parted, unseen")
SO_FAR = "  # parted, so far"  # as long as a rank has not come farther
PROGRAMS = sorted(FOLDER.glob("*.py"))
# lockstep.Stopped ends the threads of a program, too.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


def opaque(file):
    return not file.startswith(str(FOLDER))


def reports(group):
    stacks = _C.thread_stacks()
    told = []
    for rank, calls in enumerate(group.calls):
        operations = [
            positions.Operation("0", number, name, thread, positions.stack_of(stack))
            for number, (name, _, thread, stack, _) in enumerate(calls, 1)
        ]
        threads = {each.thread for each in operations} | {group.threads[rank]}
        now = inquiry.now_of(stacks, threads)
        now = {thread: lockstep.without_trace(stack) for thread, stack in now.items()}
        told.append(positions.Report(rank, operations, now))
    return [positions.read(positions.write(report)) for report in told]


def part(group):
    """Where the ranks parted, and its text, as a rank that waits asks."""
    told = reports(group)
    counts = [len(calls) for calls in group.calls]
    number = group.done + 1
    waiting = [rank for rank, count in enumerate(counts) if count >= number]
    missing = [rank for rank, count in enumerate(counts) if count < number]
    if not waiting:
        return None
    if missing:
        pair = (waiting[0], missing[0])
    else:
        what = [group.calls[rank][number - 1][:2] for rank in waiting]
        other = [rank for rank in waiting if what[rank] != what[0]]
        pair = (0, other[0])
    sides = [inquiry.Side(told[rank], f"rank {rank}", f"rank {rank}") for rank in pair]
    asked = inquiry.Inquiry(*sides, "0", number, lockstep.__file__.__eq__, opaque)
    stacks = _C.thread_stacks()
    values = [inquiry.answer(each, stacks, _C.variables_of) for each in asked.questions()]
    found = asked.conclude(tuple(values))
    return found and (found, found.text(lambda file, line: f"{pathlib.Path(file).name}:{line}"))


def marked(path, marks=MARKS):
    """The lines of the program with a comment that names them as right."""
    lines = path.read_text().splitlines()
    return [number for number, line in enumerate(lines, 1) if line.endswith(marks)]


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_the_ranks_parted_at_the_marked_line_or_nothing_is_said(path):
    found = lockstep.run(path, part)
    right = marked(path)
    print(found and found[1])
    if not right:
        assert found is None
        return
    assert found is not None, "nothing is said"
    assert sorted(place.line for place in found[0].places) == right, found[1]


@pytest.mark.slow
@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_wherever_a_rank_is_late_no_wrong_line_is_named(path):
    allowed = [[], marked(path)] + [[line] for line in marked(path, SO_FAR)]
    for rank in range(getattr(lockstep.load(path), "WORLD", 2)):
        for count in itertools.count(1):
            parked = lockstep.Parked(path, rank, count)
            found = lockstep.run(path, part, begin=parked.begin)
            if parked.line is None:
                break
            places = sorted(place.line for place in found[0].places) if found else []
            assert places in allowed, f"rank {rank} at line {parked.line}: {found[1]}"


LONG_AGO = """
def valid_loss(at, valid):
    if not valid:  # parted
        return
    at.all_reduce(at.ones(1))


def main(at):
    for step in range(620):
        if at.rank == 0 and step % 3 == 0:
            pass
        if step == 100 + at.rank:
            at.noted = step
        valid_loss(at, valid=not (at.rank == 1 and step == 200))
        at.all_reduce(at.ones(1))
    at.barrier()
"""


@pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.monitoring is of Python 3.12")
def test_a_branch_that_went_against_its_habit_is_named_a_thousand_operations_later(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(LONG_AGO)
    recorder = branches.Recorder(str(path).__eq__)
    assert recorder.start()
    try:

        def difference(group):
            told = []
            for calls in group.calls:
                times = [(call[-1], number) for number, call in enumerate(calls, 1)]
                told.append(branches.write(recorder.intervals(calls[0][2], times)))
            return branches.first_difference(*map(branches.read, told)), len(group.calls[0])

        found, last = lockstep.run(path, difference)
    finally:
        recorder.stop()
    assert found.number == 401 and last - found.number > 800
    code = found.branch.code
    flow = positions.Sources().flow(code)
    assert [flow.line(found.branch.place)] == marked(path)


class Counting(branches.Recorder):
    """Counts the calls of the recorder's callback."""

    events = 0

    def _noter(self, disable):
        note = super()._noter(disable)

        def counted(*args):
            self.events += 1
            return note(*args)

        return counted


LIBRARY = """
def look_up(items):
    for item in items:
        if item > 3:
            pass
"""
STEPS = """
def train(steps, items):
    for step in range(steps):
        if step % 2:
            pass
        look_up(items)
"""


@pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.monitoring is of Python 3.12")
def test_a_step_costs_an_event_for_each_of_its_branches_and_none_in_libraries():
    names = {}
    exec(compile(LIBRARY, "library.py", "exec"), names)
    exec(compile(STEPS, "program.py", "exec"), names)
    recorder = Counting("program.py".__eq__)
    assert recorder.start()
    try:
        counts = []
        for steps in (100, 200):
            before = recorder.events
            names["train"](steps, range(10))
            counts.append(recorder.events - before)
    finally:
        recorder.stop()
    # Two branches a step, and the end of the loop. Of the library's, which go another way 2,000
    # times in all, each way is reported once.
    assert 200 <= counts[0] <= 215
    assert 400 <= counts[1] <= 402


# Programs whose partings are of different kinds.
ON_RANKS = [
    "early_return",
    "data_ends_earlier",
    "finally_after_exception",
    "table_of_handlers",
    "three_ranks_one_returns",
    "parted_long_before",
    "quiet_slow_rank",
]


def parted_on_ranks(path, backend, started_with=None):
    """The places of the verdict, and the verdict, of ranks that run the program."""
    world = getattr(lockstep.load(path), "WORLD", 2)
    with Ranks(world, init=False, started_with=started_with) as ranks:
        ranks.start(
            parting_rank.run, str(path), backend, ranks.store_args(), world, [LIMIT] * world
        )
        whole = lambda: [text for text in ranks.verdicts(0) if "prints the rest" not in text]  # noqa: E731
        assert wait_for(whole, SOON), ranks.output(0)
        text = whole()[0]
        if backend == "torchcomms":
            outcome = ranks.wait(ranks=[0])[0]
            assert outcome.value is not None, outcome
            places, error = outcome.value
            assert text.partition("torchcomms_pg: ")[2] in error
            return places, text
    found = re.findall(r"(\S+\.py):(\d+) in \w+: `", text)
    return [(pathlib.Path(file).name, int(line)) for file, line in found], text


@pytest.mark.beyond_gloo
@pytest.mark.parametrize("backend", ["torchcomms", "gloo"], ids=["torchcomms", "watched"])
@pytest.mark.parametrize("program", ON_RANKS)
def test_a_verdict_of_ranks_names_the_marked_line(program, backend):
    if backend == "gloo" and torch.__version__ < "2.14":
        pytest.skip("c10d has hooks from torch 2.14 on")
    assert_the_marked_line_is_named(FOLDER / f"{program}.py", backend)


@pytest.mark.beyond_gloo
@pytest.mark.parametrize("backend", ["torchcomms", "gloo"], ids=["torchcomms", "watched"])
def test_a_module_that_one_rank_skips_is_named_though_the_hang_is_in_backward(backend):
    if backend == "gloo" and torch.__version__ < "2.14":
        pytest.skip("c10d has hooks from torch 2.14 on")
    path = FOLDER / "on_ranks" / "second_module_in_backward.py"
    assert_the_marked_line_is_named(path, backend)


def assert_the_marked_line_is_named(path, backend, started_with=None):
    right = [(path.name, line) for line in marked(path)]
    for _ in range(3):
        places, text = parted_on_ranks(path, backend, started_with)
        assert places in (right, []), text
        if places == right:
            break
    assert places == right, text  # a rank without a core is not waited for
    assert ("the ranks parted at" in text) == bool(right)


ALL_PROGRAMS = [*PROGRAMS, *sorted((FOLDER / "on_ranks").glob("*.py"))]
AT_A_TIME = 4
ATTEMPTS = 6  # a rank without a core is not waited for
# Programs of which a backend's verdict names no line, and why.
SILENT = {
    "torchcomms": {},
    "gloo": {
        "comprehension": "a rank has got its data of the other call, and has gone on",
        "set_order": "a rank has got its data of the other call, and has gone on",
        "drifted_counter": "gloo ends the process",
    },
    "nccl": {
        "second_module_in_backward": "its collectives come from autograd's thread, and the program"
        " goes on meanwhile",
    },
}


def texts_of_hangs(paths, backend, first=0):
    """Yields each program with the verdicts of its ranks; with none if it has ended.

    Rank `first` asks before the others do. What a verdict can say differs by the rank that asks,
    where one operation has ended on one rank alone, as a broadcast does on its root.
    """
    over_nccl = backend == "nccl"
    started_with = gpus.environment if over_nccl else None
    env = {"EMULATED_MISMATCHES_HANG": "1"} if over_nccl else {}
    for begin in range(0, len(paths), AT_A_TIME):
        with contextlib.ExitStack() as stack:
            hangs = []
            for path in paths[begin : begin + AT_A_TIME]:
                world = getattr(lockstep.load(path), "WORLD", 2)
                ranks = stack.enter_context(
                    Ranks(world, init=False, env=env, started_with=started_with)
                )
                args = ranks.store_args()
                limits = [LIMIT if rank == first % world else LIMIT + 1 for rank in range(world)]
                ranks.start(parting_rank.run, str(path), backend, args, world, limits)
                hangs.append((path, ranks))
            for path, ranks in hangs:
                every = range(ranks.world)
                texts = lambda: [  # noqa: E731
                    text
                    for rank in every
                    for text in ranks.verdicts(rank)
                    if "prints the rest" not in text
                ]
                ended = lambda: all(ranks.outcome(rank) for rank in every)  # noqa: E731
                named = lambda: any(map(lines_named, texts()))  # noqa: E731
                wait_for(lambda: texts() or ended(), SOON)
                wait_for(lambda: named() or ended(), LIMIT)
                yield path, texts()


def lines_named(text):
    return {int(line) for line in re.findall(r"\S+\.py:(\d+) in \w+: `", text)}


@pytest.mark.slow
@pytest.mark.beyond_gloo
@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", ["torchcomms", "gloo", "nccl"])
def test_every_program_s_line_is_named_over_a_backend_and_no_wrong_one(backend):
    if backend != "torchcomms" and torch.__version__ < "2.14":
        pytest.skip("c10d has hooks from torch 2.14 on")
    if backend == "nccl" and gpus.missing():
        pytest.skip(gpus.missing())
    left = [path for path in ALL_PROGRAMS if marked(path, TRUE + MARKS)]
    quiet = [path for path in ALL_PROGRAMS if path not in left]
    for _, texts in texts_of_hangs(quiet, backend):
        assert not any(map(lines_named, texts)), texts
    named = {}
    for attempt in range(ATTEMPTS):
        for path, texts in texts_of_hangs(left, backend, first=attempt):
            true = set(marked(path, TRUE)) or set(marked(path))
            for lines in filter(None, map(lines_named, texts)):
                assert lines & true, f"{path.stem}: {texts}"
                named[path.stem] = sorted(lines)
        done = {*named, *SILENT[backend]}
        left = [path for path in left if path.stem not in done and marked(path)]
    print(f"{backend}: {len(named)} are named:", named)
    assert not left
