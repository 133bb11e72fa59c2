"""What one rank of torch does: it holds a group of every backend and measures over them."""

from __future__ import annotations

import functools
import gc
import time
from array import array
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from . import deepspeed, groups, operations, programs, sharing, steps, timing
from .front_ends import FRONT_ENDS, FrontEnd
from .results import Contender

TIMEOUT = timedelta(seconds=60)


class Rank:
    """Measures operations. The ranks of a Team call each method together."""

    def __init__(self, rank: int) -> None:
        gc.freeze()  # what every rank has loaded is never garbage
        self.rank = rank
        self.subjects: dict[Contender, timing.Subject] = {}

    def meet(self) -> None:
        """Returns once all ranks have called this."""
        raise NotImplementedError

    def front_end(self, contender: Contender) -> FrontEnd:
        """Returns the way to call the backend."""
        raise NotImplementedError

    def prepare(self, contender: Contender) -> float:
        """Makes ready for `measure`. Returns the microseconds of a call, roughly."""
        subject = operations.subject(contender, self.front_end(contender), self.rank)
        self.subjects[contender] = subject
        timing.run(subject, 2, self.meet)
        return min(timing.run(subject, 3, self.meet))

    def measure(self, contender: Contender, calls: int) -> array[float]:
        """Times so many calls and checks the result."""
        return timing.run(self.subjects[contender], calls, self.meet)

    def made(self, call: programs.Call) -> dict[str, programs.Run]:
        """Makes a call of programs over each backend."""
        raise NotImplementedError

    def prepare_program(self, name: str) -> None:
        """Makes ready for rounds of one of programs.CALLS."""
        call = next(call for call in programs.CALLS if call.name == name)
        self.turns = programs.Turns(call, self.made(call), self.meet)

    def program_round(self, counts: bool) -> None:
        """Times a round."""
        self.turns.round(counts)

    def program_times(self) -> dict[str, float]:
        """Returns what the rounds have found."""
        return self.turns.found()

    def forget(self) -> None:
        """Frees the buffers of all subjects."""
        self.subjects.clear()
        gc.collect()


