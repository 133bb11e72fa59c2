"""Runs one body over Gloo and over the backend under test, in the same processes, and compares.

`@like_gloo(2)` makes a test of a function that uses the default group and returns what it
computed: nested lists, tuples and dicts of tensors and plain values. Every rank of the session's
pool runs the function over a default group of each backend, with the same seeds. The rank compares
the two results bit by bit, or with `rounding=True` up to the rounding of any order of additions.
"""

import inspect
import os
import random

from harness.ranks import (
    BACKEND,
    CALL_TIMEOUT,
    GROUP_TIMEOUT,
    Ranks,
    as_test,
    init_default_group,
    pool,
)

REFERENCE = "gloo"


def like_gloo(*worlds, rounding=False, timeout=CALL_TIMEOUT, ours=None):
    """Makes a function a test of the backend against Gloo, once per world size.

    Args:
        rounding: whether results may differ by rounding.
        timeout: of both runs together, in seconds.
        ours: further arguments of init_process_group for the backend under test.
    """

    # The test's attribute `over_one` is the body, an argument for `run_over`.
    def decorate(body):
        def on_rank(stores, world, **kwargs):
            want = run_over(REFERENCE, stores[0], world, body, kwargs, {})
            got = run_over(BACKEND, stores[1], world, body, kwargs, ours or {})
            assert_equal(got, want, rounding)

        def test(world, **kwargs):
            __tracebackhide__ = True
            stores = [Ranks.store_args(), Ranks.store_args()]
            pool(world, init=False).run(body, stores, world, timeout=timeout, **kwargs)

        test = as_test(test, body, worlds)
        test.body = on_rank
        test.over_one = body
        return test

    return decorate


def run_over(backend, store, world, body, kwargs, init):
    """Called in a rank: returns the result of the body over a default group of this backend."""
    import torch
    import torch.distributed as dist

    init_default_group(*store, int(os.environ["RANK"]), world, GROUP_TIMEOUT, backend, **init)
    torch.manual_seed(11)
    random.seed(11)
    if "world" in inspect.signature(body).parameters:
        kwargs = dict(kwargs, world=world)
    result = kept(body(**kwargs))
    dist.barrier()  # no rank ends the group while a slower rank needs the store
    dist.destroy_process_group()
    return result


def kept(result):
    """Returns a copy of the result without references to the group that made it."""
    import torch

    if isinstance(result, torch.Tensor):
        result = result.full_tensor() if hasattr(result, "full_tensor") else result
        return result.detach().clone()
    if isinstance(result, dict):
        return {name: kept(value) for name, value in result.items()}
    if isinstance(result, (list, tuple)):
        return [kept(value) for value in result]
    return result


def assert_equal(got, want, rounding=False, where="result"):
    """Asserts that two results of `kept` are equal, or close if `rounding`."""
    import torch

    from harness.values import assert_same

    assert type(got) is type(want), f"{where}: got {got!r}, {REFERENCE} has {want!r}"
    if isinstance(want, dict):
        assert list(got) == list(want), f"{where}: got {list(got)}, {REFERENCE} has {list(want)}"
        for name, value in want.items():
            assert_equal(got[name], value, rounding, f"{where}[{name!r}]")
    elif isinstance(want, list):
        assert len(got) == len(want), f"{where}: got {len(got)}, {REFERENCE} has {len(want)}"
        for number, value in enumerate(want):
            assert_equal(got[number], value, rounding, f"{where}[{number}]")
    elif isinstance(want, torch.Tensor) and not rounding:
        assert_same(got, want, where)
    elif isinstance(want, torch.Tensor) or (isinstance(want, float) and rounding):
        torch.testing.assert_close(got, want, msg=lambda text: f"{where}: {text}")
    else:
        assert got == want, f"{where}: got {got!r}, {REFERENCE} has {want!r}"


def raised(call, *args, **kwargs):
    """Returns the names of the built-in classes that match the call's exception, [] without one.

    These names can be compared between backends, since torch's own errors are subclasses.
    """
    kinds = (TypeError, ValueError, NotImplementedError, RuntimeError, AssertionError)
    try:
        call(*args, **kwargs)
    except Exception as error:
        return [kind.__name__ for kind in kinds if isinstance(error, kind)] or [repr(error)]
    return []


def refused(call, *args, **kwargs):
    """Returns whether the call raises TypeError, ValueError or RuntimeError.

    For mistakes of the caller that backends check: NCCL may raise ValueError, Gloo RuntimeError.
    """
    return bool({"TypeError", "ValueError", "RuntimeError"} & set(raised(call, *args, **kwargs)))
