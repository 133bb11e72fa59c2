"""Tests that test_ranks.py has pytest run: breakpoint() gives a rank the terminal."""

import pytest

stopped = []  # by the tests that have run in this process


@pytest.mark.ranks(2, timeout=1)
def test_stops_twice():
    for value in (10, 20):
        breakpoint()
        print("went on after", value)
    stopped.append(value)


@pytest.mark.ranks(2)
def test_after_one_that_stops_has_new_processes():
    assert not stopped
