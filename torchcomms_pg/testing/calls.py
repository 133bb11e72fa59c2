"""Calls of functions on ranks, and `run_ranks`, which needs no pytest."""

from __future__ import annotations

import atexit
import itertools
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torchcomms_pg.testing.processes import Death, Processes, Store, Zygote, end_of, place

CALL_TIMEOUT = 40.0  # seconds of one call on all ranks, unless its caller says another limit


class RanksError(AssertionError):
    """At least one rank raised, died or hung."""


@dataclass
class Outcome:
    """What became of one rank's call: one of error, skip, died and hung, or else the value."""

    rank: int
    value: Any = None
    error: str = ""
    skip: str = ""
    died: str = ""
    hung: str = ""

    @property
    def failed(self) -> bool:
        """Whether the rank raised, died or hung."""
        return bool(self.error or self.died or self.hung)

    @property
    def ok(self) -> bool:
        """Whether there is a value."""
        return not (self.failed or self.skip)


class Calls(Processes):
    """Ranks that run functions which the test names.

    Attributes:
        reports: of each rank, what it has passed to `rank.report` and nobody has taken.
    """

    def __init__(self, world: int) -> None:
        super().__init__(world)
        self.reports: list[list[Any]] = [[] for _ in range(world)]
        self._done: dict[int, Outcome] = {}

    def start(
        self,
        function: Callable[..., Any],
        *args: Any,
        ranks: Iterable[int] | None = None,
        **kwargs: Any,
    ) -> None:
        """Starts function(*args, **kwargs) on each of `ranks` (default: all), without waiting."""
        self.busy = True
        packed = pickle.dumps((function.__module__, function.__name__, args, kwargs))
        for rank in self._ranks(ranks):
            self._done.pop(rank, None)
            self.connections[rank].send_bytes(packed)

    def wait(
        self,
        timeout: float = CALL_TIMEOUT,
        ranks: Iterable[int] | None = None,
        grace: float = 5.0,
        *,
        prolong: bool = False,
        meeting: float | None = None,
    ) -> list[Outcome]:
        """Waits for the calls, and kills ranks that do not answer in time.

        Args:
            timeout: how long to wait, in seconds.
            ranks: whose calls; by default all ranks'.
            grace: how long to wait once one rank has raised or died, in seconds: its peers may
                wait for it for ever.
            prolong: whether the time begins anew whenever a rank reports something.
            meeting: how long to wait once one rank has returned, in seconds; by default no shorter.

        Returns:
            The outcome of each rank, in order.
        """
        ranks = self._ranks(ranks)
        timeout, grace = self.grown(timeout), self.grown(grace)
        deadline = time.monotonic() + timeout
        while missing := [rank for rank in ranks if rank not in self._done]:
            self._read(missing, max(0.0, deadline - time.monotonic()))
            if prolong and any(self.reports):
                self.reports = [[] for _ in range(self.world)]
                deadline = time.monotonic() + timeout
            done = [self._done[rank] for rank in ranks if rank in self._done]
            if any(outcome.error for outcome in done):
                deadline = min(deadline, time.monotonic() + grace)
                grace = 1e9
            if done and meeting is not None:
                deadline = min(deadline, time.monotonic() + meeting)
                meeting = None
            if time.monotonic() >= deadline:
                late = [rank for rank in missing if rank not in self._done]
                for rank, stacks in self.stacks(late).items():
                    self._done[rank] = Outcome(rank, hung=self._hang(rank, stacks))
                    self.kill(rank)
        self.busy = any(self._done[rank].failed for rank in ranks)
        return [self._done[rank] for rank in ranks]

    def wait_report(self, rank: int, timeout: float = CALL_TIMEOUT) -> Any:
        """Waits for the next value that `rank` passes to report(), and returns it.

        Raises:
            RanksError: the rank's call has ended, or `timeout` seconds have passed.
        """
        deadline = time.monotonic() + self.grown(timeout)
        while not self.reports[rank]:
            if rank in self._done:
                check([self._done[rank]])
                raise RanksError(f"rank {rank} returned without the report the test waits for")
            if time.monotonic() > deadline:
                stacks = self.stacks([rank])[rank]
                raise RanksError(f"rank {rank} reported nothing: {self._hang(rank, stacks)}")
            self._read([rank], max(0.0, deadline - time.monotonic()))
        return self.reports[rank].pop(0)

    def tell(self, rank: int, value: Any) -> None:
        """Sends a value to a rank whose function calls `rank.receive`."""
        self.connections[rank].send_bytes(pickle.dumps(value))

    def _hang(self, rank: int, stacks: str) -> str:
        where = place(stacks)
        text = f"still running, at {where}" if where else "still running"
        return f"{text}; its output ends:\n{self.output(rank)[-4000:]}"

    def _ranks(self, ranks: Iterable[int] | None) -> list[int]:
        return list(range(self.world)) if ranks is None else list(ranks)

    def _read(self, ranks: list[int], timeout: float) -> None:
        for rank, message in self.receive(ranks, min(timeout, 0.5)):
            if isinstance(message, Death):
                died = f"{message}; its output ends:\n{end_of(self.output(rank))}"
                self._done[rank] = Outcome(rank, died=died)
            elif message[0] == "report":
                self.reports[rank].append(message[1])
            elif message[0] == "ok":
                self._done[rank] = Outcome(rank, value=message[1])
            else:
                self._done[rank] = Outcome(rank, **{message[0]: message[1] or message[0]})