class TorchRank(Rank):
    """Holds a group of every backend of torch."""

    def __init__(self, rank: int, ranks: int, network: Any, hosts: Sequence[int]) -> None:
        super().__init__(rank)
        self.ranks = ranks
        self.groups: dict[str, dist.ProcessGroup] = {}
        if network:
            network.enter(hosts[rank])

    def serve_store(self, address: str) -> int:
        """Serves the store at rank 0, on a port that was free. Returns the port; 0 on others."""
        if self.rank:
            return 0
        self.store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
        return self.store.port

    def join(self, address: str, port: int, backends: tuple[str, ...]) -> None:
        """Makes a group of each backend."""
        if self.rank:
            self.store = dist.TCPStore(address, port, is_master=False)
        if not backends:
            return
        self.init("gloo")
        for backend in backends:
            if backend == "fake":
                import torch.testing._internal.distributed.fake_pg  # noqa: F401
            self.groups[backend] = self.new_group(backend)
        self.meeting = self.new_group("torchcomms" if "torchcomms" in backends else "gloo")

    def init(self, backend: str, name: str = "default") -> float:
        """Makes the default group. Returns the seconds that takes, without the store.

        `name` is new for each that is made: Gloo leaves its addresses in the store.
        """
        start = time.perf_counter()
        store = dist.PrefixStore(name, self.store)
        dist.init_process_group(
            backend, store=store, rank=self.rank, world_size=self.ranks, timeout=TIMEOUT
        )
        return time.perf_counter() - start

    def init_and_first(self, backend: str) -> dict[str, float]:
        """Times the default group's making and its first operation, which may connect."""
        init = self.init(backend)
        start = time.perf_counter()
        dist.all_reduce(torch.zeros(1))
        first = time.perf_counter() - start
        dist.destroy_process_group()
        return {"init": init, "first": first}

    def over_link(self, backend: str) -> dict[str, float]:
        """Times a group's making with its first all-reduce, and all-reduces: medians in seconds."""
        small, large = torch.zeros(1), torch.zeros(800_000)
        made = []
        for number in range(7):
            if dist.is_initialized():
                dist.barrier()
                dist.destroy_process_group()
            start = time.perf_counter()
            self.init(backend, f"made {number}")
            dist.all_reduce(small)
            made.append(time.perf_counter() - start)
        found = {"made": median(made)}
        assert dist.group.WORLD is not None  # just made
        self.meeting = dist.group.WORLD
        for name, tensor in (("4 B", small), ("3.2 MB", large)):
            found[name] = self._median(functools.partial(dist.all_reduce, tensor), 7) / 1e6
        dist.barrier()
        dist.destroy_process_group()
        return found

    def new_group(self, backend: str) -> dist.ProcessGroup:
        """Makes a group of all ranks."""
        group = dist.new_group(backend=backend, timeout=TIMEOUT)
        assert isinstance(group, dist.ProcessGroup)
        return group

    def meet(self) -> None:
        """Returns once all ranks have called this."""
        dist.barrier(group=self.meeting)

    def front_end(self, contender: Contender) -> FrontEnd:
        """Returns the way to call the backend."""
        kind = FRONT_ENDS[contender.frontend]
        return kind(self.groups[contender.backend], contender.mode == "async")

    def overlap(self, contender: Contender, calls: int) -> dict[str, float]:
        """Times a collective and a matrix product of its length, apart and together.

        In microseconds: medians.
        """
        issue, reset, wrong = operations.bind(contender, self.front_end(contender), self.rank)
        reset()
        issue().wait()
        alone = self._median(lambda: issue().wait(), calls)
        a, b = torch.randn(256, 256), torch.randn(256, 256)
        out = torch.empty(256, 256)
        torch.mm(a, b, out=out)
        one = self._median(lambda: torch.mm(a, b, out=out), 20)
        longest = torch.tensor([alone / one])
        dist.all_reduce(longest, dist.ReduceOp.MAX)  # every rank as many products
        products = max(1, round(longest.item()))

        def multiply() -> None:
            for _ in range(products):
                torch.mm(a, b, out=out)

        def both() -> None:
            work = issue()
            multiply()
            work.wait()

        product = self._median(multiply, calls)
        together = self._median(both, calls)
        reset()
        issue().wait()
        if problem := wrong(1):
            raise AssertionError(f"wrong result: {problem}")
        return {"collective": alone, "product": product, "together": together}

    def _median(self, call: Any, calls: int) -> float:
        times = []
        for _ in range(calls):
            self.meet()
            times.append(timing.timed(call))
        return median(times)

    def train(self, job: steps.Job) -> dict[str, Any]:
        """Times training steps over every backend in turns."""
        return steps.train(job, {name: self.groups[name] for name in job.backends}, self.meet)

    def made(self, call: programs.Call) -> dict[str, programs.Run]:
        """Makes a call of programs over each backend."""
        return programs.over(call, self.groups)

    def shared_cores(self, backends: tuple[str, ...]) -> sharing.Measured:
        """Measures all-reduces of ranks that may share cores."""
        return sharing.small({name: self.groups[name] for name in backends}, self.meet)

    def busy_cores(self, backends: tuple[str, ...], pinned: bool) -> sharing.Measured:
        """Measures steps beside other programs, each rank on a core of its own if `pinned`."""
        groups = {name: self.groups[name] for name in backends}
        return sharing.busy(groups, self.meet, self.rank if pinned else -1)

    def deepspeed(self, folder: Path) -> list[dict[str, Any]]:
        """Times all-reduces beside DeepSpeed's, which is built in a folder."""
        return deepspeed.measure(self.groups["torchcomms"], self.meet, folder)

    def many_groups(self, backend: str, counts: list[int]) -> list[dict[str, float]]:
        """Measures what up to so many groups cost in this process."""
        return groups.cost(counts, lambda: self.new_group(backend), self.meet)
