"""What the metadata asks pip for: the torches that a build exists for, and no other.

pip runs in an environment whose torch is only a version; its index is a folder of empty wheels, so
nothing is downloaded or compiled.
"""

import importlib.metadata
import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import venv
import zipfile

import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version

from harness import ROOT
from harness.programs import PROGRAM_LIMIT, run_program
from package.test_tools import write_wheel

OURS = ("torchcomms_pg", "torchcomms_pg_autoload")
BARE = re.compile(r"torchcomms_pg|TORCH|PIP_|PYTHON")


@pytest.fixture
def sources(tmp_path):
    """The files of the checkout from which the metadata is made, without csrc/."""
    folder = tmp_path / "sources"
    folder.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, folder)
    for name in (*OURS, "tools", "licenses", "docs"):
        shutil.copytree(
            ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.so")
        )
    return folder


def environment_with(folder, version):
    """Makes an environment with this Python's pip and setuptools, and an empty torch.

    Returns the environment's Python.
    """
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python3*/site-packages")
    for module in ("pip", "setuptools", "_distutils_hack"):
        place = pathlib.Path(importlib.util.find_spec(module).origin).parent
        for entry in place.parent.glob(f"{place.name}*"):
            (packages / entry.name).symlink_to(entry)
    write_wheel(folder, "torch", version)
    (wheel,) = folder.glob("torch-*.whl")
    shutil.unpack_archive(wheel, packages, "zip")
    (packages / "torch/version.py").write_text(f"__version__ = {version!r}\n")
    (packages / "nvidia/nccl/include").mkdir(parents=True)
    (packages / "nvidia/nccl/include/nccl.h").touch()
    (folder / "bin/ninja").touch()
    return folder / "bin/python"


def clean(**variables):
    kept = {name: value for name, value in os.environ.items() if not BARE.match(name)}
    return {**kept, "PIP_CONFIG_FILE": os.devnull, **variables}


