"""A simulated accelerator, the device ``sim``, for tests of what is the same on any accelerator.

`install` makes it known to torch, with all that PyTorch's "Accelerator Hooks" asks of a device;
then ``torch.randn(3, device="sim")`` works, with streams and events as asynchronous as a GPU's.
See Device.hpp.
"""

import atexit
import contextlib
import functools
import pathlib
import sys
import types

import torch

__all__ = [
    "Graph",
    "early_queries",
    "hanging_driver",
    "hold",
    "install",
    "set_delays",
    "settled",
    "waits",
]

# Where build.py leaves what it has built for this torch.
_TAG = f"torch-{torch.__version__}-{sys.implementation.cache_tag}"
__path__.append(str(pathlib.Path(__file__).parents[2] / "build" / _TAG / "_simulated"))


@functools.cache
def _extension():
    import importlib

    return importlib.import_module("simulated._simulated")


@functools.cache
def install():
    """Makes the device ``sim`` known; returns its module, which is also ``torch.sim``."""
    native = _extension()
    torch.utils.rename_privateuse1_backend("sim")
    module = _device_module(native)
    torch._register_device_module("sim", module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    # What is queued may hold tensors that Python knows.
    atexit.register(module.synchronize_all)
    return module


def set_delays(seed=0, probability=0.3, longest_us=2000):
    """Every stream waits before an operation, with this probability, up to this long.

    The delays of a stream depend on the seed and its number. ``longest_us=0`` ends them.
    """
    _extension().set_delays(seed, probability, longest_us)


@contextlib.contextmanager
def hold(stream=None):
    """Holds a stream (the current one) up while the block runs, or until ``.release()``."""
    stream = install().current_stream() if stream is None else stream
    held = _extension().hold(stream.device_index, stream.stream_id)
    try:
        yield held
    finally:
        held.release()


def settled():
    """Whether every stream of the process is idle, or waits for another one or a `hold`.

    Then nothing more runs until somebody outside queues or releases something. A stream in which a
    collective runs is not settled, also while it waits for its peers.
    """
    return _extension().settled()


def waits(stream):
    """Whether a stream has come to a wait for something that has not happened."""
    return _extension().waits(stream.device_index, stream.stream_id)


def early_queries():
    """How often the main thread, and other threads, were told that an event has not come yet."""
    return _extension().early_queries()


@contextlib.contextmanager
def hanging_driver():
    """Whoever asks for an event in the block waits until its end."""
    _extension().hang_driver(True)
    try:
        yield
    finally:
        _extension().hang_driver(False)


class Graph:
    """What a stream was told to do, recorded instead of run; `replay` does it in the current one.

    As with CUDA's graphs, tensors keep their places: a replay reads and writes those of the
    capture.
    """

    def __init__(self):
        self._graph = _extension().Graph()

    @contextlib.contextmanager
    def capture(self):
        """Records what the block queues in the current stream."""
        stream = install().current_stream()
        self._graph.begin(stream.device_index, stream.stream_id)
        try:
            yield
        finally:
            self._graph.end(stream.device_index, stream.stream_id)

    def replay(self):
        stream = install().current_stream()
        self._graph.replay(stream.device_index, stream.stream_id)


def _index(device):
    if device is None:
        return _extension().current_device()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return _extension().current_device() if index is None else index


def _device_module(native):
    module = types.ModuleType("torch.sim")

    class Stream(torch.Stream):
        def __new__(cls, device=None, priority=0, **kwargs):
            if kwargs:
                return super().__new__(cls, **kwargs)
            return super().__new__(cls, torch.device("sim", _index(device)), priority=priority)

    class Event(torch.Event):
        def __new__(cls, enable_timing=False, blocking=False, interprocess=False):
            return super().__new__(cls, torch.device("sim"), enable_timing=enable_timing)

    @contextlib.contextmanager
    def device_context(device):
        before = native.current_device()
        native.set_device(_index(device))
        try:
            yield
        finally:
            native.set_device(before)

    @contextlib.contextmanager
    def stream_context(stream):
        if stream is None:
            yield
            return
        before = torch.accelerator.current_stream(torch.device("sim", stream.device_index))
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)

    def manual_seed_all(seed):
        for device in range(native.device_count()):
            native.default_generator(device).manual_seed(seed)

    def synchronize_all():
        for device in range(native.device_count()):
            native.synchronize(device)

    module.Stream = Stream
    module.Event = Event
    module.device = device_context
    module.stream = stream_context
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module.init = lambda: None
    # Without it torch 2.11 takes the device for unused, and torch.accelerator.synchronize for done.
    module._lazy_init = lambda: None
    module._is_in_bad_fork = lambda: False
    module.device_count = native.device_count
    module.current_device = native.current_device
    module.set_device = lambda device: native.set_device(_index(device))
    module.current_stream = lambda device=None: torch.accelerator.current_stream(
        torch.device("sim", _index(device))
    )
    module.set_stream = torch.accelerator.set_stream
    module.synchronize = lambda device=None: native.synchronize(_index(device))
    module.synchronize_all = synchronize_all
    module.manual_seed = lambda seed: native.default_generator(_index(None)).manual_seed(seed)
    module.manual_seed_all = manual_seed_all
    module.get_rng_state = lambda device=None: native.default_generator(_index(device)).get_state()
    module.set_rng_state = lambda state, device=None: native.default_generator(
        _index(device)
    ).set_state(state)
    module.default_generators = [native.default_generator(i) for i in range(native.device_count())]
    return module
