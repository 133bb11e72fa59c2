"""What a quick run has of a test with many parameters, whose full product the others run.

The marker ``product`` says that the values of a test's parameters do not depend on each other: that
one operation works with every type, and every operation with one type, shows nearly all that their
product shows. So a diagonal through the product is quick, in which each value of each parameter
comes, and the rest is marked ``slow``.
"""

import collections

import pytest


def mark_slow(items):
    """Marks of each test with ``product`` what lies beside the diagonal."""
    products = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("product") and hasattr(item, "callspec"):
            products[item.nodeid.partition("[")[0]].append(item)
    for product in products.values():
        sizes = collections.Counter()
        for item in product:
            for name, index in item.callspec.indices.items():
                sizes[name] = max(sizes[name], index + 1)
        for item in product:
            if not on_diagonal(item.callspec.indices, sizes):
                item.add_marker(pytest.mark.slow)


def on_diagonal(indices, sizes):
    """Whether the others go round with the parameter that has the most values.

    Each of them falls behind by another number of values with every round.
    """
    (longest, _), *others = sizes.most_common()
    step = indices[longest]
    return all(
        indices[name] == (step + behind * (step // size)) % size
        for behind, (name, size) in enumerate(others)
    )
