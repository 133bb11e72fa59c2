"""Asynchronous operations, from their issue until the program learns of their end."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchcomms_pg import _C
from torchcomms_pg.check_async.places import caller_is_result, here
from torchcomms_pg.check_async.spans import Span, Unseen, address, bytes_of, poison, same_bytes

# Takes a finding's kind, the flight, and what came too early with its line.
Report = Callable[[str, "Flight", tuple[str, str]], None]


class Flight:
    """One operation whose end the program does not know yet. Keeps no tensor alive.

    Attributes:
        issue: the operation and its line.
        rank, process: who issued it.
        outputs, inputs: the bytes that it writes, and those that it only reads.
        compiled: whether compiled code has issued it.
        touched: whether an operator has written into its tensors.
    """

    def __init__(
        self,
        issue: tuple[str, str],
        rank: int,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        compiled: bool = False,
    ) -> None:
        self.issue, self.rank, self.compiled = issue, rank, compiled
        self.process = os.getpid()
        self.outputs = [Span(tensor) for tensor in outputs]
        self.inputs = [Span(tensor) for tensor in inputs]
        self.touched = False

    def memory(self) -> list[tuple[int, int]]:
        """Returns the addresses of all bytes, and of some between them if views have gaps."""
        return [(span.start, span.end) for span in self.outputs + self.inputs]

    def gone(self) -> bool:
        """Returns whether no output exists any more, or no input if it has no outputs."""
        return all(span.freed() for span in self.outputs or self.inputs)


class Flights:
    """The flights of this process. Thread-safe."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self._flights: dict[int, Flight] = {}
        self._lock = threading.RLock()
        self._added = 0

    def __len__(self) -> int:
        return len(self._flights)

    def add(self, flight: Flight) -> None:
        """Adds a flight, and now and then drops those whose tensors are gone."""
        with self._lock:
            self._flights[id(flight)] = flight
            _C.guard_memory(id(flight), flight.memory())
            self._added += 1
            if self._added % 64 == 0:
                self.sweep()

    def end(self, flight: Flight) -> None:
        """Removes a flight."""
        with self._lock:
            self._flights.pop(id(flight), None)
            _C.guard_memory(id(flight), [])

    def clear(self) -> None:
        """Removes all flights, as a forked process does, which has issued none."""
        self._lock = threading.RLock()
        self._flights.clear()
        _C.guard_nothing()

    def sweep(self) -> None:
        """Drops flights whose tensors are gone, and reports lost results of compiled code."""
        with self._lock:
            for key, flight in list(self._flights.items()):
                if not flight.gone():
                    continue
                del self._flights[key]
                _C.guard_memory(key, [])
                if flight.compiled:
                    self.report("lost", flight, ("nothing waits for it", ""))

    def touch(
        self, tensor: torch.Tensor, writes: bool, then: Callable[[], tuple[str, str]]
    ) -> None:
        """Reports the flights that it is too early to read or write `tensor` for.

        Args:
            then: returns what reads or writes, and its line.
        """
        start = address(tensor)
        span: Span | None = None
        for flight in list(self._flights.values()):
            for kind, spans in (
                ("write" if writes else "read", flight.outputs),
                ("input", flight.inputs),
            ):
                if kind == "input" and not writes:
                    continue
                for known in spans:
                    if start >= known.end:
                        continue
                    span = span or Span(tensor)
                    if not known.shares_bytes(span) or known.freed():
                        continue
                    flight.touched |= writes
                    self.report(kind, flight, then())
                    break

    def issued(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        then: Callable[[], tuple[str, str]],
    ) -> bool:
        """Reports the flights whose memory another operation takes; returns whether one is."""
        shared = False
        for tensor, writes in [(each, True) for each in outputs] + [
            (each, False) for each in inputs
        ]:
            span = Span(tensor)
            for flight in list(self._flights.values()):
                taken = flight.outputs + flight.inputs if writes else flight.outputs
                if any(known.shares_bytes(span) and not known.freed() for known in taken):
                    shared = True
                    flight.touched |= writes
                    self.report("overlap", flight, then())
        return shared

    def written_by(self, tensor: torch.Tensor) -> list[Flight]:
        """Returns the flights that write bytes of `tensor`."""
        span = Span(tensor)
        return [
            flight
            for flight in list(self._flights.values())
            if any(known.shares_bytes(span) and not known.freed() for known in flight.outputs)
        ]


