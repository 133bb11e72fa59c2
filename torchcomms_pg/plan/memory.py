"""Bytes of the parameters, gradients and states that the program's optimizers step."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from torchcomms_pg.plan.recorder import current


class Meter:
    """Takes the largest sums at the steps of all optimizers of this process."""

    def __init__(self) -> None:
        self._parameters: dict[int, int] = {}
        self._gradients: dict[int, int] = {}
        self._states: dict[int, int] = {}
        register_optimizer_step_pre_hook(self._before)
        register_optimizer_step_post_hook(self._after)

    def _before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        me = id(optimizer)
        self._parameters[me] = sum(map(_bytes, parameters))
        gradients = sum(_bytes(each.grad) for each in parameters if each.grad is not None)
        self._gradients[me] = max(gradients, self._gradients.get(me, 0))
        self._tell()

    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        states = [each for state in optimizer.state.values() for each in _tensors(state)]
        self._states[id(optimizer)] = sum(map(_bytes, states))
        self._tell()

    def _tell(self) -> None:
        memory = current().program.memory
        memory.parameters = sum(self._parameters.values())
        memory.gradients = sum(self._gradients.values())
        memory.states = sum(self._states.values())


def _tensors(state: Any) -> list[torch.Tensor]:
    values = state.values() if isinstance(state, dict) else ()
    return [value for value in values if isinstance(value, torch.Tensor)]


def _bytes(tensor: torch.Tensor) -> int:
    """Returns the bytes of this rank's part of a tensor."""
    local = getattr(tensor, "_local_tensor", tensor)
    return int(local.numel() * local.element_size())
