"""Each mutex of csrc is one that clang's analysis knows, and the analysis finds a missing lock."""

import re
import shutil
import subprocess

import pytest

from harness import ROOT

CSRC = ROOT / "csrc"
MUTEX = CSRC / "base/Mutex.hpp"
SOURCES = [file for file in CSRC.rglob("*") if file.suffix in {".cpp", ".hpp"} and file != MUTEX]

# Files that need a mutex of the standard library.
OTHERS = {
    "bindings/LateFlights.cpp": "operators of several threads read at the same time",
    "handle/CommHandle.cpp": "waits for a mutex with a time limit",
    "handle/CommHandle.hpp": "waits for a mutex with a time limit",
    "comm/Work.cpp": "c10d::Work has the mutex",
    "comm/Work.hpp": "c10d::Work has the mutex",
}

# Mutexes that guard no data.
ALONE = {
    "handle/CommHandle.hpp: mutex_": "held to free what an atomic pointer points to, or to use it",
    "comm/RecorderSet.hpp: mutex_": "held while a list is replaced that threads load atomically",
    "recorder/ProcessRecorder.cpp: writing": "held while a file is written",
    "shm/collective/TicketLock.hpp: mutex_": "for its condition variable: the tickets are atomic",
}


def _text(file):
    """Returns the text of a source without its comments."""
    return re.sub(r"//.*", "", file.read_text())


def _name(file):
    return str(file.relative_to(CSRC))


def test_one_file_names_the_mutexes_and_locks_of_the_standard_library():
    """The analysis does not see those."""
    locks = re.compile(r"std::(\w*mutex|lock_guard|unique_lock|scoped_lock|shared_lock|lock)\b")
    found = {_name(file) for file in SOURCES if locks.search(_text(file))}
    assert found == set(OTHERS), "use the types of base/Mutex.hpp"


def test_each_mutex_is_named_by_what_it_guards():
    alone = set()
    for file in SOURCES:
        for name in re.findall(r"\bMutex (\w+)(?=;| ACQUIRED_BEFORE)", text := _text(file)):
            guards = rf"\b(GUARDED_BY|ACQUIRED_BEFORE)\({name}\)|\bMutex {name} ACQUIRED_BEFORE"
            if not re.search(guards, text):
                alone.add(f"{_name(file)}: {name}")
    assert alone == set(ALONE)


def test_what_is_not_analysed_says_why():
    for file in SOURCES:
        before = ""
        for line in file.read_text().splitlines():
            if "NO_THREAD_SAFETY_ANALYSIS" in line:
                assert before.startswith("// Not analysed: "), f"{_name(file)}: {line}"
            before = line.strip()


def _clang():
    """Returns the path of a clang++ that can build the extension, or None."""
    for name in ("clang++-19", "clang++-20", "clang++-21", "clang++"):
        path = shutil.which(name)
        if path is None:
            continue
        asked = [path, "-dumpversion"]
        said = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=60)
        if int(said.stdout.split(".")[0]) >= 19:
            return path
    return None


# The bodies of functions of Counter, with the error of each.
BODIES = {
    "const LockGuard lock(mutex); ++value;": None,
    "++value;": "writing variable 'value' requires holding mutex 'mutex'",
    "const LockGuard lock(first); raise();": "'raise' requires holding mutex 'mutex'",
    "const LockGuard lock(first); const LockGuard other(mutex);": None,
    "const LockGuard lock(mutex); const LockGuard other(first);": "'first' must be acquired before",
    "UniqueLock lock(mutex); lock.unlock(); lock.lock(); raise();": None,
    "UniqueLock lock(mutex); lock.unlock(); raise();": "'raise' requires holding mutex 'mutex'",
    "const LockGuard lock(mutex); { const Unlocked now(mutex); } raise();": None,
    "const LockGuard lock(mutex); const Unlocked now(mutex); raise();": "'raise' requires holding",
    "const LockGuard lock(mutex); take();": "'take' while mutex 'mutex' is held",
    "UniqueLock lock(mutex); changed.wait(lock, [this]() REQUIRES(mutex) { return value; });": None,
    "UniqueLock lock(mutex); changed.wait(lock, [this] { return value; });": "reading variable",
    "mutex.lock(); ++value;": "mutex 'mutex' is still held at the end of function",
    "const ThreadRole::Taken taken(role); ++own;": None,
    "role.check(); ++own;": None,
    "const LockGuard lock(mutex); ++own;": "writing variable 'own' requires holding role 'role'",
}
PROGRAM = """\
#include <condition_variable>
#include "base/ThreadRole.hpp"
using namespace torchcomms_pg;
struct Counter {
  Mutex first ACQUIRED_BEFORE(mutex);
  Mutex mutex;
  std::condition_variable changed;
  int value GUARDED_BY(mutex) = 0;
  ThreadRole role;
  int own GUARDED_BY(role) = 0;
  void raise() REQUIRES(mutex) { ++value; }
  void take() EXCLUDES(mutex) {}
"""


@pytest.mark.skipif(_clang() is None, reason="no clang++ 19 or later is installed")
def test_a_build_with_clang_finds_an_access_without_the_mutex(setup_py, tmp_path):
    source = tmp_path / "counter.cpp"
    functions = [f"void use{number}() {{ {body} }}" for number, body in enumerate(BODIES)]
    source.write_text(PROGRAM + "\n".join([*functions, "};"]))
    command = [_clang(), "-std=c++20", *setup_py.LOCKS_CHECKED, "-Werror", f"-I{CSRC}"]
    run = subprocess.run(
        [*command, "-fsyntax-only", source],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert run.returncode == 1, run.stderr
    line = PROGRAM.count("\n")
    for body, error in BODIES.items():
        line += 1
        found = re.findall(rf"counter\.cpp:{line}:\d+: error: (.*)", run.stderr)
        assert len(found) == (0 if error is None else 1), f"{body}: {run.stderr}"
        assert error is None or error in found[0], f"{body}: {found}"
