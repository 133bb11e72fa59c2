"""What a user of the installed package relies on: it imports everywhere or says what is wrong."""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import importlib.util
import json
import pathlib
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import zipfile

import pytest
import torch

import torchcomms_pg
from harness import ROOT
from harness.programs import PROGRAM_LIMIT, run_program, run_python
from torchcomms_pg import _C, _compat, _elf, _judge

BARE = {"PATH": "/usr/bin:/bin"}  # none of this process's variables


def test_version_is_that_of_the_metadata():
    # A wheel's version names its torches after a plus sign.
    public = importlib.metadata.version("torchcomms_pg").partition("+")[0]
    assert torchcomms_pg.__version__ == public


def test_typing_files_are_shipped():
    files = importlib.resources.files("torchcomms_pg")
    assert files.joinpath("py.typed").is_file()
    assert files.joinpath("_C.pyi").is_file() and files.joinpath("_judge.pyi").is_file()


@pytest.mark.torch_version
def test_entry_point_names_the_registration():
    (entry,) = importlib.metadata.entry_points(
        group="torch.distributed.backends", name="torchcomms"
    )
    assert entry.load() is torchcomms_pg.register


def test_no_top_level_module_takes_the_name_of_the_torchcomms_package():
    for names in (
        [path.stem for path in ROOT.iterdir()],
        (importlib.metadata.distribution("torchcomms_pg").read_text("top_level.txt") or "").split(),
    ):
        assert "torchcomms" not in names


