"""Rank processes for the tests: start them, run a function on each, find out who failed.

The processes are those of torchcomms_pg.testing, which users have as run_ranks and as a mark of
pytest. Ranks that only run healthy collectives are kept and shared by the tests that follow each
other (`pool`); tests that kill or break ranks make their own (`Ranks`).

A rank that fails, dies or hangs is named in the test's failure, with its traceback or the stacks
of its threads. Hung ranks are killed by pid, and everything dies with the pytest process.
"""

import contextlib
import datetime
import functools
import inspect
import itertools
import os
import pathlib
import re
import select
import time

from harness import ROOT, TESTS, limits
from torchcomms_pg.testing import calls
from torchcomms_pg.testing.calls import CALL_TIMEOUT, Outcome
from torchcomms_pg.testing.calls import RanksError as RankFailure
from torchcomms_pg.testing.processes import Store, Zygote
from torchcomms_pg.testing.zygote import ask_no_name_server

__all__ = ["CALL_TIMEOUT", "Outcome", "RankFailure"]

BACKEND = os.environ.get("TEST_BACKEND", "torchcomms")

ask_no_name_server(os.environ)  # also in the programs that tests start
# Inductor compiles a program for each extension of the processor to see whether the extension can
# be used. With an empty cache that takes longer than a test may.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

WORLDS = (1, 2, 3, 4)
GROUP_TIMEOUT = 30.0  # of the shared ranks' default group: longer than any healthy test

_zygotes = {}
_plugins = []  # of the tests with the mark, which the plugin ends
_imports = ()


def _zygote_process(started_with=None):
    """Returns the zygote whose environment has these variables besides this process's."""
    variables = tuple(sorted(started_with().items())) if started_with else ()
    if variables not in _zygotes:
        path = os.pathsep.join((str(TESTS), str(ROOT)))
        _zygotes[variables] = Zygote(_imports, dict(variables), path)
    return _zygotes[variables]


def start(imports, plugins=None):
    """Starts the zygote of ranks that need no variables; returns once it can fork ranks.

    Args:
        imports: what each zygote imports.
        plugins: the zygote of the tests with the mark ``ranks``, which serves the others, too.
    """
    global _imports
    _imports = imports
    if plugins is not None:
        _zygotes[()] = plugins
        _plugins.append(plugins)
    limits.set_pace(_zygote_process().wait_until_ready() / limits.IMPORT)


def prepare(started_with):
    """Starts a zygote for each of these functions, as of `Ranks`; returns once all can fork."""
    for zygote in list(map(_zygote_process, started_with)):
        zygote.wait_until_ready()


@functools.cache
def _store():
    return Store(_zygote_process())


_names = itertools.count()


def connect_store(port, prefix, timeout=GROUP_TIMEOUT):
    """Called in a rank: returns a client of the test's store that adds `prefix` to its keys."""
    import torch.distributed as dist

    timeout = datetime.timedelta(seconds=timeout)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    return dist.PrefixStore(prefix, store)


def meet(store, where, ranks):
    """Called in a rank: returns when so many ranks have called it with the same `where`.

    It is no wait of the program's, in verdicts and status.
    """
    import torch.distributed as dist

    if store.add(where, 1) == ranks:
        store.set(f"all {where}", "")
    inspect.unwrap(dist.Store.wait)(store, [f"all {where}"])


def init_default_group(port, prefix, rank, world, timeout, backend=BACKEND, **kwargs):
    """Called in a rank: makes the default group over the test's store."""
    import torch.distributed as dist

    store = connect_store(port, prefix)
    timeout = datetime.timedelta(seconds=timeout)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world, timeout=timeout, **kwargs
    )


