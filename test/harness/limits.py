"""Limits that grow with the machine.

What a test waits for at most is right for a machine of which it has a core. One that is slower, or
busy, takes longer for everything: as much longer as for the import of torch, by which the processes
that fork the ranks measure it when the run begins.
"""

import os
import time

IMPORT = 8.0  # seconds, on a slow core of its own
MOST = 10.0  # beyond that a test says little

_pace = 1.0


def measure():
    """Called in a process that has imported torch since it began, and has done nothing else."""
    with open("/proc/self/stat") as file:
        begun = int(file.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    set_pace((time.clock_gettime(time.CLOCK_BOOTTIME) - begun) / IMPORT)
    return _pace


def set_pace(pace):
    """How many times as long as on an idle machine all takes; less than before changes nothing."""
    global _pace
    _pace = min(max(pace, _pace), MOST)


def grown(seconds):
    """A limit that is right on an idle machine, as this one needs it."""
    return seconds * _pace
