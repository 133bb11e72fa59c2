"""The two devices that checks run on: GPUs, and the simulated accelerator of test/simulated."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

import torch

from gpu.check import Skip

DELAY_SECONDS = 0.5
FASTEST_CLOCK = 3e9  # Hz. A GPU with a slower one only sleeps longer


class Graph(Protocol):
    """What was recorded."""

    def replay(self) -> None:
        """Does it, in the current stream."""


class Cuda:
    """GPUs, with NCCL below."""

    type = "cuda"
    reference = "nccl"  # torch's own backend
    reference_type = "cuda"

    def missing(self) -> str:
        """Says why nothing can be checked; empty where it can."""
        if torch.cuda.is_available():
            return ""
        return (
            f"torch {torch.__version__} sees no GPU; it is built for {_built_for()}. A GPU, its "
            "driver and a torch for them are needed. Without, --device sim checks on a simulated "
            "accelerator what does not depend on CUDA"
        )

    def count(self) -> int:
        """Returns the number of GPUs."""
        return torch.cuda.device_count()

    def describe(self) -> str:
        """Names the GPUs, and what torch was built for."""
        names = {torch.cuda.get_device_name(i) for i in range(self.count())}
        return f"{self.count()} x {', '.join(sorted(names))}, {_built_for()}"

    def prepare(self, rank: int, ranks: int) -> None:
        """Called on every rank before its first tensor."""

    def environment(self, rank: int) -> dict[str, str]:
        """Has NCCL take ranks that share a GPU for hosts of their own, joined by sockets.

        NCCL refuses two ranks of one host on one GPU. One CTA each: the kernels of all ranks have
        to find room on the GPU together.
        """
        return {
            "NCCL_HOSTID": f"gpu-check-{rank}",
            "NCCL_NET": "Socket",
            "NCCL_SOCKET_IFNAME": "lo",
            "NCCL_IB_DISABLE": "1",
            "NCCL_NET_GDR_LEVEL": "LOC",
            "NCCL_MAX_CTAS": "1",
            "NCCL_NVLS_ENABLE": "0",
            "NCCL_MNNVL_ENABLE": "0",
        }

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """What the block queues into the current stream comes late."""
        torch.cuda._sleep(int(DELAY_SECONDS * FASTEST_CLOCK))
        yield

    @contextlib.contextmanager
    def capture(self) -> Iterator[Graph]:
        """Records what the block queues, instead of running it."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            yield graph


def _built_for() -> str:
    if torch.version.cuda:
        return f"CUDA {torch.version.cuda}"
    return f"ROCm {torch.version.hip}" if torch.version.hip else "CPUs only"


class Simulated:
    """Host memory with streams and events that are as asynchronous as a GPU's.

    Shared memory takes NCCL's place, and torch's own backend is Gloo, with CPU tensors.
    """

    type = "sim"
    reference = "gloo"
    reference_type = "cpu"

    def missing(self) -> str:
        """Says why nothing can be checked; empty where it can."""
        try:
            import simulated

            simulated.install()
        except ImportError as error:
            return f"the simulated accelerator is not built ({error}); test/simulated/build.py"
        return ""

    def count(self) -> int:
        """Returns the number of devices that are simulated."""
        return int(torch.get_device_module("sim").device_count())

    def describe(self) -> str:
        """Says that there is no GPU."""
        return "simulated accelerator (not a GPU), over shared memory"

    def prepare(self, rank: int, ranks: int) -> None:
        """Called on every rank before its first tensor. Streams dawdle, by seed."""
        import simulated
        import torch._dynamo  # noqa: F401  (some operators do at first use: seconds, in a check)

        from torchcomms_pg.registration import serve_host_device

        simulated.install()
        serve_host_device(self.type)
        simulated.set_delays(seed=rank + 1, probability=0.25, longest_us=1000)

    def environment(self, rank: int) -> dict[str, str]:
        """Ranks may share a device as they are."""
        return {}

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """What the block queues into the current stream comes after the block."""
        import simulated

        with simulated.hold():
            yield

    @contextlib.contextmanager
    def capture(self) -> Iterator[Graph]:
        """Records what the block queues, instead of running it."""
        import simulated

        if not hasattr(torch.Stream, "is_capturing"):
            raise Skip("streams that are not CUDA's tell of a capture from torch 2.12 on")
        graph: Graph = simulated.Graph()
        with graph.capture():  # type: ignore[attr-defined]
            yield graph


Device = Cuda | Simulated
DEVICES: dict[str, type[Cuda] | type[Simulated]] = {"cuda": Cuda, "sim": Simulated}
