"""The environment variables of torchcomms_pg; ``python -m torchcomms_pg.env`` lists them.

No other module of the package changes the environment. Other modules read only RANK, MASTER_PORT
and variables of Gloo, which are not listed. A variable is read when it is needed, so a change takes
effect for communicators created afterwards.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path


@dataclass(frozen=True)
class Variable:
    """One environment variable.

    Attributes:
        name: of the variable.
        default: the value if the variable is not set, in words.
        meaning: what the variable does, in one line.
        since: the first version of torchcomms_pg that reads it.
    """

    name: str
    default: str
    meaning: str
    since: str = "0.1.0"


VARIABLES = (
    Variable(
        "TORCHCOMMS_PG_AS_GLOO",
        "false",
        "whether groups of the name gloo run over torchcomms; read by import torch",
    ),
    Variable(
        "TORCHCOMMS_PG_WATCH",
        "false",
        "whether groups of other backends are watched, see watch.md; read by import torch",
    ),
    Variable(
        "TORCHCOMMS_PG_WATCH_TIMEOUT",
        "60",
        "after how many seconds of an operation the ranks of a watched group say who holds it up",
    ),
    Variable(
        "TORCHCOMMS_PG_TIMEOUT",
        "torch's, 30 minutes",
        "timeout in seconds of process groups of torchcomms that are made without one",
    ),
    Variable(
        "TORCHCOMMS_PG_VERDICT_AFTER",
        "none",
        "after how many seconds of an operation the ranks of a group of torchcomms say who holds "
        "it up, long before its timeout; nothing is aborted",
    ),
    Variable(
        "TORCHCOMMS_PG_BRANCHES",
        "false",
        "whether the program's branches are recorded, for verdicts on hangs that began long before "
        "(Python 3.12 and later), see failures.md; read by import torchcomms_pg",
    ),
    Variable(
        "TORCHCOMMS_PG_LATE_WARNING",
        "true",
        "whether a line on stderr names a rank that the others always wait for, see lateness.md",
    ),
    Variable(
        "TORCHCOMMS_PG_SIGTERM",
        "true",
        "whether SIGTERM and SIGABRT first have a process say whom it waits for, and dump, see "
        "failures.md",
    ),
    Variable(
        "TORCHCOMMS_PG_METRICS_FILE",
        "none",
        "path of a file of metrics, with {rank} or {pid} in it, see metrics.md",
    ),
    Variable(
        "TORCHCOMMS_PG_STATUS",
        "torchcomms_pg in XDG_RUNTIME_DIR, else /tmp/torchcomms_pg-<number of the user>",
        "folder with the sockets by which processes answer python -m torchcomms_pg.status, see "
        "status.md; 0: there are none",
    ),
    Variable(
        "TORCHCOMMS_PG_RAS_ADDR",
        "none",
        "127.0.0.1:PORT or [::1]:PORT, where the job answers ncclras, NCCL's client, see status.md",
    ),
    Variable("XDG_RUNTIME_DIR", "none", "folder of a user's session, where the sockets above are"),
    Variable("TORCHELASTIC_RUN_ID", "none", "name of the run in its status, set by torchrun"),
    Variable(
        "TORCHELASTIC_ERROR_FILE",
        "none",
        "file into which a failure is written for torchrun's summary, set by torchrun",
    ),
    Variable(
        "TORCH_DEVICE_BACKEND_AUTOLOAD",
        "1",
        "torch's; if it is 0, import torchcomms_pg alone reads AS_GLOO and WATCH above",
    ),
    Variable("TORCHCOMM_TIMEOUT_SECONDS", "600", "seconds that an operation of new_comm may take"),
    Variable(
        "TORCHCOMM_ABORT_ON_ERROR",
        "true for new_comm; for process groups TORCH_NCCL_ASYNC_ERROR_HANDLING decides",
        "whether a timeout or error ends the process; else it raises CommError",
    ),
    Variable(
        "TORCHCOMM_NCCL_LIBRARY",
        "torch's, else the installed package's",
        "path of the libnccl.so.2 to load for accelerators",
    ),
    Variable(
        "TORCHCOMM_NCCLX_LIBRARY",
        "none",
        "path of NCCLX's libnccl.so, for backend ncclx of new_comm",
    ),
    Variable(
        "TORCH_NCCL_RANKS_PER_ROOT",
        "128",
        "for how many ranks NCCL starts from one unique id; the same on all ranks",
    ),
    Variable(
        "TORCHCOMM_COMPILE_TIMEOUT_SECONDS",
        "1800",
        "seconds beyond its timeout that an operation waits for ranks that compile; 0: not at all",
    ),
    Variable(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "3",
        "of process groups on an accelerator, where TORCHCOMM_ABORT_ON_ERROR is not set: "
        "1, 3: a timeout or error ends the process; 0, 2: it raises CommError",
    ),
    Variable(
        "TORCH_NCCL_BLOCKING_WAIT",
        "false",
        "whether waiting for an operation of a process group on an accelerator stops the host, and "
        "raises CommError whatever the variable above says",
    ),
    Variable(
        "TORCH_NCCL_DESYNC_DEBUG",
        "true where TORCH_DISTRIBUTED_DEBUG is DETAIL",
        "whether works of a process group know how long they took, and "
        "TORCH_NCCL_ASYNC_ERROR_HANDLING=0 counts as 3",
    ),
    Variable(
        "TORCH_NCCL_NAN_CHECK",
        "false",
        "whether an operation of a process group that would send NaN raises",
    ),
    Variable(
        "TORCH_NCCL_ENABLE_TIMING",
        "false",
        "whether works of a process group know how long they took",
    ),
    Variable("NCCL_ALGO", "none", "NCCL's; ^NVLS where torch is told to be deterministic"),
    Variable(
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
        "480",
        "seconds after which a line on stderr reports a stuck monitor or a held GIL; 0: never",
    ),
    Variable(
        "TORCH_NCCL_ENABLE_MONITORING",
        "false",
        "whether a monitor that is stuck for that long ends the process",
    ),
    Variable("TORCHCOMM_RANK", "none", "rank of this process; before every launcher's variable"),
    Variable("TORCHCOMM_SIZE", "none", "number of ranks; goes with TORCHCOMM_RANK"),
    Variable("OMPI_COMM_WORLD_RANK", "none", "rank of this process, set by Open MPI's mpirun"),
    Variable("OMPI_COMM_WORLD_SIZE", "none", "number of ranks, set by Open MPI's mpirun"),
    Variable("PMI_RANK", "none", "rank of this process, set by MPICH's and Intel's mpirun, Slurm"),
    Variable("PMI_SIZE", "none", "number of ranks, set by MPICH's and Intel's mpirun, Slurm"),
    Variable("PALS_RANKID", "none", "rank of this process, set by HPE's PALS"),
    Variable("PALS_SIZE", "none", "number of ranks, for PALS"),
    Variable("RANK", "none", "rank of this process, set by torchrun"),
    Variable("WORLD_SIZE", "none", "number of ranks, set by torchrun"),
    Variable("MASTER_ADDR", "none", "host of the store where ranks meet, set by torchrun"),
    Variable("MASTER_PORT", "none", "its port, set by torchrun"),
    Variable(
        "TORCHELASTIC_USE_AGENT_STORE",
        "none",
        "whether torchrun itself keeps that store, set by torchrun",
    ),
    Variable(
        "TORCHELASTIC_RESTART_COUNT",
        "none",
        "how often torchrun has restarted the ranks, set by it",
    ),
    Variable(
        "TORCH_FR_BUFFER_SIZE",
        "2000",
        "how many operations the flight recorder of a process remembers; 0: it records nothing",
    ),
    Variable("TORCH_NCCL_TRACE_BUFFER_SIZE", "none", "the same; TORCH_FR_BUFFER_SIZE goes first"),
    Variable("TORCH_FR_CPP_STACK", "false", "whether it records C++ stacks too, which is slow"),
    Variable("TORCH_NCCL_TRACE_CPP_STACK", "none", "the same; TORCH_FR_CPP_STACK goes first"),
    Variable(
        "TORCHCOMM_FR_DUMP_TEMP_FILE", "none", "path of its dumps, without the rank at the end"
    ),
    Variable(
        "TORCH_FR_DUMP_TEMP_FILE",
        "~/.cache/torch/comm_lib_trace_rank_",
        "the same; TORCHCOMM_FR_DUMP_TEMP_FILE goes first",
    ),
    Variable("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "none", "the same; the other two go first"),
    Variable(
        "TORCHCOMMS_PG_DUMP_AT_EXIT",
        "false",
        "whether a process with a process group dumps it when it ends, for "
        "python -m torchcomms_pg.trace FOLDER --nccl",
    ),
    Variable(
        "TORCHCOMMS_PG_CHECK_ASYNC",
        "none",
        "beginning of the paths of files with early uses of asynchronous operations, see "
        "check_async.md",
    ),
    Variable(
        "TORCH_FR_DUMP_ON_TIMEOUT",
        "true",
        "whether the recorder is dumped when an operation times out or fails",
    ),
    Variable("TORCH_NCCL_DUMP_ON_TIMEOUT", "none", "the same; TORCH_FR_DUMP_ON_TIMEOUT goes first"),
    Variable(
        "TORCH_FR_WAIT_TIMEOUT_DUMP_MILSEC",
        "15000",
        "milliseconds that a dump waits for Python's stacks; then it is written without them",
    ),
    Variable(
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",
        "none",
        "the same; TORCH_FR_WAIT_TIMEOUT_DUMP_MILSEC goes first",
    ),
    Variable("TORCH_INCLUDE_STACK_TRACE", "true", "whether a dump after a failure has stacks"),
    Variable(
        "TORCH_INCLUDE_ONLY_ACTIVE",
        "false",
        "whether a dump after a failure leaves completed operations out",
    ),
    Variable(
        "TORCH_FR_DEBUG_INFO_PIPE_FILE",
        "none",
        "path of a named pipe, without the rank and .pipe at the end; writing into it makes the "
        "rank dump",
    ),
    Variable(
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE",
        "none",
        "the same; TORCH_FR_DEBUG_INFO_PIPE_FILE goes first",
    ),
    Variable(
        "XDG_CACHE_HOME",
        "~/.cache",
        "folder in whose torch/ dumps are written if no variable names their path",
    ),
)
"""Every variable that this package reads."""

LAUNCHERS = (
    ("TORCHCOMM_RANK", "TORCHCOMM_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("PALS_RANKID", "PALS_SIZE"),
    ("RANK", "WORLD_SIZE"),
)
"""Each launcher's variables of rank and number of ranks. The first pair that is set counts."""

