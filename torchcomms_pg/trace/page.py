"""Makes self-contained pages, which share their style and their timeline."""

from __future__ import annotations

import importlib.resources
import json
from typing import Any


def page(package: str, name: str, data: dict[str, Any]) -> str:
    """Returns a page with its data.

    Args:
        package: the package that has the template.
        name: the template's file. ``@STYLE@`` in it stands for style.css, ``@TIMELINE@`` for
            timeline.js, and ``@DATA@`` for the data.
        data: values of JSON.
    """

    def read(package: str, name: str) -> str:
        return importlib.resources.files(package).joinpath(name).read_text(encoding="utf-8")

    text = read(package, name)
    text = text.replace("@STYLE@", read(__package__, "style.css"))
    text = text.replace("@TIMELINE@", read(__package__, "timeline.js"))
    # "</script" in the data would end its element, and "<!--<script" would hide the element's end.
    content = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return text.replace("@DATA@", content)