@pytest.mark.slow
def test_wheel_has_everything_and_nothing_else(tmp_path):
    locked = runpy.run_path(str(ROOT / "setup.py"))["locked"]
    # Other environments write the same egg-info and the same scratch folder: in_turn of tools/_env.
    with locked(ROOT / "build/install.lock"):
        subprocess.run(
            [sys.executable, "-m", "pip", "wheel", "-q", "--disable-pip-version-check"]
            + ["--no-build-isolation", "--no-deps", "--wheel-dir", tmp_path, ROOT],
            check=True,
            timeout=PROGRAM_LIMIT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    extension = pathlib.Path(_C.__file__).name
    pages = ("plan/plan.html", "trace/style.css", "trace/timeline.html", "trace/timeline.js")
    data = ("_C.pyi", "_judge.pyi", "py.typed", *pages)
    for file in (extension, "_judge.abi3.so", *data):
        assert f"torchcomms_pg/{file}" in names
    packages = ("torchcomms_pg", "torchcomms_pg_autoload")
    files = [file for package in packages for file in (ROOT / package).rglob("*.py")]
    assert {str(file.relative_to(ROOT)) for file in files} <= names
    info = f"torchcomms_pg-{torchcomms_pg.__version__}.dist-info/"
    for license in (
        "LICENSE",
        *(f"licenses/{file.name}" for file in (ROOT / "licenses").iterdir()),
    ):
        assert f"{info}licenses/{license}" in names
    pages = f"torchcomms_pg-{torchcomms_pg.__version__}.data/data/share/doc/torchcomms_pg/"
    assert {pages + page.name for page in (ROOT / "docs").iterdir()} <= names
    own = (info, pages, *(f"{package}/" for package in packages))
    assert not [n for n in names if not n.startswith(own)]


# Importing


@pytest.mark.slow
@pytest.mark.torch_version
def test_imports_without_gpu_driver_or_nccl_package():
    # A CUDA build of torch loads libnccl itself. With a CPU build torchcomms_pg loads libnccl, but
    # not before the first use.
    run = run_python(
        "-c",
        """
        import sys
        asked_for = []
        class Hide:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] == "nvidia":
                    asked_for.append(name)
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        sys.meta_path.insert(0, Hide())
        import torch
        asked_for.clear()
        import torchcomms_pg
        assert not asked_for, asked_for
        maps = open("/proc/self/maps").read()
        assert torch.version.cuda or "libnccl" not in maps, "libnccl was loaded"
        assert not torch.cuda.is_initialized()
        print("imported", torchcomms_pg.__version__)
        """,
        env=BARE,
        CUDA_VISIBLE_DEVICES="",
    )
    assert run.stdout.strip() == f"imported {torchcomms_pg.__version__}", run.stderr


@pytest.mark.torch_version
def test_extension_links_neither_nccl_nor_cuda():
    dump = subprocess.run(
        ["objdump", "-p", _C.__file__], capture_output=True, text=True, check=True
    )
    needed = [line.split()[1] for line in dump.stdout.splitlines() if "NEEDED" in line]
    assert "libtorch_cpu.so" in needed
    assert not [name for name in needed if "nccl" in name or "cuda" in name]


@pytest.mark.torch_version
def test_extension_exports_nothing_of_its_own_but_what_is_looked_up_by_name():
    # Anything else could collide with symbols of torch, NCCL or the torchcomms package.
    dump = subprocess.run(
        ["nm", "-DC", "--defined-only", _C.__file__], capture_output=True, text=True, check=True
    )
    # The other exports are templates that torch, pybind11 and the standard library export.
    symbols = [line.split(maxsplit=2)[2] for line in dump.stdout.splitlines()]
    own = [name for name in symbols if name.startswith(("torchcomms_pg", "PyInit"))]
    # The module's entry, and the functions that torch's pluggable allocator looks up.
    module = pathlib.Path(_C.__file__).name.split(".")[0]
    assert sorted(own) == [f"PyInit_{module}", "torchcomms_pg_allocate", "torchcomms_pg_free"]


@pytest.mark.slow
@pytest.mark.torch_version
def test_a_torch_that_there_is_no_build_for_is_refused_with_the_command_to_build():
    run = run_python(
        "-c",
        """
        import sys, torch
        torch.__version__ = "2.99.1+cpu"
        try:
            import torchcomms_pg
        except ImportError as error:
            assert "torchcomms_pg._C" not in sys.modules, "one was loaded all the same"
            print(error)
        """,
        env=BARE,
    )
    minor = _compat.minor_of(torch.__version__)
    assert run.stdout.startswith("torchcomms_pg was built for torch "), run.stderr
    assert minor in run.stdout.partition(", and torch 2.99.1+cpu is installed")[0]
    assert "pip install --no-build-isolation" in run.stdout


@pytest.mark.torch_version
def test_each_torch_minor_finds_the_build_that_is_named_for_it(tmp_path):
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    for name in ("_C_torch29", "_C_torch213", "_C_torch215", "_C_torch", "_C_other"):
        (tmp_path / (name + suffix)).touch()
    (tmp_path / "_C_torch214.cpython-39-x86_64-linux-gnu.so").touch()  # another Python's
    assert _compat.builds(tmp_path) == {
        "2.9": "_C_torch29",
        "2.13": "_C_torch213",
        "2.15": "_C_torch215",
    }
    assert _compat.builds(tmp_path / "nothing") == {}


@pytest.mark.torch_version
def test_patch_release_and_other_build_of_a_torch_count_as_the_same():
    assert _compat.minor_of("2.13.1+cu130") == _compat.minor_of("2.13.0+cpu") == "2.13"
    assert _compat.minor_of("2.16.0a0+git1234") == "2.16"


@pytest.mark.torch_version
def test_types_of_the_extension_do_not_show_which_torch_it_is_for():
    assert torchcomms_pg.Backend.__module__ == _C.__name__ == "torchcomms_pg._C"
    assert sys.modules["torchcomms_pg._C"] is _C


@pytest.mark.torch_version
def test_extension_was_built_for_the_torch_that_runs():
    assert _C.torch_version == _compat.minor_of(torch.__version__)


@pytest.mark.slow
@pytest.mark.parametrize("module", ["env", "nccl"])
def test_what_is_run_as_a_module_warns_of_nothing(module):
    run = run_python("-W", "error", "-m", f"torchcomms_pg.{module}")
    # Without a libnccl, torchcomms_pg.nccl says so in its last line.
    assert "RuntimeWarning" not in run.stderr
    assert run.stdout or "libnccl" in run.stderr.splitlines()[-1], run.stderr


@pytest.mark.slow
def test_dumps_are_read_variables_listed_and_programs_started_where_there_is_no_torch(tmp_path):
    # -S: the standard library alone, without what is installed.
    for arguments, code, said in (
        (["torchcomms_pg.trace", "--help"], 0, "usage: python -m torchcomms_pg.trace"),
        (["torchcomms_pg.trace", tmp_path], 2, str(tmp_path)),
        (["torchcomms_pg.status", "--help"], 0, "usage: python -m torchcomms_pg.status"),
        (["torchcomms_pg.status", "4194304"], 2, "there is no process 4194304"),
        (["torchcomms_pg.check_async", tmp_path], 2, "No asynchronous operation on CPU tensors"),
        (["torchcomms_pg.run", "--help"], 0, "usage: python -m torchcomms_pg.run"),
        (["torchcomms_pg.env", "--help"], 0, "usage: python -m torchcomms_pg.env"),
        (["torchcomms_pg.env"], 0, "TORCHCOMM_TIMEOUT_SECONDS (default: 600)"),
    ):
        run = run_python("-S", "-m", *arguments, env={**BARE, "PYTHONPATH": str(ROOT)})
        assert run.returncode == code and said in run.stdout + run.stderr, run.stderr
    run = run_python("-S", "-c", "import torchcomms_pg", env={**BARE, "PYTHONPATH": str(ROOT)})
    assert "No module named 'torch'" in run.stderr


@pytest.mark.slow
def test_without_a_build_a_verdict_says_what_to_build_and_the_check_for_nccl_runs(tmp_path):
    package, dumps = tmp_path / "torchcomms_pg", tmp_path / "dumps"
    shutil.copytree(ROOT / "torchcomms_pg", package, ignore=shutil.ignore_patterns("*.so"))
    entry = {"record_id": 0, "pg_id": 0, "process_group": ["0", "default_pg"], "op_id": 1}
    entry |= {"collective_seq_id": 1, "p2p_seq_id": 0, "is_p2p": False, "state": "started"}
    entry |= {"profiling_name": "nccl:all_reduce", "time_created_ns": 1, "timeout_ms": 1}
    entry |= {f"{side}_{what}": [] for side in ("input", "output") for what in ("sizes", "dtypes")}
    groups = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
    dumps.mkdir()
    dump = {"version": "2.10", "pg_config": groups, "pg_status": {}, "entries": [entry]}
    (dumps / "rank_0.json").write_text(json.dumps(dump))
    for more, code, said in (((), 2, "Build it: pip install"), (("--nccl",), 0, "")):
        command = [sys.executable, "-S", "-m", "torchcomms_pg.trace", *more, dumps]
        run = run_program(command, cwd=tmp_path, env=BARE, stderr=subprocess.PIPE)
        assert run.returncode == code and said in run.stderr, run.stderr


@pytest.mark.slow
def test_a_program_is_started_whose_torch_has_no_metadata(tmp_path):
    entry = tmp_path / "torchcomms_pg-1.dist-info"
    entry.mkdir()
    (entry / "METADATA").write_text("Name: torchcomms_pg\nVersion: 1\n")
    (entry / "entry_points.txt").write_text("[torch.backends]\ntorchcomms_pg = a:b\n")
    (tmp_path / "train.py").write_text("print('started')")
    path = f"{tmp_path}:{ROOT}"
    arguments = ("-S", "-m", "torchcomms_pg.run", tmp_path / "train.py")
    run = run_python(*arguments, env={**BARE, "PYTHONPATH": path})
    assert run.returncode == 0 and run.stdout == "started\n", run.stderr


@pytest.mark.slow
@pytest.mark.parametrize("check", [(), ("--check-nccl",)], ids=["plain", "checked"])
def test_without_a_build_a_program_is_not_started_and_what_to_build_is_said(tmp_path, check):
    package = tmp_path / "torchcomms_pg"
    shutil.copytree(ROOT / "torchcomms_pg", package, ignore=shutil.ignore_patterns("*.so"))
    (tmp_path / "train.py").write_text("print('started')")
    command = [sys.executable, "-m", "torchcomms_pg.run", *check, "train.py"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    run = run_program(command, cwd=tmp_path, env=BARE, **pipes)
    assert run.returncode == 1 and "started" not in run.stdout, run.stdout + run.stderr
    assert run.stderr.startswith("torchcomms_pg.run: torchcomms_pg has not been built")


JUDGE = """
import importlib.machinery, importlib.util, sys
loader = importlib.machinery.ExtensionFileLoader("_judge", sys.argv[1])
judge = importlib.util.module_from_spec(importlib.util.spec_from_loader("_judge", loader))
try:
    judge.report(b"of another version")
except ValueError as error:
    print(error)
print("torch" in open("/proc/self/maps").read().replace("torchcomms_pg", ""))
"""


@pytest.mark.slow
@pytest.mark.torch_version
@pytest.mark.parametrize("python", [sys.executable, "python3.12", "python3.13", "python3.14"])
def test_the_judge_is_loaded_by_every_python_without_torch(python):
    version = [python, "--version"]  # pyenv has commands that only say where the Python is
    if not shutil.which(python) or subprocess.run(version, capture_output=True).returncode:
        pytest.skip(f"no {python}")
    command = [python, "-I", "-S", "-c", JUDGE, _judge.__file__]
    run = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_LIMIT)
    expected = "the text is damaged, or of another version\nFalse\n"
    assert run.stdout == expected, run.stderr


@pytest.mark.torch_version
def test_the_judge_links_only_what_every_process_has_and_exports_its_entry():
    library = _elf.Elf(_judge.__file__)
    needed = {*library.needed()} - {*_elf.OF_CXX}
    assert all(re.match(r"(libc|libm|libdl|librt|libpthread|ld-linux)\b", name) for name in needed)
    assert _elf.without_cxx(_judge.__file__) == []
    assert library.exported() == ["PyInit__judge"]


@pytest.mark.slow
@pytest.mark.parametrize("module", ["nccl", "demo", "trace", "env", "run", "status"])
def test_modules_that_are_run_have_help(module):
    run = run_python("-m", f"torchcomms_pg.{module}", "--help")
    assert run.returncode == 0 and run.stdout.startswith("usage: "), run.stderr


@pytest.mark.torch_version
def test_the_extension_does_not_show_where_the_torch_of_its_build_lay():
    content = pathlib.Path(_C.__file__).read_bytes()
    assert b"torch/include/c10/" in content  # from the messages of torch's checks
    assert b"site-packages/torch/include" not in content


# The documents


def document(name):
    return (ROOT / name).read_text(encoding="utf-8")


def test_each_command_of_the_documents_is_in_the_package():
    """A user of the installed package has neither tools/ nor test/."""
    texts = [document("README.md"), *(file.read_text() for file in (ROOT / "docs").glob("*.md"))]
    modules = set(re.findall(r"python -m (torchcomms_pg[\w.]*\w)", "\n".join(texts)))
    assert {"torchcomms_pg.env", "torchcomms_pg.nccl", "torchcomms_pg.trace"} <= modules
    for module in modules:
        found = importlib.util.find_spec(module)
        assert found, module
        if found.submodule_search_locations is not None:
            assert importlib.util.find_spec(f"{module}.__main__"), module


@pytest.mark.slow
def test_ranks_of_a_notebook_are_threads_of_its_process():
    text = document("docs/install.md")
    cell = re.search(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL).group(1)
    run = run_python("-c", cell + "\nprint('the kernel lives')")
    said = re.search(r"print\(results\)  # (.*)", cell).group(1)
    assert sorted(run.stdout.splitlines()[0]) == sorted(said), run.stderr  # ranks in any order
    assert run.stdout.splitlines()[1] == "the kernel lives"


def test_the_pythons_of_the_metadata_are_those_that_the_readme_says_are_tested():
    text = document("pyproject.toml")
    claimed = re.findall(r"Programming Language :: Python :: (3\.\d+)", text)
    tested = re.search(r"^- Tested on .* with Python (.*?)\. ", document("README.md"), re.MULTILINE)
    assert claimed == re.findall(r"3\.\d+", tested[1])


def test_the_changes_of_this_version_are_listed():
    latest = re.search(r"^## (\S+)", document("CHANGELOG.md"), re.MULTILINE).group(1)
    assert latest == torchcomms_pg.__version__


def test_workflows_and_hooks_call_what_there_is():
    files = [*(ROOT / ".github/workflows").iterdir(), ROOT / ".pre-commit-config.yaml"]
    called = set()
    for file in files:
        text = file.read_text()
        called |= set(re.findall(r"(?<![\w./-])((?:tools|\.ci|test)/[\w./]*\w)", text))
    assert {".ci/run", "tools/wheel", "tools/lint"} <= called
    assert not [name for name in called if not (ROOT / name).is_file()]
    # The workflow checks wheels in environments of torches that requirements/ pins.
    wheels = (ROOT / ".github/workflows/wheels.yml").read_text()
    for minor in re.findall(r"\.venv-([\d.]+)/", wheels):
        assert (ROOT / f"requirements/torch-{minor}.txt").is_file()


def anchors(text):
    """Returns the anchors that GitHub makes of the headings."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_link_of_the_documents_leads_somewhere_and_the_index_has_every_page():
    pages = sorted((ROOT / "docs").glob("*.md"))
    broken, linked = [], set()
    for page in [*ROOT.glob("*.md"), ROOT / "csrc" / "README.md", *pages]:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            if "://" in link:
                continue
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if page.parent.name == "docs" and page.name == "README.md":
                linked.add(target)
            known = target.exists() and (
                not anchor or anchor in anchors(target.read_text(encoding="utf-8"))
            )
            if not known:
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert not broken
    assert {page for page in pages if page.name != "README.md"} <= linked


def test_no_page_has_a_placeholder_that_a_browser_takes_for_a_tag():
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        text = re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        assert not re.findall(r"<[a-z][^>]*>", re.sub(r"`[^`]*`", "", text)), page.name


def test_the_readme_is_short():
    assert document("README.md").count("\n") <= 160


def test_the_page_of_the_layout_lists_the_files_of_the_cpu_path_with_their_lines():
    """It has the only copy of the list, and has to follow a file that is renamed."""
    text = document("csrc/README.md")
    said = int(re.search(r"about ([\d,]+) lines", text).group(1).replace(",", ""))
    command = re.search(r"^\$ cd csrc && (wc -l .*?)^```", text, re.MULTILINE | re.DOTALL).group(1)
    run = subprocess.run(
        ["bash", "-c", command],
        cwd=ROOT / "csrc",
        capture_output=True,
        text=True,
        timeout=PROGRAM_LIMIT,
    )
    assert run.returncode == 0, run.stderr  # else the list names a file that does not exist
    counted = int(run.stdout.split()[-2])
    assert abs(counted - said) <= 0.05 * counted, f"it says {said} lines, they are {counted}"


def test_the_reference_has_each_hook_and_what_it_is_given():
    from torchcomms_pg import _comms

    text = document("docs/api.md")
    names = [name for name in dir(torchcomms_pg.TorchComm) if re.match(r"register_\w+_hook$", name)]
    assert len(names) >= 4
    names += [name for name in dir(torchcomms_pg.hooks) if name.endswith(("Args", "Hook"))]
    names += ["CommOptions", "TorchWork", "OpName", "RemovableHandle"]
    names += [name for name in dir(_comms.OpName) if not name.startswith("_")]
    missing = {name for name in names if not re.search(rf"\b{name}\b", text)}
    assert missing <= {"name", "value"}, missing  # attributes of every enumeration
    assert re.search(r"^## Graphs of an accelerator$", text, re.MULTILINE)


def version(text):
    return tuple(map(int, text.split(".")))


def test_the_list_of_all_variables_is_the_one_that_the_code_gives():
    from torchcomms_pg import env
    from torchcomms_pg.env.__main__ import page

    assert document("docs/variables.md").startswith(page() + "\n## "), (
        "replace the list by what python -m torchcomms_pg.env --markdown prints"
    )
    assert page().count("\n| `") == len(env.VARIABLES) == len({v.name for v in env.VARIABLES})
    released = version(torchcomms_pg.__version__)
    for variable in env.VARIABLES:
        assert "|" not in variable.default + variable.meaning
        assert version(variable.since) <= released


def test_the_page_of_variables_has_the_effect_of_each_that_users_of_nccl_set():
    """Each variable is in a row of a table with three columns, with or without an effect."""
    text = document("docs/variables.md").partition("\n## ")[2]
    for name in (
        "TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_NAN_CHECK",
        "TORCH_NCCL_ENABLE_TIMING", "TORCH_NCCL_CUDA_EVENT_CACHE",
        "TORCH_NCCL_AVOID_RECORD_STREAMS", "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK",
        "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "TORCHCOMM_ABORT_ON_ERROR",
    ):  # fmt: skip
        assert re.search(rf"^\| .*`{name}`.* \|.*\|.*\|$", text, re.MULTILINE), name
    assert (
        "NCCL_ALGO" in text and "TORCH_CPP_LOG_LEVEL=INFO" in text and "initIntraNodeComm" in text
    )


# setup.py


def test_a_compiler_is_named_with_or_without_its_folder(setup_py, monkeypatch, tmp_path):
    compiler = tmp_path / "g++-13"
    compiler.write_text("")
    compiler.chmod(0o755)
    assert setup_py.find_tool(str(compiler), "") == str(compiler)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert setup_py.find_tool("g++-13", "") == str(compiler)
    with pytest.raises(setup_py.SetupError, match="12 was not found. Install it:\n    this"):
        setup_py.find_tool(str(tmp_path / "g++-12"), "this")


def test_build_without_torch_says_what_to_install(setup_py, monkeypatch):
    monkeypatch.setattr(setup_py, "package_folder", lambda name: None)
    with pytest.raises(setup_py.SetupError, match=r"pip install --no-build-isolation \."):
        setup_py.find_torch()


@pytest.mark.parametrize("hip", (None, "7.1.2"))
def test_a_torch_for_rocm_is_told_apart(setup_py, monkeypatch, tmp_path, hip):
    (tmp_path / "version.py").write_text(f"__version__ = '2.15.0'\nhip = {hip!r}\n")
    monkeypatch.setattr(setup_py, "package_folder", lambda name: tmp_path)
    assert setup_py.find_torch() == (tmp_path, "2.15.0", hip is not None)


def test_build_without_nccl_header_says_what_to_install(setup_py, monkeypatch):
    monkeypatch.setattr(setup_py, "package_folder", lambda name: None)
    with pytest.raises(setup_py.SetupError, match=r"pip install 'nvidia-nccl-cu12>=2\.28\.7,<3'"):
        setup_py.find_nccl_include()


def test_nccl_header_named_by_hand_comes_first(setup_py, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHCOMMS_PG_NCCL_INCLUDE", str(tmp_path))
    with pytest.raises(setup_py.SetupError, match=r"there is no nccl\.h in it"):
        setup_py.find_nccl_include()
    (tmp_path / "nccl.h").touch()
    assert setup_py.find_nccl_include() == tmp_path


def compiler_that_says(folder, name, version):
    program = folder / name
    program.write_text(
        f'#!/bin/sh\n[ "$1" = -dumpversion ] && echo {version} || echo "{name} version {version}"\n'
    )
    program.chmod(0o755)
    return str(program)


@pytest.mark.parametrize("name, version", (("clang", "14.0.6"), ("c++", "10")))
def test_a_compiler_that_is_too_old_is_refused_with_those_that_are_not(
    setup_py, monkeypatch, tmp_path, name, version
):
    monkeypatch.setattr(setup_py, "find_tool", lambda name, command: name)
    monkeypatch.setenv("CXX", compiler_that_says(tmp_path, name, version))
    with pytest.raises(setup_py.SetupError, match=rf"{version}: wanted g\+\+ 11 or clang 19"):
        setup_py.find_compiler()


@pytest.mark.parametrize("name, version", (("clang", "19.1.7"), ("c++", "11")))
def test_a_compiler_may_have_ccache_in_front(setup_py, monkeypatch, tmp_path, name, version):
    compiler = compiler_that_says(tmp_path, name, version)
    monkeypatch.setattr(setup_py, "find_tool", lambda name, command: name)
    monkeypatch.setenv("CXX", compiler)
    clang = name == "clang"
    assert setup_py.find_compiler() == ("", compiler, clang)
    monkeypatch.setenv("CXX", f"ccache {compiler}")
    assert setup_py.find_compiler() == ("ccache", compiler, clang)
    monkeypatch.setenv("CXX", f"{compiler} -m32")
    with pytest.raises(setup_py.SetupError, match="flags go into CXXFLAGS"):
        setup_py.find_compiler()


@pytest.mark.parametrize("value", ("abc", "0", "-1", "1.5"))
def test_a_number_of_jobs_that_is_none_is_refused(setup_py, monkeypatch, value):
    monkeypatch.setenv("MAX_JOBS", value)
    with pytest.raises(
        setup_py.SetupError, match=rf"MAX_JOBS={value}: wanted a whole number, 1 or"
    ):
        setup_py.job_count()


def test_the_database_of_commands_has_each_file_with_a_command_that_compiles_it(
    setup_py, monkeypatch
):
    written = {}
    monkeypatch.setattr(setup_py, "write_if_changed", written.__setitem__)
    setup_py.Build().write_database()
    commands = json.loads(written[ROOT / "compile_commands.json"])
    files = {command["file"]: command for command in commands}
    assert sorted(files) == sorted(str(f.relative_to(ROOT)) for f in (ROOT / "csrc").rglob("*.cpp"))
    command = files["csrc/host/Process.cpp"]
    subprocess.run(
        [*command["arguments"], "-fsyntax-only"],
        cwd=command["directory"],
        check=True,
        timeout=PROGRAM_LIMIT,
    )
