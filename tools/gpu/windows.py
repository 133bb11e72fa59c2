"""One-sided windows: puts, signals and mapped peers."""

from __future__ import annotations

import torch
from values import assert_same, data

from gpu.check import Skip
from gpu.here import Here
from gpu.torchcomm import new_comm

SIZES = (1, 1025, 300_000)


def check(here: Here) -> str:
    """What is put is there when its signal is, and a mapped tensor is the peer's memory."""
    comm = new_comm(here, "windows")
    after, before = (here.rank + 1) % here.ranks, (here.rank - 1) % here.ranks
    try:
        window = comm.new_window(torch.zeros(max(SIZES), device=here.device))
    except NotImplementedError as error:
        comm.finalize()
        raise Skip(str(error)) from error
    except RuntimeError as error:
        if "cannot map" not in str(error):
            raise
        comm.finalize()
        raise Skip(str(error)) from error
    for async_op in (False, True):
        for size in SIZES:
            window.put(here.place(data(here.rank, size)), after, 0, async_op)
            window.signal(after, async_op)
            window.wait_signal(before, async_op).wait()
            got = window.get_tensor()
            assert got is not None
            assert_same(got[:size].cpu(), data(before, size), f"{size} elements")
            window.signal(before, async_op)  # has read them
            window.wait_signal(after, async_op).wait()
    mapped = window.map_remote_tensor(after)
    assert_same(mapped[: SIZES[-1]].cpu(), data(here.rank, SIZES[-1]), "mapped")
    window.tensor_deregister()
    comm.finalize()
    return f"{len(SIZES)} sizes, sync and async; mapped"
