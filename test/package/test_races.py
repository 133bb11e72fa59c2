"""Each branch that only a race reaches has a mark, and a native test that passes it."""

import re

from harness import ROOT

MARKS = re.compile(r"^  (\w+),\s+// ", re.MULTILINE)


def test_each_mark_of_a_race_has_its_branch_and_its_native_test():
    marks = MARKS.findall((ROOT / "csrc/base/Races.hpp").read_text())
    assert len(marks) >= 7
    code = "".join(path.read_text() for path in (ROOT / "csrc").rglob("*.cpp"))
    tests = "".join(path.read_text() for path in (ROOT / "test/native").glob("*.cpp"))
    for mark in marks:
        assert code.count(f"races::mark(races::Race::{mark});") == 1, mark
        assert re.search(rf"CHECK_PASSED\({mark}\)|passed\([\w:]*Race::{mark}\)", tests), mark
