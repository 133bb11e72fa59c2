"""Signals during a group's first operation on an accelerator, and while its memory is managed."""

import datetime
import os
import re
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

import torchcomms_pg
from failures.test_interrupts import ENDS, Handler, interrupt, run_with_signals
from harness.limits import grown
from harness.ranks import wait_for
from torchcomms_pg.testing.rank import report

try:
    from accelerator.test_memory import Pool, backend, over_fake
    from harness.simulated_group import DEVICE, start
except ImportError:
    pytest.skip("python test/simulated/build.py builds it", allow_module_level=True)

MINUTE = datetime.timedelta(seconds=60)
REFUSED = "called by the handler of a signal in the middle of"


def all_reduce(device=DEVICE):
    dist.all_reduce(tensor := torch.ones(1, device=device))
    return tensor.cpu().item()


def refusals(*calls):
    """The text of the error that each of the calls raises."""
    texts = []
    for call in calls:
        with pytest.raises(RuntimeError) as raised:
            call()
        texts.append(str(raised.value))
    return texts


def uses_the_group():
    """Rank 1 arrives at the first operation when rank 0's handler has used the group."""
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["handler"], MINUTE)
        return all_reduce("cpu"), all_reduce()
    texts = []

    def use():
        texts.extend(
            refusals(
                all_reduce,
                lambda: dist.send(torch.ones(1, device=DEVICE), 1),
                lambda: backend().register_mem_pool(Pool((1 << 20, 10))),
            )
        )
        store.set("handler", "")
        assert all_reduce("cpu") == 2

    Handler(use)
    report(os.getpid())
    assert all_reduce() == 2
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return texts


def test_the_first_operation_on_an_accelerator_refuses_a_handlers_operation_and_goes_on():
    texts, sums = run_with_signals(uses_the_group, init=start)
    assert sums == (2, 2)
    assert len(texts) == 3
    for text in texts:
        assert f"{REFUSED} the first operation on an accelerator" in text, text


def ends_the_group(how):
    """How long rank 0's handler takes to end the group, and what rank 1 gets."""
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["ended"], MINUTE)
        with pytest.raises(torchcomms_pg.CommError) as raised:
            all_reduce()
        return str(raised.value)
    took = []

    def end():
        begun = time.monotonic()
        ENDS[how](None)
        took.append(time.monotonic() - begun)

    Handler(end)
    report(os.getpid())
    with pytest.raises(torchcomms_pg.CommError, match="the group was ended on rank 0 while"):
        all_reduce()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    store.set("ended", "")
    assert not dist.is_initialized()
    return took[0]


@pytest.mark.parametrize("how", ("destroy_process_group", "abort a process group"))
def test_a_handler_that_ends_the_group_fails_its_first_operation_on_an_accelerator(how):
    took, told = run_with_signals(ends_the_group, how, init=start)
    assert took < grown(20), took  # no deadline has to pass
    assert re.search(r"rank 0\b", told), told


def waits_for_a_thread():
    """The main thread waits for another thread's first operation when a handler raises."""
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["interrupted"], MINUTE)
        return all_reduce()
    sums = []
    first = threading.Thread(target=lambda: sums.append(all_reduce()))
    before = store.num_keys()
    first.start()
    assert wait_for(lambda: store.num_keys() > before, 20), "the thread has not come to the others"
    Handler(interrupt)
    report(os.getpid())
    with pytest.raises(KeyboardInterrupt):
        all_reduce()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    store.set("interrupted", "")
    first.join()
    return sums.pop()


def test_a_handler_that_raises_ends_the_wait_for_another_threads_first_operation():
    main, peer = run_with_signals(waits_for_a_thread, init=start)
    assert main == peer == 2


def over_joining_fake(port, prefix, world, timeout):
    over_fake(port, prefix, world, timeout, joins=False)


CALLS = {
    "register_mem_pool": lambda: backend().register_mem_pool(Pool((1 << 20, 10))),
    "suspend": lambda: backend().suspend(),
    "memory_stats": lambda: backend().memory_stats(),
    "comm_ptr": lambda: torchcomms_pg.get_comm(device=DEVICE).get_nccl_comm_ptr(),
}


def manages_memory(what, ends):
    """The handler's errors while `what` waits for the ranks to join; or it ends the group."""
    from accelerator.test_memory import library

    texts = []
    functions = library.functions

    def act():
        if ends:
            dist.destroy_process_group()
        else:
            group = backend()
            texts.extend(
                refusals(
                    *(CALLS[name] for name in ("register_mem_pool", "suspend", "memory_stats")),
                    group.resume,
                    lambda: group.deregister_mem_pool(Pool()),
                    all_reduce,
                )
            )
        functions.fakeHang(False)

    functions.fakeHang(True)
    torchcomms_pg.get_comm(device=DEVICE)
    Handler(act)
    report(os.getpid())
    if ends:
        with pytest.raises(torchcomms_pg.CommError, match="aborted on rank 0 by the handler"):
            CALLS[what]()
        assert not dist.is_initialized()
    else:
        CALLS[what]()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return texts


@pytest.mark.parametrize("what", CALLS)
def test_a_call_for_memory_refuses_a_handlers_use_of_the_group_and_goes_on(what):
    (texts,) = run_with_signals(manages_memory, what, False, world=1, init=over_joining_fake)
    assert len(texts) == 6
    for text in texts:
        assert REFUSED in text, text


@pytest.mark.parametrize("what", CALLS)
def test_a_handler_that_ends_the_group_fails_a_call_for_memory(what):
    run_with_signals(manages_memory, what, True, world=1, init=over_joining_fake)
