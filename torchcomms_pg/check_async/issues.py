"""The issue of an asynchronous operation, as a finding tells it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from torchcomms_pg.check_async import flights
from torchcomms_pg.check_async.places import here
from torchcomms_pg.diagnosis import python_stacks

# Takes a finding's kind, the rank, the issue, and what came too early, each with its line.
Told = Callable[[str, int, tuple[str, str], tuple[str, str]], None]


class Issue(NamedTuple):
    """The issue of one operation. Its texts are made for a finding alone.

    Attributes:
        told: takes findings.
        name: of the operation.
        elements, dtype: of the tensors that it writes, or else of those that it reads.
        group, description: of the process group, or a text for it.
        rank: who issues it.
        frames: the lines of the program, as `python_stacks.place_frames` returns them.
    """

    told: Told
    name: str
    elements: int
    dtype: torch.dtype | None
    group: str
    description: str
    rank: int
    frames: list[python_stacks.Frame]

    def report(self, kind: str, what: str) -> None:
        """Reports what has happened to the operation. C++ calls it at its end, or to sweep."""
        self.found(kind, (what, "" if kind == "lost" else here()))

    def overlaps(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> bool:
        """Reports the flights whose memory the operation takes; returns whether one is."""
        return flights.overlap(outputs, inputs, self.text)

    def found(self, kind: str, then: tuple[str, str]) -> None:
        """Reports a finding about the operation, with what came too early and its line."""
        self.told(kind, self.rank, self.text(), then)

    def text(self) -> tuple[str, str]:
        """Returns the operation, and its line."""
        tensors = f" ({self.elements} x {str(self.dtype).removeprefix('torch.')})"
        shown = f" ({self.description})" if self.description not in ("", "undefined") else ""
        what = f"{self.name}{tensors if self.dtype else ''} of {self.group}{shown}"
        return what, python_stacks.text_of(self.frames)
