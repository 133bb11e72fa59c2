"""A default group that carries tensors of the simulated accelerator, with delays in its streams."""

import os

import pytest
import torch._dynamo  # noqa: F401  (some operators import it at first use: seconds, inside a test)

import simulated
from harness import ranks
from torchcomms_pg.registration import serve_host_device

DEVICE = "sim:0"
both = pytest.mark.parametrize("async_op", (False, True), ids=("sync", "async"))


def start(port, prefix, world, timeout, **kwargs):
    """Called in a rank: makes the default group, for CPU tensors and the simulated device."""
    simulated.install()
    serve_host_device("sim")
    rank = int(os.environ["RANK"])
    simulated.set_delays(seed=rank + 1, probability=0.25, longest_us=1500)
    ranks.init_default_group(port, prefix, rank, world, timeout, **kwargs)


def on_sim(*worlds, **kwargs):
    """Does what ranks.on_ranks does, with a default group that carries the device's tensors."""
    return ranks.on_ranks(*worlds or (2, 3), init=start, **kwargs)


def sim(tensor):
    return tensor.to(DEVICE)