class Delivery:
    """Hands an operation's results over when the program learns of its end.

    The operation runs on copies. C++ calls `awaited`, `ended` and `complete`, from any thread.

    Args:
        outputs, results: the program's tensors, and the copies that the operation writes.
        inputs, copies: the program's tensors, and what was in them at the issue.
    """

    def __init__(
        self,
        flights: Flights,
        flight: Flight,
        outputs: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        copies: Sequence[torch.Tensor],
    ) -> None:
        self.flight = flight
        self._flights = flights
        self._outputs = [*zip(outputs, results, strict=True)]
        # A work keeps the tensors themselves until its end. So do not spans: they see memory freed.
        self._inputs: list[torch.Tensor] = [*inputs]
        self._copies = [*copies]
        self._lock = threading.RLock()
        self._delivered = self._told = False
        self._waits = 0
        self._futures_of_python = 0
        flights.add(flight)

    def awaited(self, ok: bool) -> None:
        """Counts a call of wait()."""
        if os.getpid() != self.flight.process:
            self._flights.report("process", self.flight, ("wait()", here()))
        elif self._waits and not caller_is_result():
            self._flights.report("again", self.flight, ("the second wait()", here()))
        self._waits += not caller_is_result()

    def ended(self, ok: bool) -> None:
        """Hands the results over, if the operation has ended well, and ends the flight."""
        with self._lock:
            if self._told:
                return
            self._told = True
            self._deliver(ok)
            if ok:
                self._check_inputs()
            self._flights.end(self.flight)
            self._inputs, self._copies = [], []

    def complete(self, ok: bool) -> None:
        """Hands the results over at the end, for a future.

        The flight goes on if the program has only futures that tell it by a call.
        """
        with self._lock:
            if self._futures_of_python and ok:
                self._deliver(ok)
            else:
                self.ended(ok)

    def future_taken(self) -> None:
        """Notes that Python has got a future, whose calls tell of the end."""
        with self._lock:
            self._futures_of_python += 1

    def future_passed_on(self) -> None:
        """Notes that the future is in the hands of C++, which waits for it by itself."""
        with self._lock:
            self._futures_of_python = 0
            if self._delivered:
                self.ended(True)

    def work_dropped(self) -> None:
        """Releases the inputs, as a work does that the program drops: futures keep no input."""
        with self._lock:
            self._inputs = []

    def _deliver(self, ok: bool) -> None:
        if self._delivered:
            return
        self._delivered = True
        if ok and os.getpid() == self.flight.process:
            with Unseen():
                for span, (output, result) in zip(self.flight.outputs, self._outputs, strict=True):
                    if span.freed():
                        continue
                    if not self.flight.touched and not _is_poison(output):
                        self.flight.touched = True
                        self._flights.report(
                            "changed", self.flight, _learned("its output has changed")
                        )
                    output.data.copy_(result)
        self._outputs = []

    def _check_inputs(self) -> None:
        flight = self.flight
        if flight.touched or os.getpid() != flight.process:
            return
        with Unseen():
            for span, copy in zip(flight.inputs, self._copies, strict=True):
                if span.freed():
                    self._flights.report("freed", flight, _learned("its input has been freed"))
                elif (now := span.tensor()) is not None and not same_bytes(now, copy):
                    self._flights.report("changed", flight, _learned("its input has changed"))
                else:
                    continue
                return


class Deliveries:
    """Several operations that end together, as in a batch."""

    def __init__(self, parts: Sequence[Delivery]) -> None:
        self._parts = parts

    def __getattr__(self, name: str) -> Callable[..., None]:
        def of_all(*arguments: Any) -> None:
            for part in self._parts:
                getattr(part, name)(*arguments)

        return of_all


def _learned(what: str) -> tuple[str, str]:
    """Returns what has happened, with the line at which the program learns of the end."""
    return f"{what} before the wait", here()


def _is_poison(tensor: torch.Tensor) -> bool:
    """Returns whether the tensor holds what `poison` has put into it."""
    if not tensor.numel():
        return True
    return bool((bytes_of(tensor) == _bytes_of_poison(tensor.dtype)).all())


@functools.cache
def _bytes_of_poison(dtype: torch.dtype) -> torch.Tensor:
    element = torch.empty(1, dtype=dtype)
    poison(element)
    return bytes_of(element)[0]
