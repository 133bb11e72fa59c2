"""Functions that are called with every operation of a communicator.

A function passed to ``comm.register_pre_hook`` gets `PreHookArgs` before each operation. One passed
to ``register_post_hook`` gets `PostHookArgs` when the operation is over for its caller: when a
synchronous operation returns, or an asynchronous one has completed or failed. One passed to
``register_end_hook`` gets `EndHookArgs`, which has the duration. One passed to
``register_abort_hook`` is called without arguments when the communicator has failed. docs/api.md
says what a hook may do, and in which thread it runs.

`FlightRecorderHook` records operations; `NanCheckHook` refuses operations that would send NaN.
`process_recorder` returns the ring in which all process groups of this process are recorded.
"""

from torchcomms_pg._C import EndHookArgs, OpName, PostHookArgs, PreHookArgs, RemovableHandle
from torchcomms_pg.hooks.flight_recorder import (
    FlightRecorder,
    FlightRecorderHook,
    process_recorder,
)
from torchcomms_pg.hooks.nan_check import NanCheckHook

__all__ = [
    "EndHookArgs",
    "FlightRecorder",
    "FlightRecorderHook",
    "NanCheckHook",
    "OpName",
    "PostHookArgs",
    "PreHookArgs",
    "RemovableHandle",
    "process_recorder",
]
