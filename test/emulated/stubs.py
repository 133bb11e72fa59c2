"""Writes functions in the place of those that torch wants and the emulator does not define.

Torch imports most of them, and asks for functions of the driver by name
(cudaGetDriverEntryPointByVersion). Each says its name when it is called, and fails: `emulatedLacks`
in libcudart/Calls.cpp.

python stubs.py OUT PATTERN ERROR TORCH_LIB OBJECT...
"""

import pathlib
import re
import subprocess
import sys


def symbols(option, *files):
    """The names in the symbol tables of the files, without their versions."""
    lines = subprocess.run(
        ["nm", *option, "-P", *map(str, files)], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    return {line.split()[0].split("@")[0] for line in lines if len(line.split()) > 1}


def texts(library):
    """The strings of the library that may be names of functions, for which it asks."""
    return {text.decode() for text in re.findall(rb"(?<=\0)\w+(?=\0)", library.read_bytes())}


def main(out, pattern, error, torch_lib, *objects):
    """Writes the functions to `out`, and prints their names."""
    torch_lib = pathlib.Path(torch_lib)
    wanted = symbols(["-D", "--undefined-only"], *torch_lib.glob("*.so"))
    wanted |= texts(torch_lib / "libc10_cuda.so")
    lacking = sorted(
        name
        for name in wanted - symbols(["--defined-only"], *objects)
        if re.fullmatch(pattern, name)
    )
    name = pathlib.Path(out).stem.removesuffix("-stubs")
    print(f"{name}: not emulated, refused when called: {' '.join(lacking) or 'nothing'}")
    functions = "".join(
        f'int {name}(void) {{ return emulatedLacks("{name}", {error}); }}\n' for name in lacking
    )
    pathlib.Path(out).write_text(
        "int emulatedLacks(const char* function, int error);\n"
        f"#pragma GCC visibility push(default)\n{functions}"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
