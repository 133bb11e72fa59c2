"""Makes a rank run out of threads, descriptors or memory: called in it, others go on as before."""

import contextlib
import ctypes
import functools
import os
import platform
import resource
import struct
import subprocess
import tempfile
import types

import pytest

from harness import TESTS

_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_SET_MODE_FILTER, _SECCOMP_FILTER_FLAG_TSYNC = 1, 1
_CLONE_THREAD = 0x10000
_EAGAIN, _ENOSYS = 11, 38
_NUMBERS = {"x86_64": (317, 56, 435), "aarch64": (277, 220, 435)}  # seccomp, clone, clone3


def no_more_threads():
    """Prevents this process from starting threads, as at the limit of a container.

    Installs a filter of system calls for good, since limits of a user do not hold for root.
    """
    if platform.machine() not in _NUMBERS:
        pytest.skip(f"the numbers of the system calls of {platform.machine()} are not known here")
    seccomp, clone, clone3 = _NUMBERS[platform.machine()]
    load, equal, any_bit, give = 0x20, 0x15, 0x45, 0x06
    allow, refuse = 0x7FFF0000, 0x00050000
    program = [
        (load, 0, 0, 0),  # the number of the call
        (equal, 0, 1, clone3),
        (give, 0, 0, refuse | _ENOSYS),  # glibc then calls clone, whose flags a filter can read
        (equal, 0, 3, clone),
        (load, 0, 0, 16),  # the lower half of clone's first argument, the flags
        (any_bit, 0, 1, _CLONE_THREAD),
        (give, 0, 0, refuse | _EAGAIN),
        (give, 0, 0, allow),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    described = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    flags = _SECCOMP_FILTER_FLAG_TSYNC
    if libc.syscall(seccomp, _SECCOMP_SET_MODE_FILTER, flags, described) != 0:
        pytest.skip(f"no filter of system calls: {os.strerror(ctypes.get_errno())}")


@contextlib.contextmanager
def no_more_descriptors():
    """Makes every attempt of the block to open a descriptor fail."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = []
    free = os.open("/dev/null", os.O_RDONLY)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 64, limits[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
        yield
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@functools.cache
def short_of_memory():
    """The variables to start a process with that is to have `failing_allocation`."""
    # conftest.py removes this folder.
    path = f"{tempfile.mkdtemp(dir=os.path.dirname(os.environ['TORCH_FR_DUMP_TEMP_FILE']))}/new.so"
    source = TESTS / "harness/short_memory.cpp"
    subprocess.run(["g++", "-std=c++20", "-O1", "-shared", "-fPIC", source, "-o", path], check=True)
    return {"LD_PRELOAD": path}


@contextlib.contextmanager
def failing_allocation(threads, number):
    """Makes an allocation of the library's C++ fail in the process's threads of this name.

    Gives an object whose `seen` becomes the number of such allocations.

    Args:
        threads: the begin of the threads' names.
        number: which of the block's allocations fails, from 1 on; 0: none.
    """
    library = ctypes.CDLL(None)
    library.failAllocation(threads.encode(), ctypes.c_long(number))
    allocations = types.SimpleNamespace(seen=0)
    try:
        yield allocations
    finally:
        allocations.seen = library.endFailure()
