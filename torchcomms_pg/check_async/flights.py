"""Compares tensors with the asynchronous operations whose end the program does not know yet.

The operations and their deliveries are in C++ (csrc/bindings/LateFlights.hpp).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from torchcomms_pg import _C


def touch(tensor: torch.Tensor, writes: bool, then: Callable[[], tuple[str, str]]) -> None:
    """Reports the flights that should have ended before `tensor` is read or written.

    Args:
        then: returns what reads or writes, and its line.
    """
    span = _C.Span(tensor)
    for flight in _C.flights():
        for kind, spans in (
            ("write" if writes else "read", flight.outputs),
            ("input", flight.inputs if writes else ()),
        ):
            if _shared(spans, span):
                flight.touched |= writes
                flight.issue.found(kind, then())


def overlap(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    then: Callable[[], tuple[str, str]],
) -> bool:
    """Reports the flights whose memory another operation takes; returns whether one is."""
    shared = False
    if not _C.any_flights():
        return shared
    for tensor, writes in [(each, True) for each in outputs] + [(each, False) for each in inputs]:
        span = _C.Span(tensor)
        for flight in _C.flights():
            if _shared([*flight.outputs, *(flight.inputs if writes else ())], span):
                shared = True
                flight.touched |= writes
                flight.issue.found("overlap", then())
    return shared


def written_by(tensor: torch.Tensor) -> list[_C.Flight]:
    """Returns the flights that write bytes of `tensor`."""
    span = _C.Span(tensor)
    return [flight for flight in _C.flights() if _shared(flight.outputs, span)]


def _shared(spans: Sequence[_C.Span], span: _C.Span) -> bool:
    return any(known.shares_bytes(span) and not known.freed() for known in spans)
