"""Builds the extension torchcomms_pg._C. Everything else is in pyproject.toml.

It needs g++ (C++20), ninja, an installed torch and nccl.h; no CUDA toolkit, no CUDA build
of torch, no libnccl. Variables that it reads:

TORCHCOMMS_PG_NCCL_INCLUDE  the folder with nccl.h, where no nvidia-nccl package is installed
CXX, CXXFLAGS, LDFLAGS      the compiler (g++), and flags to add
MAX_JOBS                    compilations at a time (one per core, if memory suffices)

Objects are kept in build/<torch>-<python>/, so that only what changed is compiled again and
several torch versions can be built from one checkout in turn.
"""

from __future__ import annotations

import fcntl
import filecmp
import importlib.util
import os
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, SetupError

ROOT = Path(__file__).resolve().parent
PACKAGE = "torchcomms_pg"
# Commands that lead to a build; an sdist needs neither torch nor a compiler.
BUILDS = {"bdist_wheel", "build", "build_ext", "develop", "dist_info", "editable_wheel", "install"}
GIB_PER_JOB = 2.0


def package_folder(name: str) -> Path | None:
    """Finds an installed package without importing it (torch takes seconds)."""
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return None
    locations = list(spec.submodule_search_locations or []) if spec else []
    return Path(locations[0]) if locations else None


def find_torch() -> tuple[Path, str, bool]:
    """Returns the folder of the installed torch, its version, and whether it is for ROCm."""
    folder = package_folder("torch")
    if folder is None:
        raise SetupError(
            f"torch is not installed for {sys.executable}, and torchcomms_pg is compiled against "
            "the torch that it will run with. Install torch first, then build without isolation "
            "(an isolated build does not see it):\n"
            "    pip install torch 'setuptools>=77' ninja\n"
            "    pip install --no-build-isolation ."
        )
    about = runpy.run_path(str(folder / "version.py"))
    return folder, str(about["__version__"]), about.get("hip") is not None


def find_nccl_include() -> Path:
    """Returns the folder with nccl.h: the one named by hand, else that of the NCCL package."""
    by_hand = os.environ.get("TORCHCOMMS_PG_NCCL_INCLUDE")
    if by_hand:
        if not (Path(by_hand) / "nccl.h").is_file():
            raise SetupError(f"TORCHCOMMS_PG_NCCL_INCLUDE={by_hand}: there is no nccl.h in it.")
        return Path(by_hand).resolve()
    # Every nvidia-nccl-cu* package puts its files here.
    folder = package_folder("nvidia.nccl")
    if folder and (folder / "include" / "nccl.h").is_file():
        return folder / "include"
    raise SetupError(
        "nccl.h was not found: this torch brings no NCCL. The header is needed to build, also for "
        "a machine without a GPU. Install it:\n"
        "    pip install 'nvidia-nccl-cu12>=2.28.7,<3'\n"
        "or set TORCHCOMMS_PG_NCCL_INCLUDE to the folder with nccl.h of NCCL 2.28.7 or later."
    )


def find_tool(name: str, command: str) -> str:
    found = shutil.which(name)
    if found is None:
        beside_python = Path(sys.executable).with_name(name)  # the venv is not activated
        if not beside_python.is_file():
            raise SetupError(f"{name} was not found. Install it:\n    {command}")
        found = str(beside_python)
    return found


def job_count() -> int:
    if os.environ.get("MAX_JOBS"):
        return max(1, int(os.environ["MAX_JOBS"]))
    memory = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return max(1, min(len(os.sched_getaffinity(0)), int(memory / GIB_PER_JOB)))


def relative(path: Path) -> str:
    """Gives a path inside the checkout without the checkout's own place.

    Then neither a moved checkout nor a second clone defeats ccache, and no build machine's
    folder names end up in messages (``__FILE__``).
    """
    return os.path.relpath(path, ROOT) if path.is_relative_to(ROOT) else str(path)


