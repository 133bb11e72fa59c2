"""Tests that test_ranks.py has pytest run, and interrupts while the ranks of the first wait."""

import os
import signal
import time

import pytest

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored


@pytest.mark.ranks(2, timeout=200, limit=200)
def test_waits():
    pipe = os.open(os.environ["RANKS_PIPE"], os.O_WRONLY)  # open for as long as the rank lives
    os.write(pipe, b"r")
    time.sleep(200)


@pytest.mark.ranks(2)
def test_does_not_begin():
    raise AssertionError
