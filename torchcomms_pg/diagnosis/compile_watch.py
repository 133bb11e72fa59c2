"""Records when ``torch.compile`` is at work, so that peers wait longer for this rank.

torch calls callbacks when a compilation begins and ends. Registering them at once would import
``torch._dynamo``, which takes seconds. So they are registered when the program imports that module,
as every compilation does.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from torchcomms_pg import _C, env

_CALLBACKS = "torch._dynamo.callback"


def configure() -> None:
    """Sets the limit of waits for ranks that compile, and has the callbacks registered.

    Raises:
        ValueError: TORCHCOMM_COMPILE_TIMEOUT_SECONDS has an invalid value.
    """
    _C.set_compile_limit(env.compile_timeout())
    if _CALLBACKS in sys.modules:
        _register(sys.modules[_CALLBACKS])
    elif not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())


class _Watch:
    """An import hook that registers the callbacks when torch._dynamo.callback is imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _CALLBACKS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _register(module)

            loader.exec_module = exec_module
        return spec


def _register(module: Any) -> None:
    handler = module.callback_handler
    if _began in handler.start_callbacks:
        return
    _listen(handler)
    clear = handler.clear

    def clear_others() -> None:
        """Clears all callbacks but this module's, which `torch._dynamo.reset` must not remove."""
        try:
            clear()
        finally:  # clear() raises during a compilation, whose end must be noticed, too
            _listen(handler)

    handler.clear = clear_others


def _listen(handler: Any) -> None:
    # First in the lists: if a callback raises, the callbacks after it are not called.
    handler.start_callbacks.insert(0, _began)
    handler.end_callbacks.insert(0, _ended)


def _began(args: Any = None) -> None:
    trigger = getattr(args, "callback_trigger", None)
    _C.compile_began(getattr(trigger, "name", "DYNAMO"))


def _ended(args: Any = None) -> None:
    _C.compile_ended()
