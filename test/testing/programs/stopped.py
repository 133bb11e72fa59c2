"""A test that test_ranks.py has pytest run: breakpoint() gives a rank the terminal."""

import pytest


@pytest.mark.ranks(2, timeout=1)
def test_stops_twice():
    for value in (10, 20):
        breakpoint()
        assert value