_RECORDER_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")

_KNOWN = {variable.name for variable in VARIABLES}
_TRUE = {"1", "true", "yes", "on", "y", "t"}
_FALSE = {"0", "false", "no", "off", "n", "f"}


def read(name: str) -> str | None:
    """Returns the value of the variable `name` of `VARIABLES`, or None if it is unset or empty.

    Raises:
        KeyError: `VARIABLES` has no such name.
    """
    if name not in _KNOWN:
        raise KeyError(f"{name} is not among torchcomms_pg.env.VARIABLES")
    return os.environ.get(name) or None


def read_int(name: str) -> int | None:
    """Does the same as `read` for a variable `name` whose value is a whole number, 0 or more.

    Raises:
        ValueError: the value is no such number.
    """
    value = read(name)
    if value is None:
        return None
    if not value.strip().isdecimal():
        raise ValueError(f"{name}={value!r}: wanted a whole number, 0 or more")
    return int(value)


def default_timeout() -> timedelta:
    """Returns the value of TORCHCOMM_TIMEOUT_SECONDS, or 600 s if it is not set.

    Raises:
        ValueError: the value is not a positive number.
    """
    return _seconds("TORCHCOMM_TIMEOUT_SECONDS", 600, timedelta(milliseconds=1))


def group_timeout() -> timedelta | None:
    """Returns the timeout of process groups that are made without one, or None for torch's.

    Raises:
        ValueError: TORCHCOMMS_PG_TIMEOUT is not a positive number.
    """
    if read("TORCHCOMMS_PG_TIMEOUT") is None:
        return None
    return _seconds("TORCHCOMMS_PG_TIMEOUT", 0, timedelta(milliseconds=1))


