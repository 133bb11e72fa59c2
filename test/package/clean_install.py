"""Installs a wheel in an environment without a compiler and without this checkout, and uses it.

    python test/package/clean_install.py WHEEL

The new environment links to this Python's packages except torchcomms_pg, since a copy of torch
takes several GB. Then test/package/smoke.py trains in it, on two ranks, and pytest runs the first
test of docs/testing.md within a minute.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv

SMOKE = pathlib.Path(__file__).with_name("smoke.py")
TESTING = pathlib.Path(__file__).parents[2] / "docs/testing.md"
OURS = ("torchcomms_pg", "__editable__")


def main(wheel):
    with tempfile.TemporaryDirectory(prefix="torchcomms_pg-clean-") as folder:
        folder = pathlib.Path(folder)
        venv.create(folder / "env", symlinks=True)
        python = folder / "env/bin/python"
        path = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
        packages = pathlib.Path(subprocess.check_output(path, text=True).strip())
        for entry in pathlib.Path(sysconfig.get_path("purelib")).iterdir():
            if not entry.name.startswith(OURS):
                (packages / entry.name).symlink_to(entry)
        smoke = shutil.copy(SMOKE, folder)  # away from the checkout, where the sources are
        env = {"PATH": str(folder), "HOME": str(folder)}
        assert not shutil.which("g++", path=env["PATH"])
        started = time.monotonic()
        install = ("-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-index")
        # As users install it; what the extra asks for is linked already.
        subprocess.run([python, *install, f"{wheel}[test]"], env=env, check=True, cwd=folder)
        print(f"installed in {time.monotonic() - started:.1f} s")
        where = "import torchcomms_pg as t; print(t.__file__, t._C.__file__)"
        found = subprocess.check_output([python, "-c", where], env=env, cwd=folder, text=True)
        assert all(name.startswith(str(packages)) for name in found.split()), found
        assert (folder / "env/share/doc/torchcomms_pg/README.md").is_file()
        subprocess.run([python, smoke], env=env, check=True, cwd=folder, timeout=120)
        first = re.search(r"```python\n(.*?)```", TESTING.read_text(), re.DOTALL)[1]
        (folder / "test_sum.py").write_text(first)
        started = time.monotonic()
        tested = subprocess.run(
            [python, "-m", "pytest", "-p", "no:cacheprovider", "test_sum.py"],
            env=env, cwd=folder, timeout=60, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert "1 passed" in tested.stdout, tested.stdout
        print(f"the first test of docs/testing.md passed in {time.monotonic() - started:.1f} s")


if __name__ == "__main__":
    main(os.path.abspath(sys.argv[1]))
