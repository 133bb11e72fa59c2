"""Finds phrases in comments and docstrings that make a reader read a sentence twice.

``_sentences.py [PATH...]``: reads these files, or the files of these folders; by default csrc and
torchcomms_pg. Prints each place with what to write instead, and exits with 1 if it finds one.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# What to write, and the pattern of the phrase that it replaces.
HABITS = {
    "a sentence, such as `null if ...`": r"(?:^|[.;:,] |\()(?:null|none|false|true|empty): ",
    "`arrived`, `joined` or `been received`": r"\b(?:has|have|had) (?:not )?come\b",
    "`if no ... exists`": r"\bthere (?:is|are|was|were) none\b",
    "`recently`, or the present tense": r"\bof late\b",
    "the noun once more, or a possessive": r"\b(?:that|those) of\b",
    "`if`": r"(?<!to )(?<!from )(?<!by )\bwhere (?:there|it|they|this|that|none|nothing)\b",
    "`own`, `separate` or `dedicated`": r"\bof (?:its|their) own\b",
}
PHRASE = re.compile("|".join(f"({phrase})" for phrase in HABITS.values()), re.IGNORECASE)
# Matches a string or a character of C++, in which two slashes are no comment, or a comment.
CPP = re.compile(r'"(?:\\.|[^"\\])*"|' + r"(?<!\w)'(?:\\.|[^'\\])+'|//(.*)")
Lines = list[tuple[int, str]]


def commented(path: Path, text: str) -> Iterator[tuple[int, str]]:
    """Yields the number of each line that has a comment, with the comment."""
    if path.suffix == ".py":
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string[1:]
        return
    for number, line in enumerate(text.splitlines(), 1):
        for match in CPP.finditer(line):
            if match[1] is not None:
                yield number, match[1]


def blocks(path: Path) -> Iterator[Lines]:
    """Yields the numbered lines of each docstring and comment; lines below each other are one."""
    text = path.read_text()
    lines = text.splitlines()
    block: Lines = []
    above = False
    for number, comment in commented(path, text):
        alone = lines[number - 1].lstrip().startswith(("#", "//"))
        if block and not (alone and above and number == block[-1][0] + 1):
            yield block
            block = []
        block.append((number, comment.strip()))
        above = alone
    yield block
    for node in ast.walk(ast.parse(text)) if path.suffix == ".py" else ():
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        if isinstance(node, kinds) and ast.get_docstring(node) is not None:
            first, last = node.body[0].lineno, node.body[0].end_lineno or 0
            rows = ((number, lines[number - 1].strip()) for number in range(first, last + 1))
            yield [(number, row.strip('"')) for number, row in rows if not row.startswith(">>>")]


def findings(path: Path) -> Iterator[str]:
    """Yields what is found in the file, a line for each place."""
    for block in blocks(path):
        text = ""
        starts = []
        for number, line in block:
            starts.append((len(text), number))
            text += line + " "
        for match in PHRASE.finditer(text):
            begin = match.end() - len(match[0].lstrip(".;:,( "))
            number = max(number for start, number in starts if start <= begin)
            wanted = list(HABITS)[(match.lastindex or 1) - 1]
            yield f"{path}:{number}: '{text[begin : match.end()].strip()}': write {wanted}"


def main() -> None:
    """Prints what is found in the files that the command names."""
    given = [Path(name) for name in sys.argv[1:]] or [ROOT / "csrc", ROOT / "torchcomms_pg"]
    files = [file for path in given for file in ([path] if path.is_file() else path.rglob("*"))]
    wanted = [file for file in sorted(files) if file.suffix in (".cpp", ".hpp", ".inl", ".py")]
    found = [line for file in wanted for line in findings(file)]
    print("\n".join(found), end="\n" if found else "")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
