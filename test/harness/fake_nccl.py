"""A libnccl that carries the tensors of the simulated accelerator and records its calls."""

import ctypes
import functools
import json
import os
import pathlib
import shutil
import subprocess
import tempfile

from harness import ROOT, TESTS
from torchcomms_pg import nccl

# A folder that conftest.py removes: a rank may be killed before it could.
FOLDER = os.path.dirname(os.environ["TORCH_FR_DUMP_TEMP_FILE"])


@functools.cache
def _compiled(version, *features):
    """The path of a library that nobody loads: tests have copies, whose calls are their own."""
    path = f"{tempfile.mkdtemp(dir=FOLDER)}/libnccl.so.2"
    subprocess.run(
        [
            *("g++", "-std=c++20", "-shared", "-fPIC", f"-DVERSION={version}"),
            *(f"-D{name}" for name in features),
            *("-I", ROOT / "csrc", "-isystem", ROOT / "csrc/nccl/cuda_stub"),
            *("-isystem", f"{nccl.package_folder()}/include"),
            *(TESTS / "harness/fake_nccl.cpp", "-o", path),
        ],
        check=True,
    )
    return path


class Library:
    """fake_nccl.cpp as some version of NCCL.

    Args:
        folder: where it is put.
        version: as ncclGetVersion tells it.
        features: parts of the API that not every version has, as fake_nccl.cpp names them.
    """

    def __init__(self, folder, version, *features):
        self.path = shutil.copy(_compiled(version, *features), folder)
        self._log = pathlib.Path(f"{self.path}.log")
        self._seen = 0

    @property
    def functions(self):
        """Its fakeRank, fakeHang and fakeRefuse."""
        return ctypes.CDLL(self.path)

    def _all(self):
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        return list(map(json.loads, lines))

    def calls(self, name):
        """All calls of this name."""
        return [call for call in self._all() if call["call"] == name]

    def latest(self):
        """The calls since the last time, each as ``name:value:value``."""
        calls = self._all()[self._seen :]
        self._seen += len(calls)
        return [":".join(map(str, (call["call"], *call.get("values", ())))) for call in calls]

    def configs(self, name):
        """What calls of this name had in their configuration.

        Without what is not set, and without blocking, which is 1 in all of them.
        """
        found = [call["config"] for call in self.calls(name)]
        assert all(config.pop("blocking") == 1 for config in found)
        return [{k: v for k, v in config.items() if v is not None} for config in found]
