"""What runs in a rank: functions that the test names, each in a fresh group, leaving no traces."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import logging
import multiprocessing.spawn
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

import torchcomms_pg  # noqa: F401  # registers the backend
from torchcomms_pg.testing.zygote import ask_no_name_server

# What a rank finds in the environment besides the variables of torchrun.
_ALWAYS = {
    # A failure on an accelerator raises, so that a test can see it, and does not end the rank.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
}

_SIGNALS = tuple(signal.valid_signals())

# Seconds that ranks wait for each other at least to make a group: a busy machine starts some late.
_JOINING = 30.0


def _set_deterministic(mode: int) -> None:
    """Sets torch's deterministic mode, as a number of `torch.get_deterministic_debug_mode`."""
    # torch.set_deterministic_debug_mode leaves Inductor's mode as it is.
    torch.use_deterministic_algorithms(mode > 0, warn_only=mode == 1)


# Functions that read and write what a test may change in torch and in Python.
_STATES: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_default_device, torch.set_default_device),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (torch.get_deterministic_debug_mode, _set_deterministic),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (gc.isenabled, lambda enabled: gc.enable() if enabled else gc.disable()),
    (lambda: logging.root.manager.disable, logging.disable),
)


@dataclass(frozen=True)
class Setting:
    """What a rank is told before a test.

    Attributes:
        world: number of ranks.
        port: of the store that the ranks meet in.
        number: of the test; no other test of this store has it.
        backend: name of the default group's backend, or None if the test makes its own groups.
        timeout: of the default group, in seconds.
        devices: the number of GPUs; a rank gets the device rank % devices. 0 if no GPU is used.
        fresh_group: whether the default group is made for this test; else it is the earlier tests'
            of the same backend and timeout, if there is one.
        rank: of this process.
    """

    world: int
    port: int
    number: int
    backend: str | None = "torchcomms"
    timeout: float = 5.0
    devices: int = 0
    fresh_group: bool = True
    rank: int = 0

    @property
    def environment(self) -> dict[str, str]:
        """The variables that torchrun would set; they lead to the store."""
        rank, world = str(self.rank), str(self.world)
        return {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": world,
            "LOCAL_WORLD_SIZE": world,
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            # torch puts it in front of the keys of the groups that a test makes from the variables.
            "TORCHELASTIC_RESTART_COUNT": str(self.number),
        }

    def of_rank(self, rank: int) -> Setting:
        """Returns the same for another rank."""
        return replace(self, rank=rank)


# The default group that tests without a fresh one share, with its backend and timeout.
_kept: tuple[str, float, Any] | None = None


