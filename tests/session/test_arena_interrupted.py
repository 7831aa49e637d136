"""Slots of a session's arena whose bookkeeping is interrupted anywhere: no byte has two owners."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from attnd.road.arena import Slot, Slots

SIZE = 1 << 16
LINES = 400
"""More than the work has."""


def interrupted(work: Callable[[], None], line: int) -> bool:
    """Raises KeyboardInterrupt before a line of the bookkeeping; whether there was such a line."""
    left = line

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.endswith(("road/arena.py", "wire/slots.py")):
            return None
        if event == "line":
            left -= 1
            if left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    return left <= 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_any_line_gives_no_byte_to_two_owners() -> None:
    for line in range(1, LINES):
        slots, kept = Slots(SIZE), list[Slot]()

        def work(slots: Slots = slots, kept: list[Slot] = kept) -> None:
            for _ in range(6):
                kept.append(slots.take(4096))  # type: ignore[arg-type]
            for at in (1, 3, 4):
                kept[at].free()
            kept[0].trim(64)
            for size in (64, 8192, 4096, 128):
                kept.append(slots.take(size))  # type: ignore[arg-type]
            slots.extend(kept[-1], 256)
            kept[2].free()
            kept.append(slots.take(1 << 14))  # type: ignore[arg-type]

        was_there = interrupted(work, line)
        while slots.returned:
            slots._collect()
        free = slots.stretches
        assert len(free.begins) == len(free.lengths)
        owned = [(slot.offset, slot.size) for slot in kept if slot.size]
        last = 0
        for begin, length in sorted([*owned, *zip(free.begins, free.lengths, strict=True)]):
            assert begin >= last, f"line {line}: byte {begin} has two owners"
            last = begin + length
        assert last <= SIZE
        if not was_there:
            return
    raise AssertionError("the work has more lines")
