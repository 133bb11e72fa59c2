"""Builds torchcomms_pg._C_torchXYZ and torchcomms_pg._judge. Everything else is in pyproject.toml.

It needs g++ 11 or clang 19, ninja, an installed torch and nccl.h; no CUDA toolkit, no CUDA build
of torch, no libnccl. Variables that it reads:

TORCHCOMMS_PG_NCCL_INCLUDE  the folder with nccl.h, where no nvidia-nccl package is installed
TORCHCOMMS_PG_UNIT_LINES    lines of source to a unit of compilation (3200; 7200 on one or two
                            cores); 0: each file alone
TORCHCOMMS_PG_PYTHON_INCLUDE  the folders with Python.h and what it includes, a colon between
                            them, where the build is for another processor (tools/wheel --arch)
CXX, CXXFLAGS, LDFLAGS      the compiler (g++; ccache may be in front), and flags to add
MAX_JOBS                    compilations at a time (one per core, if memory suffices)
TORCHCOMMS_PG_ANY_TORCH     1: build also for a torch minor that this source is not for, to try it

The name of the extension states the torch minor that it is for, and its objects are kept in
build/<torch>-<python>/: builds for several torch versions stand side by side in one checkout,
and only what changed is compiled again. _judge needs no torch, and serves every Python.
"""

from __future__ import annotations

import fcntl
import filecmp
import importlib.util
import itertools
import json
import os
import platform
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
# Folders of csrc/ that must not need torch: without its headers they cannot.
WITHOUT_TORCH = {
    *("host", "monitor", "nccl", "shm"),
    *("diagnosis/hang", "diagnosis/lateness", "diagnosis/rank", "diagnosis/status"),
    "judge",
}
# The module without torch, and the folders of whose functions it is linked.
JUDGE = "_judge.abi3.so"
OF_JUDGE = {"judge", "monitor", "diagnosis/hang", "diagnosis/rank", "diagnosis/status"}


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


