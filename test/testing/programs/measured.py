"""Code whose lines test_ranks.py has pytest-cov count."""


def branch(rank):
    if rank == 0:
        return "zero"
    if rank == 1:
        return "one"
    return "other"
