"""FSDP2 on `meta`: it refuses parameters without memory, and here no rank needs any."""

from __future__ import annotations

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

_MODULE = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
_COLLECTIVES = "torch.distributed.fsdp._fully_shard._fsdp_collectives"


def install() -> None:
    """Lets FSDP2's groups of parameters stay on `meta`, once the program imports it."""
    if _MODULE in sys.modules:
        _change(sys.modules[_MODULE])
    else:
        sys.meta_path.insert(0, _Finder())


def _change(module: Any) -> None:
    def _validate_no_meta_params(self: Any) -> None:
        if any(each.sharded_param.device.type == "meta" for each in self.fsdp_params):
            self.device = torch.device("meta")

    module.FSDPParamGroup._validate_no_meta_params = _validate_no_meta_params
    collectives: Any = importlib.import_module(_COLLECTIVES)
    handle = collectives._get_device_handle
    collectives._get_device_handle = lambda device: handle("cpu" if device == "meta" else device)
    # From torch 2.15 on; a stream of the CPU has nothing to record.
    collectives.record_grad_output_stream = lambda buffer, stream: None


class _Finder(MetaPathFinder):
    """Finds the module by the other finders, and changes it after its import."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Changing(spec.loader)
        return spec


class _Changing(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _change(module)
