"""Pinned memory between pageable arrays and the device: its layout and copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kernels.cuda.device.transfer import ALIGNMENT, aligned


class Span(NamedTuple):
    """Bytes on the device. `number` counts all tensors of a call: neighbours differ by 1."""

    number: int
    begin: int
    size: int


@dataclass(slots=True)
class Copy:
    """Bytes that one copy takes: where they begin on the device and in the staging memory."""

    begin: int
    offset: int
    size: int


class Staged(NamedTuple):
    """Where each span begins in the staging memory, its copies, and its size."""

    offsets: list[int]
    copies: list[Copy]
    size: int


def stage(spans: Sequence[Span]) -> Staged:
    """Lay spans out for as few copies as can be: neighbours with nothing but padding between them
    keep their distance, and go together."""
    offsets: list[int] = []
    copies: list[Copy] = []
    last, end = None, 0
    for span in spans:
        gap = ALIGNMENT
        if last is not None and span.number == last.number + 1:
            gap = span.begin - last.begin - last.size
        if 0 <= gap < ALIGNMENT:
            copy = copies[-1]
            copy.size += gap + span.size
        else:
            copy = Copy(span.begin, aligned(end), span.size)
            copies.append(copy)
        end = copy.offset + copy.size
        offsets.append(end - span.size)
        last = span
    return Staged(offsets, copies, end)
