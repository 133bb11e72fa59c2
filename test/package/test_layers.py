"""Folders of csrc include in one direction only, modules of torchcomms_pg import in no circle, and
one file tells torch versions apart."""

import ast
import re
from graphlib import TopologicalSorter

from harness import ROOT

CSRC = ROOT / "csrc"
SOURCES = [file for file in CSRC.rglob("*") if file.suffix in {".cpp", ".hpp", ".h", ".inl"}]

# Which other folders a folder may include; each of these has its line above the folder's. The
# library knows nothing of the diagnosis.
LIBRARY = {
    "base": "",
    "nccl": "base",
    "host": "base nccl",
    "shm": "base host nccl",
    "monitor": "base",
    "device": "base host monitor",
    "gloo": "base device host monitor nccl shm",
    "recorder": "base device monitor",
    "operation": "base nccl",
    "handle": "base device host monitor nccl operation",
    "hooks": "base device monitor operation",
    "comm": "base device handle hooks host monitor nccl operation recorder",
    "collectives": "base comm nccl operation",
    "connect": "base comm device gloo handle host nccl operation shm",
    "window": "base comm device nccl operation",
    "backend": "base collectives comm connect device handle hooks host nccl operation recorder "
    "window",
}
DIAGNOSIS = {
    "diagnosis/rank": "base monitor",
    "diagnosis/lateness": "base",
    "diagnosis/hang": "base diagnosis/rank monitor",
    "diagnosis/status": "base diagnosis/hang diagnosis/lateness diagnosis/rank host monitor",
    "diagnosis/store": "base comm diagnosis/hang diagnosis/status host monitor operation",
    "diagnosis/dumps": "base monitor recorder",
    "diagnosis/group": "base comm device diagnosis/dumps diagnosis/hang diagnosis/lateness "
    "diagnosis/rank diagnosis/status diagnosis/store handle host monitor operation recorder",
    "diagnosis/watch": "base comm device diagnosis/group diagnosis/hang diagnosis/lateness "
    "diagnosis/status diagnosis/store handle host monitor operation recorder",
}
ROOMS = (
    LIBRARY
    | DIAGNOSIS
    | {
        "judge": "diagnosis/hang diagnosis/rank diagnosis/status monitor",
        "bindings": "base backend collectives comm connect diagnosis/dumps diagnosis/group "
        "diagnosis/hang diagnosis/rank diagnosis/status diagnosis/store diagnosis/watch hooks "
        "host monitor nccl operation recorder window",
    }
)


def included_by(file):
    """Returns the paths below csrc that a source includes."""
    return re.findall(r'^\s*#\s*include\s*"(.*?)"', file.read_text(), re.MULTILINE)


def room_at(path):
    """Returns the folder of a path below csrc; of diagnosis/ it is a folder in that one."""
    first, *others = path.split("/")
    return f"{first}/{others[0]}" if first == "diagnosis" else first


def room_of(file):
    path = str(file.relative_to(CSRC))
    return room_at(path).removesuffix(".cpp")  # bindings.cpp is of bindings/


def test_no_folder_includes_what_stands_above_it():
    rooms = list(ROOMS)
    for number, room in enumerate(rooms):
        assert set(ROOMS[room].split()) <= set(rooms[:number]), f"upward or round: {room}"
    wrong = []
    for file in SOURCES:
        room = room_of(file)
        for path in included_by(file):
            assert (CSRC / path).is_file(), f"{file}: {path} is no path from csrc/"
            other = room_at(path)
            if other != room and other not in ROOMS[room].split():
                wrong.append(f"{file.relative_to(CSRC)}: {path}")
    assert not wrong, "\n".join(sorted(wrong))


def test_every_folder_includes_each_that_it_may():
    """ROOMS has to forbid what a folder does not include."""
    for room, others in ROOMS.items():
        sources = (file for file in SOURCES if room_of(file) == room)
        used = {room_at(path) for file in sources for path in included_by(file)}
        assert set(others.split()) <= used, f"{room} does without {set(others.split()) - used}"


PACKAGE = ROOT / "torchcomms_pg"


def modules():
    """Returns the file of each module of the package."""
    files = {}
    for file in PACKAGE.rglob("*.py"):
        parts = file.relative_to(ROOT).with_suffix("").parts
        files[".".join(parts).removesuffix(".__init__")] = file
    return files


