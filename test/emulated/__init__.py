"""An emulated CUDA for the CUDA build of torch: two GPUs whose memory is the host's.

A process that is started with `environment` has them; all else here is called inside one. What is
modelled, and what is not, is in README.md.
"""

import collections
import contextlib
import ctypes
import functools
import gc
import json
import os
import pathlib
import runpy
import sys
import types

__all__ = [
    "available",
    "build",
    "calls",
    "contexts",
    "counted",
    "environment",
    "hold_driver",
    "hold_nccl",
    "kernels_begun",
    "kernels_spinning",
    "misuses",
    "nccl_environment",
    "revocations",
    "set_delays",
    "settled",
]

HERE = pathlib.Path(__file__).resolve().parent


@functools.cache
def _build():
    return types.SimpleNamespace(**runpy.run_path(str(HERE / "build.py"), run_name="build"))


@functools.cache
def _folder():
    """Where build.py leaves what it has built for this torch."""
    tag = f"torch-{_build().about()['__version__']}-{sys.implementation.cache_tag}"
    return HERE.parents[1] / "build" / tag / "_emulated"


def available():
    """Why there is no emulated CUDA for this torch; empty if there is."""
    reason = _build().why_not()
    if not reason and not (_folder() / "operators.so").is_file():
        reason = "python test/emulated/build.py builds it"
    return reason


def build():
    """Builds what has changed."""
    _build().Build().run()


def environment():
    """The variables to start a process with that is to have the emulated GPUs."""
    folder = _folder()
    runtime = next(folder.glob("libcudart.so.*"))
    libraries = [runtime, folder / "libcuda.so.1", folder / "libnccl.so.2"]
    path = [str(folder / "autoload"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        # torch's libraries have an RPATH, which comes before LD_LIBRARY_PATH.
        "LD_PRELOAD": ":".join(map(str, libraries)),
        "PYTHONPATH": os.pathsep.join(path),
        "OMP_NUM_THREADS": "1",
    }


def nccl_environment(version):
    """The variables for the rules and functions of a version of NCCL, not that of the newest torch.

    They may be set in the process, before it uses NCCL.

    Args:
        version: "2.18", "2.24", "2.27", "2.30" or "2.32".
    """
    return {
        "EMULATED_NCCL": version,
        "TORCHCOMM_NCCL_LIBRARY": str(_folder() / f"nccl-{version}" / "libnccl.so.2"),
    }


@functools.cache
def _native():
    """What the preloaded libraries offer beyond CUDA's functions."""
    library = ctypes.CDLL(None)
    for name in ("Counts", "Contexts", "DriverWaiters", "Misuses"):
        getattr(library, f"emulated{name}").restype = ctypes.c_char_p
    library.emulatedSetDelays.argtypes = [ctypes.c_uint64, ctypes.c_double, ctypes.c_int64]
    return library


@contextlib.contextmanager
def counted():
    """Counts the calls of CUDA's runtime in the block.

    Gives a dictionary, filled at the block's end: by thread ("main", or its name) a Counter by
    function.
    """
    all = {}
    _native().emulatedCountCalls(1)
    try:
        yield all
    finally:
        all.update(calls())
        _native().emulatedCountCalls(0)


def calls():
    """What `counted` has counted so far, called in its block."""
    counts = json.loads(_native().emulatedCounts())
    return {thread: collections.Counter(all) for thread, all in counts.items()}


def contexts():
    """The devices that have a context in this process, and who made it: "thread: function"."""
    return {int(d): maker for d, maker in json.loads(_native().emulatedContexts()).items()}


def misuses():
    """What has been done since the last call that NCCL forbids or does not survive."""
    return _native().emulatedMisuses().decode().splitlines()


@contextlib.contextmanager
def hold_driver():
    """Holds the lock of the driver's context: no other thread comes back from a call meanwhile.

    Gives a function that tells who waits: a list of [thread, function].
    """
    # Garbage of CUDA's, collected in another thread that keeps the GIL, would wait for ever.
    collects = gc.isenabled()
    gc.disable()
    # ctypes lets go of the GIL in the call, and this thread alone gets through.
    _native().emulatedHoldDriver()
    try:
        yield lambda: json.loads(_native().emulatedDriverWaiters())
    finally:
        _native().emulatedReleaseDriver()
        if collects:
            gc.enable()


def set_delays(seed=0, probability=0.3, longest_us=2000):
    """Every stream waits before a kernel, with this probability, up to this long; 0 ends it."""
    _native().emulatedSetDelays(seed, probability, longest_us)


@contextlib.contextmanager
def hold_nccl(where):
    """Holds what NCCL does in the background up, until the block's end.

    Args:
        where: "launch", before it launches operations; "finalize", before a communicator is
            finalized; "end", when a thread has set the state of its communicators, and has not
            ended yet. A communicator that blocks stops at the first two, too.

    Gives a function that returns how many threads are held up.
    """
    places = ("launch", "finalize", "end")
    _native().emulatedNcclHold(*(place == where for place in places))
    try:
        yield _native().emulatedNcclHeld
    finally:
        _native().emulatedNcclHold(0, 0, 0)


def settled():
    """Whether every stream of the process is idle, or waits for another one or in `streams.hold`.

    Then nothing more runs until somebody outside queues or releases something. A stream in which a
    kernel of NCCL waits for its peers is not settled. The branches of a graph are not looked at.
    """
    return bool(_native().emulatedSettled())


def kernels_begun():
    """How many kernels of NCCL streams have come to in this process."""
    return _native().emulatedNcclCount(0)


def kernels_spinning():
    """How many kernels of NCCL wait now for a peer that has failed, and whom nobody tells."""
    return _native().emulatedNcclCount(1)


def revocations():
    """How many communicators NCCL has revoked in this process."""
    return _native().emulatedNcclCount(2)