def run(*command, cwd, **variables):
    return run_program(
        list(map(str, command)),
        cwd=cwd,
        env=clean(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=PROGRAM_LIMIT,
    )


def would_install(python, sources, *arguments, **variables):
    """Returns what `pip install --no-build-isolation ARGUMENTS` would install, or [its output]."""
    index = sources.parent / "index"
    if not index.exists():
        index.mkdir()
        for version in ("2.13.0", "2.15.0"):
            write_wheel(index, "torch", version)
        for name in ("expecttest-0.3.0", "numpy-2.3.0", "prometheus_client-0.26", "pytest-9.0",
                     "pytest_timeout-2.4", "pytest_xdist-3.8", "requests-2.32",
                     "tabulate-0.9"):  # fmt: skip
            write_wheel(index, *name.split("-"))
    options = ("--dry-run", "--no-index", "--find-links", index, "--no-build-isolation")
    done = run(python, "-m", "pip", "install", *options, *arguments, cwd=sources, **variables)
    said = re.search(r"^Would install (.*)$", done.stdout, re.MULTILINE)
    assert (said is None) == (done.returncode != 0), done.stdout
    return said[1].split() if said else [done.stdout]


def required(metadata):
    (line,) = re.findall(r"^Requires-Dist: (torch\S*)$", metadata, re.MULTILINE)
    return line


@pytest.mark.parametrize("version", ("2.13.1+cpu", "2.15.0a0+git1234"))
def test_a_build_asks_for_the_torch_that_it_is_for_and_keeps_the_one_that_is_there(
    sources, version
):
    python = environment_with(sources.parent / "env", version)
    done = run(python, "setup.py", "-q", "dist_info", "--output-dir", ".", cwd=sources)
    assert done.returncode == 0, done.stdout
    (metadata,) = sources.glob("*.dist-info/METADATA")
    minor = ".".join(version.split(".")[:2])
    assert required(metadata.read_text()) == f"torch=={minor}.*"
    names = [name.partition("-")[0] for name in would_install(python, sources, ".")]
    assert names == ["torchcomms_pg"]  # no torch


def test_sources_ask_for_every_torch_that_they_are_for(sources):
    done = run(sys.executable, "setup.py", "-q", "egg_info", cwd=sources)
    assert done.returncode == 0, done.stdout
    limits = re.search(r'^torch = "(.*)"', (sources / "pyproject.toml").read_text(), re.MULTILINE)
    asked = (sources / "torchcomms_pg.egg-info/requires.txt").read_text().splitlines()
    lower, upper = limits[1].split(",")
    assert asked[0] in (f"torch{lower},{upper}", f"torch{upper},{lower}")


@pytest.mark.parametrize("what", (("-e", ".[test]"), (".",)), ids=("editable", "plain"))
def test_a_torch_that_the_sources_are_not_for_is_refused_before_another_takes_its_place(
    sources, what
):
    python = environment_with(sources.parent / "env", "2.16.0a0+git1234")
    (said,) = would_install(python, sources, *what)
    assert (
        "error: torch 2.16.0a0+git1234 is installed, and this source of torchcomms_pg is for"
        in said
    )
    assert "TORCHCOMMS_PG_ANY_TORCH=1 pip install --no-build-isolation" in said
    # TORCHCOMMS_PG_ANY_TORCH=1 tries that torch, and does not replace it.
    names = would_install(python, sources, *what, TORCHCOMMS_PG_ANY_TORCH="1")
    assert [name for name in names if name.startswith("torch")] == ["torchcomms_pg-0.1.0"]


def test_a_build_that_lacks_nccl_fails_first_with_the_package_to_install(sources):
    python = environment_with(sources.parent / "env", "2.15.0")
    (header,) = (sources.parent / "env").glob("lib/python3*/site-packages/nvidia/nccl/include/*")
    header.unlink()
    (said,) = would_install(python, sources, ".")
    before, _, after = said.partition("error: nccl.h was not found: this torch brings no NCCL")
    assert "pip install 'nvidia-nccl-cu12>=2.28.7,<3'" in after
    assert len(before.splitlines()) < 12 and "Building wheel" not in said, said


def test_type_checkers_see_an_editable_install(sources):
    python = environment_with(sources.parent / "env", "2.15.0")
    setup = (sources / "setup.py").read_text()
    assert "ext_modules=[" in setup
    # Nothing is compiled here.
    (sources / "setup.py").write_text(re.sub("ext_modules=.*", "ext_modules=[],", setup))
    install = ("install", "-q", "--no-index", "--no-build-isolation", "--no-deps", "-e", ".")
    done = run(python, "-m", "pip", *install, cwd=sources)
    assert done.returncode == 0, done.stdout
    (file,) = (sources.parent / "env").glob("lib/python3*/site-packages/*torchcomms_pg*.pth")
    # Type checkers read a folder's name in the file, but do not run a statement.
    assert file.read_text().split() == [str(sources)]
    assert (sources / "torchcomms_pg/py.typed").is_file()


# The wheel of several builds


def part(folder, minor, extension=b"built", public="0.1.0"):
    """Writes a wheel as `pip wheel` makes it for one torch, and the headers.json of that torch."""
    info = f"torchcomms_pg-{public}.dist-info"
    place = folder / minor
    place.mkdir(parents=True)
    with zipfile.ZipFile(
        place / f"torchcomms_pg-{public}-cp311-cp311-linux_x86_64.whl", "w"
    ) as file:
        file.writestr("torchcomms_pg/__init__.py", "")
        file.writestr(
            f"torchcomms_pg/_C_torch{minor.replace('.', '')}.cpython-311-x86_64-linux-gnu.so",
            extension,
        )
        file.writestr(
            f"{info}/METADATA",
            f"Metadata-Version: 2.4\nName: torchcomms_pg\nVersion: {public}\n"
            f"Requires-Dist: torch==2.{minor.partition('.')[2]}.*\n"
            'Provides-Extra: test\nRequires-Dist: pytest; extra == "test"\n'
            "\nVersion: of the text\n",
        )
        file.writestr(f"{info}/RECORD", "")
        file.writestr(f"torchcomms_pg-{public}.data/data/share/doc/torchcomms_pg/api.md", "")
    (place / "headers.json").write_text(json.dumps({"fmt": "12.2.1", "torch": f"{minor}.0"}))


def combined(folder, *minors, **content):
    for minor in minors:
        part(folder, minor, **content)
    done = run(sys.executable, ROOT / "tools/_wheel.py", "combine", folder, cwd=folder)
    assert done.returncode == 0, done.stdout
    (info,) = folder.glob("unpacked/*.dist-info")
    return info


def test_a_wheel_of_several_builds_asks_for_their_torches_and_no_other(tmp_path):
    metadata = (combined(tmp_path, "2.15", "2.13") / "METADATA").read_text()
    asked = Requirement(required(metadata)).specifier
    assert [f"2.{minor}" for minor in range(9, 19) if asked.contains(f"2.{minor}.1")] == [
        "2.13",
        "2.15",
    ]
    assert 'Requires-Dist: pytest; extra == "test"' in metadata


def test_the_version_of_a_wheel_says_its_torches_and_is_another_when_its_content_is(tmp_path):
    names = [
        combined(tmp_path / "1", "2.15").name,
        combined(tmp_path / "2", "2.15").name,
        combined(tmp_path / "3", "2.15", extension=b"BUILT").name,
        combined(tmp_path / "4", "2.13", "2.15").name,
    ]
    assert names[0] == names[1] and len(set(names)) == 3
    versions = [name.removeprefix("torchcomms_pg-").removesuffix(".dist-info") for name in names]
    for version, torches in zip(versions, ["torch215"] * 3 + ["torch213.torch215"], strict=True):
        assert re.fullmatch(rf"0\.1\.0\+{torches}\.h[0-9a-f]{{8}}", version)
        assert str(Version(version)) == version  # pip does not normalise it
    metadata = (tmp_path / "4/unpacked" / names[3] / "METADATA").read_text()
    data = names[3].replace(".dist-info", ".data")
    assert (tmp_path / "4/unpacked" / data / "data/share/doc/torchcomms_pg/api.md").is_file()
    assert f"\nVersion: {versions[3]}\n" in metadata and "\nVersion: of the text\n" in metadata


def test_a_release_is_of_the_commit_that_its_tag_names_and_has_the_plain_version(tmp_path):
    checkout = tmp_path / "checkout"
    for name in ("tools/_wheel.py", "torchcomms_pg/_version.py"):
        (checkout / name).parent.mkdir(parents=True)
        shutil.copy(ROOT / name, checkout / name)
    (checkout / "torchcomms_pg/_version.py").write_text('__version__ = "0.0.7"\n')

    def git(*arguments):
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        assert run("git", *identity, *arguments, cwd=checkout).returncode == 0

    def check():
        return run(sys.executable, checkout / "tools/_wheel.py", "check", cwd=tmp_path)

    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "the release")
    assert "the checkout is not at the tag v0.0.7: git checkout v0.0.7" in check().stdout
    git("tag", "v0.0.7")
    assert check().returncode == 0, check().stdout
    (checkout / "more").touch()
    assert "the checkout has changes that v0.0.7 lacks:\n?? more" in check().stdout
    (checkout / "more").unlink()

    part(tmp_path / "parts", "2.15", public="0.0.7")
    command = (checkout / "tools/_wheel.py", "combine", tmp_path / "parts", "--release")
    assert run(sys.executable, *command, cwd=tmp_path).returncode == 0
    assert (tmp_path / "parts/unpacked/torchcomms_pg-0.0.7.dist-info").is_dir()


