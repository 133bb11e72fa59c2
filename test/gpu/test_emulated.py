"""The emulated CUDA keeps CUDA's promises, and torch's own nccl works over it."""

import contextlib
import copy
import ctypes
import os
import pathlib
import runpy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

import emulated
from harness import streams

if reason := emulated.available():
    pytest.skip(reason, allow_module_level=True)

from harness import gpus, ranks
from harness.gpus import on_gpu

pytestmark = pytest.mark.torch_version


def filled(value, size=1000):
    return torch.full((size,), float(value), device="cuda")


def in_thread(function):
    """What `function` returns or raises in another thread, whose current device is 0."""
    with ThreadPoolExecutor(1) as thread:
        try:
            return thread.submit(function).result()
        except RuntimeError as error:
            return error


def alone(body, *args, **env):
    """Runs a body that leaves its process in no state for others in one of its own."""
    options = dict(init=gpus.no_group, env=env, started_with=emulated.environment)
    with ranks.Ranks(1, **options) as rank:
        rank.run(body, *args)
        return rank.output(0)


# ---------------------------------------------------------------- operators and memory


@on_gpu()
def test_operators_are_those_of_the_cpu():
    values = torch.randn(6, 5)
    ours = values.cuda()
    assert ours.device == torch.device("cuda:0")
    expected = torch.nn.functional.softmax(values @ values.t() + 1, dim=0)
    torch.testing.assert_close(
        torch.nn.functional.softmax(ours @ ours.t() + 1, dim=0).cpu(), expected
    )
    assert torch.equal(torch.nonzero(ours > 0).cpu(), torch.nonzero(values > 0))
    assert torch.equal(ours.t().to(torch.bfloat16).contiguous().cpu(), values.t().bfloat16())
    assert torch.equal(ours.to("cuda:1").cpu(), values)


@on_gpu()
def test_random_numbers_depend_on_the_seed_and_not_on_when_a_kernel_runs():
    torch.manual_seed(7)
    with streams.hold():
        first = torch.rand(5, device="cuda")
        second = torch.rand(5, device="cuda")
    torch.manual_seed(7)
    assert torch.equal(torch.rand(5, device="cuda"), first)
    assert torch.equal(torch.rand(5, device="cuda"), second)


@on_gpu()
def test_an_optimizer_step_is_that_of_the_cpu():
    torch.manual_seed(0)
    expected = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3))
    model = copy.deepcopy(expected).cuda()
    inputs = torch.randn(4, 5)
    for each, device in (expected, "cpu"), (model, "cuda"):
        optimizer = torch.optim.AdamW(each.parameters(), fused=True)
        each(inputs.to(device)).square().sum().backward()
        optimizer.step()
    for ours, theirs in zip(model.parameters(), expected.parameters()):
        torch.testing.assert_close(ours.cpu(), theirs)


@on_gpu()
def test_memory_is_that_of_torchs_own_allocator():
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    first = torch.empty(1 << 20, device="cuda")
    place = first.data_ptr()
    del first
    again = torch.empty(1 << 20, device="cuda")
    assert again.data_ptr() == place  # of the same stream: at once
    side = torch.cuda.Stream()
    again.record_stream(side)
    with streams.hold(side):
        del again
        assert torch.empty(1 << 20, device="cuda").data_ptr() != place
    both = [torch.empty(1 << 20, device="cuda") for _ in range(2)]
    del both
    assert torch.cuda.max_memory_allocated() - before == 8 << 20


@on_gpu()
def test_a_device_has_no_more_memory_than_it_tells():
    free, total = torch.cuda.mem_get_info()
    assert 0 < free <= total
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(total + 1, dtype=torch.uint8, device="cuda")


# ---------------------------------------------------------------- streams and events


@on_gpu()
def test_operators_return_before_they_have_run():
    values = filled(1)
    with streams.hold():
        values.add_(1)
        more = values * 3
        assert not torch.cuda.current_stream().query()
    assert more.cpu()[0] == 6 and torch.cuda.current_stream().query()