def verdict_after() -> timedelta:
    """Returns how old an operation gets before a verdict that aborts nothing is printed; 0: never.

    Raises:
        ValueError: TORCHCOMMS_PG_VERDICT_AFTER is not a number of 0 or more.
    """
    return _seconds("TORCHCOMMS_PG_VERDICT_AFTER", 0, timedelta(0))


def compile_timeout() -> timedelta:
    """Returns how much longer than its deadline an operation waits for ranks that compile.

    Raises:
        ValueError: TORCHCOMM_COMPILE_TIMEOUT_SECONDS is not a number of 0 or more.
    """
    return _seconds("TORCHCOMM_COMPILE_TIMEOUT_SECONDS", 1800, timedelta(0))


def _seconds(name: str, default: float, least: timedelta) -> timedelta:
    value = read(name)
    if value is None:
        return timedelta(seconds=default)
    try:
        time = timedelta(seconds=float(value))
    except (ValueError, OverflowError):
        time = timedelta(-1)
    if time < least:
        wanted = "a positive number" if least else "a number, 0 or more,"
        raise ValueError(f"{name}={value!r}: wanted {wanted} of seconds")
    return time


def read_bool(*names: str, default: bool) -> bool:
    """Returns the value of the first of the variables `names` that is set, else `default`.

    Raises:
        ValueError: the value is neither true nor false.
    """
    for name in names:
        value = read(name)
        if value is None:
            continue
        word = value.strip().lower()
        if word not in _TRUE | _FALSE:
            raise ValueError(f"{name}={value!r}: wanted true or false")
        return word in _TRUE
    return default


