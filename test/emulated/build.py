"""Builds the emulated CUDA for this Python's torch, with ninja as setup.py builds the package.

It stays in setup.py's build folder, which is each torch's own. CUDA's headers are those of the
packages beside torch; csrc/host, csrc/nccl and csrc/shm are the extension's own objects.

python test/emulated/build.py
"""

import importlib.util
import pathlib
import re
import runpy
import shutil
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent

# For the loader of torchcomms_pg, which asks for functions by name: libraries with those of an
# older NCCL alone. torch's libraries take all.
NCCL_VERSIONS = {"2.18": 21803, "2.24": 22403, "2.27": 22707, "2.30": 23007, "2.32": 23203}

AUTOLOAD = '''"""Puts the emulated operators in place when torch is imported."""


def load():
    import torch

    if str(torch.__version__) != {version!r}:
        raise ImportError(
            "the emulated CUDA at {path} was built for torch {version}, and torch "
            f"{{torch.__version__}} is loaded; run python test/emulated/build.py with this Python"
        )
    torch.ops.load_library({path!r})
'''


def setup_module():
    spec = importlib.util.spec_from_file_location("setup", ROOT / "setup.py")
    setup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(setup)
    return setup


setup = setup_module()


def about():
    """What torch/version.py of this Python defines, without importing torch."""
    return runpy.run_path(str(setup.find_torch()[0] / "version.py"))


def why_not():
    """Says why the emulator cannot stand in for this torch's CUDA, empty if it can."""
    found = about()
    if found.get("hip"):
        return "torch is built for ROCm"
    return "" if found.get("cuda") else "torch is built without CUDA"


def exported_since():
    """The NCCL functions that not every version has, with the version each came with."""
    found = {}
    for source in sorted((HERE / "libnccl").glob("*.cpp")):
        for function in re.split(r"^EMULATED_API ", source.read_text(), flags=re.M)[1:]:
            name = re.search(r"\b(nccl\w+)\(", function)
            since = re.search(r"hasFunction\(__func__, (\d+)\)", function)
            if name and since:
                found[name[1]] = int(since[1])
    return found


