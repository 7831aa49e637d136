"""Structs that kernels take by value: read off their declarations, and of the size compiled."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from kernels.compile import Spec, compile_spec
from kernels.cuda.attention.kernels import attend_kernels
from kernels.cuda.common import structs
from kernels.cuda.masks import expand
from kernels.cuda.merge.variants import merge_spec
from kernels.cuda.rows.variants import rows_spec
from kernels.cuda.visible import table as visible

PARAMETERS_AT = 352
"""Where a kernel's parameters begin in its constant bank, for sm_80."""
TILE = attend_kernels("sm_80", 64, "fp16", "fp16", False)[-1].spec
POOL_AND_TENSOR = (structs.POOL_ROWS, structs.TENSOR_ROWS)


@pytest.mark.parametrize(
    ("spec", "entry", "parts"),
    [
        (TILE, "attend_tile", (structs.ATTEND_PARAMS, structs.VISIBLE_TABLE)),
        (visible.SPEC, visible.ENTRY, (structs.VISIBLE_PARAMS,)),
        (expand.SPEC, expand.ENTRY, (structs.EXPAND_PARAMS,)),
        (merge_spec(64, True, "fp16", 2), "merge_states", (structs.MERGE_PARAMS,)),
        (rows_spec(64, "fp16", "fp16"), "append_rows", POOL_AND_TENSOR),
    ],
)
def test_a_struct_is_as_large_as_the_compiler_made_it(
    spec: Spec, entry: str, parts: tuple[np.dtype[np.void], ...]
) -> None:
    compiled = compile_spec(spec, "sm_80")
    size = section_sizes(compiled.cubin)[f".nv.constant0.{entry}"]
    assert size == PARAMETERS_AT + sum(part.itemsize for part in parts)


def section_sizes(elf: bytes) -> dict[str, int]:
    """Bytes of each section of a 64-bit little-endian ELF file, by name."""
    (begin,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names_index = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, begin + i * size) for i in range(count)]
    names_at = headers[names_index][4]
    names = [elf[names_at + header[0] :].split(b"\0", 1)[0].decode() for header in headers]
    return {name: header[5] for name, header in zip(names, headers, strict=True)}


def test_a_struct_has_the_fields_of_its_declaration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structs, "SOURCES", tmp_path)
    (tmp_path / "one.cuh").write_text(
        "struct Other {\n  int x;\n};\n\n"
        "struct One {\n  // counts\n  int n;  // of rows; none: 0\n"
        "  const float* o;\n  uint32 m;\n};\n"
    )
    one = structs.declared("one.cuh", "One")
    assert [(name, one[name]) for name in one.names or ()] == [
        ("n", np.int32),
        ("o", np.uint64),
        ("m", np.uint32),
    ]
    assert (one.itemsize, one.fields and one.fields["o"][1]) == (24, 8)


@pytest.mark.parametrize("line", ["int n[4];", "Other other;", "int n() const { return 1; }"])
def test_a_line_that_is_no_plain_field_is_refused(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structs, "SOURCES", tmp_path)
    (tmp_path / "one.cuh").write_text(f"struct One {{\n  int m;\n  {line}\n}};\n")
    with pytest.raises(RuntimeError, match="of plain fields"):
        structs.declared("one.cuh", "One")


def test_a_struct_that_is_not_there_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"work\.cuh declares no struct Nothing"):
        structs.declared("common/work.cuh", "Nothing")
