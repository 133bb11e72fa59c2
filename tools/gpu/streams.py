"""The order of an operation among what is queued, with streams that are held up."""

from __future__ import annotations

import gc
import time

import torch
import torch.distributed as dist
from values import all_data, assert_same

from gpu.devices import DELAY_SECONDS
from gpu.here import Here, finish, within

LENGTH = 10_000


def check(here: Here) -> str:
    """Before, after, beside, and in a stream's memory."""
    here.start()
    # NCCL connects, and CUDA loads kernels, at the first use, and may wait for streams then.
    warm = torch.full((LENGTH,), 1.0, device=here.device).fill_(2)
    dist.all_reduce(warm)
    dist.all_gather_into_tensor(torch.empty(here.ranks * LENGTH, device=here.device), warm * 10)
    here.synchronize()
    orders = [_after_what_is_queued, _before_what_follows, _in_memory_of_its_own]
    for order in orders:
        order(here)
        here.synchronize()
        here.meet(order.__name__)
    here.stop()
    return f"{len(orders)} orderings, with streams held up {DELAY_SECONDS * 1000:.0f} ms or more"


def _after_what_is_queued(here: Here) -> None:
    """The operation reads what the current stream has not written yet."""
    total = here.ranks * (here.ranks + 1) / 2
    for async_op in (False, True):
        tensor = torch.zeros(LENGTH, device=here.device)
        here.synchronize()
        with here.kind.held():
            tensor.fill_(here.rank + 1)
            work = dist.all_reduce(tensor, async_op=async_op)
            assert work is None or not work.is_completed(), "it did not wait for the stream"
        if work is not None:
            finish(work)
        assert (tensor.cpu() == total).all(), f"async_op={async_op}: {tensor[:4].cpu()}"


def _before_what_follows(here: Here) -> None:
    """After wait() the current stream waits for the operation, and the host does not."""
    module = torch.get_device_module(here.device.type)
    current, other = torch.accelerator.current_stream(), module.Stream()
    inputs = all_data(here.ranks, LENGTH)
    tensor = here.place(inputs[here.rank])
    output = torch.full((here.ranks * LENGTH,), -7.0, device=here.device)
    here.synchronize()
    with module.stream(other), here.kind.held():
        work = dist.all_gather_into_tensor(output, tensor, async_op=True)
        with module.stream(current):
            with within(DELAY_SECONDS * 0.8, "waiting, of the host"):
                finish(work)
                after = output * 2
            until = time.monotonic() + DELAY_SECONDS / 4  # it would have run by then
            while time.monotonic() < until:
                assert not current.query(), "the current stream did not wait"
    assert_same(after.cpu(), torch.cat(inputs) * 2)


def _in_memory_of_its_own(here: Here) -> None:
    """Memory that only the operation still uses, or its copy of it, is not given to others."""
    module = torch.get_device_module(here.device.type)
    current, other = torch.accelerator.current_stream(), module.Stream()
    inputs = all_data(here.ranks, (LENGTH, 1))
    first = torch.zeros(1, device=here.device)
    for layout in ("contiguous", "strided"):
        mine = here.place(inputs[here.rank], layout)
        output = here.empty((here.ranks * LENGTH, 1))
        here.synchronize()
        gc.collect()  # which may take longer than the stream is held
        with module.stream(other), here.kind.held():
            # Holds up what comes after it.
            works: list[dist.Work | None] = [dist.all_reduce(first, async_op=True)]
            with module.stream(current):
                works.append(dist.all_gather_into_tensor(output, mine, async_op=True))
                del mine
                reused = [torch.full((LENGTH,), -7.0, device=here.device) for _ in range(20)]
                current.synchronize()
                for work in works:
                    assert work is not None
                    assert not work.is_completed(), "it did not wait for what came before"
        for work in works:
            finish(work)
        assert_same(output.cpu(), torch.cat(inputs), layout)
        del reused