def imported_by(file, known):
    """Returns those of the modules `known` that a module imports, when it is loaded or later; not
    what it imports for annotations alone."""
    package = file.relative_to(ROOT).parent.parts
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join((*parts, *filter(None, [node.module])))
            names = {f"{base}.{alias.name}" for alias in node.names}
            found |= names if names & known else {base}
    return found & known


def test_no_modules_of_the_package_import_each_other_in_a_circle():
    files = modules()
    root = PACKAGE.name  # imports most of its modules
    graph = {name: imported_by(file, set(files)) - {name, root} for name, file in files.items()}
    assert f"{root}.window" in graph[f"{root}.comm"]
    TopologicalSorter(graph).prepare()  # raises CycleError


# Names that two parts share: of both CPU libraries, or of a library and of the code above it.
TWINS = {
    "Api": "gloo shm/api",
    "Comm": "gloo shm",
    "Exchanges": "collectives gloo",
    "Gathering": "collectives gloo",
    "Messages": "collectives gloo",
    "Reductions": "collectives gloo",
    "Window": "shm window",
}


def test_a_files_name_stands_for_one_part():
    """Files of bindings/ and backend/ are exempt: they have the names of what they make public."""
    folders = {}
    for file in SOURCES:
        if room_of(file) not in {"bindings", "backend"}:
            folders.setdefault(file.stem, set()).add(str(file.parent.relative_to(CSRC)))
    found = {name: " ".join(sorted(of)) for name, of in folders.items() if len(of) > 1}
    assert found == TWINS


def test_the_table_of_nccls_functions_is_named_by_two_libraries_alone():
    """Code above the seam knows a Library, not its table."""
    naming = {room_of(file) for file in SOURCES if re.search(r"\bNcclApi\b", file.read_text())}
    assert naming == {"nccl", "shm"}


def test_no_part_of_a_communicator_refers_to_all_of_it():
    """A part's constructor lists the parts that it uses."""
    member = re.compile(r"\bCommunicator( const)?[&*] ?(const )?\w+_\b")
    found = {str(file.relative_to(CSRC)) for file in SOURCES if member.search(file.read_text())}
    assert not found


def test_python_frees_what_may_hold_a_communicator_without_the_gil():
    """The end of a communicator joins threads that need the GIL, and a Work may hold its last
    reference."""
    holder = re.compile(r"py::class_<(\w+), c10::intrusive_ptr<\1>")
    found = {name for file in SOURCES for name in holder.findall(file.read_text())}
    assert found == {"GroupOptions"}


def test_only_one_file_tells_torch_versions_apart():
    asks = re.compile(r"\bTORCHCOMMS_PG_TORCH_AT_LEAST\b|\bTORCH_VERSION(_M\w+)?\b")
    asking = {str(file.relative_to(CSRC)) for file in SOURCES if asks.search(file.read_text())}
    assert asking == {"base/TorchCompat.hpp"}


def test_one_file_starts_threads():
    """So each thread has a name, and csrc/README.md can list the ways to use a thread."""
    starts = re.compile(
        r"std::j?thread(\s+\w+)?\s*[({]|\w*threads?_?\.emplace_back\(|std::async|pthread_create"
    )
    found = [file for file in SOURCES if starts.search(file.read_text())]
    assert found == [CSRC / "base/Thread.hpp"]


def test_two_files_read_frames_of_other_threads():
    """While the garbage collector stands still; `WithoutCollector` says why."""
    reads = re.compile(r"_current_frames|PyThreadState_GetFrame|PyThreadState_Next")
    sources = [*SOURCES, *PACKAGE.rglob("*.py")]
    found = {file.name for file in sources if reads.search(file.read_text())}
    assert found == {"Frames.cpp", "PythonStack.cpp"}


def test_text_does_not_depend_on_the_locale():
    """Else a program's std::locale::global() would change the numbers in texts between ranks."""
    found = [file for file in SOURCES if re.search(r"std::[io]?stringstream", file.read_text())]
    assert found == [CSRC / "base/TextStreams.hpp"]


def test_one_file_calls_the_functions_for_atomic_shared_pointers():
    """Standard libraries deprecate these functions: an error with libstdc++ 14 and -Werror."""
    calls = re.compile(r"std::atomic_(load|store|exchange|compare_exchange_\w+)\(")
    found = [file for file in SOURCES if calls.search(file.read_text())]
    assert found == [CSRC / "base/AtomicShared.hpp"]