class Build(setup.Build):
    """The four libraries of the emulator."""

    def __init__(self):
        super().__init__("_emulated", [])
        site = self.torch.parent
        headers = [
            site / f"nvidia/cu{about()['cuda'].split('.')[0]}/include",
            site / "nvidia/cuda_runtime/include",
        ]
        self.cuda_include = next((h for h in headers if (h / "cuda_runtime_api.h").is_file()), None)
        if self.cuda_include is None:
            raise setup.SetupError(f"cuda_runtime_api.h was not found in {headers[0]}")
        # It brings the headers of the compiler, which those of the runtime include.
        self.compiler_include = site / "triton/backends/nvidia/include"
        runtime = next(self.cuda_include.parent.glob("lib/libcudart.so.*"))
        self.runtime = runtime.name

    def flags(self):
        common = [
            *("-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden"),
            *("-fmax-errors=20", "-pthread", "-Wall", "-Wextra", "-Wno-subobject-linkage", "-I."),
            *("-Icsrc", "-Itest", "-Itest/emulated", "-Itest/simulated"),
            *(
                f"-isystem{setup.relative(path)}"
                for path in (self.cuda_include, self.compiler_include)
            ),
        ]
        # nccl.h includes more than the packages have.
        stubs = ["-isystemcsrc/nccl/cuda_stub", "-isystemtest/emulated/cuda_stub"]
        nccl = [*stubs, f"-isystem{setup.relative(self.nccl)}"]
        torch = [f"-isystem{setup.relative(self.torch / 'include')}"]
        return {"plain": nccl + common, "torch": common + torch}

    def write_ninja(self, shm):
        out = setup.relative(self.folder)
        emulated = setup.relative(HERE)
        torch_lib = setup.relative(self.torch / "lib")
        for name, flags in self.flags().items():
            text = "\n".join(setup.quoted(flag) for flag in flags)
            setup.write_if_changed(self.folder / f"{name}.flags", text + "\n")
        ccache = shutil.which("ccache")
        cxx = f"{ccache} {self.cxx}" if ccache else self.cxx
        lines = [
            "ninja_required_version = 1.5",
            f"builddir = {out}",
            "rule compile",
            f"  command = {cxx} @{out}/$flags.flags -MD -MF $out.d -c $in -o $out",
            "  description = compile $in",
            "  depfile = $out.d",
            "  deps = gcc",
            "rule stubs",
            f"  command = {sys.executable} {emulated}/stubs.py $out '$pattern' $error"
            f" {torch_lib} $in",
            "  description = what torch wants beyond $in",
            "rule link",
            f"  command = {self.cxx} -shared -pthread $in -o $out -Wl,-Bsymbolic -Wl,-z,defs"
            " $options -ldl -lrt",
            "  description = link $out",
            "rule stub_object",
            f"  command = {self.cxx} -x c -fPIC -w -c $in -o $out",
            "  description = compile $in",
        ]

        def unit(name, flags, *sources):
            text = "".join(f'#include "{source.relative_to(ROOT)}"\n' for source in sources)
            setup.write_if_changed(self.folder / f"{name}.cpp", text)
            lines.append(f"build {out}/{name}.o: compile {out}/{name}.cpp | {out}/{flags}.flags")
            lines.append(f"  flags = {flags}")
            return f"{out}/{name}.o"

        def stubs(name, pattern, error, *objects):
            made = f"{out}/{name}-stubs.c"
            lines.append(f"build {made}: stubs {' '.join(objects)} | {emulated}/stubs.py")
            lines.append(f"  pattern = {pattern}")
            lines.append(f"  error = {error}")
            lines.append(f"build {out}/{name}-stubs.o: stub_object {out}/{name}-stubs.c")
            return f"{out}/{name}-stubs.o"

        def link(path, soname, inputs, *options, exports="", libraries=()):
            options = [f"-Wl,-soname,{soname}", *options, *libraries]
            needed = list(libraries)
            if exports:
                exported = f"{out}/{path}.exports"
                setup.write_if_changed(ROOT / exported, exports + "\n")
                options.append(f"-Wl,--version-script={exported}")
                needed.append(exported)
            lines.append(f"build {out}/{path}: link {' '.join(inputs)} | {' '.join(needed)}")
            lines.append(f"  options = {' '.join(options)}")
            return f"{out}/{path}"

        sources = {
            name: sorted((HERE / name).glob("*.cpp"))
            for name in ("libcudart", "libcuda", "libnccl", "operators")
        }
        shared = [ROOT / "test/simulated/Delays.cpp", ROOT / "csrc/device/WorkerStream.cpp"]
        operators = unit(
            "operators", "torch", *sources["operators"], ROOT / "test/simulated/HostKernels.cpp"
        )
        runtime = [unit("libcudart", "plain", *sources["libcudart"], *shared)]
        runtime.append(stubs("libcudart", "(__)?cuda[A-Z].*", 801, *runtime))
        driver = [unit("libcuda", "plain", *sources["libcuda"])]
        driver.append(stubs("libcuda", "cu(?!File|pti)[A-Z].*", 801, *driver))
        nccl = [unit("libnccl", "plain", *sources["libnccl"])]
        nccl.append(stubs("libnccl", "nccl[A-Z].*", 5, *nccl))

        # torch's libraries ask for the runtime's symbols with its version.
        exports = (
            f"{self.runtime} {{ global: cuda*; __cuda*; emulated*; _ZN8emulated*; local: *; }};"
        )
        cudart = link(self.runtime, self.runtime, runtime, exports=exports)
        link("libcuda.so.1", "libcuda.so.1", driver, libraries=[cudart])
        soname = "libnccl.so.2"
        exports = "{ global: nccl*; emulated*; local: *; };"
        link(soname, soname, [*nccl, *shm], exports=exports, libraries=[cudart])
        since = exported_since()
        for name, version in NCCL_VERSIONS.items():
            (self.folder / f"nccl-{name}").mkdir(exist_ok=True)
            later = "".join(f"{function}; " for function, first in since.items() if first > version)
            exports = f"{{ global: nccl*; emulated*; local: {later}*; }};"
            inputs = [nccl[0], *shm]
            link(f"nccl-{name}/{soname}", soname, inputs, exports=exports, libraries=[cudart])
        torch = [f"-L{torch_lib}", "-ltorch_cuda", "-ltorch_cpu", "-lc10_cuda", "-lc10"]
        # What they need beyond, their own libraries bring.
        torch.append("-Wl,--allow-shlib-undefined")
        link("operators.so", "operators.so", [operators], *torch, libraries=[cudart])
        setup.write_if_changed(self.folder / "build.ninja", "\n".join(lines) + "\n")

    def write_autoload(self):
        """Writes a package with an entry point that torch calls when it is imported."""
        folder = self.folder / "autoload"
        info = folder / "emulated_autoload-1.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        text = AUTOLOAD.format(
            path=str(self.folder / "operators.so"), version=about()["__version__"]
        )
        setup.write_if_changed(folder / "emulated_autoload.py", text)
        setup.write_if_changed(
            info / "METADATA", "Metadata-Version: 2.1\nName: emulated_autoload\nVersion: 1\n"
        )
        setup.write_if_changed(
            info / "entry_points.txt", "[torch.backends]\nemulated = emulated_autoload:load\n"
        )

    def run(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        with setup.locked(self.folder / "lock"):
            self.write_ninja(setup.Build().objects("host", "nccl", "shm"))
            self.make()
            self.write_autoload()


def main():
    if reason := why_not():
        print(f"nothing to build: {reason}")
    else:
        Build().run()


if __name__ == "__main__":
    sys.exit(main())
