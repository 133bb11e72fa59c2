import os
import tempfile

import pytest

from harness import limits, ranks, sampling

# What failed groups write, and the sockets of those that are killed, where a test does not look at
# them itself: also those of this process and of the programs that tests start, whose environment
# some modules make when they are imported.
left = tempfile.TemporaryDirectory(prefix="torchcomms_pg-tests-")
os.environ["TORCH_FR_DUMP_TEMP_FILE"] = os.path.join(left.name, "trace_")
os.environ["TORCHCOMMS_PG_STATUS"] = os.path.join(left.name, "status")


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


def pytest_configure(config):
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
    left.cleanup()


def pytest_collection_finish(session):
    """Starts what forks the ranks before the first test's time limit counts: it imports torch."""
    if session.items and not session.config.option.collectonly:
        wanted = {getattr(item.function, "started_with", None) for item in session.items}
        ranks.start(wanted)
        for item in session.items:
            limit = limits.grown(limit_of(session.config, item))
            item.add_marker(pytest.mark.timeout(limit), append=False)


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
    sampling.mark_slow(items)
    turn, turns = map(int, config.getoption("--turn").split("/"))
    every = list(items)
    items[:] = sampling.of_turn(items, turn, turns)
    if len(items) < len(every):
        config.hook.pytest_deselected(items=[item for item in every if item not in set(items)])
    for item in items:
        mark = item.get_closest_marker("beyond_gloo")
        if mark and ranks.BACKEND == "gloo":
            item.add_marker(pytest.mark.skip(reason="Gloo cannot do this"))
    yield
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    items[:] = sampling.long_ones_first(items, lambda item: limit_of(config, item), processes)