class Fresh:
    """A group and fresh seeds for one test, and what the test must leave as it was."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._environment = dict(os.environ)
        self._folder = os.getcwd()
        self._path = list(sys.path)
        self._threads = set(threading.enumerate())
        self._states = [read() for read, _ in _STATES]
        self._signals = {number: signal.getsignal(number) for number in _SIGNALS}
        random.seed(0)
        _seed_torch()
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(0)
        os.environ.update(_ALWAYS, **setting.environment)

    def make_group(self) -> None:
        """Makes the default group, unless the setting has no backend or a kept group serves."""
        global _kept
        setting = self.setting
        if setting.devices:
            torch.cuda.set_device(setting.rank % setting.devices)
        keep = not setting.fresh_group and setting.backend is not None
        if _kept is not None:
            if keep and _kept[:2] == (setting.backend, setting.timeout):
                return
            _kept = None
            dist.destroy_process_group()
        if setting.backend is None:
            return
        dist.set_debug_level_from_env()
        dist.init_process_group(
            setting.backend,
            store=self.store(),
            rank=setting.rank,
            world_size=setting.world,
            timeout=timedelta(seconds=max(setting.timeout, _JOINING)),
        )
        group = dist.group.WORLD
        assert group is not None
        group.set_timeout(timedelta(seconds=setting.timeout))
        if keep:
            _kept = setting.backend, setting.timeout, group

    def store(self) -> dist.Store:
        """Returns a client of the store; its keys are this test's."""
        store = dist.TCPStore(
            "127.0.0.1",
            self.setting.port,
            is_master=False,
            timeout=timedelta(seconds=max(self.setting.timeout, _JOINING)),
        )
        return dist.PrefixStore(f"test{self.setting.number}", store)

    def end(self) -> list[str]:
        """Ends all groups but a kept one, and undoes what the test has changed.

        Returns:
            What could not be undone in this process, each as a sentence about the test.
        """
        left = []
        try:
            if _kept is None:
                if dist.is_initialized():
                    dist.destroy_process_group()
            elif not dist.is_initialized() or dist.group.WORLD is not _kept[2]:
                left.append("it ended the group that other tests share; give it fresh_group=True")
            else:
                _end_other_groups(_kept[2])
        except Exception as error:
            left.append(f"its groups could not be ended: {error}")
        for name in os.environ.keys() - self._environment.keys():
            del os.environ[name]
        for name, value in self._environment.items():
            if os.environ.get(name) != value:
                os.environ[name] = value
        os.chdir(self._folder)
        sys.path[:] = self._path
        for (read, write), value in zip(_STATES, self._states, strict=True):
            if read() != value:
                write(value)
        for number, handler in self._signals.items():
            if signal.getsignal(number) is handler:
                continue
            if handler is None:
                name = getattr(number, "name", f"{number}")
                left.append(f"it replaced the handler of signal {name}")
            else:
                signal.signal(number, handler)
        for thread in self._left_threads():
            left.append(f"it left the thread {thread.name!r} running; end and join it in the test")
        return left

    def _left_threads(self) -> list[threading.Thread]:
        deadline = time.monotonic() + 0.2  # a thread that is just ending is not left
        while True:
            left = [
                thread
                for thread in threading.enumerate()
                if thread not in self._threads and not isinstance(thread, threading._DummyThread)
            ]
            if not left or time.monotonic() > deadline:
                return left
            left[0].join(0.02)


_seeded = False


def _seed_torch() -> None:
    """Seeds all of torch's generators with 0."""
    global _seeded
    # torch.manual_seed keeps a call, with its stack, for each device that is not initialized.
    if not _seeded or any(
        device.is_initialized() for device in (torch.cuda, torch.xpu, torch.mtia)
    ):
        torch.manual_seed(0)
        _seeded = True
    else:
        torch.default_generator.manual_seed(0)


def _end_other_groups(kept: Any) -> None:
    """Ends all groups of this process but one, the newest first, as torch ends all."""
    names = dist.distributed_c10d._world.pg_names
    for group in sorted(names, key=names.__getitem__, reverse=True):
        if group is not kept:
            dist.destroy_process_group(group)


_connection: Connection[Any, Any]  # this rank's connection to the test


def report(value: object) -> None:
    """Called in a rank: sends a value to the test while the function is still running."""
    _connection.send_bytes(pickle.dumps(("report", value)))


def receive() -> Any:
    """Called in a rank: waits for the value that the test sends with `Calls.tell`; returns it."""
    return pickle.loads(_connection.recv_bytes())


def take_outputs(stacks: int, output: int) -> None:
    """Writes stdout and stderr to a descriptor, and stacks of all threads on SIGUSR1 to another.

    Args:
        stacks: the descriptor for stacks.
        output: the descriptor for output.
    """
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    faulthandler.enable(file=stacks)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)


def make_thread_pool() -> None:
    """Makes torch's pool of threads, at the start of a forked process.

    torch makes it anew at the first use, and no lock guards that: two first uses at once, such as
    by autograd's thread and by the main one, end the process.
    """
    torch.set_num_threads(torch.get_num_threads())


