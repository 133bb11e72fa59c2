"""The process that imports torch once and forks the ranks, so that a rank starts in milliseconds.

The process has one thread and makes no group, so a forked rank is like any new process. It answers
one request at a time: it forks a process that calls a function, or says how such a process ended.
The forked process may itself go on as a zygote (`serve`), with more imported.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import pickle
import signal
import socket
import time
import traceback
from collections.abc import MutableMapping, Sequence
from typing import Any

import torch

_ANSWER = 1 << 16  # bytes that a request or an answer has at most
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent() -> None:
    """Has the kernel kill this process when its parent ends, for whatever reason."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def ask_no_name_server(environment: MutableMapping[str, str]) -> None:
    """Has processes of this environment look up no name in the network, unless it says how.

    torch's store looks up the name of every host that connects, and serves no rank meanwhile. A
    name server that loses the query holds the store, or a rank, up for five seconds.

    Args:
        environment: is changed.
    """
    environment.setdefault("RES_OPTIONS", "attempts:0")


def main(control: int, modules: Sequence[str]) -> None:
    """Imports modules, then serves requests until the other end of a socket is closed.

    Args:
        control: descriptor of the socket.
        modules: names of what to import before the first fork.
    """
    die_with_parent()
    for name in modules:
        importlib.import_module(name)
    torch.set_num_threads(1)
    serve(socket.socket(fileno=control), ("ready", _age()))


def serve(control: socket.socket, answer: object) -> None:
    """Answers requests, and ends this process once the other end of the socket is closed.

    Args:
        control: a socket of the type SOCK_SEQPACKET.
        answer: sent first.
    """
    # Forked processes then neither collect nor copy the imports' objects: 0.2 s of CPU time each.
    gc.collect()
    gc.freeze()
    while True:
        control.send(pickle.dumps(answer)[:_ANSWER])
        message, fds, _, _ = socket.recv_fds(control, _ANSWER, 4)
        if not message:
            os._exit(0)  # a regular exit cleans up after all imports, which takes seconds
        request = pickle.loads(message)
        if request[0] == "fork":
            answer = _fork(control, fds, *request[1:])
        else:  # ("reap", pid): the exit code, None while the process lives; the code frees the pid
            pid, status = os.waitpid(request[1], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None


def _fork(control: socket.socket, fds: list[int], function: str, args: tuple[Any, ...]) -> int:
    assert threads() == 1, "a process that forks ranks must not have threads"
    pid = os.fork()
    if pid == 0:
        control.close()
        try:
            die_with_parent()
            module, _, name = function.partition(":")
            getattr(importlib.import_module(module), name)(*fds, *args)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(99)
    for inherited in fds:
        os.close(inherited)
    return pid


def threads() -> int:
    """Returns the number of threads of this process, also of those that Python does not know."""
    return len(os.listdir("/proc/self/task"))


def _age() -> float:
    """Returns how many seconds ago this process began."""
    with open("/proc/self/stat") as file:
        begun = int(file.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - begun


def keep_store(control: int) -> None:
    """Serves a TCPStore of this host until the other end of a socket is closed; sends its port.

    The store outlives every rank, so that the others can agree on a verdict when one dies.
    """
    import torch.distributed as dist

    connection = socket.socket(fileno=control)
    # The store warns of each rank whose name it cannot look up: see `Zygote`.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    connection.send(str(store.port).encode())
    connection.recv(1)
    os._exit(0)
