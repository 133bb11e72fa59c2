"""torch's own tests of torch.distributed, over nccl and over torchcomms on the emulated CUDA.

They are those of torch.testing._internal.distributed.distributed_test, gated as for NCCL, with two
ranks. Ranks are forked, which takes a fraction of a second where torch's own runner takes ten.

    python test/torch_suite.py [ARGUMENTS OF PYTEST]     prints what passes over nccl alone
"""

import os
import re
import subprocess
import sys
import tempfile

VARIABLE = "TORCH_SUITE_BACKEND"
LIMIT = 30  # seconds of one test

# What passes over nccl alone, and why.
ARGUED = {
    "test_get_backend": "asks for the name nccl",
    "test_batch_isend_irecv_self_nccl": (
        "rank 0 alone sends to itself after a barrier, which the test expects to have set up the "
        "GPU's communicator; of a group for both CPU and CUDA tensors c10d has it on the CPU"
    ),
}


def collected():
    """The class with torch's tests, over the backend that the environment names."""
    over = os.environ[VARIABLE]
    for name in ("barrier", "init_dir"):
        os.makedirs(f"{os.environ['TEMP_DIR']}/{name}")
    os.environ.update(BACKEND="nccl", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")

    import torch
    import torch.distributed as dist

    import torchcomms_pg  # noqa: F401

    original = dist.init_process_group

    def init_process_group(backend=None, *args, **kwargs):
        return original(over if backend == "nccl" else backend, *args, **kwargs)

    dist.init_process_group = init_process_group
    # The parent has asked how many devices there are, and nothing else.
    torch.cuda._is_in_bad_fork = lambda: False
    from torch.testing._internal.distributed import distributed_test

    class TestTorch(
        distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase
    ):
        def setUp(self):
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    return TestTorch


def passed(backend, arguments):
    """The names of the tests that pass over a backend."""
    import emulated

    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider"),
                *("--timeout", str(LIMIT), "--rootdir", folder, "--tb=no", __file__, *arguments),
            ],
            env={**os.environ, **emulated.environment(), VARIABLE: backend, "TEMP_DIR": folder},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    names = set(re.findall(r"^PASSED .*::(\w+)", done.stdout, flags=re.MULTILINE))
    print(f"{backend}: {done.stdout.strip().splitlines()[-1]}", flush=True)
    return names


def main():
    over = {backend: passed(backend, sys.argv[1:]) for backend in ("nccl", "torchcomms")}
    alone = over["nccl"] - over["torchcomms"]
    for name in sorted(alone):
        print(f"over nccl alone: {name}: {ARGUED.get(name, 'NOT ARGUED')}")
    if not over["nccl"]:
        print("nothing passes over nccl")
    return int(not over["nccl"] or bool(alone - set(ARGUED)))


if VARIABLE in os.environ:
    TestTorch = collected()
elif __name__ == "__main__":
    sys.exit(main())
