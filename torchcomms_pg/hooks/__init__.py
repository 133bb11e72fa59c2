"""Functions that are called with every operation of a communicator.

A pre hook (``comm.register_pre_hook``) gets `PreHookArgs` before each operation. A post hook
(``register_post_hook``) gets `PostHookArgs` when the operation is over for its caller: a
synchronous operation when it returns or raises, an asynchronous one when it has completed or
failed. An end hook (``register_end_hook``) gets `EndHookArgs`, with the duration. An abort hook
(``register_abort_hook``) is called without arguments when the communicator has failed. docs/api.md
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
