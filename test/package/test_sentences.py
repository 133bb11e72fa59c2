"""The check of tools/lint for phrases in comments that make a reader read twice."""

import subprocess
import sys

import pytest

from harness import ROOT

PHRASES = [
    "Null: none is left.",
    "Returns the peer. None: it left.",
    "`peer`: empty: no messages",
    "All ranks have come.",
    "It has not come.",
    "There are none.",
    "Waits have paid of late.",
    "Counts those of the group.",
    "Fails where it is late.",
    "Runs on a thread of its own.",
]


def check(*paths):
    return subprocess.run(
        [sys.executable, ROOT / "tools/_sentences.py", *paths],
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture
def found(tmp_path):
    def of(name, text):
        file = tmp_path / name
        file.write_text(text)
        done = check(tmp_path)
        assert done.stderr == ""
        lines = [line.removeprefix(f"{file}:") for line in done.stdout.splitlines()]
        assert done.returncode == bool(lines)
        return lines

    return of


@pytest.mark.parametrize("kind", ["C++", "Python"])
def test_each_phrase_is_found_on_its_line_and_once(found, kind):
    mark, name = ("//", "a.hpp") if kind == "C++" else ("#", "a.py")
    lines = found(name, "".join(f"{mark} {phrase}\n\n" for phrase in PHRASES))
    assert [int(line.split(":")[0]) for line in lines] == list(range(1, 2 * len(PHRASES), 2))
    assert all(": write " in line for line in lines)


def test_a_phrase_is_found_in_a_docstring_and_behind_code(found):
    text = 'def wait():\n    """Waits.\n\n    Fails where there is no time.\n    """\n'
    text += "    x = 1  # of late\n"
    assert {line.split(": write")[0] for line in found("a.py", text)} == {
        "4: 'where there'",
        "6: 'of late'",
    }
    assert found("b.cpp", "int x = 1'000;  // of late\n")[-1].endswith("present tense")


def test_a_phrase_that_two_lines_share_is_found_on_the_first(found):
    (line,) = found("a.cpp", "int x;  // unrelated\n// Ends if there\n//   is none.\n")
    assert line.startswith("2: 'there is none'")


def test_code_and_its_texts_are_no_comments(found):
    assert not found("a.cpp", 'const char* url = "tcp://of late"; char quote = \'"\';\n')
    assert not found("a.py", 'def of(x):\n    """Example:\n        >>> of(None: 1)\n    """\n')
    assert not found("b.py", 'text = "# there is none"\n')


def test_plain_sentences_pass(found):
    assert not found(
        "a.hpp",
        "// Returns null if no peer has arrived. Copies the input to where it is reduced from.\n"
        "// Returns true: every library can. Is that often the case?\n",
    )
