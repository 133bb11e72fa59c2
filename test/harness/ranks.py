"""Rank processes for the tests: start them, run a function on each, find out who failed.

One helper process (the zygote) imports torch and the package once and forks the ranks, so that
starting four ranks takes milliseconds instead of ten seconds of imports. It has no threads and
makes no group, so a rank that comes out of it is like any new process. Ranks that only run healthy
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

# torch's store asks for the name of every host that connects, and serves nobody meanwhile; a name
# server that loses the question holds it up for five seconds. No test needs a name server.
os.environ.setdefault("RES_OPTIONS", "attempts:0")
# Inductor compiles a program for each extension of the processor to see whether it may use it: with
# an empty cache that takes longer than a test may.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

WORLDS = (1, 2, 3, 4)
GROUP_TIMEOUT = 30.0  # of the shared ranks' default group: longer than any healthy test
CALL_TIMEOUT = 40.0  # of one function on all ranks: shorter than pytest's 60 s


class RankFailure(AssertionError):
    """At least one rank raised, died or hung."""


@dataclasses.dataclass
class Outcome:
    """What became of one rank's call: exactly one of value, error, died or hung is meant."""

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
        # A failure on an accelerator is raised here, so that tests can look at it.
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
            # Ctrl-C is for this process alone, which needs the zygote to end the ranks.
            start_new_session=True,
        )
        theirs.close()

    def ask(self, *request, fds=()):
        socket.send_fds(self.control, [pickle.dumps(request)], fds)
        return pickle.loads(self.control.recv(1 << 16))


_zygotes = {}


def _zygote_process(started_with=None):
    """The one whose environment has these variables beside this process's."""
    variables = tuple(sorted(started_with().items())) if started_with else ()
    if variables not in _zygotes:
        _zygotes[variables] = _Zygote(variables)
    return _zygotes[variables]


def start(started_with=(None,)):
    """Returns once ranks can be forked that were started with each of these."""
    for zygote in list(map(_zygote_process, started_with)):
        limits.set_pace(zygote.ask("ready"))


@functools.cache
def _store_server():
    import torch.distributed as dist

    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


_names = itertools.count()


def connect_store(port, prefix, timeout=GROUP_TIMEOUT):
    """Called in a rank: a client of the test's store, with a name of its own."""
    import torch.distributed as dist

    timeout = datetime.timedelta(seconds=timeout)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    return dist.PrefixStore(prefix, store)


def meet(store, where, ranks):
    """Called in a rank: returns when so many have come there."""
    if store.add(where, 1) == ranks:
        store.set(f"all {where}", "")
    store.wait([f"all {where}"])


def init_default_group(port, prefix, rank, world, timeout, backend=BACKEND, **kwargs):
    """Called in a rank."""
    import torch.distributed as dist

    store = connect_store(port, prefix)
    timeout = datetime.timedelta(seconds=timeout)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world, timeout=timeout, **kwargs
    )


class Ranks:
    """`world` processes, rank 0 to world-1; in a `with` statement they are gone at its end.

    init=False leaves init_process_group to the function under test, which finds what it needs in
    `store_args()`. A function is called on every rank in place of that, like `_init`.

    started_with is a function that gives the variables of the environment which a process must be
    started with, such as those of the dynamic loader. `env` is set once it runs.
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
        """Fills pids, connections and outputs."""
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
        """(port, prefix) of a store that nobody else uses, for `connect_store`."""
        return _store_server().port, f"test{next(_names)}"

    def start(self, function, *args, ranks=None, **kwargs):
        """Run function(*args, **kwargs) on each of `ranks` (all); does not wait."""
        self.busy = True
        packed = pickle.dumps((function.__module__, function.__name__, args, kwargs))
        for rank in self._ranks(ranks):
            self._done.pop(rank, None)
            self.connections[rank].send_bytes(packed)

    def wait(self, timeout=CALL_TIMEOUT, ranks=None, grace=5.0, *, prolong=False):
        """The outcome of each rank, in order. Kills what does not answer in time.

        Once one rank has raised, its peers may wait for it for ever: they get `grace` seconds.
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
        """start() and wait(); raises RankFailure unless every rank returned. Their values."""
        __tracebackhide__ = True
        self.start(function, *args, **kwargs)
        outcomes = self.wait(timeout)
        check(outcomes)
        return [outcome.value for outcome in outcomes]

    def wait_report(self, rank, timeout=CALL_TIMEOUT):
        """The next value that `rank` passed to report()."""
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
        """Wait for the rank's process to end; its exit code, -9 after a kill, None if it lives."""
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
    """Raise RankFailure, naming each rank that failed; where none did, skip if one skipped."""
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
    """The session's ranks for this world size, started as Ranks by `init`."""
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
    """What a body on ranks asks for of the world size, and of (port, prefix) as of `store_args`."""
    values = dict(zip(GIVEN, (world, *Ranks.store_args())))
    return {name: values[name] for name in inspect.signature(body).parameters if name in GIVEN}


def as_test(test, body, worlds, started_with=None, groups=()):
    """Make `test` the test of a body that runs on every rank, once per world size.

    It is called with the world size, with each of `groups` in turn where there are some, and with
    what pytest has for the body's parameters other than those of `given`.
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
    """Make a function a test whose body runs on every rank, once per world size (default 1-4).

    For a dictionary of functions `init`, also once for each of them, under its name. The body may
    ask for `world`, and for `port` and `prefix` of a store that nobody else uses.
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
    """As on_ranks, on ranks that only this test has; `options` are further ones of Ranks."""

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
    """What is inside takes between low and high seconds; `high` grows with the machine."""
    high = limits.grown(high)
    begin = time.monotonic()
    yield
    took = time.monotonic() - begin
    assert low <= took <= high, f"{what} took {took:.2f} s, expected {low} to {high:.1f} s"


def thread_names():
    """Of this process; a thread has its name a moment after its start."""
    names = []
    for path in pathlib.Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it has just ended
            names.append(path.read_text().strip())
    return names


def asleep(thread):
    """Whether a thread of this process, by its name or its id, waits, and not for a core."""
    for path in pathlib.Path("/proc/self/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            number, _, rest = path.read_text().partition(" (")
            found, _, rest = rest.rpartition(") ")
            if str(thread) in (number, found) and rest.startswith("S"):
                return True
    return False


def woken(name="tcpg_(worker|messages|callbacks)"):
    """How often threads of this process have gone to sleep: those that run asynchronous operations.

    Args:
        name: pattern of other threads' names; the main thread is none of them.
    """
    times = 0
    for path in pathlib.Path("/proc/self/task").glob("*/status"):
        if path.parent.name == str(os.getpid()):
            continue
        with contextlib.suppress(OSError):  # it has just ended
            status = path.read_text()
            if re.match(rf"Name:\t{name}\n", status):
                times += int(re.search(r"\nvoluntary_ctxt_switches:\t(\d+)", status)[1])
    return times


def wait_for(condition, timeout=5.0):
    """Poll for something that has no event to wait on (/proc, /dev/shm). Its last value."""
    deadline = time.monotonic() + limits.grown(timeout)
    while not (value := condition()) and time.monotonic() < deadline:
        select.select([], [], [], 0.02)
    return value
