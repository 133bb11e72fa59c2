"""A libnccl for the simulated accelerator, which records the calls that it gets."""

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

# conftest.py removes this folder, since a rank may be killed before it could remove its own.
FOLDER = os.path.dirname(os.environ["TORCH_FR_DUMP_TEMP_FILE"])


@functools.cache
def _compiled(version, *features):
    """Returns the path of a compiled library, of which each test loads a copy with its own log."""
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
        folder: where the library is put.
        version: the number that ncclGetVersion returns.
        features: parts of the API that not every version has, by their macros in fake_nccl.cpp.
    """

    def __init__(self, folder, version, *features):
        self.path = shutil.copy(_compiled(version, *features), folder)
        self._log = pathlib.Path(f"{self.path}.log")
        self._seen = 0

    @property
    def functions(self):
        """The loaded library, for its fakeRank, fakeHang and fakeRefuse."""
        return ctypes.CDLL(self.path)

    def _all(self):
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        return list(map(json.loads, lines))

    def calls(self, name):
        """Returns all calls of this name."""
        return [call for call in self._all() if call["call"] == name]

    def latest(self):
        """Returns the calls since the last call of `latest`, each as ``name:value:value``."""
        calls = self._all()[self._seen :]
        self._seen += len(calls)
        return [":".join(map(str, (call["call"], *call.get("values", ())))) for call in calls]

    def configs(self, name):
        """Returns the configurations that the calls of this name got.

        Leaves out fields that are not set, and blocking, which has to be 1 in all of them.
        """
        found = [call["config"] for call in self.calls(name)]
        assert all(config.pop("blocking") == 1 for config in found)
        return [{k: v for k, v in config.items() if v is not None} for config in found]
