"""Tests on GPUs over torch's own nccl and over torchcomms: on emulated GPUs, or on this machine's.

`on_gpus` makes a function a test whose body runs on every rank over each of them, so that what
holds for one is compared with the others. Rank r has the device cuda:(r % number of GPUs). The GPUs
are those of the emulated CUDA; with `pytest --device cuda`, as tools/gpu_check calls it, those of
this machine.
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

# NCCL refuses two ranks of one host on one GPU. Ranks that share one say that they are on hosts of
# their own, joined by sockets. One CTA each: the kernels of all have to find room on the GPU.
SHARED_GPU = {
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NET_GDR_LEVEL": "LOC",
    "NCCL_MAX_CTAS": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
}
# NCCL 2.30 and later takes them on one host, where they map each other's memory.
ONE_HOST = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "1", "NCCL_NVLS_ENABLE": "0"}
# What it says where that does not help: up to 2.29, and from 2.30 on.
REFUSALS = ("Duplicate GPU detected", "Multiple Ranks are using the same GPU")

# Of which there are the rules and functions on the emulated GPUs.
NCCL_VERSIONS = ("2.18", "2.24", "2.27", "2.30", "2.32") if EMULATED else ("of this machine",)
by_version = pytest.mark.parametrize("version", NCCL_VERSIONS)

emulated_only = pytest.mark.skipif(not EMULATED, reason="looks into the emulated CUDA")


def missing():
    """Why there are no GPUs to test on; empty if there are."""
    if EMULATED:
        return emulated.available()
    return "" if torch.cuda.is_available() else f"torch {torch.__version__} sees no GPU"


def environment():
    """The variables to start a process with that is to have the GPUs."""
    return emulated.environment() if EMULATED else {"NCCL_DEBUG": "WARN"}


def nccl_environment(version):
    """The variables for one of NCCL_VERSIONS."""
    return emulated.nccl_environment(version) if EMULATED else {}


def take_device(world):
    """Called in a rank, before its first tensor."""
    rank, devices = int(os.environ["RANK"]), torch.cuda.device_count()
    torch.cuda.set_device(rank % devices)
    if EMULATED:
        emulated.set_delays(seed=rank + 1, probability=0.25, longest_us=1500)
    elif world > devices:
        os.environ.update(shared_gpu(rank))


def shared_gpu(rank):
    """The variables for a rank that shares its GPU with others.

    TEST_SHARED_GPU=sockets keeps them apart also where NCCL would take them on one host.
    """
    sockets = os.environ.get("TEST_SHARED_GPU") == "sockets"
    if not sockets and torchcomms_pg.nccl.load().version >= 23000:
        return ONE_HOST
    return SHARED_GPU | {"NCCL_HOSTID": f"gpus-{rank}"}


def start(backend, port, prefix, world, timeout=ranks.GROUP_TIMEOUT, **kwargs):
    """Called in a rank: its device, and the default group of a backend."""
    take_device(world)
    rank = int(os.environ["RANK"])
    ranks.init_default_group(port, prefix, rank, world, timeout, backend=backend, **kwargs)


def refused(port, prefix, world):
    """Called in a rank: what NCCL says of ranks that share a GPU; empty if it takes them."""
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
    """Asks NCCL once, in ranks that no test has: the question connects the group."""
    with ranks.Ranks(2, init=False, started_with=environment) as processes:
        return max(processes.run(refused, *processes.store_args(), 2), key=len)


def skip_if_refused(world):
    """Skips a test of `world` ranks if they would share a GPU, and NCCL does not let them."""
    if not EMULATED and world > torch.cuda.device_count() and refusal():
        pytest.skip(f"NCCL refuses ranks on one GPU: {refusal()}")


def nccl(*args, **kwargs):
    start("nccl", *args, **kwargs)


def torchcomms(*args, **kwargs):
    start("torchcomms", *args, **kwargs)


def no_group(port, prefix, world, timeout):
    """A rank with a device and without a group."""
    take_device(world)


def nccl_legacy(*args, **kwargs):
    start(LEGACY, *args, **kwargs)


# Torch's nccl of up to 2.14, whose name that is there.
LEGACY = "nccl-legacy" if hasattr(dist.distributed_c10d, "ProcessGroupNCCL2") else "nccl"
GROUPS = {"nccl": nccl, "nccl-legacy": nccl_legacy, "torchcomms": torchcomms}
if LEGACY == "nccl":
    del GROUPS["nccl"]


def settle():
    """Called in a rank: what no `streams.hold` holds up has run.

    A GPU tells nobody what its streams wait for: on one, what is not ordered has a moment.
    """
    if EMULATED:
        assert ranks.wait_for(emulated.settled, 20)
    else:
        time.sleep(0.1)


def over_nccl():
    """Called in a rank: whether the default group is one of torch's own."""
    return dist.get_backend().startswith("nccl")


def assert_no_misuse():
    """Called in a rank: nothing was done that NCCL forbids or does not survive."""
    if EMULATED:
        told = emulated.misuses()
        assert not told, told


def _on_ranks(*worlds, **options):
    """As ranks.on_ranks, with GPUs; nothing may be misused."""

    def decorate(body):
        @functools.wraps(body)
        def watched(*args, **kwargs):
            body(*args, **kwargs)
            assert_no_misuse()

        return ranks.on_ranks(*worlds, started_with=environment, **options)(watched)

    return decorate


on_gpu = functools.partial(_on_ranks, 1, init=no_group)


def on_gpus(*worlds, groups=tuple(GROUPS), **kwargs):
    """On ranks with a group, once over each of `groups`."""
    return _on_ranks(*worlds or (2,), init={name: GROUPS[name] for name in groups}, **kwargs)


on_ours = functools.partial(on_gpus, groups=("torchcomms",))


def apart(world, body, *args, env=None, **kwargs):
    """Runs a body that makes its own groups, in ranks of its own; gives what each returns.

    The body is called with port, prefix, world, and what else is given.
    """
    skip_if_refused(world)
    with ranks.Ranks(world, init=False, env=env, started_with=environment) as processes:
        results = processes.run(body, *processes.store_args(), world, *args, **kwargs)
        processes.run(assert_no_misuse)
        return results


def on_own_ranks(*worlds, env=None):
    """Make a function a test whose body is run by `apart`, once per world size."""

    def decorate(body):
        def test(world, **kwargs):
            __tracebackhide__ = True
            apart(world, body, env=env, **kwargs)

        return ranks.as_test(test, body, worlds, environment)

    return decorate


def by_root_over_nccl(name):
    """Whether torch's nccl runs a collective as messages from or to the root."""
    return over_nccl() and name in ("gather", "scatter")


def current_device():
    return torch.device("cuda", torch.cuda.current_device())


empty = functools.partial(catalogue.empty, device="cuda")
place = functools.partial(catalogue.place, device="cuda")
