"""libnccl is found, checked and told of before it is used, also where there is no GPU.

Real libraries: that of the installed package, and those that TORCHCOMMS_PG_TEST_NCCL names
(separated by colons). What no real one at hand does, a small library made here does.
"""

import ctypes
import datetime
import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

import torchcomms_pg
from harness import ROOT
from harness.programs import run_python
from harness.ranks import time_limit
from torchcomms_pg import _C, nccl
from torchcomms_pg.nccl import __main__ as nccl_main

TABLE = (ROOT / "csrc/nccl/NcclApi.hpp").read_text()


def functions(macro):
    block = re.search(rf"#define {macro}\(X\)(.*?)\n\n", TABLE, re.S).group(1)
    return re.findall(r"X\(\w+, (nccl\w+)\)", block)


REQUIRED = functions("TORCHCOMMS_PG_NCCL_REQUIRED")
OPTIONAL = functions("TORCHCOMMS_PG_NCCL_OPTIONAL")

# The first NCCL that has them.
SINCE = {
    "ncclMemAlloc": 21903,
    "ncclMemFree": 21903,
    "ncclCommRegister": 21903,
    "ncclCommDeregister": 21903,
    "ncclCommInitRankScalable": 22304,
    "ncclCommShrink": 22703,
    "ncclCommWindowRegister": 22703,
    "ncclCommWindowDeregister": 22703,
    "ncclAlltoAll": 22803,
    "ncclGather": 22803,
    "ncclScatter": 22803,
    "ncclCommRevoke": 22807,
    "ncclPutSignal": 22902,
    "ncclSignal": 22902,
    "ncclWaitSignal": 22902,
    "ncclGetPeerDevicePointer": 22902,
    "ncclCommSuspend": 22907,
    "ncclCommResume": 22907,
    "ncclCommMemStats": 22907,
}


def real_libraries():
    found = [f"{nccl.package_folder()}/lib/libnccl.so.2"]
    found += os.environ.get("TORCHCOMMS_PG_TEST_NCCL", "").split(":")
    return [path for path in found if os.path.exists(path)]


def make_library(folder, version, names):
    """A libnccl of that version with these functions: the version is right, the rest fails."""
    source = folder / "nccl.c"
    lines = [f"int ncclGetVersion(int* v) {{ *v = {version}; return 0; }}"]
    lines += ['const char* ncclGetLastError(void* c) { return "made for a test"; }']
    lines += ['const char* ncclGetErrorString(int r) { return "failed"; }']
    lines += ["int ncclGetUniqueId(char* id) { id[0] = 1; return 0; }"]
    have = {"ncclGetVersion", "ncclGetLastError", "ncclGetErrorString", "ncclGetUniqueId"}
    lines += [f"int {name}(void) {{ return 3; }}" for name in names if name not in have]
    if "ncclGetVersion" not in names:
        lines = [line for line in lines if "ncclGetVersion" not in line]
    source.write_text("\n".join(lines))
    library = folder / "libnccl.so.2"
    subprocess.run(["g++", "-xc", "-shared", "-fPIC", "-o", library, source], check=True)
    return str(library)


def test_every_function_of_the_table_is_dated():
    assert set(SINCE) == set(OPTIONAL) and "ncclAllReduce" in REQUIRED


@pytest.mark.parametrize("path", real_libraries())
def test_real_library_has_what_its_version_has(path):
    library = nccl.load(path)
    assert os.path.samefile(library.path, path)
    assert library.version >= 21800
    assert library.missing == [name for name in OPTIONAL if SINCE[name] > library.version]


@pytest.mark.torch_version
@pytest.mark.skipif(torch.version.cuda is None, reason="torch is not built for CUDA")
def test_torch_has_the_questions_of_captures_where_they_are_looked_for():
    process = ctypes.CDLL(None)
    assert process.cudaStreamIsCapturing and process.cudaThreadExchangeStreamCaptureMode


@pytest.mark.skipif(not real_libraries(), reason="no libnccl is installed")
def test_two_versions_in_one_process_keep_apart(tmp_path):
    other = nccl.load(make_library(tmp_path, 22105, REQUIRED))
    real = nccl.load(real_libraries()[0])
    assert other.version == 22105 != real.version
    assert other.path != real.path


@pytest.mark.skipif(not real_libraries(), reason="no libnccl is installed")
def test_torchs_own_copy_is_taken_where_torch_has_one():
    run = run_python("-m", "torchcomms_pg.nccl", TORCHCOMM_NCCL_LIBRARY="")
    assert run.returncode == 0, run
    text = run.stdout
    origin = "loaded by torch already" if torch.version.cuda else "of the installed NCCL package"
    assert origin in text and f"{nccl.package_folder()}/lib/libnccl.so.2" in text


