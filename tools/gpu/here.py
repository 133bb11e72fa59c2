"""What a check knows of the rank that it runs on."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from gpu.check import Check
from gpu.devices import Device

LAYOUTS = ("contiguous", "transposed", "strided")


class Here:
    """One rank of a check, its device and its groups."""

    def __init__(self, check: Check, rank: int, kind: Device, folder: Path) -> None:
        self.check = check
        self.rank = rank
        self.ranks = check.ranks
        self.kind = kind
        self.folder = folder
        self.groups = 0
        self.device = torch.device(kind.type, rank % check.gpus)
        self.reference_device = self.device
        if kind.reference_type != kind.type:
            self.reference_device = torch.device(kind.reference_type)
        self.store: dist.Store = dist.FileStore(str(folder / "store"), check.ranks)

    def start(
        self, backend: str = "torchcomms", timeout: float = 60.0, eager: bool = False
    ) -> None:
        """Makes the default group.

        Args:
            backend: its name.
            timeout: of every operation, in seconds.
            eager: it is told its device, and connects at once.
        """
        self.groups += 1
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(f"group{self.groups}", self.store),
            rank=self.rank,
            world_size=self.ranks,
            timeout=timedelta(seconds=timeout),
            device_id=self.device if eager else None,
        )

    @property
    def group(self) -> dist.ProcessGroup:
        """The default group."""
        group = dist.group.WORLD
        assert group is not None, "start() comes first"
        return group

    def stop(self) -> None:
        """Ends the default group."""
        dist.destroy_process_group()

    def meet(self, name: str, seconds: float = 60.0) -> None:
        """Returns once every rank has called this with the name, whatever became of the groups."""
        self.store.set(f"{name} {self.rank}", "")
        names = [f"{name} {rank}" for rank in range(self.ranks)]
        self.store.wait(names, timedelta(seconds=seconds))

    def empty(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype = torch.float32,
        layout: str = "contiguous",
    ) -> torch.Tensor:
        """Makes a tensor on the device: one of LAYOUTS, whose strides differ."""
        if layout == "transposed":
            mirrored = torch.empty(shape[::-1], dtype=dtype, device=self.device)
            return mirrored.permute(*range(len(shape))[::-1])
        if layout == "strided":
            shape = (*shape[:-1], 2 * shape[-1])
            return torch.empty(shape, dtype=dtype, device=self.device)[..., ::2]
        return torch.empty(shape, dtype=dtype, device=self.device)

    def place(self, values: torch.Tensor, layout: str = "contiguous") -> torch.Tensor:
        """Copies a CPU tensor to the device."""
        return self.empty(tuple(values.shape), values.dtype, layout).copy_(values)

    def synchronize(self) -> None:
        """Waits for all that is queued on the device."""
        torch.get_device_module(self.device.type).synchronize(self.device)


def finish(work: dist.Work | None) -> None:
    """Waits for an asynchronous operation."""
    assert work is not None, "an asynchronous operation returned no work"
    work.wait()


@contextlib.contextmanager
def within(seconds: float, what: str) -> Iterator[None]:
    """Fails if the block has taken longer. A block that never ends meets the check's own limit."""
    begin = time.monotonic()
    yield
    took = time.monotonic() - begin
    assert took <= seconds, f"{what} took {took:.1f} s, expected at most {seconds:.0f} s"


class Raised:
    """What `raises` has caught."""

    error: BaseException


@contextlib.contextmanager
def raises(kind: type[BaseException], what: str, *words: str) -> Iterator[Raised]:
    """Fails unless the block raises this, with one of the words in its text."""
    raised = Raised()
    try:
        yield raised
    except kind as error:
        raised.error = error
        text = str(error)
        assert not words or any(word in text for word in words), f"{what} raised: {text}"
        return
    raise AssertionError(f"{what} raised nothing, expected {kind.__name__}")
