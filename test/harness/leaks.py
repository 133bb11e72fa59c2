"""What this process holds that the library may have left behind."""

import contextlib
import os

from harness.ranks import thread_names


def descriptors():
    """What is open, by number."""
    links = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the folder's own, or it has just been closed
            links[number] = os.readlink(f"/proc/self/fd/{number}")
    return links


def library_threads():
    return [name for name in thread_names() if name.startswith("tcpg_")]


def mappings(of="memfd:torchcomms_pg"):
    """The lines of mapped files with this in their name; those of the library."""
    with open("/proc/self/maps") as file:
        return [line.strip() for line in file if of in line]
