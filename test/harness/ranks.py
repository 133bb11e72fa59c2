"""Rank processes for the tests: start them, run a function on each, find out who failed.

One helper process (the zygote) imports torch and the package once and forks the ranks, so that
starting four ranks takes milliseconds instead of ten seconds of imports. The zygote has no threads
and makes no group, so a forked rank is like any new process. Ranks that only run healthy
collectives are kept and shared by all tests of a session (`pool`); tests that kill or break ranks
make their own (`Ranks`).

A rank that fails, dies or hangs is named in the test's failure, with its traceback or the stacks
of its threads. Hung ranks are killed by pid, and everything dies with the pytest process.
"""

import contextlib
import dataclasses
import datetime
import functools
import inspect
import itertools
import os
import pathlib
import pickle
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_connections

from harness import ROOT, TESTS, limits
from harness.rank_process import BACKEND

# torch's store looks up the name of every host that connects, and serves no rank meanwhile. A name
# server that loses the query holds up the store for five seconds, and no test needs a name server.
os.environ.setdefault("RES_OPTIONS", "attempts:0")
# Inductor compiles a program for each extension of the processor to see whether the extension can
# be used. With an empty cache that takes longer than a test may.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

WORLDS = (1, 2, 3, 4)
GROUP_TIMEOUT = 30.0  # of the shared ranks' default group: longer than any healthy test
CALL_TIMEOUT = 40.0  # of one function on all ranks: shorter than pytest's 120 s


class RankFailure(AssertionError):
    """At least one rank raised, died or hung."""


@dataclasses.dataclass
class Outcome:
    """What became of one rank's call: one of error, skip, died and hung, or else the value."""

    rank: int
    value: object = None
    error: str = ""
    skip: str = ""
    died: str = ""
    hung: str = ""

    @property
    def failed(self):
        return bool(self.error or self.died or self.hung)

    @property
    def ok(self):
        return not (self.failed or self.skip)


START = "import sys; from harness import rank_process; rank_process.zygote(int(sys.argv[1]))"


