"""What the type stub says of the compiled module: every name, each parameter and each type."""

from __future__ import annotations

import ast
import dataclasses
import importlib.resources
import inspect
import re

import pytest

from torchcomms_pg import _C, _judge


def read_stub(name: str) -> ast.Module:
    return ast.parse(importlib.resources.files("torchcomms_pg").joinpath(name).read_text())


STUB = read_stub("_C.pyi")
ALIASES = {
    alias.asname: alias.name
    for node in STUB.body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
    if alias.asname
}
"""The names that the stub gives to what it imports."""

CLASSES = {*ALIASES.values(), *(node.name for node in STUB.body if isinstance(node, ast.ClassDef))}
"""Those of which C++ holds pointers."""


@dataclasses.dataclass(frozen=True)
class Signature:
    parameters: dict[str, str]
    """The type of each parameter, without modules. After a bare `*` names begin with `*`."""
    returned: str

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.parameters)


def parse_docstring(doc: str | None) -> list[Signature]:
    """Reads the signature of every overload from the docstring that pybind11 writes."""
    lines = (doc or "").splitlines()
    if len(lines) > 1 and lines[1].startswith("Overloaded function"):
        signatures = [line.split(". ", 1)[1] for line in lines if line[:1].isdigit()]
    else:
        signatures = lines[:1]
    return [parse_signature(signature) for signature in signatures]


def parse_signature(text: str) -> Signature:
    """Reads ``name(self: X, a: int = 2, *, b: str) -> None``."""
    parts, depth, quote, end = [""], 0, "", text.index("(")
    while depth >= 0:
        end += 1
        char = text[end]
        if quote or char in "'\"":
            quote = "" if char == quote else quote or char
        else:
            depth += (char in "([{<") - (char in ")]}>")
        if char == "," and depth == 0 and not quote:
            parts.append("")
        elif depth >= 0:
            parts[-1] += char
    parameters, star = {}, ""
    for part in parts:
        name, _, rest = part.partition(":")
        name = name.partition("=")[0].strip()
        if name == "*":
            star = "*"
        elif name not in ("", "/", "self"):
            parameters[star + name] = without_modules(rest.partition(" = ")[0])
    return Signature(parameters, without_modules(text[end + 1 :].partition("->")[2]))


def without_modules(text: str) -> str:
    """Returns a type in the stub's words, from pybind11's or the stub's own."""
    text = re.sub(r"\w+::Held<([^<>]*)>", r"\1", text)  # a class that was bound later than its user
    text = re.sub(r"\b(?:[a-z_]\w*(?:\.|::))+(?=\w)", "", text.strip().strip("'\""))
    text = re.sub(r"Supports(Int|Float) \| SupportsIndex", lambda found: found[1].lower(), text)
    return re.sub(r"\w+", lambda found: ALIASES.get(found[0], found[0]), text)


def parse_stub(function: ast.FunctionDef) -> Signature:
    args = function.args
    parameters = {}

    def add(name: str, arg: ast.arg | None) -> None:
        if arg and arg.arg != "self":
            parameters[name + arg.arg] = annotation(arg.annotation)

    for arg in args.posonlyargs + args.args:
        add("", arg)
    add("*", args.vararg)
    for arg in args.kwonlyargs:
        add("*", arg)
    add("**", args.kwarg)
    return Signature(parameters, annotation(function.returns))


def annotation(node: ast.expr | None) -> str:
    return without_modules(ast.unparse(node)) if node else ""


def agrees(real: str, stub: str, *, or_none: bool) -> bool:
    """Returns whether the stub's type is pybind11's, or says more where pybind11 says little.

    pybind11 writes `object`, `list` or `Callable` where C++ says no more, and nothing for `*args`.
    It leaves out that a pointer may be null, and so takes and returns None: with `or_none` the stub
    may say so. What takes a str takes bytes, too.
    """
    stub = stub.replace("str | bytes", "str")
    if or_none:
        stub = stub.removesuffix(" | None")
    pattern = re.escape(real).replace("object", ".*") or ".*"
    pattern = re.sub(r"\b(Callable|list|dict|tuple|type)\b(?!\\\[)", r"\1(\\[.*\\])?", pattern)
    return re.fullmatch(pattern, stub) is not None


def type_faults(real: Signature, stub: Signature) -> list[str]:
    pairs = [(name, real.parameters[name], stub.parameters[name]) for name in real.parameters]
    pairs.append(("the result", real.returned, stub.returned))
    faults = [pair for pair in pairs if not agrees(*pair[1:], or_none=pair[1] in CLASSES)]
    return [f"{name} is {got}, in the stub {want}" for name, got, want in faults]


def decorators(function: ast.FunctionDef) -> set[str]:
    return {ast.unparse(decorator) for decorator in function.decorator_list}


def public(name: str) -> bool:
    return not name.startswith("_")


