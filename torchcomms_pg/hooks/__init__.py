"""Functions that are called with every operation of a communicator.

``comm.register_pre_hook(f)`` has ``f(args: PreHookArgs)`` called before each operation,
``register_post_hook`` with `PostHookArgs` after it was launched, ``register_end_hook`` with
`EndHookArgs` when it has ended, and ``register_abort_hook`` without arguments when the
communicator has failed. docs/api.md says what a hook may do.
"""

from torchcomms_pg._C import EndHookArgs, OpName, PostHookArgs, PreHookArgs, RemovableHandle
from torchcomms_pg.hooks.nan_check import NanCheckHook

__all__ = [
    "EndHookArgs",
    "NanCheckHook",
    "OpName",
    "PostHookArgs",
    "PreHookArgs",
    "RemovableHandle",
]