class _Zygote:
    def __init__(self, started_with):
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        env = dict(os.environ, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")
        # A failure on an accelerator raises, so that tests can see it, and does not end the rank.
        env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        env.update(started_with)
        env["PYTHONPATH"] = os.pathsep.join(
            [str(TESTS), str(ROOT)] + env.get("PYTHONPATH", "").split(os.pathsep)
        ).rstrip(os.pathsep)
        self.process = subprocess.Popen(
            [sys.executable, "-c", START, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=env,
            stdin=subprocess.DEVNULL,
            # Ctrl-C must reach this process alone, which needs the zygote to end the ranks.
            start_new_session=True,
        )
        theirs.close()

    def ask(self, *request, fds=()):
        socket.send_fds(self.control, [pickle.dumps(request)], fds)
        return pickle.loads(self.control.recv(1 << 16))


_zygotes = {}


def _zygote_process(started_with=None):
    """Returns the zygote whose environment has these variables besides this process's."""
    variables = tuple(sorted(started_with().items())) if started_with else ()
    if variables not in _zygotes:
        _zygotes[variables] = _Zygote(variables)
    return _zygotes[variables]


def start(started_with=(None,)):
    """Starts a zygote for each of `started_with`; returns once all of them can fork ranks."""
    for zygote in list(map(_zygote_process, started_with)):
        limits.set_pace(zygote.ask("ready"))


@functools.cache
def _store_server():
    import torch.distributed as dist

    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


_names = itertools.count()


def connect_store(port, prefix, timeout=GROUP_TIMEOUT):
    """Called in a rank: returns a client of the test's store that adds `prefix` to its keys."""
    import torch.distributed as dist

    timeout = datetime.timedelta(seconds=timeout)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    return dist.PrefixStore(prefix, store)


def meet(store, where, ranks):
    """Called in a rank: returns when so many ranks have called it with the same `where`."""
    if store.add(where, 1) == ranks:
        store.set(f"all {where}", "")
    store.wait([f"all {where}"])


def init_default_group(port, prefix, rank, world, timeout, backend=BACKEND, **kwargs):
    """Called in a rank: makes the default group over the test's store."""
    import torch.distributed as dist

    store = connect_store(port, prefix)
    timeout = datetime.timedelta(seconds=timeout)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world, timeout=timeout, **kwargs
    )


class Ranks:
    """`world` processes, rank 0 to world-1; a `with` statement ends them.

    With `init=False` the function under test makes the default group, with `store_args()`. A
    function `init` is called on every rank in place of `_init`, with the same arguments.

    `started_with` returns the environment variables that a process must have at its start, such as
    the dynamic loader's. A rank sets the variables of `env` once it runs.
    """

    def __init__(
        self,
        world,
        *,
        init=True,
        timeout=None,
        env=None,
        delete_env=(),
        started_with=None,
    ):
        self.world = world
        self.timeout = timeout or limits.grown(GROUP_TIMEOUT)
        self.busy = False
        self.pids, self.connections, self.outputs = [], [], []
        self.reports = [[] for _ in range(world)]
        self._done = {}
        self._exit_codes = {}  # of reaped ranks, whose pids may be other processes' by now
        self.make_processes(env or {}, tuple(delete_env), started_with)
        if init:
            self.run(_init if init is True else init, *self.store_args(), world, self.timeout)

    def make_processes(self, env, delete_env, started_with):
        """Forks the ranks, and fills pids, connections and outputs."""
        self._zygote = _zygote_process(started_with)
        for rank in range(self.world):
            ours, theirs = socket.socketpair()
            output = tempfile.TemporaryFile()
            request = ("fork", rank, env, delete_env)
            self.pids.append(self._zygote.ask(*request, fds=[theirs.fileno(), output.fileno()]))
            theirs.close()
            self.connections.append(Connection(ours.detach()))
            self.outputs.append(output)

    @staticmethod
    def store_args():
        """Returns (port, prefix) for `connect_store`, with a prefix that is new for each call."""
        return _store_server().port, f"test{next(_names)}"

    def start(self, function, *args, ranks=None, **kwargs):
        """Starts function(*args, **kwargs) on each of `ranks` (default: all), without waiting."""
        self.busy = True
        packed = pickle.dumps((function.__module__, function.__name__, args, kwargs))
        for rank in self._ranks(ranks):
            self._done.pop(rank, None)
            self.connections[rank].send_bytes(packed)

    def wait(self, timeout=CALL_TIMEOUT, ranks=None, grace=5.0, *, prolong=False):
        """Returns the outcome of each rank, in order. Kills ranks that do not answer in time.

        Once one rank has raised, its peers may wait for it for ever, so they get `grace` seconds.
        With `prolong` the time begins anew whenever a rank reports something.
        """
        ranks = self._ranks(ranks)
        timeout, grace = limits.grown(timeout), limits.grown(grace)
        deadline = time.monotonic() + timeout
        while missing := [rank for rank in ranks if rank not in self._done]:
            self._read(missing, max(0.0, deadline - time.monotonic()))
            if prolong and any(self.reports):
                self.reports = [[] for _ in range(self.world)]
                deadline = time.monotonic() + timeout
            if any(rank in self._done and self._done[rank].error for rank in ranks):
                deadline = min(deadline, time.monotonic() + grace)
                grace = 1e9
            if time.monotonic() >= deadline:
                for rank in missing:
                    if rank not in self._done:
                        self._done[rank] = Outcome(rank, hung=self._stacks(rank))
                        self.kill(rank)
        self.busy = any(self._done[rank].failed for rank in ranks)
        return [self._done[rank] for rank in ranks]

    def run(self, function, *args, timeout=CALL_TIMEOUT, **kwargs):
        """Runs a function on all ranks and returns their values, or raises RankFailure."""
        __tracebackhide__ = True
        self.start(function, *args, **kwargs)
        outcomes = self.wait(timeout)
        check(outcomes)
        return [outcome.value for outcome in outcomes]

    def wait_report(self, rank, timeout=CALL_TIMEOUT):
        """Waits for the next value that `rank` passes to report(), and returns it."""
        deadline = time.monotonic() + limits.grown(timeout)
        while not self.reports[rank]:
            if rank in self._done:
                check([self._done[rank]])
                raise RankFailure(f"rank {rank} returned without the report the test waits for")
            if time.monotonic() > deadline:
                raise RankFailure(f"rank {rank} reported nothing: {self._stacks(rank)}")
            self._read([rank], max(0.0, deadline - time.monotonic()))
        return self.reports[rank].pop(0)

    def tell(self, rank, value):
        self.connections[rank].send_bytes(pickle.dumps(value))

    def kill(self, rank, number=signal.SIGKILL):
        if rank in self._exit_codes:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pids[rank], number)

    def exit_code(self, rank, timeout=10.0):
        """Waits for the rank's process to end. Returns its exit code, None if it still lives."""
        deadline = time.monotonic() + limits.grown(timeout)
        while rank not in self._exit_codes:
            code = self._zygote.ask("reap", self.pids[rank])
            if code is not None:
                self._exit_codes[rank] = code
            elif time.monotonic() > deadline:
                return None
            else:
                time.sleep(0.01)  # polling a process that is not our child: nothing to wait on
        return self._exit_codes[rank]

    def output(self, rank):
        self.outputs[rank].seek(0)
        return self.outputs[rank].read().decode(errors="replace")

    def close(self):
        for rank, connection in enumerate(self.connections):
            with contextlib.suppress(OSError):
                connection.send_bytes(pickle.dumps(None))
            if self.busy:
                self.kill(rank)
        for rank in range(self.world):
            with contextlib.suppress(ChildProcessError, OSError):
                if self.exit_code(rank, 5.0) is None:
                    self.kill(rank)
                    self.exit_code(rank)
        for connection, output in zip(self.connections, self.outputs):
            connection.close()
            output.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.busy = True
        self.close()

    def _ranks(self, ranks):
        return list(range(self.world)) if ranks is None else list(ranks)

    def _read(self, ranks, timeout):
        by_connection = {self.connections[rank]: rank for rank in ranks}
        for connection in wait_connections(list(by_connection), min(timeout, 0.5)):
            rank = by_connection[connection]
            try:
                kind, value = pickle.loads(connection.recv_bytes())
            except (EOFError, OSError):
                code = self.exit_code(rank)
                self._done[rank] = Outcome(
                    rank, died=f"exit code {code}; its output ends:\n{self.output(rank)[-3000:]}"
                )
                continue
            if kind == "report":
                self.reports[rank].append(value)
            elif kind == "ok":
                self._done[rank] = Outcome(rank, value=value)
            else:
                self._done[rank] = Outcome(rank, **{kind: value or kind})

    def _stacks(self, rank):
        self.kill(rank, signal.SIGUSR1)
        time.sleep(0.3)  # faulthandler gives no sign when it has written
        return f"still running; its output ends:\n{self.output(rank)[-4000:]}"


