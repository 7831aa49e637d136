"""A whole safetensors body taken apart at once, by the pieces that the service calls one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attnd.wire.dtypes import Array

from service.image.reading import place, read_layout, split


@dataclass(frozen=True, slots=True)
class Message:
    """A body's fields and tensors."""

    fields: dict[str, Any]
    tensors: dict[str, Array]


def read_safetensors(body: bytes | memoryview) -> Message:
    """Fields and tensors of one body; raises `MalformedBody`, never anything else."""
    header, start = split(body)
    layout = read_layout(header, len(body) - start)
    return Message(layout.fields, place(body, start, layout))