def process(
    connection: int,
    stacks: int,
    output: int,
    rank: int,
    env: dict[str, str],
    delete_env: tuple[str, ...] = (),
) -> None:
    """Is the main function of a rank that serves calls.

    Args:
        connection: descriptor of the connection to the test.
        stacks: descriptor for stacks.
        output: descriptor for stdout and stderr.
        rank: the rank.
        env: environment variables to set.
        delete_env: environment variables to delete.
    """
    take_outputs(stacks, output)
    make_thread_pool()
    os.environ.update(env, RANK=str(rank))
    for name in delete_env:
        os.environ.pop(name, None)
    dist.set_debug_level_from_env()
    if serve(Connection(connection)):
        with contextlib.suppress(Exception):
            if dist.is_initialized():
                dist.destroy_process_group()
    os._exit(0)


def process_of(
    connection: int,
    stacks: int,
    output: int,
    rank: int,
    env: dict[str, str],
    folder: str,
    path: list[str],
) -> None:
    """Does the same as `process` in the folder, and with the modules, of the process that tests.

    Args:
        connection: descriptor of the connection to the test.
        stacks: descriptor for stacks.
        output: descriptor for stdout and stderr.
        rank: the rank.
        env: all environment variables.
        folder: the current one.
        path: where Python looks for modules.
    """
    os.chdir(folder)
    sys.path[:] = path
    os.environ.clear()
    ask_no_name_server(env)
    process(connection, stacks, output, rank, env)


def serve(connection: Connection[Any, Any]) -> bool:
    """Runs the functions that the test names: the whole work of a rank.

    Args:
        connection: to the test.

    Returns:
        True when the test tells the rank to end, False if the test is gone.
    """
    global _connection
    _connection = connection
    while True:
        try:
            command = pickle.loads(_connection.recv_bytes())
        except EOFError:
            return False
        if command is None:
            return True
        module, name, args, kwargs = command
        try:
            function: Any = importlib.import_module(module)
            for part in name.split("."):
                function = getattr(function, part)
            function = getattr(function, "body", function)
            answer = "ok", function(*args, **kwargs)
            packed = pickle.dumps(answer)
        except BaseException as error:
            # The type of pytest's skip, without an import of pytest.
            if type(error).__name__ == "Skipped":
                packed = pickle.dumps(("skip", str(error)))
            else:
                packed = pickle.dumps(("error", describe(error)))
        _connection.send_bytes(packed)


def describe(error: BaseException) -> str:
    """Returns the traceback of an error, with the local variables of the frame of the test."""
    text = "".join(traceback.format_exception(error))
    frame, shown = error.__traceback__, {}
    while frame is not None:
        if os.path.basename(frame.tb_frame.f_code.co_filename).startswith("test_"):
            shown = dict(frame.tb_frame.f_locals)
        frame = frame.tb_next
    lines = []
    for name, value in shown.items():
        if not isinstance(value, type(os)) and not callable(value):
            with contextlib.suppress(Exception):
                lines.append(f"    {name} = {repr(value)[:200]}")
    return text + ("  locals:\n" + "\n".join(lines) if lines else "")


def call_in_group(
    setting: Setting,
    program: str | None,
    module: str,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Called in a rank by `run_ranks`: calls a function in a fresh group.

    Args:
        setting: of the group.
        program: path of the file in which the function is, if that file is the main program.
        module: of the function.
        name: of the function.
        args: of the function.
        kwargs: of the function.
    """
    global _fresh
    _fresh = Fresh(setting.of_rank(int(os.environ["RANK"])))
    _fresh.make_group()
    if program is not None:
        # Runs the file without its `if __name__ == "__main__"`, as multiprocessing does.
        multiprocessing.spawn._fixup_main_from_path(program)  # type: ignore[attr-defined]
        module = "__mp_main__"
    function: Callable[..., Any] = importlib.import_module(module)  # type: ignore[assignment]
    for part in name.split("."):
        function = getattr(function, part)
    return function(*args, **kwargs)


_fresh: Fresh


def end_group() -> list[str]:
    """Called in a rank after `call_in_group` has returned on all ranks; see `Fresh.end`."""
    return _fresh.end()
