"""Runs a program on threads that act as the ranks of a group, up to its hang, without torch.

The operations only wait for each other: an operation ends when all ranks have called their
operation of its number, with one name and one size.
"""

import importlib.util
import sys
import threading
import time

LIMIT = 20  # seconds for which a program may run


class Stopped(BaseException):
    """Ends a rank after the hang."""


class Group:
    def __init__(self, size):
        self.size = size
        self.changed = threading.Condition()
        self.calls = [[] for _ in range(size)]  # by rank: name, size, thread, stack, time
        self.done = 0  # operations that have ended
        self.idle = [False] * size  # ranks that wait, or have ended
        self.stopped = False

    def call(self, rank, name, size):
        frames = []
        frame = sys._getframe(1)
        while frame is not None:
            frames.append((frame.f_code, frame.f_lasti))
            frame = frame.f_back
        with self.changed:
            self.calls[rank].append((name, size, threading.get_ident(), frames, time.time_ns()))
            number = len(self.calls[rank])
            self.advance()
            self.wait(rank, lambda: self.done >= number)

    def advance(self):
        while all(len(calls) > self.done for calls in self.calls):
            if len({calls[self.done][:2] for calls in self.calls}) > 1:
                return
            self.done += 1
            self.idle = [False] * self.size
            self.changed.notify_all()

    def wait(self, rank, over):
        while not over() and not self.stopped:
            self.idle[rank] = True
            self.changed.notify_all()
            assert self.changed.wait(LIMIT), "the program does not end"
            self.idle[rank] = self.idle[rank] and not over()
        if self.stopped:
            raise Stopped


class At:
    """What a program gets: its rank, and operations."""

    def __init__(self, group, rank):
        self.group = group
        self.rank = rank
        self.world = group.size

    def ones(self, size):
        return [1.0] * size

    def all_reduce(self, tensor):
        self.group.call(self.rank, "all_reduce", len(tensor))

    def broadcast(self, tensor, root):
        self.group.call(self.rank, f"broadcast from {root}", len(tensor))

    def barrier(self):
        self.group.call(self.rank, "barrier", 0)

    def away(self):
        """Waits for something that is no operation."""
        with self.group.changed:
            self.group.wait(self.rank, lambda: False)


class Parked:
    """Has a rank wait at one of the lines of its program, as a rank does that has got no core.

    Attributes:
        line: where the rank waits; None if its program has fewer lines.
    """

    def __init__(self, path, rank, count):
        self.path, self.rank, self.left, self.line = str(path), rank, count, None

    def begin(self, group, rank):
        if rank == self.rank:
            self.group = group
            sys.settrace(self.trace)

    def trace(self, frame, event, _):
        if frame.f_code.co_filename != self.path:
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                self.line = frame.f_lineno
                with self.group.changed:
                    self.group.wait(self.rank, lambda: False)
        return self.trace


def without_trace(stack):
    """Returns the places of a stack up to where its rank is parked."""
    for level, frame in enumerate(stack):
        if frame.code.file == __file__ and frame.code.name == "Parked.trace":
            return stack[:level]
    return stack


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(path, at_hang, world=None, last=lambda at: None, begin=lambda group, rank: None):
    """Runs the program's main() on each rank. Returns at_hang(group) if it hangs, else None.

    Args:
        path: the program.
        at_hang: called while the ranks wait.
        world: the number of ranks; None for the program's.
        last: called by each rank after main().
        begin: called by each rank before main().
    """
    module = load(path)
    group = Group(world or getattr(module, "WORLD", 2))
    failures = []

    def rank(number):
        try:
            at = At(group, number)
            begin(group, number)
            module.main(at)
            last(at)
        except Stopped:
            pass
        except BaseException as error:
            failures.append(error)
        with group.changed:
            group.idle[number] = True
            group.changed.notify_all()

    threads = [threading.Thread(target=rank, args=(i,), daemon=True) for i in range(group.size)]
    group.threads = [None] * group.size
    for number, thread in enumerate(threads):
        thread.start()
        group.threads[number] = thread.ident
    with group.changed:
        assert group.changed.wait_for(lambda: all(group.idle), LIMIT), "the program does not end"
    for thread in threads:
        if all(len(calls) == group.done for calls in group.calls):
            thread.join(0.2)
    hangs = any(thread.is_alive() for thread in threads)
    try:
        return at_hang(group) if hangs and not failures else None
    finally:
        with group.changed:
            group.stopped = True
            group.changed.notify_all()
        for thread in threads:
            thread.join(LIMIT)
        if failures:
            raise failures[0]
