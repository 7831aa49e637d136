"""What of a cubin decides how a kernel runs: its machine code, registers, constants, shared memory.

A cubin is an ELF file. NVRTC also puts into it every constant of the source that has a name, used
or not, and the names of all symbols: neither is code, and neither is digested. Where the code reads
tables, it finds their addresses in constant bank 4; only then does their content count.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

_HEADER: Final = struct.Struct("<IIQQQQIIQQ")
_NOTHING_STORED: Final = 8
"""The section type of memory that is only asked for, such as shared memory."""
_INSTRUCTION_BYTES: Final = 16
_CONSTANT_FORMS: Final = (3, 5)
"""Bits 9 to 11 of an instruction that has an operand in a constant bank, named in bits 54 to 58."""
_TABLES_BANK: Final = 4


@dataclass(frozen=True, slots=True)
class Section:
    """A section of an ELF file; `size` also where no content is stored."""

    name: str
    info: int
    size: int
    content: bytes


@dataclass(frozen=True, slots=True)
class MachineCode:
    """The digest of one kernel's machine code, and the release of the compiler that made it."""

    release: str
    digest: str


def machine_code(cubin: bytes, entry: str) -> MachineCode:
    """The code of the kernel `entry`. Raises ValueError when the cubin has no such kernel."""
    found = {section.name: section for section in sections(cubin)}
    if f".text.{entry}" not in found:
        raise ValueError(f"a cubin has no kernel {entry}, but sections {sorted(found)}")
    digest, code = hashlib.sha256(), code_sections(found, entry)
    tables = any(reads_tables(section.content) for section in code)
    for name in sorted(found):
        section = found[name]
        if section in code:
            registers = section.info >> 24
            digest.update(f"{name} {registers} {section.size}\0".encode() + section.content)
        elif name == f".nv.shared.{entry}" or is_constant(name, entry):
            digest.update(f"{name} {section.size}\0".encode() + section.content)
        elif tables and name in (".nv.global.init", ".rela.nv.constant4"):
            digest.update(f"{name}\0".encode() + section.content)
    return MachineCode(release(found), digest.hexdigest()[:16])


def code_sections(found: dict[str, Section], entry: str) -> list[Section]:
    """The kernel itself, and functions that it may call: those that are no kernels of their own."""
    names = [name for name in found if name.startswith(".text.")]
    kernels = {name for name in names if f".nv.constant0.{name.removeprefix('.text.')}" in found}
    return [found[name] for name in names if name == f".text.{entry}" or name not in kernels]


def is_constant(name: str, entry: str) -> bool:
    """Whether a section holds constants of the kernel: its parameters' bank, or `__constant__`."""
    bank, _, owner = name.removeprefix(".nv.constant").partition(".")
    return name.startswith(".nv.constant") and bank != str(_TABLES_BANK) and owner in ("", entry)


def reads_tables(code: bytes) -> bool:
    """Whether an instruction has an operand in the bank of the tables' addresses."""
    for (low,) in struct.iter_unpack(f"<Q{_INSTRUCTION_BYTES - 8}x", code):
        if low >> 9 & 7 in _CONSTANT_FORMS and low >> 54 & 31 == _TABLES_BANK:
            return True
    return False


def release(found: dict[str, Section]) -> str:
    """The compiler's release, such as "13.0.48"; "unknown" where the cubin does not say."""
    note = found.get(".note.nv.tkinfo")
    told = re.search(rb"V(\d+\.\d+\.\d+)", note.content) if note is not None else None
    return told[1].decode() if told else "unknown"


def sections(elf: bytes) -> Iterator[Section]:
    """The sections of a 64-bit little-endian ELF file."""
    (begin,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names_index = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [_HEADER.unpack_from(elf, begin + i * size) for i in range(count)]
    names = headers[names_index][4]
    for name_at, kind, _, _, offset, length, _, info, _, _ in headers:
        name = elf[names + name_at : elf.index(b"\0", names + name_at)].decode()
        stored = b"" if kind == _NOTHING_STORED else elf[offset : offset + length]
        yield Section(name, info, length, stored)
