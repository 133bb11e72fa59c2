"""Ends of the steps of the program's optimizers."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from torchcomms_pg.plan.recorder import current


class Rounds:
    """Notes in `Program.steps` how many operations this process had called at the end of each step.

    A step ends with the last of its optimizers. An optimizer that steps again begins the next step.
    """

    def __init__(self) -> None:
        self._stepped: set[int] = set()
        register_optimizer_step_post_hook(self._after)

    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        program = current().program
        if not program.steps or id(optimizer) in self._stepped:
            self._stepped.clear()
            program.steps.append(0)
        self._stepped.add(id(optimizer))
        program.steps[-1] = len(program.calls)