@on_gpu()
def test_streams_run_side_by_side_and_in_their_own_order():
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    values = filled(1)
    torch.cuda.synchronize()
    with streams.hold(first):
        with torch.cuda.stream(first):
            values.add_(1)
            values.mul_(10)
        with torch.cuda.stream(second):
            seen = values.clone()
        second.synchronize()  # does not wait for the first
    torch.cuda.synchronize()
    assert seen.cpu()[0] == 1 and values.cpu()[0] == 20


@on_gpu()
def test_an_event_orders_streams():
    first, second, event = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Event()
    values = filled(1)
    torch.cuda.synchronize()
    assert event.query()  # nothing is recorded
    with streams.hold(first):
        with torch.cuda.stream(first):
            values.add_(1)
            event.record(first)
        assert not event.query()
        second.wait_event(event)
        event.record(second)  # what waits, waits for the record that there was
        with torch.cuda.stream(second):
            seen = values.clone()
        assert not second.query()
    event.synchronize()
    second.synchronize()
    assert event.query() and seen.cpu()[0] == 2


@on_gpu()
def test_an_event_tells_how_long_it_took():
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    torch.cuda._sleep(20_000_000)  # 20 ms at 1 GHz
    end.record()
    end.synchronize()
    assert begin.elapsed_time(end) >= 20


@on_gpu()
def test_copies_wait_for_pageable_memory_alone():
    device, pinned = filled(1), torch.zeros(1000).pin_memory()
    torch.cuda.synchronize()
    with streams.hold():
        pinned.copy_(device, non_blocking=True)  # returns
        pageable = torch.full((1000,), 5.0)
        device.copy_(pageable, non_blocking=True)
        pageable.zero_()  # the copy has what was in it
    torch.cuda.synchronize()
    assert pinned[0] == 1 and device.cpu()[0] == 5


@on_gpu()
def test_the_default_stream_waits_for_blocking_streams():
    runtime, handle = ctypes.CDLL(None), ctypes.c_void_p()
    assert runtime.cudaStreamCreate(ctypes.byref(handle)) == 0
    blocking, other = torch.cuda.ExternalStream(handle.value), torch.cuda.Stream()
    values = filled(1)
    torch.cuda.synchronize()
    with streams.hold(blocking):
        other.query()
        values.add_(1)  # in the default stream
        assert other.query() and not torch.cuda.default_stream().query()
    torch.cuda.synchronize()
    assert values.cpu()[0] == 2 and runtime.cudaStreamDestroy(handle) == 0
    invalid_handle = 400
    assert runtime.cudaStreamQuery(handle) == runtime.cudaGetLastError() == invalid_handle


@on_gpu()
def test_delays_show_a_wait_that_is_missing():
    emulated.set_delays(seed=1, probability=1, longest_us=3000)
    try:
        side, wrong = torch.cuda.Stream(), 0
        for _ in range(20):
            values = filled(0)
            torch.cuda.synchronize()
            with torch.cuda.stream(side):
                values.add_(1)
            wrong += values.cpu()[0].item() != 1
            torch.cuda.synchronize()
        assert wrong > 0
    finally:
        emulated.set_delays(longest_us=0)


# ---------------------------------------------------------------- contexts, the driver, counts


def contexts_are_made_where_they_are_needed():
    torch.cuda.set_device(1)
    torch.cuda.Event().record()
    filled(1)
    assert list(emulated.contexts()) == [1]
    event = torch.cuda.Event()
    event.record()
    in_thread(event.query)  # device 0 is current there
    assert list(emulated.contexts()) == [1]

    def exchange():
        return ctypes.CDLL(None).cudaThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(1)))

    assert in_thread(exchange) == 0
    assert list(emulated.contexts()) == [0, 1]


def test_contexts_are_made_where_they_are_needed():
    with ranks.Ranks(1, init=False, started_with=emulated.environment) as rank:
        rank.run(contexts_are_made_where_they_are_needed)