def differences(path: str, stub: list[ast.stmt], real: dict[str, object], types: bool) -> list[str]:
    """Returns how the stub of a module or class differs from the attributes of the real one."""
    found = []
    functions: dict[str, list[ast.FunctionDef]] = {}
    classes: dict[str, ast.ClassDef] = {}
    variables: set[str] = set()
    for node in stub:
        if isinstance(node, ast.FunctionDef):
            functions.setdefault(node.name, []).append(node)
        elif isinstance(node, ast.ClassDef):
            classes[node.name] = node
        elif isinstance(node, ast.AnnAssign):
            variables.add(ast.unparse(node.target))
        elif isinstance(node, ast.Assign):
            variables.update(ast.unparse(target) for target in node.targets)
    in_stub = {*functions, *classes, *variables}
    # pybind11 gives these to every enum.
    skipped = {"name", "value"} if "__members__" in real else set()
    wanted = {name for name in real if public(name) or name == "__init__"} - skipped
    if (getattr(real.get("__init__"), "__doc__", None) or "").startswith("Initialize self."):
        wanted -= {"__init__"}  # pybind11's own, which raises since the class has no constructor
    found += [f"{path}{name}: not in the stub" for name in sorted(wanted - in_stub)]
    # A private name, such as a TypeVar, may be in the stub alone.
    stated = {name for name in in_stub if public(name) or name.endswith("__")}
    found += [f"{path}{name}: only in the stub" for name in sorted(stated - set(real))]
    for name, node in classes.items():
        if isinstance(real.get(name), type):
            found += differences(f"{path}{name}.", node.body, dict(vars(real[name])), types)
    for name, value in real.items():
        if name in variables and isinstance(value, property) and value.fset is None:
            found.append(f"{path}{name}: read-only, but the stub lets it be set")
        if name not in functions:
            continue
        kinds = set().union(*(decorators(node) for node in functions[name]))
        want = [parse_stub(node) for node in functions[name]]
        if isinstance(value, property):
            if "property" not in kinds:
                found.append(f"{path}{name}: a property, but a method in the stub")
            if (value.fset is not None) != (f"{name}.setter" in kinds):
                found.append(f"{path}{name}: one of module and stub has no setter")
            [getter] = parse_docstring(value.fget.__doc__)
            if types and not agrees(getter.returned, want[0].returned, or_none=False):
                found.append(f"{path}{name} is {getter.returned}, in the stub {want[0].returned}")
            continue
        if isinstance(value, staticmethod) != ("staticmethod" in kinds):
            found.append(f"{path}{name}: static in one of module and stub")
        function = value.__func__ if isinstance(value, staticmethod) else value
        overloads = parse_docstring(function.__doc__)
        got, stated = (sorted(each.names for each in side) for side in (overloads, want))
        if got != stated:
            found.append(f"{path}{name}: parameters {got}, in the stub {stated}")
        elif types:
            for each in overloads:
                faults = [type_faults(each, other) for other in want if other.names == each.names]
                found += [f"{path}{name}: {fault}" for fault in min(faults, key=len)]
    return found


@pytest.mark.torch_version
def test_stub_says_what_the_extension_has():
    found = differences("", STUB.body, dict(vars(_C)), types=False)
    assert not found, "\n".join(found)


def test_stub_has_the_types_of_the_extension():
    # Earlier versions of pybind11, which torch brings, write types in other ways.
    if "SupportsIndex" not in (_C.end_wait.__doc__ or ""):
        pytest.skip("the docstrings of this torch's pybind11 are not what the parser reads")
    found = differences("", STUB.body, dict(vars(_C)), types=True)
    assert not found, "\n".join(found)


def test_stub_of_the_judge_has_its_functions_and_their_parameters():
    real = {name: value for name, value in vars(_judge).items() if public(name)}
    stub = {
        node.name: [arg.arg for arg in node.args.posonlyargs]
        for node in read_stub("_judge.pyi").body
        if isinstance(node, ast.FunctionDef)
    }
    assert stub == {name: list(inspect.signature(each).parameters) for name, each in real.items()}


def test_docstring_parser_reads_what_pybind11_writes():
    assert parse_docstring("f() -> None") == [Signature({}, "None")]
    assert parse_docstring("f(self: m.A, a: list[int] = [1, 2], b: str = 'x, y(') -> int") == [
        Signature({"a": "list[int]", "b": "str"}, "int")
    ]
    doc = "f(a: abc.Callable[[m.int, str], None], *, b: m.E = <E.X: 1>) -> m.Sequence[m.A]"
    assert parse_docstring(doc) == [
        Signature({"a": "Callable[[int, str], None]", "*b": "E"}, "Sequence[A]")
    ]
    overloaded = "f(*args, **kwargs)\nOverloaded function.\n\n1. f(a: int)\n\n2. f()\n"
    assert parse_docstring(overloaded) == [Signature({"a": "int"}, ""), Signature({}, "")]


@pytest.mark.parametrize(
    ("real", "stub", "or_none", "agree"),
    [
        ("Sequence[int]", "Sequence[int]", False, True),
        ("Sequence[int]", "list[int]", False, False),
        ("object", "Callable[[int], str]", False, True),
        ("list", "list[str]", False, True),
        ("list", "dict[str, str]", False, False),
        ("Tensor", "Tensor | None", False, False),
        ("Tensor", "Tensor | None", True, True),
        ("Tensor | None", "Tensor", False, False),
    ],
)
def test_a_stub_may_say_more_than_pybind11_does_and_nothing_else(real, stub, or_none, agree):
    assert agrees(real, stub, or_none=or_none) is agree
