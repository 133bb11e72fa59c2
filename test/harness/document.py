"""Reads from docs/api.md which dtypes each reduction takes."""

import torch

from harness import ROOT
from harness.values import COMPLEX, FLOAT8, FLOATS, INTEGERS

DOCUMENT = ROOT / "docs" / "api.md"
COLUMNS = {
    "floats 16 to 64 bit": FLOATS,
    "float8": FLOAT8,
    "int8, uint8, int32, int64": INTEGERS,
    "int16": (torch.int16,),
    "bool": (torch.bool,),
    "complex": COMPLEX,
}


def reducible():
    """Returns {reduce op: {dtype: the text of the document's table}}."""
    lines = DOCUMENT.read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("| reduce op |"))
    header, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines[first : lines.index("", first)]
    ]
    assert header[1:] == list(COLUMNS)
    found = {}
    for first_cell, *cells in rows:
        names = first_cell.split(", ")
        for position, name in enumerate(names):
            by_dtype = found[name.split("(")[0]] = {}
            for column, cell in zip(header[1:], cells, strict=True):
                each = cell.split(", ")  # a text for each name, or one for all names
                said = each[position] if len(each) == len(names) else cell
                by_dtype.update((dtype, said) for dtype in COLUMNS[column])
    return found