@on_gpu()
def test_calls_wait_while_the_driver_is_held():
    event = torch.cuda.Event()
    event.record()
    event.synchronize()
    device = []

    def call():
        device.append(torch.cuda.current_device())  # asks no driver
        # torch's own query would keep the GIL.
        ctypes.CDLL(None).cudaEventQuery(ctypes.c_void_p(event.cuda_event))

    thread = threading.Thread(target=call)
    with emulated.hold_driver() as waiters:
        thread.start()
        assert ranks.wait_for(waiters)
        assert [function for _, function in waiters()] == ["cudaEventQuery"] and device == [0]
        assert event.query()  # of the thread that holds it
        assert thread.is_alive()
    thread.join()


@on_gpu()
def test_calls_are_counted_by_thread_and_function():
    event, stream = torch.cuda.Event(), torch.cuda.Stream()
    event.record()

    def query():
        ctypes.CDLL(None).pthread_setname_np(ctypes.c_void_p(threading.get_ident()), b"a query")
        event.query()

    with emulated.counted() as calls:
        event.record(stream)
        event.record(stream)
        stream.wait_event(event)
        in_thread(query)
    assert calls["main"]["cudaEventRecord"] + calls["main"]["cudaEventRecordWithFlags"] == 2
    assert calls["main"]["cudaStreamWaitEvent"] == 1 and "cudaEventQuery" not in calls["main"]
    assert calls["a query"]["cudaEventQuery"] == 1


# ---------------------------------------------------------------- errors


def test_an_emulator_that_was_built_for_another_torch_says_so(monkeypatch):
    (folder,) = [
        path
        for path in emulated.environment()["PYTHONPATH"].split(os.pathsep)
        if "autoload" in path
    ]
    (module,) = pathlib.Path(folder).glob("*.py")
    monkeypatch.setattr(torch, "__version__", "2.0.0")
    with pytest.raises(ImportError, match="was built for torch 2.1.*torch 2.0.0 is loaded; run "):
        runpy.run_path(str(module))["load"]()


def a_kernel_fails():
    values = torch.ones(3, device="cuda")
    with contextlib.suppress(RuntimeError):  # raised if the kernel has already run
        values[torch.tensor([5], device="cuda")]
    with pytest.raises(RuntimeError, match="cudaErrorLaunchFailure"):
        torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="cudaErrorLaunchFailure"):
        torch.cuda.synchronize()


def test_a_kernel_that_fails_is_told_by_each_later_call():
    assert "a kernel has failed: index 5 is out of bounds" in alone(a_kernel_fails)


def what_is_not_emulated_fails():
    runtime, not_supported = ctypes.CDLL(None), 801
    assert runtime.cudaIpcGetMemHandle(None, None) == not_supported
    assert runtime.cudaGetLastError() == not_supported
    dim = (ctypes.c_uint * 3)(1, 1, 1)
    assert runtime.cudaLaunchKernel(None, dim, dim, None, None, None) == not_supported


def test_what_is_not_emulated_fails_and_says_its_name():
    output = alone(what_is_not_emulated_fails)
    assert "cudaIpcGetMemHandle was called, which is not emulated" in output
    assert "the kernel unknown is not emulated" in output


def traced():
    torch.cuda.Event().record()


def test_a_trace_shows_the_calls():
    assert "emulated: main: cudaEventRecord" in alone(traced, EMULATED_TRACE="calls")


# ---------------------------------------------------------------- torch's nccl over it


@gpus.on_own_ranks(2)
def test_groups_come_and_go_with_a_context_on_the_ranks_device_alone(port, prefix, world):
    for number in range(2):
        gpus.nccl(port, f"{prefix}.{number}", world, 20)
        values = filled(1)
        dist.all_reduce(values)
        assert values.cpu()[0] == world
        dist.destroy_process_group()
    assert list(emulated.contexts()) == [int(os.environ["RANK"])]
