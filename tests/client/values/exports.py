"""An export to write into files: a header, and parts whose arrays and digests all differ."""

from __future__ import annotations

import io

import numpy as np
from attnd import ExportHeader, ExportPart
from attnd.export_file import write_header, write_part

HEADER = ExportHeader(
    {"num_parts": 3, "part_bytes": 64, "generation": "0" * 32, "cache_salt": ""},
    "a" * 64,
    {"token_ids": np.arange(8, dtype=np.uint32)},
)


def parts(header: ExportHeader = HEADER) -> list[ExportPart]:
    before, made = header.digest, []
    for number in range(header.num_parts):
        k = np.full((2, 1, 4), number, np.float16)
        made.append(ExportPart(number, before, f"{number:064x}", k, k + 1))
        before = made[-1].digest
    return made


def written(header: ExportHeader = HEADER) -> bytes:
    """The whole file."""
    file = io.BytesIO()
    write_header(file, header)
    for part in parts(header):
        write_part(file, part)
    return file.getvalue()
