"""torch's own tests of torch.distributed, over its own backends and over torchcomms.

They are those of torch.testing._internal.distributed.distributed_test. Gated as for NCCL they run
with two ranks on the emulated CUDA, or on this machine's GPUs; gated as for Gloo, with three on CPU
tensors, where the program's name for torchcomms is gloo (torchcomms_pg.as_gloo). Ranks are forked,
which takes a fraction of a second where torch's own runner takes ten.

    tools/torch_suite nccl|gloo [--device cuda] [ARGUMENTS OF PYTEST]

prints what passes over torch's own backend alone.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile

OURS = "torchcomms"
SUITE, OVER, GPUS = "TORCH_SUITE", "TORCH_SUITE_OVER", "TORCH_SUITE_GPUS"
WORLD = {"nccl": "2", "gloo": "3"}
LIMIT = 30  # seconds of one test

# What passes over torch's own backend alone, and why.
ARGUED = {
    "nccl": {"test_get_backend": "asks for the name nccl"},
    "gloo": {},
}


def share_one_gpu():
    """Has both ranks take the machine's only GPU where the tests give each one of its own."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal import common_distributed

    from harness.gpus import shared_gpu

    set_device, init_group = torch.cuda.set_device, dist.init_process_group
    properties = torch.cuda.get_device_properties

    def first_device(device):
        return set_device(0 if torch.device(device).index else device)

    def init_process_group(*args, **kwargs):
        rank = kwargs.get("rank", os.environ.get("RANK"))
        os.environ.update(shared_gpu(rank))
        return init_group(*args, **kwargs)

    torch.cuda.device_count = lambda: int(WORLD["nccl"])
    # torch looks at each device that it counts when it starts CUDA.
    torch.cuda.get_device_properties = lambda device=None: properties(0)
    torch.cuda.set_device = first_device
    dist.init_process_group = init_process_group
    # Both are looked up when distributed_test is imported.
    common_distributed.init_multigpu_helper = lambda world, _: {rank: [0] for rank in range(world)}


def collected():
    """The class with torch's tests, of the suite and over the backend of the environment."""
    suite, over = os.environ[SUITE], os.environ[OVER]
    for name in ("barrier", "init_dir"):
        os.makedirs(f"{os.environ['TEMP_DIR']}/{name}")
    os.environ.update(BACKEND=suite, WORLD_SIZE=WORLD[suite], MASTER_ADDR="127.0.0.1")

    import torch
    import torch.distributed as dist

    from torchcomms_pg import as_gloo

    if over == OURS and suite == "gloo":
        as_gloo.install()
    elif over == OURS:
        original = dist.init_process_group

        def init_process_group(backend=None, *args, **kwargs):
            return original(OURS if backend == suite else backend, *args, **kwargs)

        dist.init_process_group = init_process_group
    torch.cuda.device_count = lambda: int(os.environ[GPUS])
    if hasattr(torch._C, "_cuda_getDeviceCount"):  # a build for CUDA
        torch._C._cuda_getDeviceCount = torch.cuda.device_count
    if suite == "nccl" and torch.cuda.device_count() == 1:
        share_one_gpu()
    # CUDA does not work in a child of a process that has asked it anything.
    import torch.utils._triton  # torch.testing asks whether the device suits Triton

    torch.utils._triton.has_triton = lambda: False
    from torch.testing._internal.distributed import distributed_test

    class TestTorch(
        distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase
    ):
        def setUp(self):
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    return TestTorch


def passed(suite, over, arguments):
    """The names of the tests of a suite that pass over a backend."""
    from harness import gpus

    with tempfile.TemporaryDirectory() as folder:
        device = gpus.environment() if suite == "nccl" else {}
        environment = {**os.environ, **device}
        environment[GPUS] = subprocess.run(
            [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        done = subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider"),
                *("--timeout", str(LIMIT), "--rootdir", folder, "--tb=no", __file__, *arguments),
            ],
            env={**environment, SUITE: suite, OVER: over, "TEMP_DIR": folder},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    names = set(re.findall(r"^PASSED .*::(\w+)", done.stdout, flags=re.MULTILINE))
    print(f"{over}: {done.stdout.strip().splitlines()[-1]}", flush=True)
    return names


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("suite", choices=WORLD)
    parser.add_argument("--device", choices=("emulated", "cuda"), default="emulated")
    options, arguments = parser.parse_known_args()
    os.environ["TEST_DEVICE"], suite = options.device, options.suite
    theirs, ours = (passed(suite, over, arguments) for over in (suite, OURS))
    alone = theirs - ours
    for name in sorted(alone):
        print(f"over {suite} alone: {name}: {ARGUED[suite].get(name, 'NOT ARGUED')}")
    if not theirs:
        print(f"nothing passes over {suite}")
    return int(not theirs or bool(alone - set(ARGUED[suite])))


if OVER in os.environ:
    TestTorch = collected()
elif __name__ == "__main__":
    sys.exit(main())
