"""Lists what this process holds and the library may have left behind."""

import contextlib
import os

from harness.ranks import thread_names


def descriptors():
    """Returns {number of an open descriptor: what it refers to}."""
    links = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's descriptor, or one just closed
            links[number] = os.readlink(f"/proc/self/fd/{number}")
    return links


def library_threads():
    return [name for name in thread_names() if name.startswith("tcpg_")]


def mappings(of="memfd:torchcomms_pg"):
    """Returns the lines of /proc/self/maps with this text; by default the library's memory."""
    with open("/proc/self/maps") as file:
        return [line.strip() for line in file if of in line]