def check(outcomes):
    """Raises RankFailure with each rank that failed; otherwise skips if a rank skipped."""
    import pytest

    __tracebackhide__ = True
    bad = [o for o in outcomes if o.failed]
    if bad:
        lines = []
        for o in bad:
            what = [w for w in ("error", "died", "hung") if getattr(o, w)][0]
            lines.append(f"rank {o.rank} {what}: {getattr(o, what)}")
        raise RankFailure(
            f"{len(bad)} of {len(outcomes)} ranks did not succeed\n" + "\n".join(lines)
        )
    for outcome in outcomes:
        if outcome.skip:
            pytest.skip(outcome.skip)


def _init(port, prefix, world, timeout):
    init_default_group(port, prefix, int(os.environ["RANK"]), world, timeout)


_pools = {}


def pool(world, init=True, started_with=None):
    """Returns ranks that all tests of the session share; takes the arguments of Ranks."""
    key = world, getattr(init, "__name__", init), started_with
    if key in _pools and _pools[key].busy:
        _pools.pop(key).close()
    if key not in _pools:
        _pools[key] = Ranks(world, init=init, started_with=started_with)
    return _pools[key]


def close_all():
    while _pools:
        _pools.popitem()[1].close()
    while _zygotes:
        zygote = _zygotes.popitem()[1]
        zygote.control.close()
        zygote.process.wait(5)


GIVEN = ("world", "port", "prefix")


