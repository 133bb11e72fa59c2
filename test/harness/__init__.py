"""What the tests share; test/ is in sys.path, of pytest and of every rank."""

import os
import pathlib
import subprocess
import sys
import textwrap

TESTS = pathlib.Path(__file__).resolve().parent.parent
ROOT = TESTS.parent

# Seconds for a program that a test starts: less than a test's own limit, which would not show what
# the program has printed.
PROGRAM_LIMIT = 100


def run_python(*arguments, env=os.environ, **variables):
    """Runs an interpreter with these arguments, in the root, with `variables` added to `env`.

    A program after "-c" may be indented.
    """
    return subprocess.run(
        [sys.executable, *(textwrap.dedent(str(argument)) for argument in arguments)],
        env={**env, **variables},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PROGRAM_LIMIT,
    )
