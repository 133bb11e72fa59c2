"""Time limits that grow on a slow or busy machine.

A test's limits are right if the test has a core to itself. A slow or busy machine takes longer for
everything, by one factor. The processes that fork the ranks measure the factor when the run begins,
by the time that the import of torch has taken them.
"""

IMPORT = 5.0  # seconds that the import takes on a slow core with no other work
MOST = 10.0  # the greatest factor: beyond it a test says little

_pace = 1.0


def pace():
    """Returns the factor."""
    return _pace


def set_pace(pace):
    """Sets the factor, up to MOST; a smaller factor than the present one changes nothing."""
    global _pace
    _pace = min(max(pace, _pace), MOST)


def grown(seconds):
    """Returns the limit for this machine, from the limit for an idle machine."""
    return seconds * _pace
