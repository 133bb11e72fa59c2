"""The emulated CUDA keeps CUDA's promises of captures and graphs."""

import ctypes

import pytest
import torch

import emulated
from harness import streams

if reason := emulated.available():
    pytest.skip(reason, allow_module_level=True)

from gpu.test_emulated import filled, in_thread
from harness import ranks
from harness.gpus import on_gpu

pytestmark = pytest.mark.torch_version


@on_gpu()
def test_a_graph_runs_with_each_replay():
    values = filled(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = values * 2 + 1
    for i in range(3):
        values.fill_(i)
        graph.replay()
        assert result.cpu()[0] == 2 * i + 1


@on_gpu()
def test_random_numbers_of_a_graph_go_on_with_each_replay():
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        numbers = torch.rand(3, device="cuda")
    torch.cuda.synchronize()  # torch sets the generator's state in the stream of the capture
    seen = []
    for seed in 3, None, 3:
        if seed is not None:
            torch.manual_seed(seed)
        graph.replay()
        seen.append(numbers.tolist())
    assert seen[0] == seen[2] != seen[1]


@on_gpu()
def test_branches_of_a_graph_run_side_by_side_and_joins_hold():
    side, other, values = torch.cuda.Stream(), torch.cuda.Stream(), filled(1)
    outside, external = torch.cuda.Event(), 1  # cudaEventWaitExternal
    outside.record()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        handles = ctypes.c_void_p(side.cuda_stream), ctypes.c_void_p(outside.cuda_event)
        assert ctypes.CDLL(None).cudaStreamWaitEvent(*handles, external) == 0
        with torch.cuda.stream(side):
            branch = values * 2
        values.add_(1)  # in the main branch, which does not wait
        main.wait_stream(side)
        joined = branch.clone()
    torch.cuda.synchronize()
    with streams.hold(other):
        outside.record(other)
        graph.replay()
        place = values.data_ptr()
        assert ranks.wait_for(lambda: ctypes.c_float.from_address(place).value == 2)
        assert not torch.cuda.current_stream().query()
    assert joined.cpu()[0] == 4


@on_gpu()
def test_a_graph_waits_for_its_stream_and_for_its_last_replay():
    values = filled(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        values.add_(1)
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with streams.hold(first):
        with torch.cuda.stream(first):
            graph.replay()
        with torch.cuda.stream(second):
            graph.replay()
        assert not second.query()
    torch.cuda.synchronize()
    assert values.cpu()[0] == 2


def capture(mode, during):
    """Captures, and has `during` called meanwhile. What comes of it: an error's name, or none."""
    values = filled(1)
    torch.cuda.synchronize()
    runtime, side = ctypes.CDLL(None), torch.cuda.Stream()
    handle, graph = ctypes.c_void_p(side.cuda_stream), ctypes.c_void_p()
    runtime.cudaGetErrorName.restype = ctypes.c_char_p
    modes = {"global": 0, "thread_local": 1, "relaxed": 2}
    assert runtime.cudaStreamBeginCapture(handle, modes[mode]) == 0
    try:
        with torch.cuda.stream(side):
            values.add_(1)
            during(side)
    except RuntimeError:
        pass  # the end tells
    ended = runtime.cudaStreamEndCapture(handle, ctypes.byref(graph))
    assert bool(graph) == (ended == 0)
    runtime.cudaGetLastError()
    torch.cuda.synchronize()
    assert values.cpu()[0] == 1  # it did not run
    return runtime.cudaGetErrorName(ended).decode().removeprefix("cudaErrorStreamCapture")


OK = "cudaSuccess"


@on_gpu()
def test_a_query_in_another_thread_invalidates_a_capture_in_global_mode_alone():
    event = torch.cuda.Event()
    event.record()

    def query(_):
        return in_thread(event.query)

    assert capture("global", query) == "Invalidated"
    assert capture("thread_local", query) == capture("relaxed", query) == OK

    def query_in_mode(mode):
        def exchange_and_query():
            wanted = ctypes.c_int(mode)
            ctypes.CDLL(None).cudaThreadExchangeStreamCaptureMode(ctypes.byref(wanted))
            return event.query()

        return lambda _: in_thread(exchange_and_query)

    assert capture("global", query_in_mode(1)) == capture("global", query_in_mode(2)) == OK


@on_gpu()
def test_a_query_in_the_same_thread_is_forbidden_unless_the_capture_is_relaxed():
    event = torch.cuda.Event()
    event.record()
    assert capture("global", lambda _: event.query()) == "Invalidated"
    assert capture("thread_local", lambda _: event.query()) == "Invalidated"
    assert capture("relaxed", lambda _: event.query()) == OK


@pytest.mark.parametrize(
    "call", ["cudaMalloc", "cudaHostAlloc", "cudaDeviceSynchronize", "cudaMemset"]
)
@on_gpu()
def test_an_unsafe_call_of_another_thread_invalidates_a_capture(call):
    runtime, place = ctypes.CDLL(None), ctypes.c_void_p()
    memory = filled(1)
    arguments = dict(
        cudaMalloc=(ctypes.byref(place), ctypes.c_size_t(1)),
        cudaHostAlloc=(ctypes.byref(place), ctypes.c_size_t(1), 0),
        cudaDeviceSynchronize=(),
        cudaMemset=(ctypes.c_void_p(memory.data_ptr()), 0, ctypes.c_size_t(4)),
    )[call]
    unsupported = 900
    errors = []

    def during(_):
        errors.append(in_thread(lambda: getattr(runtime, call)(*arguments)))

    assert capture("global", during) == "Invalidated" and errors == [unsupported]


@on_gpu()
def test_a_stream_that_captures_is_neither_asked_nor_waited_for():
    assert capture("relaxed", lambda stream: stream.query()) == "Invalidated"
    assert capture("relaxed", lambda stream: stream.synchronize()) == "Invalidated"

    def query_its_event(stream):
        event = torch.cuda.Event()
        event.record(stream)
        event.query()

    assert capture("relaxed", query_its_event) == "Invalidated"


@on_gpu()
def test_work_in_another_stream_must_be_joined():
    side, values = torch.cuda.Stream(), filled(1)

    def fork(work, join):
        def during(stream):
            side.wait_stream(stream)
            if work:
                with torch.cuda.stream(side):
                    values.add_(1)
            if join:
                stream.wait_stream(side)

        return during

    assert capture("relaxed", fork(work=True, join=True)) == OK
    assert capture("relaxed", fork(work=True, join=False)) == "Unjoined"
    assert capture("relaxed", fork(work=False, join=False)) == OK
    assert not torch.cuda.is_current_stream_capturing() and side.query()


@on_gpu()
def test_a_capture_keeps_its_borders():
    outside = torch.cuda.Event()
    outside.record()
    inside = torch.cuda.Event()
    other = torch.cuda.Stream()
    assert capture("relaxed", lambda stream: stream.wait_event(outside)) == "Invalidated"
    assert capture("relaxed", lambda stream: inside.record(stream)) == OK
    with pytest.raises(RuntimeError):
        inside.query()  # of a capture that is over
    with pytest.raises(RuntimeError):
        other.wait_event(inside)

    def merge(stream):
        runtime, graph = ctypes.CDLL(None), ctypes.c_void_p()
        assert runtime.cudaStreamBeginCapture(ctypes.c_void_p(other.cuda_stream), 2) == 0
        try:
            inside.record(other)
            stream.wait_event(inside)
        finally:
            runtime.cudaStreamEndCapture(ctypes.c_void_p(other.cuda_stream), ctypes.byref(graph))

    assert capture("relaxed", merge) == "Invalidated"


@on_gpu()
def test_a_capture_is_ended_by_its_thread_unless_it_is_relaxed():
    runtime = ctypes.CDLL(None)
    wrong_thread = 908  # cudaErrorStreamCaptureWrongThread
    for mode, expected in (0, wrong_thread), (1, wrong_thread), (2, 0):
        stream, graph = torch.cuda.Stream(), ctypes.c_void_p()
        handle = ctypes.c_void_p(stream.cuda_stream)
        assert runtime.cudaStreamBeginCapture(handle, mode) == 0
        end = lambda: runtime.cudaStreamEndCapture(handle, ctypes.byref(graph))  # noqa: E731
        assert in_thread(end) == expected
        end()
    runtime.cudaGetLastError()
