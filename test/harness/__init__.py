"""What the tests share; test/ is in sys.path, of pytest and of every rank."""

import pathlib

TESTS = pathlib.Path(__file__).resolve().parent.parent
ROOT = TESTS.parent
