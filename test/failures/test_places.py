"""Places in verdicts: the thread, the exception that it handles, and the line of the caller."""

import inspect
import os
import sys
import threading
import types
import weakref

import pytest
import torch

import torchcomms_pg
from harness import ROOT
from harness.programs import run_python
from harness.ranks import wait_for
from torchcomms_pg import _C, _patches
from torchcomms_pg.diagnosis import python_stacks, waits

LIMIT = 60  # seconds


def load():
    raise ValueError("sample 17\nis broken")


def line_of(function):
    return inspect.getsourcelines(function)[1]


def test_the_exception_that_a_thread_handles_is_named_with_the_line_that_raised_it():
    told = []
    try:
        try:
            load()
        finally:
            told.append(python_stacks.describe([])[0].splitlines()[0])
    except ValueError:
        told.append(python_stacks.describe([])[0].splitlines()[0])
    wanted = f"test_places.py:{line_of(load) + 1} in load"
    for line in told:
        place, _, handles = line.partition("; handles ")
        assert place.startswith("MainThread: ") and "test_places.py" in place
        assert handles.startswith("ValueError: sample 17 is broken, raised at ")
        assert handles.endswith(wanted)
    assert "; handles" not in python_stacks.describe([])[0]


def test_no_code_of_an_exception_runs():
    class Strange(Exception):
        def __str__(self):
            raise AssertionError("it runs")

    try:
        raise Strange("text")
    except Strange:
        lines, _, _ = python_stacks.describe([])
    assert "; handles Strange, raised at " in lines


def test_frames_that_stand_in_for_torchs_are_left_out_with_and_without_the_gil():
    """A rank's place is the line that has called torch. Both readers know the same files."""
    package = os.path.dirname(torchcomms_pg.__file__)
    folder, patches = (os.path.relpath(each, package) for each in python_stacks._STAND_INS)
    without_gil = (ROOT / "csrc/bindings/PythonStackDump.cpp").read_text()
    assert f'"/torchcomms_pg/{folder}/"' in without_gil
    assert f'"/torchcomms_pg/{patches}\\""' in without_gil
    for file in (waits.__file__, _patches.__file__):
        code = compile("frames = list(walk(innermost()))", file, "exec")
        exec(code, found := {"walk": python_stacks._walk, "innermost": sys._getframe})
        assert found["frames"][0][0] == __file__, found["frames"]


class Waiting:
    """A thread that waits, called by save(); and the stack of save(), the innermost frame first."""

    def __init__(self):
        self.waits, self.goes_on = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self.save, name="saver")

    def __enter__(self):
        self.thread.start()
        assert self.waits.wait(LIMIT)
        calls = _C.thread_stacks()[self.thread.ident]
        stack = [(code.co_filename, line, code.co_name) for code, _, line in calls]
        while stack[0][2] != "save":  # what save() has called may change
            stack.pop(0)
        return stack

    def __exit__(self, *_):
        self.goes_on.set()
        self.thread.join()

    def save(self):
        self.wait_here()

    def wait_here(self):
        self.waits.set()
        self.goes_on.wait(LIMIT)


# Collections begin in many of the calls, and let go of the GIL.
COLLECTS = """
    import gc, threading, time
    from torchcomms_pg import _C

    class Circle:
        def __init__(self):
            self.itself = self

        def __del__(self):
            time.sleep(0)

    def ask():
        Circle()
        _C.thread_stacks()
        _C.current_exceptions()

    def ask_often():
        for _ in range(500):
            ask()

    gc.set_threshold(7)
    threads = [threading.Thread(target=ask_often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert gc.isenabled()
    gc.disable()
    ask()
    assert not gc.isenabled()
"""


def test_threads_are_asked_for_while_the_garbage_collector_runs_code_that_lets_go_of_the_gil():
    done = run_python("-c", COLLECTS)
    assert done.returncode == 0, done.stderr


# Each allocation that may start the collector lets go of the GIL, on the thread that asks.
RUNS_ON = """
    import gc, random, sys, threading, time
    from torchcomms_pg import _C

    functions = []
    for count in range(1, 24):
        values = "; ".join(f"v{i} = (n, {i})" for i in range(count))
        code = f"def f(n, ways): {values}; return functions[ways[n]](n - 1, ways) if n else v0"
        exec(code, made := {"functions": functions})
        functions.append(made["f"])
    main, done = threading.get_ident(), threading.Event()

    def let_go(phase, info):
        if threading.get_ident() != main:
            time.sleep(1e-5)

    def ask():
        for _ in range(100):
            for level, (code, at, line) in enumerate(reversed(_C.thread_stacks()[main])):
                assert 0 <= at < len(code.co_code), (code, at)
                assert line in [number for _, _, number in code.co_lines()], (code, line)
                names = _C.variables_of(main, level, code)
                assert names is None or code.co_name != "f" or type(names["n"]) is int, names
            answered.append(True)

    def ask_to_the_end():
        try:
            ask()
        finally:
            done.set()

    answered = []
    gc.callbacks.append(let_go)
    threading.Thread(target=ask_to_the_end).start()
    gc.freeze()  # so that collections are short
    gc.set_threshold(1, 1_000_000)
    sys.setswitchinterval(1e-5)
    while not done.is_set():
        ways = [random.randrange(len(functions)) for _ in range(30)]
        functions[ways[0]](random.randrange(29), ways)
    assert len(answered) == 100
"""


