"""Builds the simulated accelerator, test/simulated/_simulated.*.so, as setup.py builds the package.

python test/simulated/build.py
"""

import importlib.util
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def main():
    spec = importlib.util.spec_from_file_location("setup", ROOT / "setup.py")
    setup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(setup)
    build = setup.Build(
        "_simulated",
        [*HERE.glob("*.cpp"), ROOT / "csrc/device/WorkerStream.cpp"],
    )
    build.run()
    build.copy_to(HERE / build.library.name)


if __name__ == "__main__":
    sys.exit(main())