def abort_on_error() -> bool:
    """Returns the value of TORCHCOMM_ABORT_ON_ERROR, or True if it is not set.

    Raises:
        ValueError: the value is neither true nor false.
    """
    return read_bool("TORCHCOMM_ABORT_ON_ERROR", default=True)


def group_aborts_on_error() -> bool | None:
    """Returns TORCHCOMM_ABORT_ON_ERROR's value for process groups, or None if it is not set.

    Raises:
        ValueError: the value is neither true nor false.
    """
    return None if read("TORCHCOMM_ABORT_ON_ERROR") is None else abort_on_error()


def accelerator_ends_process(desync_debug: bool) -> bool:
    """Returns whether TORCH_NCCL_ASYNC_ERROR_HANDLING lets a failure end the process; default True.

    Applies only to process groups on an accelerator: torchrun sets the variable, and a failure on
    CPU tensors can be raised in the waiting caller. TORCH_NCCL_BLOCKING_WAIT takes precedence: with
    it the caller waits on an accelerator, too, so the failure is raised.

    Args:
        desync_debug: whether 0 counts as 3, as with TORCH_NCCL_DESYNC_DEBUG in torch's nccl.

    Raises:
        ValueError: the value is not 0, 1, 2 or 3.
    """
    value = read_int("TORCH_NCCL_ASYNC_ERROR_HANDLING")
    if value is not None and value > 3:
        raise ValueError(f"TORCH_NCCL_ASYNC_ERROR_HANDLING={value}: wanted 0, 1, 2 or 3")
    if blocking_wait():
        return False
    return value != 2 and (value != 0 or desync_debug)


def desync_debug() -> bool:
    """Returns the value of TORCH_NCCL_DESYNC_DEBUG, or False if it is not set."""
    return read_bool("TORCH_NCCL_DESYNC_DEBUG", default=False)


def blocking_wait() -> bool:
    """Returns whether waits for an accelerator's operations block the host and raise errors."""
    return read_bool("TORCH_NCCL_BLOCKING_WAIT", default=False)


def nan_check() -> bool:
    """Returns whether operations of process groups that would send NaN raise."""
    return read_bool("TORCH_NCCL_NAN_CHECK", default=False)


def enable_timing() -> bool:
    """Returns whether works of process groups measure their durations."""
    return read_bool("TORCH_NCCL_ENABLE_TIMING", default=False)


def as_gloo() -> bool:
    """Returns whether groups named gloo run over torchcomms.

    Raises:
        ValueError: TORCHCOMMS_PG_AS_GLOO is neither true nor false.
    """
    return as_gloo_by_run() or read_bool("TORCHCOMMS_PG_AS_GLOO", default=False)


def as_gloo_by_run() -> bool:
    """Returns whether `set_as_gloo` has set TORCHCOMMS_PG_AS_GLOO, and not the user."""
    return read("TORCHCOMMS_PG_AS_GLOO") == _BY_RUN


def set_as_gloo() -> None:
    """Sets TORCHCOMMS_PG_AS_GLOO, for programs that this process starts or becomes."""
    os.environ["TORCHCOMMS_PG_AS_GLOO"] = _BY_RUN


_BY_RUN = "torchcomms_pg.run"  # a value of TORCHCOMMS_PG_AS_GLOO


def set_dump_at_exit(prefix: str) -> None:
    """Makes programs that this process starts record all operations, and dump them at exit.

    Args:
        prefix: the first part of the dumps' paths, followed by the rank.
    """
    os.environ["TORCHCOMMS_PG_DUMP_AT_EXIT"] = "1"
    os.environ["TORCHCOMM_FR_DUMP_TEMP_FILE"] = prefix
    if all(read(name) is None for name in _RECORDER_SIZES):
        os.environ[_RECORDER_SIZES[0]] = "100000"