def given(body, world):
    """Returns values for the parameters `world`, `port` and `prefix` that a body has."""
    values = dict(zip(GIVEN, (world, *Ranks.store_args())))
    return {name: values[name] for name in inspect.signature(body).parameters if name in GIVEN}


def as_test(test, body, worlds, started_with=None, groups=()):
    """Makes `test` the test of a body that runs on every rank, once per world size.

    pytest calls `test` with the world size, with each of `groups` in turn (if any), and with the
    body's parameters, except the parameters that `given` provides.
    """
    import pytest

    functools.update_wrapper(test, body)
    del test.__wrapped__
    own = ["world", "group"] if groups else ["world"]
    own = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in own]
    parameters = inspect.signature(body).parameters.values()
    parameters = [parameter for parameter in parameters if parameter.name not in GIVEN]
    test.__signature__ = inspect.Signature([*own, *parameters])
    test.body = body
    test.started_with = started_with
    if groups:
        test = pytest.mark.parametrize("group", groups)(test)
    return pytest.mark.parametrize("world", worlds, ids=[f"{n}ranks" for n in worlds])(test)


def on_ranks(*worlds, timeout=CALL_TIMEOUT, init=True, started_with=None):
    """Makes a function a test whose body runs on every rank, once per world size (default 1-4).

    If `init` is a dictionary of functions, the body runs once for each of them, too. The body may
    have the parameters `world`, and `port` and `prefix` of `store_args`.
    """

    def decorate(body):
        def test(world, group=None, **kwargs):
            __tracebackhide__ = True
            chosen = init[group] if group else init
            kwargs.update(given(body, world))
            pool(world, chosen, started_with).run(body, timeout=timeout, **kwargs)

        groups = list(init) if isinstance(init, dict) else ()
        return as_test(test, body, worlds or WORLDS, started_with, groups)

    return decorate


def on_own_ranks(*worlds, timeout=CALL_TIMEOUT, group_timeout=None, started_with=None, **options):
    """Does what on_ranks does, on ranks of this test alone; `options` are arguments of Ranks."""

    def decorate(body):
        def test(world, **kwargs):
            __tracebackhide__ = True
            kwargs.update(given(body, world))
            with Ranks(world, timeout=group_timeout, started_with=started_with, **options) as own:
                own.run(body, timeout=timeout, **kwargs)

        return as_test(test, body, worlds, started_with)

    return decorate


@contextlib.contextmanager
def time_limit(low, high, what):
    """Asserts that the block takes between low and high seconds; `high` grows as in limits.py."""
    high = limits.grown(high)
    begin = time.monotonic()
    yield
    took = time.monotonic() - begin
    assert low <= took <= high, f"{what} took {took:.2f} s, expected {low} to {high:.1f} s"


def thread_names():
    """Returns the names of this process's threads; a thread gets its name soon after its start."""
    names = []
    for path in pathlib.Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # the thread has just ended
            names.append(path.read_text().strip())
    return names


def asleep(thread):
    """Returns whether a thread of this process, given by name or id, sleeps, so wants no core."""
    for path in pathlib.Path("/proc/self/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # the thread has just ended
            number, _, rest = path.read_text().partition(" (")
            found, _, rest = rest.rpartition(") ")
            if str(thread) in (number, found) and rest.startswith("S"):
                return True
    return False


def woken(name="tcpg_(worker|messages|callbacks)"):
    """Returns how often the threads that run asynchronous operations have gone to sleep.

    Args:
        name: a pattern of the names of the threads to count; the main thread never counts.
    """
    times = 0
    for path in pathlib.Path("/proc/self/task").glob("*/status"):
        if path.parent.name == str(os.getpid()):
            continue
        with contextlib.suppress(OSError):  # the thread has just ended
            status = path.read_text()
            if re.match(rf"Name:\t{name}\n", status):
                times += int(re.search(r"\nvoluntary_ctxt_switches:\t(\d+)", status)[1])
    return times


def wait_for(condition, timeout=5.0):
    """Polls a condition without an event to wait on (/proc, /dev/shm); returns its last value."""
    deadline = time.monotonic() + limits.grown(timeout)
    while not (value := condition()) and time.monotonic() < deadline:
        select.select([], [], [], 0.02)
    return value
