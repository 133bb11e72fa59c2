"""A default group that carries tensors of the simulated accelerator, with delays in its streams."""

import os

import torch._dynamo  # noqa: F401  (some operators import it at first use: seconds, inside a test)

import simulated
from harness import ranks
from torchcomms_pg.registration import serve_host_device


def start(port, prefix, world, timeout, **kwargs):
    """What `ranks.on_ranks(init=start)` calls on every rank."""
    simulated.install()
    serve_host_device("sim")
    rank = int(os.environ["RANK"])
    simulated.set_delays(seed=rank + 1, probability=0.25, longest_us=1500)
    ranks.init_default_group(port, prefix, rank, world, timeout, **kwargs)
