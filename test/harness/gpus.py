"""Tests on GPUs over torch's own nccl and over torchcomms: on emulated GPUs, or on this machine's.

`on_gpus` makes a function a test whose body runs on every rank over each backend, so that all
backends have to satisfy one body. Rank r has the device cuda:(r % number of GPUs). The emulated
CUDA has the GPUs; with `pytest --device cuda`, as tools/gpu_check calls it, this machine has them.
"""

import functools
import os
import time

import pytest
import torch
import torch._dynamo  # some operators import it at first use: seconds, inside a test
import torch.distributed as dist

import emulated
import torchcomms_pg.nccl
from harness import catalogue, ranks

EMULATED = os.environ.get("TEST_DEVICE", "emulated") == "emulated"  # set by --device

# NCCL refuses two ranks of one host on one GPU. So ranks that share a GPU claim to be on different
# hosts, joined by sockets. Each has one CTA, since the kernels of all ranks must fit on the GPU.
SHARED_GPU = {
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NET_GDR_LEVEL": "LOC",
    "NCCL_MAX_CTAS": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
}
# NCCL 2.30 and later accepts such ranks on one host; they map each other's memory.
ONE_HOST = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "1", "NCCL_NVLS_ENABLE": "0"}
# NCCL's messages if it refuses ranks on one GPU nevertheless: up to 2.29, and from 2.30 on.
REFUSALS = ("Duplicate GPU detected", "Multiple Ranks are using the same GPU")

# The versions of NCCL whose rules and functions the emulated CUDA has.
NCCL_VERSIONS = ("2.18", "2.24", "2.27", "2.30", "2.32") if EMULATED else ("of this machine",)
by_version = pytest.mark.parametrize("version", NCCL_VERSIONS)

emulated_only = pytest.mark.skipif(not EMULATED, reason="looks into the emulated CUDA")


def missing():
    """Returns why the tests have no GPUs; empty if they have GPUs."""
    if EMULATED:
        return emulated.available()
    return "" if torch.cuda.is_available() else f"torch {torch.__version__} sees no GPU"


def environment():
    """Returns the variables that a process with GPUs is started with."""
    return emulated.environment() if EMULATED else {"NCCL_DEBUG": "WARN"}


def nccl_environment(version):
    """Returns the variables for one of NCCL_VERSIONS."""
    return emulated.nccl_environment(version) if EMULATED else {}


def take_device(world):
    """Called in a rank before its first tensor: chooses its device, and delays emulated streams."""
    rank, devices = int(os.environ["RANK"]), torch.cuda.device_count()
    torch.cuda.set_device(rank % devices)
    if EMULATED:
        emulated.set_delays(seed=rank + 1, probability=0.25, longest_us=1500)
    elif world > devices:
        os.environ.update(shared_gpu(rank))


def shared_gpu(rank):
    """Returns the variables for a rank that shares its GPU with other ranks.

    With TEST_SHARED_GPU=sockets the ranks are on different hosts, even for an NCCL from 2.30 on.
    """
    sockets = os.environ.get("TEST_SHARED_GPU") == "sockets"
    if not sockets and torchcomms_pg.nccl.load().version >= 23000:
        return ONE_HOST
    return SHARED_GPU | {"NCCL_HOSTID": f"gpus-{rank}"}


def start(backend, port, prefix, world, timeout=ranks.GROUP_TIMEOUT, **kwargs):
    """Called in a rank: chooses its device, and makes the default group of a backend."""
    take_device(world)
    rank = int(os.environ["RANK"])
    ranks.init_default_group(port, prefix, rank, world, timeout, backend=backend, **kwargs)


def refused(port, prefix, world):
    """Called in a rank: returns NCCL's refusal of ranks that share a GPU, else an empty text."""
    torchcomms(port, prefix, world)
    try:
        dist.all_reduce(torch.ones(1, device="cuda"))
    except RuntimeError as error:
        if any(words in str(error) for words in REFUSALS):
            return str(error)
        raise
    dist.destroy_process_group()
    return ""


