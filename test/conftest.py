import os
import tempfile

import pytest

from harness import limits, ranks, sampling
from torchcomms_pg_autoload.pytest_plugin import BENCH


def pytest_addoption(parser):
    parser.addoption(
        "--device",
        choices=("emulated", "cuda"),
        default="emulated",
        help="the GPUs of gpu/test_gpu_*.py: emulated ones, or this machine's",
    )
    parser.addoption(
        "--turn",
        metavar="K/N",
        default="1/1",
        help="of a test with parameters the calls of the K-th of N runs, which have all together",
    )


collect_ignore_glob = []
STARTED_WITH = pytest.StashKey()  # functions as of Ranks, of a file's tests


def is_rank(config):
    """Returns whether this process is a rank of a test with the mark ``ranks``."""
    return hasattr(config, "torchcomms_pg_rank")


def pytest_configure(config):
    if is_rank(config):
        limits.set_pace(config.getoption("--ranks-patience"))
        return
    if ranks.BACKEND != "torchcomms":
        config.option.ranks_backend = ranks.BACKEND
    # What failed groups write, and the sockets of those that are killed, where a test does not look
    # at them itself: also those of this process and of the programs that tests start, whose
    # environment some modules make when they are imported.
    left = tempfile.TemporaryDirectory(prefix="torchcomms_pg-tests-")
    config.add_cleanup(left.cleanup)
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = os.path.join(left.name, "trace_")
    os.environ["TORCHCOMMS_PG_STATUS"] = os.path.join(left.name, "status")
    # torch's default is one folder for all who compile as this user. clang refuses a header that
    # was compiled there for an environment that has since been made anew.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(left.name, "inductor")
    os.environ["TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"] = "0"
    os.environ["TEST_DEVICE"] = config.getoption("--device")
    if config.getoption("--device") == "cuda":
        from harness import gpus

        collect_ignore_glob.append("gpu/test_emulated*.py")
        if reason := gpus.missing():
            raise pytest.UsageError(f"--device cuda: {reason}")


@pytest.fixture(scope="session", autouse=True)
def rank_processes():
    yield
    ranks.close_all()


@pytest.fixture
def world(world_size):
    return world_size


@pytest.hookimpl(trylast=True)  # after the plugin's
def pytest_collection_finish(session):
    """Starts what forks the ranks before the first test's time limit counts: it imports torch."""
    config = session.config
    if session.items and not config.option.collectonly and not is_rank(config):
        for item in session.items:
            of_file = config.stash.setdefault(STARTED_WITH, {}).setdefault(item.path, set())
            of_file.add(getattr(item.function, "started_with", None))
        bench = config.stash.get(BENCH, None)
        ranks.start(config.getini("ranks_imports"), bench and bench.zygote)
        config.option.ranks_patience = max(config.option.ranks_patience, limits.pace())
        for item in session.items:
            limit = limits.grown(limit_of(config, item))
            item.add_marker(pytest.mark.timeout(limit), append=False)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around what counts the limit
def pytest_runtest_protocol(item):
    """Ends ranks that no test needs, and starts what forks ranks that need variables.

    The latter before the first test of a file with such ranks: of several processes that share the
    tests few run such a file.
    """
    ranks.end_unused()
    ranks.prepare(item.config.stash.get(STARTED_WITH, {}).get(item.path, ()))
    return (yield)


def limit_of(config, item):
    """Returns the seconds that a test may take on an idle machine."""
    marker = item.get_closest_marker("timeout")
    return marker.args[0] if marker else float(config.getini("timeout"))


def pytest_report_header(config):
    import torch

    turn = config.getoption("--turn")
    said = "" if turn == "1/1" else f", turn {turn} of the calls of tests with parameters"
    return f"torch {torch.__version__}, backend under test: {ranks.BACKEND}{said}"


def pytest_runtest_setup(item):
    if item.config.getoption("--device") == "cuda" and hasattr(item, "callspec"):
        from harness import gpus

        gpus.skip_if_refused(item.callspec.params.get("world", 1))


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around pytest's selection by marker
def pytest_collection_modifyitems(config, items):
    """TEST_BACKEND=gloo checks harness and reference values; what Gloo lacks is skipped there."""
    for item in items:
        mark = item.get_closest_marker("beyond_gloo")
        if mark and ranks.BACKEND == "gloo":
            item.add_marker(pytest.mark.skip(reason="Gloo cannot do this"))
    if is_rank(config):  # has to find each test that it is told to run
        yield
        return
    sampling.mark_slow(items)
    turn, turns = map(int, config.getoption("--turn").split("/"))
    every = list(items)
    items[:] = sampling.of_turn(items, turn, turns)
    if len(items) < len(every):
        config.hook.pytest_deselected(items=[item for item in every if item not in set(items)])
    yield
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    items[:] = sampling.long_ones_first(items, lambda item: limit_of(config, item), processes)
