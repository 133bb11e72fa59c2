"""The pytest plugin: the mark ``ranks``, its fixtures and options.

Apart from ``torchcomms_pg``, whose import takes torch: every pytest of an environment in which
torchcomms_pg is installed loads this module. What runs the tests is imported for the first test
that has the mark: `torchcomms_pg.testing.pytest_main`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

MARK = (
    "ranks(n, backend='torchcomms', timeout=5, limit=60, fresh_group=True): run the test in n "
    "processes, which are the ranks of one fresh group; see docs/testing.md of torchcomms_pg"
)
BENCH = pytest.StashKey[Any]()  # of the session's `pytest_main.Bench`, if a test has ranks


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options of tests with ranks."""
    group = parser.getgroup("ranks", "tests with @pytest.mark.ranks, of torchcomms_pg")
    group.addoption(
        "--ranks-backend",
        metavar="NAME",
        help="backend of the groups of all tests with ranks, such as gloo, in place of the marks'",
    )
    group.addoption(
        "--check-async",
        action="store_true",
        help="fail tests with ranks that use tensors of asynchronous operations before their end",
    )
    group.addoption(
        "--check-nccl",
        action="store_true",
        help="fail tests with ranks that would hang, be refused or get other data over NCCL",
    )
    group.addoption(
        "--emulated-gpus",
        type=int,
        metavar="N",
        help="give the ranks N GPUs of the emulated CUDA, 1 or 2, built in a clone of the project",
    )
    group.addoption(
        "--ranks-patience",
        type=float,
        default=1.0,
        metavar="FACTOR",
        help="multiply the timeouts and limits of tests with ranks, for a slow or busy machine",
    )
    parser.addini("ranks_timeout", "timeout of marks that have none, in seconds", default="5")
    parser.addini("ranks_limit", "limit of marks that have none, in seconds", default="60")
    parser.addini("ranks_imports", "modules that the ranks are forked with", "args")
    parser.addini("ranks_fresh_group", "fresh_group of marks that have none", "bool", default=True)


def pytest_configure(config: pytest.Config) -> None:
    """Makes the mark known."""
    config.addinivalue_line("markers", MARK)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Calls a test once for each number of ranks, if its mark has several."""
    mark = metafunc.definition.get_closest_marker("ranks")
    numbers = mark and (mark.kwargs.get("n") or next(iter(mark.args), None))
    if isinstance(numbers, (list, tuple)):
        if "world_size" not in metafunc.fixturenames:
            metafunc.fixturenames.append("world_size")
        ids = [f"{number}ranks" for number in numbers]
        metafunc.parametrize("world_size", numbers, indirect=True, ids=ids)


def _is_with_ranks(item: pytest.Item) -> bool:
    return not hasattr(item.config, "torchcomms_pg_rank") and (
        item.get_closest_marker("ranks") is not None
    )


def pytest_collection_finish(session: pytest.Session) -> None:
    """Starts the import of torch for the ranks, if a test has ranks."""
    if session.config.option.collectonly:
        return
    items = [item for item in session.items if _is_with_ranks(item)]
    if items:
        from torchcomms_pg.testing.pytest_main import Bench

        session.config.stash[BENCH] = Bench(session.config, items)
        session.config.pluginmanager.register(_Runner(), "torchcomms_pg_runner")


class _Runner:
    """Runs tests that have the mark on their ranks."""

    def pytest_terminal_summary(self, terminalreporter: Any, config: pytest.Config) -> None:
        """Says how much the checks have had to check."""
        for line in config.stash[BENCH].checked():
            terminalreporter.write_line(line)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Waits for the import of torch before a test's limits count, as of pytest-timeout."""
        if _is_with_ranks(item):
            item.config.stash[BENCH].prepare(item)
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Runs a test that has the mark on its ranks."""
    if not _is_with_ranks(item):
        return None
    item.config.stash[BENCH].run(item, nextitem)
    return True


def pytest_unconfigure(config: pytest.Config) -> None:
    """Ends the ranks."""
    bench = config.stash.get(BENCH, None)
    if bench is not None:
        bench.close()


def _state(request: pytest.FixtureRequest) -> Any:
    state = getattr(request.config, "torchcomms_pg_state", None)
    if state is None:
        pytest.fail(
            f"the fixture {request.fixturename!r} needs ranks: give the test "
            "@pytest.mark.ranks(2), or another number",
            pytrace=False,
        )
    return state


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> int:
    """The rank of this process, 0 to world_size - 1, in a test with @pytest.mark.ranks."""
    number: int = _state(request).setting.rank
    return number


@pytest.fixture
def world_size(request: pytest.FixtureRequest) -> int:
    """The number of ranks, in a test with @pytest.mark.ranks."""
    number: int = _state(request).setting.world
    return number


@pytest.fixture
def group(request: pytest.FixtureRequest) -> Any:
    """The default group, a torch.distributed.ProcessGroup, in a test with @pytest.mark.ranks."""
    return _state(request).group


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Any:
    """A torch.distributed.Store of this test, the same on all ranks."""
    return _state(request).store


@pytest.fixture
def device_mesh(request: pytest.FixtureRequest) -> Any:
    """A DeviceMesh of one dimension with all ranks, in a test with @pytest.mark.ranks."""
    return _state(request).device_mesh
