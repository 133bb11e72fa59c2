"""Functions that are called with every operation of a communicator.

The function of ``comm.register_pre_hook`` is called with `PreHookArgs` before each operation, that
of ``register_post_hook`` with `PostHookArgs` when it is over for its caller: a synchronous one when
it returns, an asynchronous one when it has completed or failed. That of ``register_end_hook`` gets
`EndHookArgs`, which has the duration, and that of ``register_abort_hook``, when the communicator
has failed, no arguments. docs/api.md says what a hook may do, and in which thread it runs.

`FlightRecorderHook` records operations, `NanCheckHook` refuses those that would send NaN.
`process_recorder` gives the ring in which all process groups of this process are recorded.
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
