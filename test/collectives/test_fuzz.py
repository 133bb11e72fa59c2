"""Random bad arguments: an exception at most, never the end of the process."""

import datetime
import inspect
import random
import time

import pytest
import torch
import torch.distributed as dist

from harness.ranks import Ranks

pytestmark = pytest.mark.beyond_gloo
SECONDS = 8.0  # of each seed
CALLS = 4000
FEWEST = 500  # however busy the machine is
# Not for the fuzzer: what ends or waits by design.
SKIPPED = {"relaxed_timeout"}


def values(generator):
    """One argument; most of them are wrong wherever they come."""
    tensors = [
        lambda: torch.ones(generator.choice([0, 1, 3, 1000])),
        lambda: torch.ones(4, 6)[::2, 1::3],
        lambda: torch.ones(3, dtype=generator.choice(DTYPES)),
        lambda: torch.ones(()),
        lambda: torch.empty(3, device="meta"),
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.ones(3, requires_grad=True),
        lambda: torch.ones(1).expand(5),
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    ]
    numbers = [-(2**63), -(2**31), -2, -1, 0, 1, 2, 7, 2**31, 2**62, 2**63, 10**30]
    others = [None, True, 0.5, float("nan"), "", "x", b"x", object(), int, print, 1j, {"a": "b"}]
    times = [datetime.timedelta(seconds=s) for s in (-1, 0, 0.001, 0.05, 10**8)]
    kind = generator.random()
    if kind < 0.35:
        return generator.choice(tensors)()
    if kind < 0.55:
        return generator.choice(numbers)
    if kind < 0.65:
        return [values(generator) for _ in range(generator.randrange(4))]
    if kind < 0.8:
        return generator.choice(times)
    if kind < 0.9:
        return generator.choice([dist.ReduceOp.SUM, dist.ReduceOp.BXOR, dist.ReduceOp.AVG])
    return generator.choice(others)


DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int64,
    torch.uint16,
    torch.float16,
    torch.bfloat16,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float64,
    torch.complex64,
]


def arguments(generator, function):
    """Mostly as many as it takes, so that more than the parser is tried."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return [values(generator) for _ in range(generator.randrange(5))], {}
    positional, named = [], {}
    for parameter in parameters:
        if parameter.name == "async_op":
            named["async_op"] = generator.random() < 0.5
        elif parameter.default is parameter.empty and not named and generator.random() < 0.98:
            positional.append(values(generator))
        elif generator.random() < 0.3:
            named[parameter.name] = values(generator)
    return positional, named


def public(thing):
    for name in dir(thing):
        # A window's properties raise before something is registered.
        kind = thing if inspect.ismodule(thing) else type(thing)
        if not name.startswith("_") and name not in SKIPPED:
            if callable(getattr(kind, name, None)):
                yield name


def fuzz(seed):
    import torchcomms_pg

    generator = random.Random(seed)
    comm = None
    counts = {}
    end = time.monotonic() + SECONDS
    options = {"store": dist.HashStore(), "rank": 0, "size": 1}
    options |= {"abort_process_on_timeout_or_error": False}
    while (done := sum(counts.values())) < CALLS and (done < FEWEST or time.monotonic() < end):
        if comm is None or generator.random() < 0.01:
            comm = torchcomms_pg.new_comm("shm", "cpu", "fuzzed", **options)
            comm.set_timeout(datetime.timedelta(milliseconds=50))
            window = comm.new_window()
            batch = comm.batch_op_create()
        owner = generator.choice([comm, comm, comm, comm._comm, window, batch, torchcomms_pg])
        name = generator.choice(list(public(owner)))
        if owner is torchcomms_pg and name in ("new_comm", "register"):
            continue  # the first would meet at MASTER_ADDR, and wait there
        function = getattr(owner, name)
        positional, named = arguments(generator, function)
        print(seed, done, name, flush=True)  # in the failure, if it ends here
        try:
            result = function(*positional, **named)
            if hasattr(result, "wait"):
                result.wait()
            outcome = "fine"
        except Exception as error:
            outcome = type(error).__name__
        counts[outcome] = counts.get(outcome, 0) + 1
        if name in ("finalize", "abort", "close") or comm.is_aborted():
            comm.abort()
            comm = None
    return counts


@pytest.mark.parametrize("seed", range(3))
def test_no_arguments_end_the_process(seed):
    with Ranks(1, init=False) as ranks:
        counts = ranks.run(fuzz, seed)[0]
    assert sum(counts.values()) >= FEWEST, counts
    assert counts.get("fine", 0) > 5, counts
