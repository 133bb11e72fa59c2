"""Default groups over the emulated GPUs: torch's own nccl, and torchcomms.

`on_gpus` makes a function a test whose body runs on every rank over each of the two, so that what
holds for one is compared with the other on the same emulator. Rank r has the device cuda:(r % 2).
"""

import functools
import os

import emulated
import ranks
import torch._dynamo


def start(backend, port, prefix, world, timeout, **kwargs):
    """Called in a rank: its device, and the default group of a backend."""
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank % torch.cuda.device_count())
    ranks.init_default_group(port, prefix, rank, world, timeout, backend=backend, **kwargs)


def nccl(*args):
    start("nccl", *args)


def torchcomms(*args):
    start("torchcomms", *args)


def no_group(*args):
    """A rank with a device and without a group."""
    torch.cuda.set_device(int(os.environ["RANK"]) % torch.cuda.device_count())


GROUPS = {"nccl": nccl, "torchcomms": torchcomms}

on_gpu = functools.partial(ranks.on_ranks, 1, init=no_group, started_with=emulated.environment)


def on_gpus(*worlds, groups=tuple(GROUPS), **kwargs):
    """As ranks.on_ranks, over each of `groups`."""
    init = {name: GROUPS[name] for name in groups}
    return ranks.on_ranks(*worlds or (2,), init=init, started_with=emulated.environment, **kwargs)
