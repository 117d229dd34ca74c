"""The little of ELF that the BLAS choice needs: which symbols a shared library exports, and for which processor.

A library is looked into before it is loaded, since what has been loaded with RTLD_GLOBAL can never be taken out
of the process again. Layout: System V ABI, chapter 4 (64-bit objects, section headers).
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

DYNSYM = 11  # section type: the dynamic symbol table
ENTRY = struct.Struct("<IBBHQQ")  # st_name, st_info, st_other, st_shndx, st_value, st_size
SECTION = struct.Struct("<IIQQQQIIQQ")  # sh_name, type, flags, addr, offset, size, link, info, align, entsize


class NotALibrary(ValueError):
    """The file is no complete 64-bit little-endian ELF shared library; the text says what is wrong with it."""


def _header(data: mmap.mmap) -> tuple[int, int, int]:
    """Machine number, offset and number of the section headers."""
    if data[:4] != b"\x7fELF":
        raise NotALibrary("it is not an ELF file")
    if data[4:6] != b"\x02\x01":
        raise NotALibrary("it is not a 64-bit little-endian ELF file")
    machine = struct.unpack_from("<H", data, 18)[0]
    offset = struct.unpack_from("<Q", data, 40)[0]
    size, count = struct.unpack_from("<HH", data, 58)
    if size != SECTION.size or not count:
        raise NotALibrary("it has no section headers")
    # Linkers write the section headers last, so a truncated file is caught here.
    if offset + count * size > len(data):
        raise NotALibrary("it is truncated")
    return machine, offset, count


def _dynamic_symbols(data: mmap.mmap) -> set[str]:
    _, offset, count = _header(data)
    sections = [SECTION.unpack_from(data, offset + i * SECTION.size) for i in range(count)]
    names: set[str] = set()
    for section in sections:
        if section[1] != DYNSYM:
            continue
        strings = sections[section[6]]
        text = data[strings[4] : strings[4] + strings[5]]
        for name, info, _, where, _, _ in ENTRY.iter_unpack(data[section[4] : section[4] + section[5]]):
            # Defined here (section index not 0) and visible to others (global 1, weak 2).
            if where and info >> 4 in (1, 2):
                names.add(text[name : text.index(b"\0", name)].decode("ascii", "replace"))
    return names


def _mapped(path: Path, read):
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return read(data)
    except (struct.error, IndexError, ValueError) as error:
        if isinstance(error, NotALibrary):
            raise
        raise NotALibrary("its ELF tables are damaged") from None


def exported(path: Path) -> set[str]:
    """Names that the shared library at `path` defines for others. Raises NotALibrary, or OSError if unreadable."""
    return _mapped(path, _dynamic_symbols)


def machine(path: Path) -> int:
    """The ELF machine number (62 is x86-64, 183 is AArch64) of the file at `path`."""
    return _mapped(path, _header)[0]
