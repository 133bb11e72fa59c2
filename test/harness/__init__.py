"""What the tests share; test/ is in sys.path, of pytest and of every rank."""

import pathlib

TESTS = pathlib.Path(__file__).resolve().parent.parent
ROOT = TESTS.parent

# Seconds for a program that a test starts: less than a test's own limit, which would not show what
# the program has printed.
PROGRAM_LIMIT = 100