def test_the_variable_chooses_the_library(tmp_path, monkeypatch):
    path = make_library(tmp_path, 22105, REQUIRED + OPTIONAL[:4])
    monkeypatch.setenv("TORCHCOMM_NCCL_LIBRARY", path)
    assert nccl.load().path == path
    assert nccl.version() == (2, 21, 5)
    assert nccl.load().missing == OPTIONAL[4:]


def test_a_library_that_lacks_a_needed_function_is_refused_by_name(tmp_path):
    path = make_library(tmp_path, 22105, [f for f in REQUIRED if f != "ncclReduceScatter"])
    with pytest.raises(RuntimeError) as error:
        nccl.load(path)
    for part in (path, "2.21.5", "ncclReduceScatter", "pip install"):
        assert part in str(error.value)


def test_a_library_that_is_too_old_is_refused(tmp_path):
    path = make_library(tmp_path, 21703, REQUIRED)
    with pytest.raises(RuntimeError, match=r"2\.17\.3 .* too old.*2\.18\.0"):
        nccl.load(path)


def test_what_is_not_nccl_is_refused(tmp_path):
    path = make_library(tmp_path, 0, ["ncclAllReduce"])
    with pytest.raises(RuntimeError, match="is not NCCL"):
        nccl.load(path)


def test_a_chosen_library_that_is_not_there_is_named_and_nothing_else_is_tried(tmp_path):
    with pytest.raises(RuntimeError, match=r"nowhere\.so.*TORCHCOMM_NCCL_LIBRARY"):
        nccl.load(str(tmp_path / "nowhere.so"))


def test_the_module_tells_which_library_it_is(tmp_path, monkeypatch, capsys):
    path = make_library(tmp_path, 22105, REQUIRED)
    monkeypatch.setenv("TORCHCOMM_NCCL_LIBRARY", path)
    nccl_main.main()
    text = capsys.readouterr().out
    assert f"NCCL 2.21.5 at {path}" in text and "ncclCommShrink" in text


def on_threads(size, body):
    """What body(rank) returned or raised, for each rank on a thread of its own."""
    with ThreadPoolExecutor(size) as threads:
        ranks = [threads.submit(body, rank) for rank in range(size)]
    return [rank.exception() or rank.result() for rank in ranks]


def meet(paths):
    store, timeout, size = dist.HashStore(), datetime.timedelta(seconds=20), len(paths)
    libraries = [nccl.load(path) for path in paths]
    return on_threads(
        size, lambda rank: _C.meet_over_nccl(libraries[rank], store, rank, size, "g", timeout, 128)
    )


def test_ranks_with_different_versions_are_named_with_them(tmp_path):
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    old = make_library(folders[0], 22105, REQUIRED)
    new = make_library(folders[1], 22809, REQUIRED)
    for error in meet([old, new, new]):
        assert isinstance(error, torchcomms_pg.CommError)
        assert "rank 0 with NCCL '2.21.5'" in str(error)
        assert "ranks 1, 2 with NCCL '2.28.9'" in str(error)


def test_two_ranks_of_a_message_with_different_versions_are_named_with_them(tmp_path):
    store, timeout = dist.HashStore(), datetime.timedelta(seconds=20)
    libraries = []
    for number in (22105, 22809):
        (tmp_path / str(number)).mkdir()
        libraries.append(nccl.load(make_library(tmp_path / str(number), number, REQUIRED)))
    # Of three ranks, only these come. They name each other.
    errors = on_threads(
        2,
        lambda i: _C.meet_over_nccl(libraries[i], store, 1 + i, 3, "g", timeout, 128, peer=2 - i),
    )
    for error in errors:
        assert isinstance(error, torchcomms_pg.CommError)
        assert "rank 1 with NCCL '2.21.5'; rank 2 with NCCL '2.28.9'" in str(error)


@pytest.mark.parametrize("path", real_libraries())
def test_ranks_with_one_version_share_an_id_of_the_real_library(path):
    ids = [each for (each,) in meet([path] * 3)]
    assert len(set(ids)) == 1 and len(ids[0]) == 128 and any(ids[0])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_communicator_without_a_gpu_is_refused_at_once():
    with time_limit(0, 20, "refusing"), pytest.raises(ValueError, match=r"cuda:0.*GPU.*driver"):
        torchcomms_pg.new_comm("nccl", "cuda:0", rank=0, size=2, store=dist.HashStore())
