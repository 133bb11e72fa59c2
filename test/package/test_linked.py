"""The extension shares torch's libstdc++ and unwinder: in every build, or it is not loaded."""

import pathlib
import runpy
import shutil
import subprocess

import pytest
import torch

from harness import ROOT
from harness.programs import PROGRAM_LIMIT, run_python
from torchcomms_pg import _C, _compat, _elf

STATIC = "-static-libstdc++ -static-libgcc"
# Throws, and uses a stream and its locale.
SOURCE = """\
#include <sstream>
#include <stdexcept>
std::string text(int value) {
    std::ostringstream out;
    out << value;
    if (value < 0) throw std::runtime_error(out.str());
    return out.str();
}
"""


@pytest.mark.torch_version
def test_exceptions_cross_the_boundary_of_this_build_in_all_directions():
    """CI's builds for the torches are of g++ 11, of the system's g++ and of clang 19."""
    run = run_python("test/package/boundary.py", OMP_NUM_THREADS="1")
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.endswith("10 steps over the boundary\n"), run.stdout


@pytest.mark.torch_version
def test_the_extension_needs_the_libstdcxx_and_the_unwinder_of_torch():
    assert _elf.without_cxx(_C.__file__) == []
    dump = ["objdump", "-p", _C.__file__]
    said = subprocess.run(dump, capture_output=True, text=True, check=True).stdout
    needed = [line.split()[1] for line in said.splitlines() if line.startswith("  NEEDED")]
    assert _elf.Elf(_C.__file__).needed() == needed
    versions = _elf.Elf(_C.__file__).needed_versions()
    assert versions and all(f" {v}\n" in said for names in versions.values() for v in names)


@pytest.fixture
def build(setup_py, monkeypatch, tmp_path):
    """Returns a function that builds a module of `SOURCE` as setup.py builds the extension."""
    monkeypatch.setattr(setup_py, "ROOT", tmp_path)
    monkeypatch.setattr(setup_py, "package_version", lambda: "0")
    for name in ("tools", "torchcomms_pg"):
        (tmp_path / name).symlink_to(ROOT / name)
    source = tmp_path / "csrc" / "base" / "Text.cpp"
    source.parent.mkdir(parents=True)
    source.write_text(SOURCE)

    def build():
        module = setup_py.Build("throwing", [source])
        module.run()
        return module.library

    return build


def wrapper(folder, compiler, change):
    """Writes a compiler that changes its arguments, "$@", before it calls another."""
    program = folder / compiler
    program.write_text(f'#!/bin/bash\n{change}\nexec {shutil.which(compiler)} "$@"\n')
    program.chmod(0o755)
    return str(program)


@pytest.mark.parametrize("compiler", ("g++", "g++-11", "g++-12", "g++-13", "g++-14", "clang++-19"))
def test_a_static_libstdcxx_that_is_asked_for_is_not_linked(build, monkeypatch, tmp_path, compiler):
    if not shutil.which(compiler):
        pytest.skip(f"this machine has no {compiler}")
    monkeypatch.setenv("LDFLAGS", STATIC)
    monkeypatch.setenv("CXX", wrapper(tmp_path, compiler, f'set -- {STATIC} "$@"'))
    library = build()
    assert _elf.without_cxx(library) == []
    exported = _elf.Elf(library).exported()
    assert not [name for name in exported if "NSt" in name or "Unwind" in name], exported


def left_out(flag):
    return f'for each; do shift; [[ $each == {flag} ]] || set -- "$@" "$each"; done'


@pytest.mark.parametrize(
    "change, said",
    (
        (
            f'{left_out("-lstdc++")}; set -- "$@" -static-libstdc++',
            "it does not need libstdc++.so.6, so it has a copy",
        ),
        (
            f'{left_out("-lgcc_s")}; set -- "$@" -static-libgcc',
            "it does not need libgcc_s.so.1, so it has a copy",
        ),
        (
            "all=$(g++ -print-file-name=libstdc++.a);"
            ' set -- -Wl,--whole-archive "$all" -Wl,--no-whole-archive "$@"',
            "functions of C++, such as _Z",
        ),
    ),
)
def test_a_build_with_a_copy_ends_with_what_is_wrong_and_what_to_do(
    build, setup_py, monkeypatch, tmp_path, capfd, change, said
):
    change = f'if [[ " $* " == *" -shared "* ]]; then {change}; fi'
    monkeypatch.setenv("CXX", wrapper(tmp_path, "g++", change))
    with pytest.raises(setup_py.CompileError):
        build()
    assert not list(tmp_path.glob("build/**/*.so")), "it could be loaded"
    output = capfd.readouterr().out
    assert said in output and "env -u LDFLAGS CXX=/usr/bin/g++ pip install" in output, output


def test_a_build_that_needs_more_than_the_libraries_that_torch_loads_is_refused():
    linked = runpy.run_path(str(ROOT / "tools" / "_linked.py"))
    loaded = linked["loaded_with_torch"](pathlib.Path(torch.__file__).parent / "lib")
    library = _elf.Elf(_C.__file__)
    assert linked["wrong"](library, loaded) == []
    older = {**loaded, "libstdc++.so.6": loaded["libgcc_s.so.1"]}
    (said,) = linked["wrong"](library, older)
    assert "it needs CXXABI_1.3, " in said and str(loaded["libgcc_s.so.1"]) in said


def test_an_extension_with_a_copy_is_not_imported(monkeypatch, tmp_path):
    (tmp_path / "text.cpp").write_text(SOURCE)
    built = tmp_path / pathlib.Path(_C.__file__).name
    command = ["g++", "-shared", "-fPIC", *STATIC.split(), tmp_path / "text.cpp", "-o", built]
    subprocess.run(command, check=True, timeout=PROGRAM_LIMIT)
    monkeypatch.setattr(_compat, "FOLDER", tmp_path)
    monkeypatch.setattr(_compat.builds, "__defaults__", (tmp_path,))
    with pytest.raises(ImportError, match=r"copy of libstdc\+\+.so.6 and libgcc_s.so.1") as refused:
        _compat.load_extension(torch.__version__)
    assert "the process would crash. Build it again" in str(refused.value)
