"""Chooses the calls that a run has of a test with parameters: a quick run, or one of several runs.

The marker ``product`` is for parameters that do not depend on each other. One operation with every
type, and every operation with one type, show nearly all that the product of both shows. So a few
calls are quick, in which each value of each parameter occurs, and the others are marked ``slow``.

The marker ``rotation`` is for tests that take seconds with each value, such as those that wait for
a deadline over each backend. A quick run calls such a test with one value, and the next such test
of the file with the next value.

CI runs the same tests on several torches, one of which has all calls. The others take turns
(``--turn 2/4``): each has at least one call of each test, and together they have every call.

Also chooses the order, for a run that several processes share.
"""

import collections
import itertools

import pytest

LONG = 300  # seconds


def mark_slow(items):
    """Marks the calls of tests with ``product`` or ``rotation`` that a quick run leaves out."""
    turns = collections.Counter()
    for calls in calls_of_each("rotation", items):
        turn = turns[calls[0].path] = turns[calls[0].path] + 1
        for item in calls[: turn % len(calls)] + calls[turn % len(calls) + 1 :]:
            item.add_marker(pytest.mark.slow)
    for product in calls_of_each("product", items):
        values = [
            {(name, repr(value)) for name, value in item.callspec.params.items()}
            for item in product
        ]
        quick = covering(values)
        for number, item in enumerate(product):
            if number not in quick:
                item.add_marker(pytest.mark.slow)


def of_turn(items, turn, turns):
    """Returns what the `turn`-th of several runs has of the tests: from 1 to `turns`."""
    chosen = set()
    for number, calls in enumerate(calls_of_each(None, items)):
        # Each test begins with another call, or one run would have all first values.
        first = (turn + number) % min(turns, len(calls))
        chosen.update(item.nodeid for item in calls[first::turns])
    return [item for item in items if item.nodeid in chosen]


def long_ones_first(items, limit_of, processes):
    """Returns the tests in an order in which no process is left alone with a long one.

    pytest-xdist gives each process a part of the list, and later moves tests from the ends of parts
    to processes that have none left. So each part begins with its share of the tests with long
    limits, the longest first.
    """
    if processes == 1:
        return items
    long = [item for item in items if limit_of(item) >= LONG]
    long.sort(key=limit_of, reverse=True)
    rest = [item for item in items if item not in set(long)]
    order = []
    for number in range(processes):
        size = (len(items) - len(order)) // (processes - number)
        part = long[number::processes]
        share = max(size - len(part), 0)
        order += part + rest[:share]
        rest = rest[share:]
    return order + rest


def calls_of_each(marker, items):
    """Returns a list of calls for each test; with a marker, of tests with it and parameters."""
    calls = collections.defaultdict(list)
    for item in items:
        if marker is None or (item.get_closest_marker(marker) and hasattr(item, "callspec")):
            calls[item.nodeid.partition("[")[0]].append(item)
    return list(calls.values())


def covering(sets):
    """Returns the indices of a few sets that together have each member of all sets.

    Chooses next the set with the most new members; among equals the set whose members were chosen
    least often, and then whose pairs were. So the values of short parameters alternate in changing
    combinations while the longest parameter advances.
    """
    come, pairs, chosen = collections.Counter(), collections.Counter(), set()

    def gain(number):
        members = sets[number]
        new = sum(member not in come for member in members)
        together = sum(pairs[pair] for pair in itertools.permutations(members, 2))
        return -new, sum(come[member] ** 2 for member in members), together

    while set().union(*sets) - come.keys():
        best = min(range(len(sets)), key=gain)
        chosen.add(best)
        come.update(sets[best])
        pairs.update(itertools.permutations(sets[best], 2))
    return chosen