def quoted(flag: str) -> str:
    """Quotes a flag the way a response file of the compiler wants it."""
    return '"' + flag.replace("\\", "\\\\").replace('"', '\\"') + '"'


def write_if_changed(path: Path, text: str) -> None:
    """Writes a file unless it already reads so, for its time stamp triggers compilations."""
    if not path.is_file() or path.read_text() != text:
        path.write_text(text)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keeps a second build of the same checkout out of the folder meanwhile."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class Build:
    """One compilation for one torch and one Python: of csrc/, or of other `sources`."""

    def __init__(self, name: str | None = None, sources: Iterable[Path] | None = None) -> None:
        self.torch, self.torch_version, self.rocm = find_torch()
        self.nccl = find_nccl_include()
        self.cxx = find_tool(os.environ.get("CXX", "g++"), "apt-get install g++")
        self.ninja = find_tool("ninja", "pip install ninja")
        self.python = Path(sysconfig.get_path("include"))
        if not (self.python / "Python.h").is_file():
            raise SetupError(
                f"Python.h was not found in {self.python}. Install Python's headers, for Debian's "
                "and Ubuntu's own Python:\n    apt-get install python3-dev"
            )
        tag = f"torch-{self.torch_version}-{sys.implementation.cache_tag}"
        self.folder = ROOT / "build" / tag
        if name is None:
            name = f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
        else:
            self.folder /= name.split(".")[0]
        self.library = self.folder / name
        self.sources = (ROOT / "csrc").rglob("*.cpp") if sources is None else sources

    def flags(self) -> dict[str, list[str]]:
        """Compiler flags by response file.

        They go into files so that a failed command prints as one line that can be read and
        run again.
        """
        minor = ".".join(self.torch_version.split(".")[:2])
        common = [
            "-std=c++20",
            "-O2",
            "-DNDEBUG",
            "-fPIC",
            "-fvisibility=hidden",
            "-fvisibility-inlines-hidden",
            "-fmax-errors=20",
            "-pthread",
            "-Wall",
            "-Wextra",
            "-Icsrc",
            "-isystemcsrc/nccl/cuda_stub",
            f"-isystem{relative(self.nccl)}",
        ]
        # torch first: it bundles the pybind11 whose types it shares with us.
        includes = [
            self.torch / "include",
            self.torch / "include/torch/csrc/api/include",
            self.python,
        ]
        torch = common + [f"-isystem{relative(path)}" for path in includes]
        torch += ["-isystemcsrc/recorder/json_stub", "-DFMT_HEADER_ONLY=1"]
        torch += [f'-DTORCHCOMMS_PG_TORCH_VERSION="{minor}"']
        if self.rocm:
            common.append("-DTORCHCOMMS_PG_ROCM")
            torch.append("-DTORCHCOMMS_PG_ROCM")
        # Last, so that they win.
        added = shlex.split(os.environ.get("CXXFLAGS", ""))
        return {
            "torch": torch + added,
            # csrc/shm must not need torch: without its headers here, it cannot.
            "shm": common + added,
            "reduce": [*common, "-O3", *added],
        }

    @staticmethod
    def flags_for(source: Path) -> str:
        if "shm" not in source.parts:
            return "torch"
        return "reduce" if source.name.startswith("Reduce") else "shm"

    def write_ninja(self) -> None:
        out = relative(self.folder)
        for name, flags in self.flags().items():
            text = "\n".join(quoted(flag) for flag in flags)
            write_if_changed(self.folder / f"{name}.flags", text + "\n")
        ccache = shutil.which("ccache")
        cxx = f"{ccache} {self.cxx}" if ccache else self.cxx
        link = [shlex.quote(f"-L{relative(self.torch / 'lib')}"), "-ltorch_python", "-ltorch_cpu"]
        link += ["-ltorch", "-lc10", "-ldl", "-lrt", "-pthread"]
        # No rpath: torch is imported first, so its libraries are loaded by then.
        link += shlex.split(os.environ.get("LDFLAGS", ""))
        lines = [
            "ninja_required_version = 1.5",
            f"builddir = {out}",
            "rule compile",
            f"  command = {cxx} @{out}/$flags.flags -MD -MF $out.d -c $in -o $out",
            "  description = compile $in",
            "  depfile = $out.d",
            "  deps = gcc",
            "rule link",
            # A shared library may lack symbols, Python's among them: ours would show at import.
            f"  command = {self.cxx} -shared @$out.rsp -o $out {' '.join(link)}"
            " && if nm -DCu $out | grep ' torchcomms_pg::'; then"
            " echo 'error: these are declared and used, but defined nowhere'; rm $out; false; fi",
            "  description = link $out",
            "  rspfile = $out.rsp",
            "  rspfile_content = $in_newline",
        ]
        sources = sorted(self.sources)
        # The slow ones (with torch's headers) first, so that none is left over at the end.
        sources.sort(key=lambda source: self.flags_for(source) != "torch")
        objects = []
        for path in sources:
            source = path.relative_to(ROOT)
            kind = self.flags_for(source)
            objects.append(f"{out}/{source.with_suffix('.o')}")
            lines.append(f"build {objects[-1]}: compile {source} | {out}/{kind}.flags")
            lines.append(f"  flags = {kind}")
        lines.append(f"build {relative(self.library)}: link {' '.join(objects)}")
        write_if_changed(self.folder / "build.ninja", "\n".join(lines) + "\n")

    def run(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with locked(self.folder / "lock"):
            self.write_ninja()
            command = [self.ninja, "-f", relative(self.folder / "build.ninja")]
            command += ["-j", str(job_count())]
            sys.stdout.flush()
            if subprocess.run(command, cwd=ROOT, check=False).returncode:
                raise CompileError(
                    "torchcomms_pg: the compiler's errors are above. "
                    f"Again, from {ROOT}: {shlex.join(command)}"
                )

    def copy_to(self, target: Path) -> None:
        """Puts the extension at `target`."""
        target.parent.mkdir(parents=True, exist_ok=True)
        if not (target.is_file() and filecmp.cmp(self.library, target, shallow=False)):
            # A new file in the old one's place: a process that has the old one loaded keeps it.
            partial = target.with_name(f".{target.name}.{os.getpid()}")
            shutil.copy(self.library, partial)
            partial.replace(target)

    def install(self, target: Path) -> None:
        """Puts the package's extension at `target`, beside it what it was built for."""
        self.copy_to(target)
        note = f'"""Written by setup.py."""\n\nTORCH_VERSION = "{self.torch_version}"\n'
        write_if_changed(target.with_name("_built_for.py"), note)


class BuildExtension(build_ext):
    """setuptools' command, with ninja in place of distutils' compiler."""

    def run(self) -> None:
        (extension,) = self.extensions
        build = Build()
        build.run()
        if self.inplace:  # also an editable install
            build.install(ROOT / PACKAGE / build.library.name)
        else:
            build.install(Path(self.get_ext_fullpath(extension.name)))


if __name__ == "__main__":
    if int(setuptools.__version__.split(".")[0]) < 77:
        raise SystemExit(
            f"setuptools {setuptools.__version__} is too old for this pyproject.toml. Upgrade it:\n"
            "    pip install 'setuptools>=77'"
        )
    if BUILDS & set(sys.argv):
        try:
            find_torch()  # before pip downloads a torch that would come too late
        except SetupError as error:
            raise SystemExit(f"error: {error}") from None
    # setuptools packs whatever lies in its build folder: also modules deleted since.
    scratch = ROOT / "build" / "setuptools"
    if "bdist_wheel" in sys.argv:
        shutil.rmtree(scratch, ignore_errors=True)
    setup(
        options={"build": {"build_base": relative(scratch)}},
        # The sources are found at build time; an sdist takes them through MANIFEST.in.
        ext_modules=[Extension(f"{PACKAGE}._C", sources=[])],
        cmdclass={"build_ext": BuildExtension},
    )
