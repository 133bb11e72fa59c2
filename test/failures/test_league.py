"""The league of those who explain hangs: it gives each its due."""

import pytest

from failures import league
from harness.entrants import Answer, Evidence, counts, py_spy, torchfrtrace, trace, verdict

TRUTH = league.Truth({1}, {1: {("train.py", 7)}}, [("train.py", 5)])
SAID = """verdict on group '0', 3 ranks: rank 1 has not arrived at all_reduce #2 (7 x Float)
  the ranks parted at src/train.py:5 in step: `if ready:`
    rank 1 returned at line 6
  rank 1: last completed all_reduce #1 in this group
      MainThread: src/train.py:7 in main
  ranks 0, 2: in all_reduce #2 (7 x Float), called at src/train.py:9 in step"""


def test_a_verdict_is_read_as_its_reader_reads_it():
    answer = verdict(Evidence(3, [SAID], {}, {}))
    assert answer.accused == answer.named == {1}
    assert answer.places == {rank: {("train.py", 7 if rank == 1 else 9)} for rank in range(3)}
    assert answer.branches == [("train.py", 5)]
    score = league.judge(answer, TRUTH, 0.5)
    assert score.rank and score.line and score.branch
    assert not score.wrong_rank and not score.wrong_branch


@pytest.mark.parametrize(
    "text, accused, named",
    [
        ("rank 1 (pid 4711) died", {1}, {1}),
        ("all_reduce #4 of group '0' on rank 2: rank 1 destroyed its communicator", {1}, {1}),
        ("verdict on group '0', 3 ranks: its ranks call different operations", set(), {0, 1, 2}),
        (
            "verdict: x\n  deadlock: rank 0 waits in a for rank 1, which waits for rank 0",
            set(),
            {0, 1},
        ),
        ("all_reduce #2 on rank 0: aborted on rank 1", {1}, {1}),
        ("ranks 0-1 (global 4, 5) have not arrived at barrier #2", {0, 1}, {0, 1}),
    ],
)
def test_whom_an_error_accuses_is_read(text, accused, named):
    answer = verdict(Evidence(3, [text], {}, {}))
    assert (answer.accused, answer.named) == (accused, named)


def test_false_blame_a_wrong_branch_and_silence_are_told_apart():
    wrong = league.judge(Answer({0}, {0}, {}, [("train.py", 8)]), TRUTH, None)
    assert not (wrong.rank or wrong.line or wrong.branch)
    assert wrong.wrong_rank and wrong.wrong_branch
    silent = league.judge(Answer(), TRUTH, None)
    assert not (silent.rank or silent.line or silent.branch)
    assert not (silent.wrong_rank or silent.wrong_branch)


def test_a_majority_of_stacks_needs_more_than_half_of_the_ranks():
    one, other = [[("train.py", 9, "step")]], [[("train.py", 7, "main")]]
    answer = py_spy(Evidence(3, [], {}, {0: one, 1: other, 2: one}))
    assert answer.accused == {1} and answer.places == {1: {("train.py", 7)}}
    assert py_spy(Evidence(2, [], {}, {0: one, 1: other})).accused == set()


@pytest.mark.timeout(120, method="thread")  # torchfrtrace's limit has the signal
def test_readers_of_dumps_are_scored_over_scenes():
    scores = [scores for _, scores in league.scene_results(3)]
    readers = {name for each in scores for name in each}
    assert readers == {
        n for n, ask in league.ENTRANTS.items() if ask in (trace, torchfrtrace, counts)
    }
    assert any(score.rank for each in scores for score in each.values())


def played(*cell):
    """Returns the scores of a hang, of three tries: a rank without a core is not waited for."""
    for _ in range(3):
        ((_, scores),) = league.play([cell])
        told = scores["verdict"]
        assert not told.wrong_rank and not told.wrong_branch
        if told.rank and told.line and told.branch in (True, None):
            break
    return cell, scores


@pytest.mark.beyond_gloo
@pytest.mark.timeout(240, method="thread")
def test_two_hangs_make_the_table(tmp_path):
    results = [
        played("parting", "early_return", "torchcomms"),
        played("fault", "never calls", "torchcomms"),
    ]
    page = tmp_path / "page.md"
    page.write_text(f"before\n{league.BEGIN}old\n{league.END}after\n")
    league.write(page, league.table(results))
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    rows = [line.split(" | ") for line in text.splitlines() if "| verdict |" in line]
    assert [row[3:8] for row in rows] == [
        ["1 of 1", "1 of 1", "1 of 1", "0", "0"],
        ["1 of 1", "1 of 1", "-", "0", "0"],
    ], text
