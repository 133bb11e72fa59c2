"""Runs operations on copies, and compares each operator of torch with the operations in flight."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

from torchcomms_pg import _C, env
from torchcomms_pg.check_async import flights
from torchcomms_pg.check_async.arguments import (
    C10D,
    COMMUNICATOR,
    COMMUNICATOR_ROOTED,
    FUNCTIONAL,
    bound,
    c10d_roles,
    mapped,
    plain,
    plan,
    tensors_in,
)
from torchcomms_pg.check_async.findings import Finding, Findings, add
from torchcomms_pg.check_async.issues import Issue
from torchcomms_pg.check_async.places import here, in_compiled_code
from torchcomms_pg.diagnosis.python_stacks import place_frames

_Call = Callable[..., Any]
_PLAIN = torch.Tensor.__torch_dispatch__


class Checker:
    """The check of one process, from `start` to `stop`.

    Args:
        found: called with each finding that is the first at its lines.
    """

    def __init__(self, found: Callable[[Finding], None] = lambda finding: None) -> None:
        self._found = found
        self._findings: dict[tuple[str, str, str], Finding] = {}
        self._operations = 0
        self._not_covered: dict[str, None] = {}
        self._results = _Results()
        self._world: ProcessGroup | None = None
        self._known_rank: int | None = None
        self._futures: dict[int, list[_C.Delivery]] = {}
        self._restore: list[tuple[Any, str, Any]] = []
        self.running = False

    def findings(self) -> Findings:
        """Returns what has been found so far."""
        _C.sweep_flights()
        return Findings([*self._findings.values()], self._operations, [*self._not_covered])

    def start(self) -> None:
        """Begins the check, in this thread and in threads that start later."""
        self.running = True
        checker = self
        for name in ("_start_coalescing", "_end_coalescing"):
            self._replace(ProcessGroup, name, getattr(self, name))
        self._replace(_C.LateWork, "get_future", self._get_future)
        future: Any = torch._C.Future
        for name in ("wait", "value"):
            self._replace(future, name, partial(_told_after, self))
        self._replace(future, "done", partial(_told_if_true, self))
        for name in ("then", "add_done_callback"):
            self._replace(future, name, partial(_told_in_callback, self))
        self._replace(torch._C, "_collect_all", self._collect_all)
        self._replace(dist, "_register_comm_hook", self._register_comm_hook)
        comm = _C.Communicator
        for name, roles in COMMUNICATOR.items():
            writes, rooted = [role == "writes" for role in roles], COMMUNICATOR_ROOTED.get(name)
            self._set(comm, name, _C.late_method(name, writes, rooted, self._issued))
        for name in ("enter_batch", "leave_batch", "cancel_batch"):
            self._replace(comm, name, getattr(self, f"_{name}"))
        self._replace(torch.Tensor, "tolist", self._tolist)
        self._replace(torch, "compile", self._compile)

        def in_thread(original: _Call, thread: threading.Thread) -> None:
            _C.show_thread(checker.running)
            original(thread)

        self._replace(threading.Thread, "_bootstrap_inner", in_thread)
        _C.show_operators(_Mode(self), self._issued, c10d_roles())
        _C.show_thread(True)

    def stop(self) -> Findings:
        """Ends the check, and returns what was found. Call it in the thread that started it."""
        self.running = False
        _C.show_thread(False)
        _C.show_no_operators()
        findings = self.findings()
        _C.forget_flights()
        while self._restore:
            owner, name, original = self._restore.pop()
            if original is None:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        return findings

    def forget(self) -> None:
        """Forgets what the parent process has found and issued, in its forked child."""
        _C.forget_flights()
        self._findings.clear()
        self._operations = 0

    # Operations

    def _issued(
        self,
        name: str,
        count: int,
        dtype: torch.dtype | None,
        group: str,
        description: str,
        checked: bool,
        covered: bool,
    ) -> Issue:
        """Counts an operation. C++ calls it at the issue of those that it checks."""
        self._operations += checked
        if not covered:
            self._not_covered["operations on tensors of other devices, or sparse ones"] = None
        rank, place = self._rank(), place_frames(sys._getframe())
        return Issue(self._report, name, count, dtype, f"group {group}", description, rank, place)

    def _rank(self) -> int:
        world = dist.distributed_c10d._world.default_pg
        if self._known_rank is None or world is not self._world:
            self._world = world
            self._known_rank = dist.get_rank() if world else (env.launcher_ranks() or (0,))[0]
        return self._known_rank

    def functional(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls an operator of functional collectives on copies."""
        schema = operator._schema
        values = bound(operator, args, kwargs)
        writes = [each.name for each in schema.arguments if each.alias_info is not None]
        reads = [
            each.name
            for each in schema.arguments
            if "Tensor" in str(each.type) and each.name not in writes
        ]
        outputs = [each for name in writes for each in tensors_in(values[name])]
        inputs = [each for name in reads for each in tensors_in(values[name])]
        if not plain(outputs + inputs):
            return operator(*args, **kwargs)
        name = schema.name.partition("::")[2].removesuffix("_out").rstrip("_")
        group = values["group_name"]
        group = group if isinstance(group, str) else getattr(group, "group_name", "?")
        described = outputs or inputs
        count = sum(each.numel() for each in described)
        dtype = described[0].dtype if described else None
        issue = self._issued(name, count, dtype, group, "", checked=True, covered=True)
        shared = issue.overlaps(outputs, inputs)
        changed = dict(values)
        for each in (*writes, *reads):
            changed[each] = mapped(values[each], lambda tensor: tensor.detach().clone())
        copies = [each for name in reads for each in tensors_in(changed[name])]
        kept = [each.clone() for each in copies]
        returned = operator(**changed)
        results = [*tensors_in(returned)]
        late = outputs if writes else [torch.empty_like(each) for each in results]
        compiled = in_compiled_code()
        for output, result in zip(late, results, strict=True):
            _C.poison(output)
            flight = _C.Flight(issue, [output], inputs, compiled)
            flight.touched = shared
            self._results.add(flight, result, inputs, kept)
        return late if isinstance(returned, (list, tuple)) else late[0]

    def wait_tensor(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Waits for the results of which tensors have bytes."""
        for tensor in tensors_in([*args, *kwargs.values()]):
            if plain([tensor]):
                self._results.wait(tensor)
        return operator(*args, **kwargs)

    def touch(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compares an operator's tensors with the operations in flight."""
        try:
            accesses = _plans[operator]
        except KeyError:
            accesses = _plans[operator] = plan(operator)
        for position, name, writes in accesses:
            value = args[position] if position < len(args) else kwargs.get(name)
            for tensor in tensors_in(value):
                if plain([tensor]):
                    flights.touch(tensor, writes, lambda: (str(operator), here()))

    def _report(self, kind: str, rank: int, issue: tuple[str, str], then: tuple[str, str]) -> None:
        finding = Finding(kind, [rank], issue, then)
        if add(self._findings, finding):
            self._found(finding)

    # Batches

    def _start_coalescing(self, original: _Call, group: Any, *args: Any) -> None:
        original(group, *args)
        _C.close_late_batch(group, None)
        _C.open_late_batch(group)

    def _end_coalescing(self, original: _Call, group: Any, *args: Any) -> Any:
        work = None
        try:
            work = original(group, *args)
        finally:
            late = _C.close_late_batch(group, work)
        return late

    def _enter_batch(self, original: _Call, comm: Any) -> int | None:
        joined: int | None = original(comm)
        _C.open_late_batch(comm)
        return joined

    def _leave_batch(self, original: _Call, comm: Any, joined: int | None) -> Any:
        work = original(comm, joined)
        return work if joined is not None else _C.close_late_batch(comm, work)

    def _cancel_batch(self, original: _Call, comm: Any, joined: int | None) -> None:
        original(comm, joined)
        if joined is None:
            _C.cancel_late_batch(comm)

    # Futures

    def _get_future(self, original: _Call, work: Any) -> Any:
        deliveries = work.deliveries
        for each in deliveries:
            each.future_taken()
            weakref.finalize(work, each.work_dropped).atexit = False
        future = original(work)
        self._futures[id(future)] = deliveries
        weakref.finalize(future, self._futures.pop, id(future), None).atexit = False
        return future

    def told(self, future: Any) -> None:
        """Notes that a future has told the program of the end."""
        for delivery in self._futures.pop(id(future), ()):
            delivery.ended(True)

    def passed_on(self, future: Any) -> None:
        """Notes that C++ waits for a future."""
        for delivery in self._futures.get(id(future), ()):
            delivery.future_passed_on()

    def _collect_all(self, original: _Call, futures: Any) -> Any:
        for future in futures:
            self.passed_on(future)
        return original(futures)

    def _register_comm_hook(self, original: _Call, reducer: Any, state: Any, hook: _Call) -> Any:
        def passing_on(*args: Any) -> Any:
            future = hook(*args)
            self.passed_on(future)
            return future

        passing_on.__name__ = getattr(hook, "__name__", "hook")
        passing_on.__qualname__ = getattr(hook, "__qualname__", passing_on.__name__)
        return original(reducer, state, passing_on)

    # Other ways to operations and data

    def _tolist(self, original: _Call, tensor: torch.Tensor) -> Any:
        if (
            _C.any_flights()
            and type(tensor) in (torch.Tensor, torch.nn.Parameter)
            and plain([tensor])
        ):
            flights.touch(tensor, False, lambda: ("tolist", here()))
        return original(tensor)

    def _compile(self, original: _Call, *args: Any, **kwargs: Any) -> Any:
        from torch._inductor import output_code

        graph = output_code.CompiledFxGraph
        if not any(owner is graph for owner, *_ in self._restore):
            self._replace(graph, "__call__", self._run_graph)
        return original(*args, **kwargs)

    def _run_graph(self, original: _Call, graph: Any, inputs: Sequence[Any]) -> Any:
        """Checks the inputs of a graph of Inductor, whose kernels are no operators."""
        if _C.any_flights():
            waited = _waited_inputs(graph)
            for position, value in enumerate(inputs):
                if position in waited or not isinstance(value, torch.Tensor):
                    continue
                if type(value) in (torch.Tensor, torch.nn.Parameter) and plain([value]):
                    flights.touch(value, False, lambda: ("a compiled graph", here()))
        return original(graph, inputs)

    def _replace(self, owner: Any, name: str, replacement: _Call) -> None:
        """Replaces a function until `stop`; `replacement` gets the original first."""
        original = getattr(owner, name)

        def replaced(*args: Any, **kwargs: Any) -> Any:
            return replacement(original, *args, **kwargs)

        replaced.__name__, replaced.__wrapped__ = name, original  # type: ignore[attr-defined]
        replaced.__doc__ = original.__doc__
        self._set(owner, name, replaced)

    def _set(self, owner: Any, name: str, value: Any) -> None:
        self._restore.append((owner, name, vars(owner).get(name)))
        setattr(owner, name, value)


class _Mode(TorchDispatchMode):
    """Sees the operators that touch memory of flights, also in C++ and in backward passes."""

    supports_higher_order_operators = True

    def __init__(self, checker: Checker) -> None:
        super().__init__()
        self._checker = checker

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Returns that torch.compile goes on as without the mode."""
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Returns that the mode need not see what the compiler itself does."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # saves a wrapper around each operator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and not all(each.__torch_dispatch__ is _PLAIN for each in types):
            if any(each.__module__.startswith("torch._subclasses") for each in types):
                return func(*args, **(kwargs or {}))  # of a compiler, without data
            return NotImplemented  # a subclass of Tensor, which calls the operator on plain tensors
        checker = self._checker
        handler = _handlers.get(func)
        if handler is None:
            handler = _handlers[func] = _handler(func)
        if handler is not _touch:
            return handler(checker, func, args, kwargs or {})
        if _C.any_flights():
            checker.touch(func, args, kwargs or {})
        return func(*args, **kwargs) if kwargs else func(*args)


class _Results:
    """The results of functional collectives that nobody has waited for."""

    def __init__(self) -> None:
        self._pending: dict[_C.Flight, tuple[_C.Delivery, torch.Tensor]] = {}

    def add(
        self,
        flight: _C.Flight,
        result: torch.Tensor,
        inputs: list[torch.Tensor],
        copies: list[torch.Tensor],
    ) -> None:
        self._pending[flight] = (_C.Delivery(flight, inputs, copies), result)
        for known in list(self._pending):
            if known.outputs[0].freed():
                del self._pending[known]

    def wait(self, tensor: torch.Tensor) -> None:
        for flight in flights.written_by(tensor):
            if flight in self._pending:
                delivery, result = self._pending.pop(flight)
                torch.ops._c10d_functional.wait_tensor(result)
                delivery.end_with(result)


def _told_after(checker: Checker, original: _Call, future: Any, *args: Any) -> Any:
    try:
        return original(future, *args)
    finally:
        checker.told(future)


def _told_if_true(checker: Checker, original: _Call, future: Any) -> Any:
    if result := original(future):
        checker.told(future)
    return result


def _told_in_callback(checker: Checker, original: _Call, future: Any, callback: _Call) -> Any:
    deliveries = checker._futures.get(id(future), ())

    def told_first(ended: Any) -> Any:
        for delivery in deliveries:
            delivery.ended(True)
        was = _C.show_thread(checker.running)
        try:
            return callback(ended)
        finally:
            _C.show_thread(was)

    return original(future, told_first)


def _again(checker: Checker, operator: Any, args: Any, kwargs: Any) -> Any:
    """Shows C++ an operator of c10d that modes of the program have seen first."""
    return _C.show_again(operator, *args, **kwargs)


def _touch(checker: Checker, operator: Any, args: Any, kwargs: Any) -> Any:
    raise AssertionError("called in line")


def _handler(operator: Any) -> _Call:
    if not isinstance(operator, torch._ops.OpOverload):
        return lambda checker, function, args, kwargs: function(*args, **kwargs)
    name = operator._schema.name.partition("::")[2]
    if operator.namespace == "c10d":
        return _again if name in C10D else _handler(None)
    if operator.namespace == "_c10d_functional":
        if name in FUNCTIONAL:
            return Checker.functional
        return Checker.wait_tensor if name in ("wait_tensor", "wait_tensors") else _handler(None)
    return _touch


_handlers: dict[Any, _Call] = {}
_plans: dict[Any, tuple[tuple[int, str, bool], ...]] = {}


def _waited_inputs(graph: Any) -> set[int]:
    """Returns the positions of the inputs that a graph of Inductor passes to wait_tensor."""
    import re

    source = getattr(graph, "source_code", "") or ""
    waited = set(re.findall(r"wait_tensor\.default\((\w+)\)", source))
    names = re.search(r"^\s+([\w, ]+?),? = args$", source, re.MULTILINE)
    order = names[1].split(", ") if names else []
    return {position for position, name in enumerate(order) if name in waited}
