"""The code of the process that forks the ranks, and of a rank: see ranks.py."""

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import inspect
import os
import pathlib
import pickle
import signal
import socket
import traceback
from multiprocessing.connection import Connection

from harness import limits

BACKEND = os.environ.get("TEST_BACKEND", "torchcomms")


def die_with_parent():
    """Has the kernel kill this process when its parent ends, for whatever reason."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def zygote(fd):
    die_with_parent()
    import pytest  # noqa: F401
    import torch
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.distributed.optim
    import torch.distributed.tensor.parallel

    import harness.catalogue  # noqa: F401

    if BACKEND == "torchcomms":
        import torchcomms_pg  # noqa: F401
    torch.set_num_threads(1)
    control = socket.socket(fileno=fd)
    # Ranks then neither collect nor copy the imports' objects, which saves 0.2 s of CPU time each.
    gc.collect()
    gc.freeze()
    pace = limits.measure()
    while True:
        message, fds, _, _ = socket.recv_fds(control, 1 << 16, 2)
        if not message:
            os._exit(0)  # a regular exit cleans up after all imports, which takes seconds
        request = pickle.loads(message)
        if request[0] == "ready":
            answer = pace
        elif request[0] == "fork":
            assert len(os.listdir("/proc/self/task")) == 1, "the zygote must not have threads"
            pid = os.fork()
            if pid == 0:
                control.close()
                try:
                    _rank_main(fds[0], fds[1], *request[1:])
                finally:
                    os._exit(99)
            for inherited in fds:
                os.close(inherited)
            answer = pid
        else:  # ("reap", pid): the exit code, None while the rank lives; the code frees the pid
            pid, status = os.waitpid(request[1], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        control.send(pickle.dumps(answer))


_connection = None  # this rank's connection to the test


def report(value):
    """Called in a rank: sends a value to the test while the function is still running."""
    _connection.send_bytes(pickle.dumps(("report", value)))


def receive():
    """Called in a rank: waits for the value that the test sends with `Ranks.tell`; returns it."""
    return pickle.loads(_connection.recv_bytes())


def keep_the_gil(pipe):
    """Called in a rank: keeps the GIL until a reader has read the whole content of the pipe.

    A reader that can read a byte knows that the GIL is held.
    """
    # More than a pipe holds. CDLL would release the GIL.
    libc, more = ctypes.PyDLL(None), 1 << 20
    libc.fopen.restype = ctypes.c_void_p
    file = ctypes.c_void_p(libc.fopen(os.fsencode(pipe), b"w"))
    libc.fwrite(bytes(more), 1, more, file)  # continues after a stop, which cuts write() short
    libc.fclose(file)


def _describe(error):
    text = "".join(traceback.format_exception(error))
    frames = traceback.extract_tb(error.__traceback__)
    frame, shown = error.__traceback__, {}
    while frame is not None:
        if pathlib.Path(frame.tb_frame.f_code.co_filename).name.startswith("test_"):
            shown = dict(frame.tb_frame.f_locals)
        frame = frame.tb_next
    lines = []
    for name, value in shown.items():
        if not inspect.ismodule(value) and not callable(value):
            with contextlib.suppress(Exception):
                lines.append(f"    {name} = {repr(value)[:200]}")
    return text + ("  locals:\n" + "\n".join(lines) if frames and lines else "")


def _rank_main(connection_fd, output_fd, rank, env, delete):
    die_with_parent()
    os.dup2(output_fd, 1)
    os.dup2(output_fd, 2)
    os.environ.update(env, RANK=str(rank))
    for name in delete:
        os.environ.pop(name, None)
    import torch.distributed as dist

    dist.set_debug_level_from_env()
    if serve(Connection(connection_fd)):
        with contextlib.suppress(Exception):
            if dist.is_initialized():
                dist.destroy_process_group()
    os._exit(0)


def serve(connection):
    """Runs the functions that the test names: the whole work of a rank.

    Returns True when the test tells the rank to end, False if the test is gone.
    """
    global _connection
    _connection = connection
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    import pytest

    while True:
        try:
            command = pickle.loads(_connection.recv_bytes())
        except EOFError:
            return False
        if command is None:
            return True
        module, name, args, kwargs = command
        try:
            function = getattr(importlib.import_module(module), name)
            function = getattr(function, "body", function)
            answer = ("ok", function(*args, **kwargs))
            packed = pickle.dumps(answer)
        except pytest.skip.Exception as skip:
            packed = pickle.dumps(("skip", str(skip)))
        except BaseException as error:
            packed = pickle.dumps(("error", _describe(error)))
        _connection.send_bytes(packed)
