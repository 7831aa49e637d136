"""Whole images taken apart and made at once, by the pieces that the service calls one by one."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from attnd.wire.dtypes import Array

from service.image.reading import place, read_layout, split
from service.image.writing import image


@dataclass(frozen=True, slots=True)
class Image:
    """An image's fields and tensors."""

    fields: dict[str, Any]
    tensors: dict[str, Array]


def read_image(body: bytes | memoryview, key: str = "request") -> Image:
    """Raises `MalformedBody`, never anything else."""
    header, start = split(body)
    layout = read_layout(header, len(body) - start, key)
    return Image(layout.fields, place(body, start, layout))


def write_image(fields: Any, tensors: Mapping[str, Array] = {}, key: str = "request") -> bytes:
    return b"".join(image(key, json.dumps(fields), tensors))


def pack(header: Any, data: bytes = b"") -> bytes:
    """An image with any header, right or wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(shape: Any = (2,), begin: Any = 0, end: Any = 8, dtype: Any = "F32") -> dict[str, Any]:
    """One tensor of a header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
