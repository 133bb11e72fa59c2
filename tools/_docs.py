"""Writes the reference of the API into a folder, with pdoc: ``_docs.py FOLDER``.

Describes the classes of the extension by _C.pyi instead of by pybind11's texts. Begins with
`new_comm` and `TorchComm`. Converts docs/*.md to linked pages in FOLDER/guides. Fails if a member
has no sentence.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from pathlib import Path

import markdown2
import pdoc.doc
import pdoc.extract
import pdoc.render
import pdoc.render_helpers

ROOT = Path(__file__).resolve().parent.parent
FIRST = (
    "new_comm", "TorchComm", "TorchWork", "ReduceOp", "CommError", "CommOptions", "get_comm",
    "get_process_group", "watch", "lateness", "waiting", "agree",
)  # fmt: skip
SAID = {"torchcomms_pg.__version__": "The version of this package."}
STYLE = """:root { color-scheme: light dark }
body { max-width: 64rem; margin: 1rem auto; padding: 0 1rem; font: 1rem/1.5 sans-serif }
pre { overflow-x: auto; padding: .6rem; font-size: .95em } pre, code { background: #8882 }
code { overflow-wrap: anywhere; font-size: .85em } pre code { background: none }
table { display: block; overflow-x: auto; border-collapse: collapse }
td, th { border: 1px solid #8886; padding: .2rem .5rem; vertical-align: top; min-width: 2.5rem }
td:has(code) { min-width: 15rem } img { max-width: 100% }"""


class Text:
    """An annotation that is written as in the source."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def read_stub() -> dict[str, ast.stmt]:
    """Returns the definitions in _C.pyi by their qualified names."""
    found: dict[str, ast.stmt] = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                found.setdefault(prefix + node.name, node)
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found[prefix + node.target.id] = node

    visit(ast.parse((ROOT / "torchcomms_pg/_C.pyi").read_text(encoding="utf-8")).body, "")
    return found


def sentences(docstring: str) -> dict[str, str]:
    """Returns what the sections Attributes and Args of a class say of each name."""
    found: dict[str, str] = {}
    for section in re.findall(r"^(?:Args|Attributes):\n((?:    .*\n|\n)*)", docstring + "\n", re.M):
        for name, text in re.findall(r"^    (\w+): (.*(?:\n     +.*)*)", section, re.M):
            found[name] = re.sub(r"\s+", " ", text)
    return found


def signature_of(node: ast.FunctionDef) -> inspect.Signature:
    """Returns the signature of a definition in the stub."""
    node = ast.parse(ast.unparse(node)).body[0]  # type: ignore[assignment]
    node.decorator_list = []
    names: dict[str, object] = {}
    exec(f"from __future__ import annotations\n{ast.unparse(node)}", names)  # of this checkout
    found = inspect.signature(names[node.name])  # type: ignore[arg-type]
    told = [
        each if each.annotation is each.empty else each.replace(annotation=Text(each.annotation))
        for each in found.parameters.values()
    ]
    result = found.return_annotation
    return found.replace(
        parameters=told, return_annotation=result if result is found.empty else Text(result)
    )


def describe_native(cls: pdoc.doc.Class, stub: dict[str, ast.stmt]) -> None:
    """Describes a class of the extension by the stub; members that are not in it are hidden."""
    node = stub[cls.qualname]
    assert isinstance(node, ast.ClassDef)
    cls.docstring = ast.get_docstring(node) or ""
    cls.bases = [base for base in cls.bases if not base[0].startswith("pybind11")]
    for name, member in list(cls.members.items()):
        found = stub.get(member.qualname)
        if found is None:
            del cls.members[name]
        elif isinstance(member, pdoc.doc.Class):
            describe_native(member, stub)
        elif isinstance(found, ast.FunctionDef):
            member.docstring = ast.get_docstring(found) or ""
            signature = signature_of(found)
            if isinstance(member, pdoc.doc.Function):
                # A class' constructor is called without self.
                member.__dict__["signature"] = signature
                member.__dict__.pop("signature_without_self", None)
                member.decorators = []
            elif isinstance(member, pdoc.doc.Variable):
                member.annotation = signature.return_annotation
        elif isinstance(found, ast.AnnAssign) and isinstance(member, pdoc.doc.Variable):
            member.docstring = ""
            member.annotation = Text(ast.unparse(found.annotation))


def owner_of(operation: str) -> str:
    """Returns what a program calls for an operation that hooks are told of."""
    import torchcomms_pg

    if operation == "batch_op_issue":
        return "`BatchSendRecv.issue`"
    if operation == "shrink":
        return "torch's `shrink_group`"
    for cls in (torchcomms_pg.TorchComm, torchcomms_pg.TorchCommWindow):
        if hasattr(cls, operation):
            return f"`{cls.__name__}.{operation}`"
    raise KeyError(operation)


def of_nccl(owner: str, name: str) -> str:
    """Returns the sentence of a field of `NcclConfig`, which NCCL's documentation describes."""
    from torchcomms_pg import _C

    fields = [key for key, value in _C.nccl_config_names.items() if value == name and key != name]
    if owner != "NcclConfig" or name not in _C.nccl_config_names.values():
        return ""
    return f"NCCL's ``{(fields or [name])[0]}``; None is NCCL's default."


def complete(cls: pdoc.doc.Class) -> None:
    """Gives the members of a class the sentences that the class' own text has for them."""
    told = sentences(cls.docstring)
    for name, member in list(cls.members.items()):
        if isinstance(member, pdoc.doc.Class):
            complete(member)
        elif name == "__init__" and not member.docstring:
            if told:
                member.docstring = "The arguments are described above."
            else:
                del cls.members[name]
        elif cls.name == "OpName" and name in cls.obj.__members__:
            member.docstring = f"A call of {owner_of(name)}."
        elif not member.docstring:
            member.docstring = told.get(name, "") or of_nccl(cls.name, name)


def silent(docs: pdoc.doc.Namespace) -> list[str]:
    """Returns the public members that have no sentence."""
    found = []
    for name, member in docs.members.items():
        if name.startswith("_") and name not in ("__init__", "__version__"):
            continue
        if not member.docstring and member.taken_from[0].startswith("torchcomms_pg"):
            found.append(member.fullname)
        if isinstance(member, pdoc.doc.Class):
            found += silent(member)
    return found


def read(name: str, stub: dict[str, ast.stmt]) -> pdoc.doc.Module:
    """Returns the description of a module."""
    module = pdoc.doc.Module.from_name(name)
    first = [each for each in FIRST if each in module.members]
    module.members = {
        each: module.members[each] for each in dict.fromkeys([*first, *module.members])
    }
    for member in module.members.values():
        if isinstance(member, pdoc.doc.Class):
            if member.obj.__module__ == "torchcomms_pg._C":
                describe_native(member, stub)
            complete(member)
        member.docstring = member.docstring or SAID.get(member.fullname, "")
    return module


def write_guides(folder: Path) -> list[tuple[str, str]]:
    """Writes each page of docs/ as HTML. Returns names and titles, the index first."""
    folder.mkdir(parents=True, exist_ok=True)
    pages = []
    for file in sorted(
        (ROOT / "docs").glob("*.md"), key=lambda file: (file.stem != "README", file)
    ):
        text = file.read_text(encoding="utf-8")
        title = re.search(r"^# (.*)", text, re.M)
        assert title is not None, file
        # Pages link to each other; what is elsewhere in the repository stays a name.
        text = re.sub(r"\]\((\w+)\.md(#[\w-]*)?\)", r"](\1.html\2)", text)
        text = re.sub(r"\[([^\]]*)\]\(\.\./[^)]*\)", r"\1", text)
        # code-friendly: the underscores of names do not emphasise.
        extras = ["tables", "fenced-code-blocks", "header-ids", "code-friendly"]
        body = markdown2.markdown(text, extras=extras)
        (folder / f"{file.stem}.html").write_text(
            "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport "
            f'content="width=device-width, initial-scale=1"><title>{title[1]}</title>'
            f"<style>{STYLE}</style><p><a href=../torchcomms_pg.html>API</a> &middot; "
            f"<a href=README.html>all guides</a></p>{body}</html>",
            encoding="utf-8",
        )
        pages.append((file.stem, title[1]))
    for image in (ROOT / "docs").glob("*.[ps][nv]g"):
        (folder / image.name).write_bytes(image.read_bytes())
    return pages


def main(folder: Path) -> None:
    """Writes all pages."""
    pdoc.render.configure(docformat="google")
    stub = read_stub()
    modules = {name: read(name, stub) for name in pdoc.extract.walk_specs(["torchcomms_pg"])}
    if missing := sorted({name for module in modules.values() for name in silent(module)}):
        sys.exit("error: a sentence is wanted in the docstring of:\n" + "\n".join(missing))
    links = [f"- [{title}](guides/{stem}.html)" for stem, title in write_guides(folder / "guides")]
    modules["torchcomms_pg"].docstring += "\n\n## Guides\n\n" + "\n".join(links) + "\n"
    for name, module in modules.items():
        page = folder / f"{name.replace('.', '/')}.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(pdoc.render.html_module(module, modules), encoding="utf-8")
    (folder / "index.html").write_text(pdoc.render.html_index(modules), encoding="utf-8")
    (folder / "search.js").write_text(pdoc.render.search_index(modules), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