def minor_of(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


def supported() -> tuple[str, list[str]]:
    """Returns the range of torches that this source is for, and its minors."""
    tool = runpy.run_path(str(ROOT / "tools" / "_torch.py"))
    limits, minors = tool["supported"]()
    return str(limits), list(minors)


def required_torch(builds: bool) -> str:
    """Returns the requirement of the package: with a build the minor that it is for.

    Raises:
        SetupError: there is no torch to build for, or this source is not for it. pip, which reads
            the requirement before it builds, has then put no other torch in its place.
    """
    limits, minors = supported()
    if not builds:
        return f"torch{limits}"
    version = find_torch()[1]
    minor = minor_of(version)
    if minor not in minors and os.environ.get("TORCHCOMMS_PG_ANY_TORCH") != "1":
        raise SetupError(
            f"torch {version} is installed, and this source of torchcomms_pg is for torch{limits}. "
            "Nothing was changed. Install a torch of that range, or try it with this one:\n"
            "    TORCHCOMMS_PG_ANY_TORCH=1 pip install --no-build-isolation ."
        )
    return f"torch=={minor}.*"


def package_version() -> str:
    """Returns the version of this package, which the ranks of a group compare."""
    return str(runpy.run_path(str(ROOT / "torchcomms_pg" / "_version.py"))["__version__"])


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


def find_python_include() -> list[Path]:
    """Returns the folders with Python's headers: those named by hand, else this Python's."""
    by_hand = os.environ.get("TORCHCOMMS_PG_PYTHON_INCLUDE")
    if by_hand:
        folders = [Path(folder).resolve() for folder in by_hand.split(":")]
        if not (folders[0] / "Python.h").is_file():
            raise SetupError(
                f"TORCHCOMMS_PG_PYTHON_INCLUDE={by_hand}: wanted Python.h in {folders[0]}."
            )
        return folders
    folder = Path(sysconfig.get_path("include"))
    if not (folder / "Python.h").is_file():
        raise SetupError(
            f"Python.h was not found in {folder}. Install Python's headers, for Debian's "
            "and Ubuntu's own Python:\n    apt-get install python3-dev"
        )
    return [folder]


def find_tool(name: str, command: str) -> str:
    """Finds a program: a path as it is, a bare name first beside this Python.

    Two versions of ninja in turn would compile everything again: each has its own log.
    """
    beside_python = Path(sys.executable).parent / name
    bare = os.path.basename(name) == name
    found = str(beside_python) if bare and beside_python.is_file() else shutil.which(name)
    if found is None:
        raise SetupError(f"{name} was not found. Install it:\n    {command}")
    return found


# With these everything compiles; clang 14 fails on builtins of the processor.
OLDEST_COMPILER = {"g++": 11, "clang": 19}

# What csrc/base/Mutex.hpp annotates; the second one is the order of two mutexes.
# Errors in CI alone, since a later clang may find more.
LOCKS_CHECKED = ["-Wthread-safety", "-Wthread-safety-beta"]


def find_compiler() -> tuple[str, str, bool]:
    """Returns what is to start the compiler ("": nothing), the compiler, and whether it is clang.

    Raises:
        SetupError: there is no such compiler, or it is too old.
    """
    given = os.environ.get("CXX", "g++")
    launcher, _, name = given.strip().rpartition(" ")
    if launcher and (" " in launcher or Path(launcher).name not in ("ccache", "sccache", "distcc")):
        raise SetupError(
            f"CXX={given}: wanted a compiler, or ccache and a compiler; flags go into CXXFLAGS."
        )
    cxx = find_tool(name, "apt-get install g++")
    said = [
        subprocess.run([cxx, flag], capture_output=True, text=True, check=False).stdout
        for flag in ("--version", "-dumpversion")
    ]
    kind = "clang" if "clang" in said[0] else "g++"
    version = said[1].split(".")[0].strip()
    if version.isdecimal() and int(version) < OLDEST_COMPILER[kind]:
        raise SetupError(
            f"{cxx} is {kind} {said[1].strip()}: wanted g++ {OLDEST_COMPILER['g++']} or clang "
            f"{OLDEST_COMPILER['clang']}, or a later one. Name it by CXX, such as CXX=g++-12."
        )
    starter = find_tool(launcher, f"apt-get install {launcher}") if launcher else ""
    return starter, cxx, kind == "clang"


def number(name: str, default: int, least: int) -> int:
    """Returns the value of a variable, `default` where it is not set."""
    value = os.environ.get(name) or str(default)
    if not value.isdecimal() or int(value) < least:
        raise SetupError(f"{name}={value}: wanted a whole number, {least} or more.")
    return int(value)


def job_count() -> int:
    if os.environ.get("MAX_JOBS"):
        return number("MAX_JOBS", 1, 1)
    # Free pages alone are few where torch has just been unpacked: it fills the page cache.
    lines = Path("/proc/meminfo").read_text().splitlines()
    kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    return max(1, min(len(os.sched_getaffinity(0)), int(kib / 2**20 / GIB_PER_JOB)))


def unit_lines() -> int:
    # Larger units take a quarter less of CPU time in all, but keep few cores busy.
    default = 3200 if len(os.sched_getaffinity(0)) > 2 else 7200
    return number("TORCHCOMMS_PG_UNIT_LINES", default, 0)


def units(files: list[Path]) -> list[list[Path]]:
    """Divides files into runs of about as many lines each, unit_lines() at the most."""
    if not unit_lines():
        return [[file] for file in files]
    lines = [len(file.read_bytes().splitlines()) for file in files]
    per_unit = sum(lines) / -(-sum(lines) // unit_lines())
    found: list[list[Path]] = []
    before = 0.0
    for file, count in zip(files, lines, strict=True):
        # By the middle of the file, so that no unit gets more than half a file too much.
        if len(found) <= (before + count / 2) // per_unit:
            found.append([])
        found[-1].append(file)
        before += count
    return found


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
    """One build for one torch and one Python: of csrc/, or of the module `name` from `sources`."""

    def __init__(self, name: str | None = None, sources: Iterable[Path] | None = None) -> None:
        self.torch, self.torch_version, self.rocm = find_torch()
        self.nccl = find_nccl_include()
        self.launcher, self.cxx, self.clang = find_compiler()
        job_count()  # before the first file is written
        self.ninja = find_tool("ninja", "pip install ninja")
        self.python = find_python_include()
        self.minor = minor_of(self.torch_version)
        self.module = f"_C_torch{self.minor.replace('.', '')}" if name is None else name
        tag = f"torch-{self.torch_version}-{sys.implementation.cache_tag}"
        # What CPython's own cross builds set, too (_PYTHON_HOST_PLATFORM).
        processor = sysconfig.get_platform().rpartition("-")[2]
        self.cross = processor != platform.machine()
        if self.cross:
            tag += f"-{processor}"
        self.folder = ROOT / "build" / tag / self.module
        self.library = self.folder / f"{self.module}{sysconfig.get_config_var('EXT_SUFFIX')}"
        self.sources = list((ROOT / "csrc").rglob("*.cpp") if sources is None else sources)

    def flags(self) -> dict[str, list[str]]:
        """Compiler flags by response file.

        They go into files so that a failed command prints as one line that can be read and
        run again.
        """
        common = [
            "-std=c++20",
            "-O2",
            "-DNDEBUG",
            "-fPIC",
            "-fvisibility=hidden",
            "-fvisibility-inlines-hidden",
            *(LOCKS_CHECKED if self.clang else ["-fmax-errors=20"]),
            "-pthread",
            "-Wall",
            "-Wextra",
            # Some pragmas are hints for g++, which takes a unit's sources for headers.
            "-Wno-unknown-pragmas" if self.clang else "-Wno-subobject-linkage",
            "-I.",
            "-Icsrc",
            "-isystemcsrc/nccl/cuda_stub",
            f"-isystem{relative(self.nccl)}",
        ]
        # torch first: it bundles the pybind11 whose types it shares with us.
        includes = [
            self.torch / "include",
            self.torch / "include/torch/csrc/api/include",
            *self.python,
        ]
        torch = common + [f"-isystem{relative(path)}" for path in includes]
        # What torch's checks say of a file is in the extension: without this machine's folders.
        torch.append(f"-ffile-prefix-map={relative(self.torch)}=torch")
        torch += ["-isystemcsrc/recorder/json_stub", "-DFMT_HEADER_ONLY=1"]
        torch += [f'-DTORCHCOMMS_PG_TORCH_VERSION="{self.minor}"']
        torch += [f'-DTORCHCOMMS_PG_VERSION="{package_version()}"']
        torch += [f"-DTORCHCOMMS_PG_MODULE={self.module}"]
        if self.rocm:
            common.append("-DTORCHCOMMS_PG_ROCM")
            torch.append("-DTORCHCOMMS_PG_ROCM")
        # Last, so that they win.
        added = shlex.split(os.environ.get("CXXFLAGS", ""))
        # A section for each function: the linker leaves out of _judge what it does not use.
        apart = [*common, "-ffunction-sections", "-fdata-sections"]
        return {
            "torch": torch + added,
            "plain": apart + added,
            "judge": [*apart, *(f"-isystem{relative(path)}" for path in self.python), *added],
            "reduce": [*common, "-O3", *added],
        }

    def units(self) -> Iterator[tuple[str, str, list[Path]]]:
        """Yields name, flags and files of each unit of compilation.

        Nearly all the time that a file takes goes into torch's headers and what they instantiate,
        so these files are compiled many at a time; without torch's headers, those of a folder.
        """

        def place(source: Path) -> tuple[str, str]:
            path = source.relative_to(ROOT)
            folder = path.parts[1].removesuffix(".cpp")  # bindings.cpp goes with bindings/
            part = "/".join(path.parts[1:3]) if folder == "diagnosis" else folder
            if folder == "host" and path.name.startswith("Reduce"):
                return f"{folder}-{path.stem}", "reduce"  # alone: compiled for other processors
            if part in WITHOUT_TORCH:
                return part.replace("/", "-"), "judge" if part == "judge" else "plain"
            # pybind11's templates take as long as torch's headers, in each unit that has some. The
            # library's units have no file of the diagnosis, so that it can be linked without.
            return folder if folder in ("bindings", "diagnosis") else "torch", "torch"

        sources = sorted(self.sources, key=lambda source: (place(source), source))
        for (folder, flags), files in itertools.groupby(sources, place):
            for number, unit in enumerate(units(list(files)), 1):
                yield f"{folder}-{number}", flags, unit

    def write_ninja(self) -> None:
        out = relative(self.folder)
        for name, flags in self.flags().items():
            text = "\n".join(quoted(flag) for flag in flags)
            write_if_changed(self.folder / f"{name}.flags", text + "\n")
        launcher = self.launcher or shutil.which("ccache")
        cxx = f"{launcher} {self.cxx}" if launcher else self.cxx
        torch = [shlex.quote(f"-L{relative(self.torch / 'lib')}"), "-ltorch_python", "-ltorch_cpu"]
        torch += ["-ltorch", "-lc10"]
        link = ["-ldl", "-lrt", "-pthread"]
        # Named before anything that LDFLAGS or a compiler's wrapper adds: what the shared ones
        # have is then not taken from static ones. Exceptions cross between this library and torch.
        link += ["-Wl,-Bdynamic", "-lstdc++", "-lgcc_s"]
        # No rpath: torch is imported first, so its libraries are loaded by then.
        link += shlex.split(os.environ.get("LDFLAGS", ""))
        check = [sys.executable, "tools/_linked.py", "$out", relative(self.torch / "lib")]
        check += [self.cxx] if self.cross else []
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
            f"  command = {self.cxx} -shared @$out.rsp -o $out $libraries {' '.join(link)}"
            " && if nm -DCu $out | grep ' torchcomms_pg::'; then"
            " echo 'error: these are declared and used, but defined nowhere'; rm $out; false; fi"
            f" && {{ {shlex.join(check)} || {{ rm $out; false; }}; }}",
            "  description = link $out",
            "  rspfile = $out.rsp",
            "  rspfile_content = $in_newline",
        ]
        objects, judge = [], []
        # The slow ones (with torch's headers) first, so that none is left over at the end.
        for unit, kind, files in sorted(self.units(), key=lambda unit: unit[1] != "torch"):
            text = "".join(f'#include "{file.relative_to(ROOT)}"\n' for file in files)
            write_if_changed(self.folder / f"{unit}.cpp", text)
            if kind != "judge":
                objects.append(f"{out}/{unit}.o")
            if unit.rpartition("-")[0] in {part.replace("/", "-") for part in OF_JUDGE}:
                judge.append(f"{out}/{unit}.o")
            lines.append(f"build {out}/{unit}.o: compile {out}/{unit}.cpp | {out}/{kind}.flags")
            lines.append(f"  flags = {kind}")
        parts = [(self.library, objects, " ".join(torch))]
        if judge:
            parts.append((self.folder / JUDGE, judge, "-Wl,--gc-sections"))
        for library, linked, libraries in parts:
            lines.append(f"build {relative(library)}: link {' '.join(linked)} | tools/_linked.py")
            lines.append(f"  libraries = {libraries}")
        write_if_changed(self.folder / "build.ninja", "\n".join(lines) + "\n")

    def write_database(self) -> None:
        """Writes compile_commands.json, for editors and clang-tidy: each file by itself."""
        flags = self.flags()
        commands = [
            {
                "directory": str(ROOT),
                "file": relative(file),
                "arguments": [self.cxx, *flags[kind], "-c", relative(file)],
            }
            for _, kind, files in self.units()
            for file in files
        ]
        write_if_changed(ROOT / "compile_commands.json", json.dumps(commands, indent=1) + "\n")

    def run(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with locked(self.folder / "lock"):
            self.write_ninja()
            self.make()

    def objects(self, *folders: str) -> list[str]:
        """Compiles folders of csrc/ as parts of the extension, and returns their objects."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with locked(self.folder / "lock"):
            self.write_ninja()
            found = [
                f"{relative(self.folder)}/{name}.o"
                for name, _, files in self.units()
                if files[0].relative_to(ROOT).parts[1] in folders
            ]
            self.make("--quiet", *found)
        return found

    def make(self, *arguments: str) -> None:
        """Runs ninja: makes everything, unless its `arguments` name targets."""
        command = [self.ninja, "-f", relative(self.folder / "build.ninja"), *arguments]
        command += ["-j", str(job_count())]
        sys.stdout.flush()
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            raise CompileError(
                f"{self.module}: the compiler's errors are above. "
                f"Again, from {ROOT}: {shlex.join(command)}"
            )

    def copy_to(self, folder: Path) -> None:
        """Puts the extension and _judge into `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        for library in (self.library, self.folder / JUDGE):
            target = folder / library.name
            if not (target.is_file() and filecmp.cmp(library, target, shallow=False)):
                # A new file in the old one's place: a process that has the old one loaded keeps it.
                partial = target.with_name(f".{target.name}.{os.getpid()}")
                shutil.copy(library, partial)
                partial.replace(target)


class BuildExtension(build_ext):
    """setuptools' command, with ninja in place of distutils' compiler."""

    def run(self) -> None:
        build = Build()
        build.run()
        if self.inplace:
            build.write_database()
        # In place also for an editable install.
        folder = ROOT if self.inplace else Path(self.build_lib)
        build.copy_to(folder / PACKAGE)


if __name__ == "__main__":
    if int(setuptools.__version__.split(".")[0]) < 77:
        raise SystemExit(
            f"setuptools {setuptools.__version__} is too old for this pyproject.toml. Upgrade it:\n"
            "    pip install 'setuptools>=77'"
        )
    try:
        requirement = required_torch(bool(BUILDS & set(sys.argv)))
        if BUILDS & set(sys.argv):
            Build()  # pip asks for the metadata first: what the build lacks is told before it
    except SetupError as error:
        raise SystemExit(f"error: {error}") from None
    # setuptools packs whatever lies in its build folder: also modules deleted since.
    scratch = ROOT / "build" / "setuptools"
    if "bdist_wheel" in sys.argv:
        shutil.rmtree(scratch, ignore_errors=True)
    setup(
        options={"build": {"build_base": relative(scratch)}},
        install_requires=[requirement],
        # For whoever has a wheel alone.
        data_files=[
            (
                f"share/doc/{PACKAGE}",
                [str(page.relative_to(ROOT)) for page in sorted((ROOT / "docs").iterdir())],
            )
        ],
        # The sources are found at build time; an sdist takes them through MANIFEST.in.
        ext_modules=[Extension(f"{PACKAGE}._C", sources=[])],
        cmdclass={"build_ext": BuildExtension},
    )
