"""Reads which libraries, versions and symbols an ELF library needs and has. Needs no torch.

The build checks what it has linked (tools/_linked.py), and the import what it is about to load.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path

# The C++ library and the unwinder of this process's exceptions, which torch's libraries need, too.
OF_CXX = ("libstdc++.so.6", "libgcc_s.so.1")

# Types of sections and tags of the format (https://refspecs.linuxfoundation.org/elf/gabi4+,
# and the LSB's for versions).
_DYNAMIC, _SYMBOLS, _DEFINED_VERSIONS, _NEEDED_VERSIONS = 6, 11, 0x6FFFFFFD, 0x6FFFFFFE
_TAG_NEEDED = 1
_GLOBAL, _WEAK = 1, 2


class Elf:
    """The dynamic section, versions and symbols of a library of 64 bits, little-endian.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no such library.
    """

    def __init__(self, path: str | Path) -> None:
        with open(path, "rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if self._data[:6] != b"\x7fELF\x02\x01":
            raise ValueError(f"{path}: wanted an ELF library of 64 bits, little-endian")
        (start,) = struct.unpack_from("<Q", self._data, 0x28)
        size, count = struct.unpack_from("<HH", self._data, 0x3A)
        # Of each section: type, offset, size, and the number of the section with its strings.
        self._sections = [
            (type_, offset, length, strings)
            for type_, offset, length, strings in (
                struct.unpack_from("<4xI16xQQI", self._data, start + number * size)
                for number in range(count)
            )
        ]

    def needed(self) -> list[str]:
        """Returns the names of the libraries that the loader loads with this one."""
        return [
            self._text(strings, value)
            for offset, length, strings in self._of_type(_DYNAMIC)
            for tag, value in struct.iter_unpack("<QQ", self._data[offset : offset + length])
            if tag == _TAG_NEEDED
        ]

    def needed_versions(self) -> dict[str, set[str]]:
        """Returns the versions of symbols that it needs, such as GLIBC_2.34, by library."""
        found: dict[str, set[str]] = {}
        for at, _, strings in self._of_type(_NEEDED_VERSIONS):
            next_library = 1
            while next_library:
                count, file, first, next_library = struct.unpack_from("<2xHIII", self._data, at)
                entry = at + first
                for _ in range(count):
                    flags, name, step = struct.unpack_from("<4xH2xII", self._data, entry)
                    if not flags & _WEAK:  # a weak version may be missing at the load
                        versions = found.setdefault(self._text(strings, file), set())
                        versions.add(self._text(strings, name))
                    entry += step
                at += next_library
        return found

    def defined_versions(self) -> set[str]:
        """Returns the versions of the symbols that it has."""
        found = set()
        for at, _, strings in self._of_type(_DEFINED_VERSIONS):
            step = 1
            while step:
                names, step = struct.unpack_from("<12xII", self._data, at)
                (name,) = struct.unpack_from("<I", self._data, at + names)
                found.add(self._text(strings, name))
                at += step
        return found

    def exported(self) -> list[str]:
        """Returns the symbols that it has for other libraries, without the weak ones.

        Weak are the templates of headers, which every library of C++ has.
        """
        return [
            self._text(strings, name)
            for offset, length, strings in self._of_type(_SYMBOLS)
            for name, info, section in struct.iter_unpack(
                "<IBxH16x", self._data[offset : offset + length]
            )
            if section and info >> 4 == _GLOBAL
        ]

    def _of_type(self, wanted: int) -> Iterator[tuple[int, int, int]]:
        for type_, offset, length, strings in self._sections:
            if type_ == wanted:
                yield offset, length, strings

    def _text(self, section: int, at: int) -> str:
        start = self._sections[section][1] + at
        return self._data[start : self._data.find(b"\0", start)].decode()


def without_cxx(path: str | Path) -> list[str]:
    """Returns the libraries of `OF_CXX` that a library does not need, since it has copies."""
    needed = Elf(path).needed()
    return [name for name in OF_CXX if name not in needed]
