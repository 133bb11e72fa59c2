"""What `help()`, `print()` and the Tab key show: every public object is described, with all of its
arguments, and the examples do what they say."""

import ast
import doctest
import importlib
import inspect
import re

import pytest
import torch

import torchcomms_pg
from harness import ROOT
from harness.comms import make, torchcomms

MODULES = ("", ".hooks", "._comms", ".env", ".nccl", ".objcol", ".device_mesh", ".testing")
# Of every operation: TorchComm says what they mean.
IN_COMMON = {"async_op", "hints", "timeout"}
EXAMPLES = (
    "TorchComm", "BatchSendRecv", "ReduceOp", "TorchCommWindow",
    "hooks.FlightRecorderHook", "hooks.NanCheckHook",
)  # fmt: skip


def public_names(module):
    own = getattr(module, "__all__", None)
    if own is None:
        own = [
            name
            for name, value in vars(module).items()
            if not name.startswith("_") and getattr(value, "__module__", "") == module.__name__
        ]
    return own


def public_objects():
    """Every public function, class, method and property, by its name."""
    found = {}
    for suffix in MODULES:
        module = importlib.import_module(f"torchcomms_pg{suffix}")
        found[module.__name__] = module
        for name in public_names(module):
            value = getattr(module, name)
            if inspect.isclass(value):
                found.update(members(value))
            elif inspect.isroutine(value):
                found[f"{module.__name__}.{name}"] = value
    return found


def members(cls):
    found = {cls.__qualname__: cls}
    for base in cls.__mro__:
        if not base.__module__.startswith("torchcomms_pg"):
            continue
        for name, value in vars(base).items():
            if isinstance(value, (staticmethod, classmethod)):
                value = value.__func__
            if name.startswith("_"):
                continue
            if inspect.isclass(value):
                found.update(members(value))
            elif inspect.isroutine(value) or isinstance(value, property):
                found[f"{cls.__qualname__}.{name}"] = value
    return found


def stub():
    """The descriptions of _C.pyi, which editors show: name to text; of a class its attributes."""
    found = {}

    def visit(body, prefix):
        for node in body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                name = f"{prefix}{node.name}"
                found[name] = (found.get(name) or "") + (ast.get_docstring(node) or "")
                if isinstance(node, ast.ClassDef):
                    visit(node.body, f"{name}.")

    visit(ast.parse((ROOT / "torchcomms_pg/_C.pyi").read_text()).body, "")
    return found


OBJECTS = public_objects()


def test_every_public_object_is_described():
    described = stub()
    missing = []
    for name, value in OBJECTS.items():
        if inspect.getdoc(value) or described.get(name):
            continue
        owner, _, attribute = name.rpartition(".")
        if not re.search(rf"\b{attribute}\b", described.get(owner, "")):
            missing.append(name)
    assert len(OBJECTS) > 200
    # Words of their own: the enumeration's number, and the options that a backend was made with.
    assert set(missing) <= {"OpName.value", "Backend.options"}, missing


def test_every_argument_of_a_public_function_is_described():
    missing = {}
    for name, value in OBJECTS.items():
        if not inspect.isfunction(value):
            continue
        text = inspect.getdoc(value) or ""
        arguments = list(inspect.signature(value).parameters)
        first = arguments[:1] if arguments[:1] in (["self"], ["comm"]) else []
        unsaid = [
            argument
            for argument in arguments[len(first) :]
            if argument not in IN_COMMON and not re.search(rf"\b{argument}\b", text)
        ]
        if unsaid:
            missing[name] = unsaid
    assert not missing


def test_every_operation_has_an_example():
    operations = [
        name
        for name, value in OBJECTS.items()
        if name.startswith("TorchComm.")
        and inspect.isfunction(value)
        and "async_op" in inspect.signature(value).parameters
    ]
    assert len(operations) > 15
    without = [name for name in operations if ">>>" not in (inspect.getdoc(OBJECTS[name]) or "")]
    assert without == ["TorchComm.recv"]  # that of send has both


def test_the_repr_of_public_objects_says_what_they_are():
    for value in (
        torchcomms_pg.ReduceOp.PREMUL_SUM(0.5),
        torchcomms_pg.CommOptions(),
        torchcomms_pg.NcclConfig(),
        torchcomms_pg.Backend.Options(),
        torchcomms_pg.OpName.all_reduce,
        torchcomms_pg.TorchCommWindowAttr(),
        torchcomms_pg.TorchWork(None),
    ):
        assert " object at 0x" not in repr(value), repr(value)


def test_the_tab_key_shows_public_names_alone():
    shown = {name for name in dir(torchcomms_pg) if not name.startswith("__")}
    assert shown == set(torchcomms_pg.__all__) - {"__version__"}
    assert "__version__" in dir(torchcomms_pg)


@pytest.mark.torch_version
@pytest.mark.ranks(2)
def test_the_examples_do_what_they_say(world):
    import torch.distributed as dist

    comm = make("examples")
    names = {
        "torch": torch,
        "comm": comm,
        "rank": dist.get_rank(),
        "ReduceOp": torchcomms().ReduceOp,
    }
    finder = doctest.DocTestFinder(exclude_empty=True)
    said, tried = [], 0
    for name in EXAMPLES:
        cls = torchcomms_pg
        for part in name.split("."):
            cls = getattr(cls, part)
        for base in cls.__mro__:
            if not base.__module__.startswith("torchcomms_pg"):
                continue
            for test in finder.find(base, base.__name__, globs=dict(names)):
                runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS, verbose=False)
                runner.run(test, out=said.append)
                tried += len(test.examples)
    assert not said, "".join(said)
    assert tried > 60
    comm.finalize()