@functools.cache
def refusal():
    """Returns the result of `refused`, asked once: on separate ranks, since it connects a group."""
    with ranks.Ranks(2, init=False, started_with=environment) as processes:
        return max(processes.run(refused, *processes.store_args(), 2), key=len)


def skip_if_refused(world):
    """Skips a test of `world` ranks if they would share a GPU, and NCCL refuses that."""
    if not EMULATED and world > torch.cuda.device_count() and refusal():
        pytest.skip(f"NCCL refuses ranks on one GPU: {refusal()}")


def nccl(*args, **kwargs):
    start("nccl", *args, **kwargs)


def torchcomms(*args, **kwargs):
    start("torchcomms", *args, **kwargs)


def no_group(port, prefix, world, timeout):
    """Called in a rank: chooses its device, and makes no group."""
    take_device(world)


def nccl_legacy(*args, **kwargs):
    start(LEGACY, *args, **kwargs)


# The name of the backend that torch up to 2.14 calls nccl.
LEGACY = "nccl-legacy" if hasattr(dist.distributed_c10d, "ProcessGroupNCCL2") else "nccl"
GROUPS = {"nccl": nccl, "nccl-legacy": nccl_legacy, "torchcomms": torchcomms}
if LEGACY == "nccl":
    del GROUPS["nccl"]


def settle():
    """Called in a rank: waits until all work has run that no `streams.hold` holds up.

    A GPU does not tell what its streams wait for, so on a GPU this is a wait of 0.1 s.
    """
    if EMULATED:
        assert ranks.wait_for(emulated.settled, 20)
    else:
        time.sleep(0.1)


def over_nccl():
    """Called in a rank: returns whether the default group's backend is one of torch's nccl."""
    return dist.get_backend().startswith("nccl")


def assert_no_misuse():
    """Called in a rank: asserts, on emulated GPUs, that nothing was done that NCCL forbids."""
    if EMULATED:
        told = emulated.misuses()
        assert not told, told


def _on_ranks(*worlds, **options):
    """Does what ranks.on_ranks does, on ranks with GPUs, and then calls assert_no_misuse."""

    def decorate(body):
        @functools.wraps(body)
        def watched(*args, **kwargs):
            body(*args, **kwargs)
            assert_no_misuse()

        return ranks.on_ranks(*worlds, started_with=environment, **options)(watched)

    return decorate


on_gpu = functools.partial(_on_ranks, 1, init=no_group)


def on_gpus(*worlds, groups=tuple(GROUPS), **kwargs):
    """Makes a function a test on ranks with a default group, once over each of `groups`."""
    return _on_ranks(*worlds or (2,), init={name: GROUPS[name] for name in groups}, **kwargs)


on_ours = functools.partial(on_gpus, groups=("torchcomms",))


def apart(world, body, *args, env=None, **kwargs):
    """Runs a body that makes its own groups, on separate ranks; returns the value of each rank.

    The body is called with port, prefix, world, and the other arguments.
    """
    skip_if_refused(world)
    with ranks.Ranks(world, init=False, env=env, started_with=environment) as processes:
        results = processes.run(body, *processes.store_args(), world, *args, **kwargs)
        processes.run(assert_no_misuse)
        return results


def on_own_ranks(*worlds, env=None):
    """Makes a function a test whose body `apart` runs, once per world size."""

    def decorate(body):
        def test(world, **kwargs):
            __tracebackhide__ = True
            apart(world, body, env=env, **kwargs)

        return ranks.as_test(test, body, worlds, environment)

    return decorate


def by_root_over_nccl(name):
    """Returns whether the group is torch's nccl, which runs this collective as messages."""
    return over_nccl() and name in ("gather", "scatter")


def current_device():
    return torch.device("cuda", torch.cuda.current_device())


empty = functools.partial(catalogue.empty, device="cuda")
place = functools.partial(catalogue.place, device="cuda")