def set_check_async(prefix: str) -> None:
    """Makes programs that this process starts check their asynchronous operations.

    Args:
        prefix: the first part of the paths of their findings.
    """
    os.environ["TORCHCOMMS_PG_CHECK_ASYNC"] = prefix


def check_async() -> str | None:
    """Returns the first part of the paths of a check's findings, or None if nothing is checked."""
    return read("TORCHCOMMS_PG_CHECK_ASYNC")


def watch() -> bool:
    """Returns whether groups of other backends are watched.

    Raises:
        ValueError: TORCHCOMMS_PG_WATCH is neither true nor false.
    """
    return read_bool("TORCHCOMMS_PG_WATCH", default=False)


def branches() -> bool:
    """Returns whether the program's branches are recorded.

    Raises:
        ValueError: TORCHCOMMS_PG_BRANCHES is neither true nor false.
    """
    return read_bool("TORCHCOMMS_PG_BRANCHES", default=False)


def set_watch() -> None:
    """Sets TORCHCOMMS_PG_WATCH, for programs that this process starts or becomes."""
    os.environ["TORCHCOMMS_PG_WATCH"] = "1"


def watch_timeout() -> timedelta:
    """Returns how long an operation of a watched group may take.

    Raises:
        ValueError: TORCHCOMMS_PG_WATCH_TIMEOUT is not a positive number.
    """
    return _seconds("TORCHCOMMS_PG_WATCH_TIMEOUT", 60, timedelta(milliseconds=1))


def last_words() -> bool:
    """Returns whether SIGTERM and SIGABRT first have a process say whom it waits for.

    Raises:
        ValueError: TORCHCOMMS_PG_SIGTERM is neither true nor false.
    """
    return read_bool("TORCHCOMMS_PG_SIGTERM", default=True)


def late_warning() -> bool:
    """Returns whether to warn of a rank that the others always wait for.

    Raises:
        ValueError: TORCHCOMMS_PG_LATE_WARNING is neither true nor false.
    """
    return read_bool("TORCHCOMMS_PG_LATE_WARNING", default=True)


def metrics_file() -> str:
    """Returns the path of this process's metrics file, with its placeholders, or "" if unset."""
    return read("TORCHCOMMS_PG_METRICS_FILE") or ""


def status_folders() -> list[str]:
    """Returns the folders that may hold the status's sockets, the best first; none if it is off.

    These are two in a session, since a job may have been started outside a session.
    """
    given = read("TORCHCOMMS_PG_STATUS")
    if given is not None:
        return [] if given.strip().lower() in _FALSE else [os.path.abspath(given)]
    session = read("XDG_RUNTIME_DIR")
    folders = [] if session is None else [os.path.join(session, "torchcomms_pg")]
    return [*folders, f"/tmp/torchcomms_pg-{os.geteuid()}"]


def ras_address() -> str:
    """Returns the address where a job answers NCCL's client of RAS, or "" if unset."""
    return read("TORCHCOMMS_PG_RAS_ADDR") or ""


def of_command(**variables: str) -> list[bytes]:
    """Returns this process's environment with other variables, as NAME=VALUE, for a command."""
    together = {**os.environ, **variables}
    return [os.fsencode(f"{name}={value}") for name, value in together.items()]


def error_file() -> str:
    """Returns the path of the file from which torchrun takes a rank's error, or ""."""
    return read("TORCHELASTIC_ERROR_FILE") or ""


def run_id() -> str:
    """Returns the name that the launcher gave the run, or ""."""
    return read("TORCHELASTIC_RUN_ID") or ""


def exclude_nvls() -> None:
    """Excludes NCCL's algorithm NVLS, unless NCCL_ALGO is set: its sums may differ between runs.

    Has an effect on this process and on the processes that it starts.
    """
    if read("NCCL_ALGO") is None:
        os.environ["NCCL_ALGO"] = "^NVLS"


def described() -> str:
    """Returns the variables that are set, as ``NAME=value, NAME=value``."""
    found = [(variable.name, os.environ.get(variable.name)) for variable in VARIABLES]
    return ", ".join(f"{name}={value}" for name, value in found if value is not None) or "none"


def ranks_per_root() -> int:
    """Returns the number of ranks that NCCL starts from one unique id.

    Raises:
        ValueError: TORCH_NCCL_RANKS_PER_ROOT is not a whole number of 1 or more.
    """
    value = read_int("TORCH_NCCL_RANKS_PER_ROOT")
    if value == 0:
        raise ValueError("TORCH_NCCL_RANKS_PER_ROOT=0: wanted 1 or more")
    return 128 if value is None else value