def check(outcomes: list[Outcome]) -> None:
    """Raises an error if a rank has failed.

    Raises:
        RanksError: what became of each rank that failed, in `outcomes`.
    """
    __tracebackhide__ = True
    bad = [outcome for outcome in outcomes if outcome.failed]
    if bad:
        lines = []
        for outcome in bad:
            what = next(word for word in ("error", "died", "hung") if getattr(outcome, word))
            lines.append(f"rank {outcome.rank} {what}: {getattr(outcome, what)}")
        raise RanksError(
            f"{len(bad)} of {len(outcomes)} ranks did not succeed\n" + "\n".join(lines)
        )


GRACE = 0.3  # seconds for the other ranks once one has failed
_numbers = itertools.count()


class _Bench:
    """What `run_ranks` keeps warm: the zygote, the store, and ranks by their number."""

    def __init__(self) -> None:
        self.zygote = Zygote()
        self.store = Store(self.zygote)
        self.pools: dict[int, Calls] = {}

    def ranks(self, world: int) -> Calls:
        if world not in self.pools:
            pool = self.pools[world] = Calls(world)
            # What this process has changed since the zygote began.
            for _ in range(world):
                pool.fork(
                    self.zygote, "torchcomms_pg.testing.rank:process_of", dict(os.environ),
                    os.getcwd(), sys.path,
                )  # fmt: skip
        return self.pools[world]

    def close(self) -> None:
        for pool in self.pools.values():
            pool.close()
        self.store.close()
        self.zygote.close()


_bench: _Bench | None = None


def bench() -> _Bench:
    """Returns this process's bench, made on the first call and closed at the process's end."""
    global _bench
    if _bench is None:
        _bench = _Bench()
        atexit.register(close)
    return _bench


def close() -> None:
    """Ends all processes of `run_ranks`; the next call starts new ones."""
    global _bench
    if _bench is not None:
        _bench.close()
        _bench = None


def run_ranks(
    function: Callable[..., Any],
    n: int,
    *args: Any,
    backend: str | None = "torchcomms",
    timeout: float = 5.0,
    limit: float = 60.0,
    **kwargs: Any,
) -> list[Any]:
    """Calls a function in `n` processes, which are ranks of one fresh group of torch.distributed.

    The first call imports torch in a process that forks the ranks: a few seconds. Later calls take
    milliseconds, as the ranks are kept.

    >>> run_ranks(torch.distributed.get_rank, 2)
    [0, 1]

    Args:
        function: of a module that can be imported, or of the main program, whose statements after
            ``if __name__ == "__main__"`` the ranks leave out.
        n: the number of ranks.
        args: of the function, the same on all ranks.
        backend: of the default group. With None the function makes its own groups, such as with
            ``dist.init_process_group("gloo")``, which finds the other ranks by the environment.
        timeout: for how many seconds a rank waits for another one, in an operation or at the
            function's end.
        limit: how many seconds the call may take.
        kwargs: of the function, the same on all ranks.

    Returns:
        What the function returned on each rank, in order of ranks.

    Raises:
        RanksError: a rank raised, died or did not return in time; the text has the traceback, exit
            code or line of each. The next call has new ranks.
        ValueError: the ranks could not import the function; the text says what to do.
    """
    from torchcomms_pg.testing.rank import Setting, call_in_group, end_group

    __tracebackhide__ = True
    if not isinstance(n, int) or n < 1:
        raise ValueError(f"run_ranks: n is {n!r}: wanted a number of ranks, 1 or more")
    where = _importable(function)
    here = bench()
    ranks = here.ranks(n)
    setting = Setting(n, here.store.port, next(_numbers), backend, timeout)
    try:
        ranks.start(call_in_group, setting, *where, args, kwargs)
        outcomes = ranks.wait(limit, grace=GRACE, meeting=timeout + 0.5)
        check(outcomes)
        ranks.start(end_group)
        left = ranks.wait(timeout + 0.5, grace=GRACE)
        ranks.busy = ranks.busy or any(not outcome.ok or outcome.value for outcome in left)
        check(left)
    finally:
        if ranks.busy:
            here.pools.pop(n).close()
    return [outcome.value for outcome in outcomes]


def _importable(function: Callable[..., Any]) -> tuple[str | None, str, str]:
    """Returns (path of the main program or None, module, name) of a function."""
    module = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", "")
    wanted = (
        "wanted a function at the top level of a module, which the ranks can import; give it what "
        "it needs as arguments"
    )
    if not module or not name or "<" in name:
        raise ValueError(f"run_ranks: function is {function!r}: {wanted}")
    if module != "__main__":
        return None, module, name
    program = getattr(sys.modules["__main__"], "__file__", None)
    if program is None or not os.path.isfile(program):
        raise ValueError(
            f"run_ranks: {name} is of a notebook or of the interactive interpreter: write it into "
            "a module, or in a notebook use the cell magic %%ranks"
        )
    return os.path.abspath(program), module, name
