"""Makes one wheel of several wheels, each built for one minor of torch. Imports no torch.

``_wheel.py headers FOLDER``: writes FOLDER/headers.json, the versions of the projects whose code
the headers of this Python's torch bring into the extension.
``_wheel.py combine FOLDER``: unpacks all FOLDER/*/*.whl into FOLDER/unpacked. The new metadata
names the torches, and lists what is compiled in. With ``--release`` the version stays as it is.
``_wheel.py check``: fails unless the checkout is the unchanged commit of the version's tag.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import runpy
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# The licenses of the projects whose headers have code that the compiler copies into the extension.
# NCCL's header only declares, and nlohmann::json is this project's own (csrc/recorder/json_stub).
LICENSES = {"fmt": "MIT", "pybind11": "BSD-3-Clause", "torch": "BSD-3-Clause"}


def compiled_in(torch: Path, torch_version: str) -> dict[str, str]:
    """Returns the versions of the projects in `LICENSES`, from torch's headers."""

    def defined(header: str, name: str) -> int:
        text = (torch / "include" / header).read_text(encoding="utf-8")
        found = re.search(rf"^#\s*define {name} (\d+)", text, re.M)
        if found is None:
            sys.exit(f"error: {torch}/include/{header} does not define {name}")
        return int(found[1])

    fmt = defined("fmt/base.h", "FMT_VERSION")
    parts = ("MAJOR", "MINOR", "(?:MICRO|PATCH)")  # PATCH before pybind11 3
    pybind11 = [defined("pybind11/detail/common.h", f"PYBIND11_VERSION_{part}") for part in parts]
    return {
        "fmt": f"{fmt // 10000}.{fmt // 100 % 100}.{fmt % 100}",
        "pybind11": ".".join(map(str, pybind11)),
        "torch": torch_version,
    }


def order(minor: str) -> tuple[int, ...]:
    return tuple(map(int, minor.split(".")))


def requirement(minors: Iterable[str]) -> str:
    """Returns the requirement for a torch of these minors and of no other.

    >>> requirement(["2.13", "2.15"])
    'torch>=2.13,<2.16,!=2.14.*'
    """
    first, *between = sorted(minors, key=order)
    if not between:
        return f"torch=={first}.*"
    major, last = order(between[-1])
    missing = [
        f"{major}.{minor}"
        for minor in range(order(first)[1], last)
        if f"{major}.{minor}" not in (first, *between)
    ]
    without = "".join(f",!={minor}.*" for minor in missing)
    return f"torch>={first},<{major}.{last + 1}{without}"


def label(folder: Path, minors: Iterable[str]) -> str:
    """Returns the local part of the version: the torches, and a digest of all files.

    pip does not install a version that is installed, so a wheel with other content needs another.
    """
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(f"{file.relative_to(folder)}\0{file.stat().st_size}\0".encode())
        digest.update(file.read_bytes())
    torches = ".".join(f"torch{minor.replace('.', '')}" for minor in sorted(minors, key=order))
    # The letter keeps the zeros at the front, which a segment of digits alone would lose.
    return f"{torches}.h{digest.hexdigest()[:8]}"


def bill_of_materials(version: str, headers: Iterable[dict[str, str]]) -> str:
    """Lists what is compiled in, as CycloneDX 1.6 (https://cyclonedx.org/docs/1.6/json/)."""
    found = {(name, version) for each in headers for name, version in each.items()}
    components = [
        {
            "type": "library",
            "name": name,
            "version": each,
            "purl": f"pkg:{'pypi' if name == 'torch' else 'generic'}/{name}@{each}",
            "licenses": [{"license": {"id": LICENSES[name]}}],
        }
        for name, each in sorted(found)
    ]
    package = {
        "type": "library",
        "name": "torchcomms_pg",
        "version": version,
        "purl": f"pkg:pypi/torchcomms-pg@{version}",
        "licenses": [{"license": {"id": "BSD-3-Clause"}}],
    }
    bill: dict[str, Any] = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": package},
        "components": components,
    }
    return json.dumps(bill, indent=2) + "\n"


def write_headers(folder: Path) -> None:
    """Writes FOLDER/headers.json."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        sys.exit(f"error: torch is not installed for {sys.executable}")
    torch = Path(spec.submodule_search_locations[0])
    about = re.search(r"__version__ = '([^']*)'", (torch / "version.py").read_text())
    assert about is not None
    (folder / "headers.json").write_text(json.dumps(compiled_in(torch, about[1])))


def check_release() -> None:
    """Exits with an error unless the checkout is the unchanged commit of the version's tag."""
    tag = f"v{runpy.run_path(str(ROOT / 'torchcomms_pg/_version.py'))['__version__']}"

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else "nothing"

    if git("rev-parse", "HEAD") != git("rev-parse", f"refs/tags/{tag}^{{commit}}"):
        sys.exit(f"error: --release: the checkout is not at the tag {tag}: git checkout {tag}")
    if changed := git("status", "--porcelain"):
        sys.exit(f"error: --release: the checkout has changes that {tag} lacks:\n{changed}")


def combine(folder: Path, release: bool) -> None:
    """Unpacks all wheels, which differ in the extension alone, and rewrites the metadata."""
    unpacked = folder / "unpacked"
    for wheel in sorted(folder.glob("*/*.whl")):
        zipfile.ZipFile(wheel).extractall(unpacked)
    (info,) = unpacked.glob("*.dist-info")
    version = info.name.removesuffix(".dist-info").partition("-")[2]
    found = [re.match(r"_C_torch(\d)(\d+)", path.name) for path in unpacked.glob("*/_C_torch*.so")]
    minors = [f"{match[1]}.{match[2]}" for match in found if match]
    # RECORD has the digests of the last wheel's files; `wheel pack` writes a new one.
    (info / "RECORD").unlink()
    metadata = info / "METADATA"
    text, count = re.subn(
        r"^Requires-Dist: torch=.*$", f"Requires-Dist: {requirement(minors)}", metadata.read_text(),
        flags=re.M,
    )  # fmt: skip
    assert count == 1, f"{metadata} asks for torch {count} times"
    metadata.write_text(text)
    if release:
        check_release()
    else:
        version += "+" + label(unpacked, minors)
        metadata.write_text(
            re.sub(r"^Version: .*$", f"Version: {version}", text, count=1, flags=re.M)
        )
    (info / "sboms").mkdir()
    headers = [json.loads(file.read_text()) for file in sorted(folder.glob("*/headers.json"))]
    (info / "sboms/torchcomms_pg.cdx.json").write_text(bill_of_materials(version, headers))
    for place in (info, info.with_suffix(".data")):
        place.rename(unpacked / f"torchcomms_pg-{version}{place.suffix}")


def main() -> None:
    """Runs the command that tools/wheel asks for."""
    match sys.argv[1:]:
        case ["headers", folder]:
            write_headers(Path(folder))
        case ["combine", folder]:
            combine(Path(folder), release=False)
        case ["combine", folder, "--release"]:
            combine(Path(folder), release=True)
        case ["check"]:
            check_release()
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