def test_a_thread_that_runs_on_is_read_while_the_garbage_collector_lets_go_of_the_gil():
    done = run_python("-c", RUNS_ON)
    assert done.returncode == 0, done.stderr


def test_an_operation_of_another_thread_has_the_threads_name():
    with Waiting() as stack:
        _, places, _ = python_stacks.describe([stack])
    assert "in save" in places[0]
    assert places[0].endswith(" (in thread saver)")


def test_the_main_threads_name_is_left_out():
    stack = [(frame.filename, frame.lineno, frame.function) for frame in inspect.stack()[1:]]
    _, places, _ = python_stacks.describe([stack])
    assert places[0] and "thread" not in places[0]


def test_a_stack_without_a_line_of_the_program_tells_what_the_library_does_and_not_c10d():
    folder = f"{torch.__path__[0]}/distributed"
    stack = [
        (f"{folder}/distributed_c10d.py", 4049, "broadcast"),
        (f"{folder}/c10d_logger.py", 83, "wrapper"),
        (f"{folder}/checkpoint/utils.py", 136, "gather_object"),
        (f"{folder}/checkpoint/utils.py", 198, "reduce_scatter"),
        (f"{folder}/checkpoint/planner.py", 1, "plan"),
        (f"{folder}/checkpoint/state_dict_saver.py", 2, "save"),
        (threading.__file__, 982, "run"),
    ]
    _, places, _ = python_stacks.describe([stack])
    assert places[0].split(" <- ") == [
        "torch/distributed/checkpoint/utils.py:136 in gather_object",
        "torch/distributed/checkpoint/utils.py:198 in reduce_scatter",
        "torch/distributed/checkpoint/state_dict_saver.py:2 in save",
    ]


def test_a_line_of_a_notebook_is_named_by_its_cell(monkeypatch):
    shell = types.SimpleNamespace(
        compile=types.SimpleNamespace(_filename_map={"/tmp/ipykernel_7/12.py": 3})
    )
    notebook = types.SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", notebook)
    assert python_stacks.line_name("/tmp/ipykernel_7/12.py", 5) == "Cell In[3], line 5"
    assert python_stacks.line_name("/tmp/other.py", 5) == "/tmp/other.py:5"
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: None))
    assert python_stacks.line_name("/tmp/ipykernel_7/12.py", 5) == "/tmp/ipykernel_7/12.py:5"


def _keeps_locals(learning_rate, told, go):
    kept = locals()
    later = [learning_rate]
    told.append((kept, dict(kept)))
    go.wait()
    return later


def _executes(learning_rate, told, go):
    exec("made = learning_rate")
    told.append(learning_rate)
    go.wait()
    told.append(eval("made"))


def _deletes(learning_rate, told, go):
    large = _Large()
    told.append(weakref.ref(large))
    go[0].wait()
    del large
    told.append(None)
    go[1].wait()


class _Large:
    pass


def _read_variables(function, *args):
    """Starts a thread that calls a function, and returns it with the function's variables."""
    told = args[1]
    thread = threading.Thread(target=function, args=args)
    thread.start()
    assert wait_for(lambda: told)
    for level, (code, _, _) in enumerate(reversed(_C.thread_stacks()[thread.ident])):
        names = _C.variables_of(thread.ident, level, code)
        if code is function.__code__:
            return thread, names
    raise AssertionError(f"{function.__name__} is not on the thread's stack")


def test_a_function_that_has_its_variables_as_a_dictionary_does_not_see_that_they_are_read():
    told, go = [], threading.Event()
    thread, names = _read_variables(_keeps_locals, 0.1, told, go)
    kept, before = told[0]
    try:
        assert kept == before and set(kept) == {"learning_rate", "told", "go"}
        assert names is None if sys.version_info < (3, 13) else names["later"] == [0.1]
    finally:
        go.set()
        thread.join()


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="exec() keeps nothing there")
def test_what_a_function_has_executed_outlives_the_reading_of_its_variables():
    told, go = [], threading.Event()
    thread, _ = _read_variables(_executes, 0.1, told, go)
    go.set()
    thread.join()
    assert told == [0.1, 0.1]


def test_what_a_function_deletes_is_freed_though_its_variables_have_been_read():
    told, go = [], (threading.Event(), threading.Event())
    thread, names = _read_variables(_deletes, 0.1, told, go)
    try:
        assert type(names.pop("large")) is _Large and names["learning_rate"] == 0.1
        go[0].set()
        assert wait_for(lambda: len(told) == 2)
        assert told[0]() is None
    finally:
        [each.set() for each in go]
        thread.join()