def test_a_wheel_lists_what_is_compiled_in(tmp_path):
    info = combined(tmp_path, "2.13", "2.15")
    bill = json.loads((info / "sboms/torchcomms_pg.cdx.json").read_text())
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert f"torchcomms_pg-{bill['metadata']['component']['version']}.dist-info" == info.name
    found = [f"{each['name']} {each['version']}" for each in bill["components"]]
    assert found == ["fmt 12.2.1", "torch 2.13.0", "torch 2.15.0"]


@pytest.mark.torch_version
def test_what_is_compiled_in_has_its_version_in_torchs_headers_and_its_license_in_the_wheel(
    tmp_path,
):
    done = run(sys.executable, ROOT / "tools/_wheel.py", "headers", tmp_path, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    found = json.loads((tmp_path / "headers.json").read_text())
    assert found.pop("torch") == torch.__version__
    assert set(found) == {file.stem for file in (ROOT / "licenses").iterdir()}
    for version in found.values():
        assert re.fullmatch(r"\d+\.\d+\.\d+", version) and version != "0.0.0"
    # The file of torch's own copy contains each license, if this torch was installed with the file.
    about = importlib.metadata.distribution("torch")
    for name in found:
        text = about.read_text(f"licenses/third_party/{name}/LICENSE")
        # A version of fmt adds an exception, which this project does not use.
        assert text is None or (ROOT / "licenses" / f"{name}.txt").read_text().strip() in text
