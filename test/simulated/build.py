"""Builds the simulated accelerator, _simulated.*.so, as setup.py builds the package.

It stays in setup.py's build folder, which is each torch's own, so that tests with several torch
versions may run at once.

python test/simulated/build.py
"""

import importlib.util
import os
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def main():
    spec = importlib.util.spec_from_file_location("setup", ROOT / "setup.py")
    setup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(setup)
    # Nothing is measured on it, and it compiles sooner.
    os.environ["CXXFLAGS"] = f"-O0 {os.environ.get('CXXFLAGS', '')}"
    build = setup.Build(
        "_simulated",
        [*HERE.glob("*.cpp"), ROOT / "csrc/device/WorkerStream.cpp"],
    )
    build.run()


if __name__ == "__main__":
    sys.exit(main())
