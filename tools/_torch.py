"""Chooses the torch that the tools use, and explains why pip could not install it. Needs no torch.

``_torch.py name``: prints the environment's folder and the requirement for $TORCH.
``_torch.py why LOG REQUIREMENT TOOL``: prints why pip, whose output is in LOG, has failed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def supported() -> tuple[str, list[str]]:
    """Returns the range of torch versions in pyproject.toml, and its minors."""
    text = (ROOT / "pyproject.toml").read_text()
    found = re.search(r'^torch = "(>=2\.(\d+),<2\.(\d+))"', text, re.M)
    if found is None:
        sys.exit('error: pyproject.toml: no line torch = ">=2.X,<2.Y"')
    return found[1], [f"2.{minor}" for minor in range(int(found[2]), int(found[3]))]


def pin(minor: str) -> str:
    """Returns the version of torch that requirements/ pins for a minor."""
    (version,) = re.findall(
        r"^torch==(\S+)$", (ROOT / "requirements" / f"torch-{minor}.txt").read_text(), re.M
    )
    return version


def of_this_python(folder: str) -> str:
    """Returns the folder, or one with this Python's name if the folder is another Python's.

    An environment keeps its Python if PYTHON names none.
    """
    python = Path(sysconfig.get_path("stdlib")).name  # such as python3.13, or python3.13t
    found = [path.name for path in (ROOT / folder).glob("lib/python3*")]
    others = os.environ.get("PYTHON") and found and python not in found
    return f"{folder}-{python}" if others else folder


def environment(suffix: str, version: str) -> str:
    """Returns the folder for a torch: .venv if .venv has this version, else .venv-SUFFIX."""
    newest = of_this_python(".venv")
    packages = (ROOT / newest).glob("lib/python3*/site-packages/torch-*.dist-info")
    names = (folder.name.removeprefix("torch-").removesuffix(".dist-info") for folder in packages)
    installed = {name.split("+")[0] for name in names}
    return newest if version in installed else of_this_python(f".venv-{suffix}")


def name() -> None:
    """Prints the folder of the environment, and the requirement for torch."""
    wanted = os.environ.get("TORCH", "")
    limits, minors = supported()
    if not wanted:
        print(of_this_python(".venv"), f"torch{limits}")
    elif wanted in minors:
        print(environment(wanted, pin(wanted)), f"torch=={pin(wanted)}")
    elif re.fullmatch(r"2\.\d+\.\d+", wanted) and (minor := wanted.rpartition(".")[0]) in minors:
        print(environment(minor if pin(minor) == wanted else wanted, wanted), f"torch=={wanted}")
    else:
        sys.exit(
            f"error: TORCH={wanted}: wanted a torch of the range {limits} of pyproject.toml: "
            f"{', '.join(minors)}, or a version like {pin(minors[-1])}. "
            "Without TORCH it is the newest that pip installs."
        )


def constraints() -> list[str]:
    """Returns pip's constraints on torch, each with its file, and the files that cannot be read."""
    listed = pip("config", "list")
    files = re.findall(r"^(?:global|install|:env:)\.constraint='(.*)'$", listed, re.M)
    # A configuration file may name several constraints files, one a line.
    named = [file for entry in files for file in re.split(r"\\n|\s+", entry) if file]
    found = []
    for file in dict.fromkeys(named):
        try:
            lines = Path(file).read_text().splitlines()
        except OSError as error:
            found.append(f"the constraints file {file}, which cannot be read: {error.strerror}")
            continue
        found += [
            f"{line.strip()} in {file}" for line in lines if re.match(r"\s*torch\b[^-_]", line)
        ]
    return found


def pip(*arguments: str) -> str:
    """Returns what a command of pip prints, empty if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout if done.returncode == 0 else ""


def setting(name: str) -> str:
    """Returns a setting of `pip install`, from a variable or a file; empty if it is not set."""
    found = re.findall(rf"^(:env:|install|global)\.{name}='(.*)'$", pip("config", "list"), re.M)
    by_place = dict(found)
    places = (":env:", "install", "global")
    return next((by_place[place] for place in places if place in by_place), "")


def without_index() -> bool:
    return setting("no-index").lower() in ("1", "true", "yes", "on")


def find_links() -> str:
    return " ".join(setting("find-links").replace("\\n", " ").split())


def free(folder: Path) -> str:
    return f"{shutil.disk_usage(folder).free / 2**30:.1f} GB in {folder}"


def newest(requirement: str) -> str:
    """Returns the version of torch that pip would install, empty if pip finds none."""
    options = ("--quiet", "--dry-run", "--no-deps", "--ignore-installed", "--report", "-")
    report = pip("install", *options, requirement)
    return json.loads(report)["install"][0]["metadata"]["version"].split("+")[0] if report else ""


def why(log: Path, requirement: str, tool: str) -> None:
    """Prints in a few lines why pip failed, and the next command."""
    text = log.read_text(errors="replace")
    limits, minors = supported()
    if "No space left on device" in text or "Disk quota exceeded" in text:
        reason = "the disk is full"
        action = (
            "torch with its CUDA packages takes about 6 GB here, and as much in pip's folder for "
            f"temporary files (TMPDIR) while it is installed. Free are {free(ROOT)} here and "
            f"{free(Path(tempfile.gettempdir()))}. Make room, name another folder by TMPDIR, or: "
            f"PIP_NO_CACHE_DIR=1 {tool}"
        )
    elif re.search(r"NewConnectionError|NameResolutionError|ConnectTimeout|ProxyError", text):
        reason = "pip cannot reach its package index"
        action = (
            "See that the network is there, or name an index (PIP_INDEX_URL) or a folder of wheels "
            f"(PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER), then again: {tool}"
        )
    elif given := constraints():
        reason = f"pip has been told {'; '.join(given)}"
        version = newest(f"torch{limits}")
        if version and version.rpartition(".")[0] in minors:
            action = f"The newest torch that this allows is {version}: TORCH={version} {tool}"
        else:
            action = (
                f"It leaves no torch of the range {limits} of pyproject.toml. Without the "
                f"constraint: PIP_CONSTRAINT=/dev/null {tool}"
            )
    elif "No matching distribution found for torch" in text and without_index():
        reason = (
            f"pip finds no {requirement} in the folders that it has been told "
            f"({find_links() or 'none'}), and is to ask no index (no-index, or PIP_NO_INDEX)"
        )
        action = f"Put a wheel of it there (PIP_FIND_LINKS=FOLDER), or: PIP_NO_INDEX=0 {tool}"
    elif "No matching distribution found for torch" in text:
        version = newest(f"torch{limits}")
        reason = (
            f"pip finds no {requirement} for Python {sys.version_info[0]}.{sys.version_info[1]}"
        )
        action = (
            f"The newest that it finds is {version}: TORCH={version} {tool}"
            if version
            else f"It finds no torch{limits} at all: see pip's index (pip config list) and its "
            f"output above, or choose another Python: PYTHON=python3.12 {tool}"
        )
    else:
        reason = "see pip's output above"
        action = f"Again: {tool}"
    print(f"error: {requirement} could not be installed: {reason}.\n{action}", file=sys.stderr)


def main() -> None:
    """Runs the command that the tools ask for."""
    match sys.argv[1:]:
        case ["name"]:
            name()
        case ["why", log, requirement, tool]:
            why(Path(log), requirement, tool)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