class Ranks(calls.Calls):
    """`world` processes, rank 0 to world-1; a `with` statement ends them.

    With `init=False` the function under test makes the default group, with `store_args()`. A
    function `init` is called on every rank in place of `_init`, with the same arguments.

    `started_with` returns the environment variables that a process must have at its start, such as
    the dynamic loader's. A rank sets the variables of `env` once it runs.
    """

    grown = staticmethod(limits.grown)

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
        super().__init__(world)
        self.timeout = timeout or limits.grown(GROUP_TIMEOUT)
        self.make_processes(env or {}, tuple(delete_env), started_with)
        if init:
            self.run(_init if init is True else init, *self.store_args(), world, self.timeout)

    def make_processes(self, env, delete_env, started_with):
        """Forks the ranks, and fills pids, connections and outputs."""
        zygote = _zygote_process(started_with)
        # A failure on an accelerator raises, so that tests can see it, and does not end the rank.
        name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
        env = {name: os.environ.get(name, "0"), **env}
        for _ in range(self.world):
            self.fork(zygote, "torchcomms_pg.testing.rank:process", env, delete_env)

    @staticmethod
    def store_args():
        """Returns (port, prefix) for `connect_store`, with a prefix that is new for each call."""
        return _store().port, f"test{next(_names)}"

    def run(self, function, *args, timeout=CALL_TIMEOUT, **kwargs):
        """Runs a function on all ranks and returns their values, or raises RankFailure."""
        __tracebackhide__ = True
        self.start(function, *args, **kwargs)
        outcomes = self.wait(timeout)
        check(outcomes)
        return [outcome.value for outcome in outcomes]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.busy = True
        self.close()

    def outcome(self, rank):
        """Returns the outcome of the rank's call; None if the call has not ended."""
        if rank not in self._done:
            self._read([rank], 0)
        return self._done.get(rank)

    def verdicts(self, rank):
        """What the rank has printed of verdicts, each read on where it says who prints the rest."""
        found = _verdicts(self.output(rank))
        for i, text in enumerate(found):
            elsewhere = re.search(
                r" \(rank (\d+)(?: \(global (\d+)\))?[^)]* prints the rest\)$", text
            )
            if elsewhere:
                first = text[: elsewhere.start()].partition("]")[2]
                whole = _verdicts(self.output(int(elsewhere[2] or elsewhere[1])))
                found[i] = next((each for each in whole if first + "\n" in each), text)
        return found


def _verdicts(output):
    return re.findall(r"(?m)^\[rank \d+\] torchcomms_pg: (?:the )?verdict.*(?:\n  .*)*", output)


def check(outcomes):
    """Raises RankFailure with each rank that failed; otherwise skips if a rank skipped."""
    import pytest

    __tracebackhide__ = True
    calls.check(outcomes)
    for outcome in outcomes:
        if outcome.skip:
            pytest.skip(outcome.skip)


def _init(port, prefix, world, timeout):
    init_default_group(port, prefix, int(os.environ["RANK"]), world, timeout)


# Seconds without a test after which ranks of the pool end. Kept for all of a session, 150 processes
# had 18 GB of memory in the end, and took a tenth of the CPU time by waking up.
UNUSED = 30.0

_pools = {}  # ranks, with the time of their last test


def pool(world, init=True, started_with=None):
    """Returns ranks that tests of the session share; takes the arguments of Ranks."""
    key = world, getattr(init, "__name__", init), started_with
    if key in _pools and _pools[key][0].busy:
        _pools.pop(key)[0].close()
    found = _pools[key][0] if key in _pools else Ranks(world, init=init, started_with=started_with)
    _pools[key] = found, time.monotonic()
    return found


def end_unused():
    """Ends the pool's ranks that have had no test for UNUSED seconds."""
    now = time.monotonic()
    for key, (found, used) in list(_pools.items()):
        if now - used > UNUSED:
            del _pools[key]
            found.close()


def close_all():
    while _pools:
        _pools.popitem()[1][0].close()
    while _zygotes:
        zygote = _zygotes.popitem()[1]
        if zygote not in _plugins:
            zygote.close()
    if _store.cache_info().currsize:
        _store().close()
        _store.cache_clear()


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
