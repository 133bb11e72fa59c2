"""What a quick run has of a test with many parameters, whose full product the others run.

The marker ``product`` says that the values of a test's parameters do not depend on each other: that
one operation works with every type, and every operation with one type, shows nearly all that
their product shows. So a few calls are quick, in which each value of each parameter comes, and the
rest is marked ``slow``.

The marker ``rotation`` is for tests that take seconds with each value, such as those that wait for
a deadline over each backend: a quick run has one call of each, and the next test of the file
another one.
"""

import collections
import itertools

import pytest


def mark_slow(items):
    """Marks of each test with ``product`` or ``rotation`` what a quick run leaves out."""
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


def calls_of_each(marker, items):
    """The calls of each test that has the marker and parameters, as lists."""
    calls = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker(marker) and hasattr(item, "callspec"):
            calls[item.nodeid.partition("[")[0]].append(item)
    return list(calls.values())


def covering(sets):
    """The numbers of sets that together have each member of all.

    Each next one is that with the most new members, of those the one whose others have come least,
    and of those the one whose pairs have: so the parameters with few values go round, each by
    itself, while the one with the most goes on.
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
