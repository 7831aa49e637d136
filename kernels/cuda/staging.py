"""Pinned memory between pageable arrays and the device: what lies where in it, by which copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kernels.cuda.transfer import ALIGNMENT, aligned


class Span(NamedTuple):
    """Bytes on the device. `number` counts all tensors of a call: neighbours differ by 1."""

    number: int
    begin: int
    size: int


@dataclass(slots=True)
class Run:
    """Bytes that one copy takes: where they begin on the device and in the staging memory."""

    begin: int
    offset: int
    size: int


class Staged(NamedTuple):
    """Where each span begins in the staging memory, its copies, and its size."""

    offsets: list[int]
    runs: list[Run]
    size: int


def stage(spans: Sequence[Span]) -> Staged:
    """Lay spans out for as few copies as can be: neighbours with nothing but padding between them
    keep their distance, and go together."""
    offsets: list[int] = []
    runs: list[Run] = []
    last, end = None, 0
    for span in spans:
        gap = ALIGNMENT
        if last is not None and span.number == last.number + 1:
            gap = span.begin - last.begin - last.size
        if 0 <= gap < ALIGNMENT:
            run = runs[-1]
            run.size += gap + span.size
        else:
            run = Run(span.begin, aligned(end), span.size)
            runs.append(run)
        end = run.offset + run.size
        offsets.append(end - span.size)
        last = span
    return Staged(offsets, runs, end)