def heartbeat_timeout() -> timedelta:
    """Returns the time after which a stuck monitor, or a held GIL, is reported; zero for never.

    Raises:
        ValueError: TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC is not a number of 0 or more.
    """
    return _seconds("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", 480, timedelta(0))


def stuck_monitor_ends_process() -> bool:
    """Returns whether a monitor that is stuck for `heartbeat_timeout` ends the process."""
    return read_bool("TORCH_NCCL_ENABLE_MONITORING", default=False)


def recorder_size() -> int:
    """Returns the number of operations that a process's recorder keeps; 0 if the recorder is off.

    Raises:
        ValueError: the variable is not a whole number.
    """
    size = _first_int(*_RECORDER_SIZES)
    return 2000 if size is None else size


def recorder_cpp_stacks() -> bool:
    """Returns whether recorders keep C++ stacks beside Python's."""
    return read_bool("TORCH_FR_CPP_STACK", "TORCH_NCCL_TRACE_CPP_STACK", default=False)


DUMP_PREFIXES = (
    "TORCHCOMM_FR_DUMP_TEMP_FILE",
    "TORCH_FR_DUMP_TEMP_FILE",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
)
"""Variables with the first part of a dump's path; the first that is set counts."""


def dump_prefix() -> str:
    """Returns the first part of a dump's path, followed by the rank."""
    for name in DUMP_PREFIXES:
        if value := read(name):
            return value
    cache = read("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    return str(Path(cache, "torch", "comm_lib_trace_rank_"))


def dump_on_failure() -> bool:
    """Returns whether a failure writes a dump."""
    return read_bool("TORCH_FR_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT", default=True)


def dump_at_exit() -> bool:
    """Returns whether a process dumps its recorder at exit.

    Raises:
        ValueError: TORCHCOMMS_PG_DUMP_AT_EXIT is neither true nor false.
    """
    return read_bool("TORCHCOMMS_PG_DUMP_AT_EXIT", default=False)


def dump_patience() -> timedelta:
    """Returns how long a dump after a failure waits for Python's stacks."""
    milliseconds = _first_int(
        "TORCH_FR_WAIT_TIMEOUT_DUMP_MILSEC", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"
    )
    return timedelta(milliseconds=15000 if milliseconds is None else milliseconds)


def dump_stacks() -> bool:
    """Returns whether a dump after a failure has stacks."""
    return read_bool("TORCH_INCLUDE_STACK_TRACE", default=True)


def dump_only_active() -> bool:
    """Returns whether a dump after a failure leaves out completed operations."""
    return read_bool("TORCH_INCLUDE_ONLY_ACTIVE", default=False)


def dump_pipe() -> str:
    """Returns the first part of the path of the pipe that requests dumps, or "" for no pipe."""
    names = ("TORCH_FR_DEBUG_INFO_PIPE_FILE", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE")
    return next((value for name in names if (value := read(name))), "")


def _first_int(*names: str) -> int | None:
    found = (read_int(name) for name in names)
    return next((value for value in found if value is not None), None)


def torchrun_store() -> tuple[str, int, int] | None:
    """Returns host and port of the store that torchrun keeps, and the number of its restarts.

    Returns None if torchrun did not start this process, or leaves the store to rank 0.
    """
    host, port = read("MASTER_ADDR"), read_int("MASTER_PORT")
    if host is None or port is None:
        return None
    if not read_bool("TORCHELASTIC_USE_AGENT_STORE", default=False):
        return None
    return host, port, restarts()


def restarts() -> int:
    """Returns how often torchrun has restarted the ranks, whose store lasts."""
    return read_int("TORCHELASTIC_RESTART_COUNT") or 0


def launcher_ranks() -> tuple[int, int] | None:
    """Returns rank and number of ranks from a launcher's variables, or None if none are set.

    Raises:
        ValueError: one of a launcher's two variables is missing, or they contradict each other.
    """
    for rank_name, size_name in LAUNCHERS:
        rank, size = read_int(rank_name), read_int(size_name)
        if rank is None and size is None:
            continue
        if rank is None or size is None:
            there, missing = (size_name, rank_name) if rank is None else (rank_name, size_name)
            raise ValueError(f"{there} is set and {missing} is not: set both, or neither")
        if rank >= size:
            raise ValueError(
                f"{rank_name}={rank} and {size_name}={size}: wanted a rank of 0 to {size - 1}"
            )
        return rank, size
    return None
