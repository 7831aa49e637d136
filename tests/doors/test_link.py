"""A door's calls to the engine: the slots of an answer that is longer than was thought."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
from attnd.wire.frames import NO_STAGES

from config.server import ServerSettings
from service.doors.kit.link import Link
from service.errors import AnswerTooLarge, Overloaded
from service.operations.table import BY_NAME
from service.road.caller_end.caller import Answered
from service.road.caller_end.slots import Slot
from service.tenants import OPEN

MIB = 2**20


@dataclass
class Caller:
    """An engine that says that the answer needs more room; it maps no more of the arena."""

    needed: list[int]
    lost: str = ""
    reach: int = MIB
    places: list[Slot] = field(default_factory=list)

    async def grow(self, size: int) -> int:
        return self.reach

    def close(self) -> None: ...

    async def call(self, *given: Any, **how: Any) -> Answered:
        self.places.append(given[3])
        return Answered(200, memoryview(b""), self.needed.pop(0), NO_STAGES)


def asked(*needed: int) -> Any:
    """A call's error, whether all slots are free at its end, and its places, when the engine needs
    these numbers of bytes."""

    async def main() -> Any:
        link: Any = Link(ServerSettings())
        link.caller = caller = Caller(list(needed))
        request = link.arena.slot(100)
        error: Exception | None = None
        try:
            _, place = await link.call(BY_NAME["gather"], request, 100, 8 * MIB, 0, b"", OPEN)
            link.arena.give_back(place)
        except (Overloaded, AnswerTooLarge) as refused:
            error = refused
        taken = [link.arena.slot(size.size) for size in caller.places]
        link.arena.give_back(request)
        for slot in taken:
            link.arena.give_back(slot)
        link.arena.spare.free()
        slots = link.arena.slots
        is_free = slots.free() == slots.size
        link.close()
        return error, is_free, [slot.offset for slot in taken]

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("needed", "kind"),
    [
        ((0,), type(None)),
        ((200_000, 0), type(None)),
        ((4 * MIB,), Overloaded),
        ((9 * MIB,), AnswerTooLarge),
        ((200_000, 4 * MIB), Overloaded),
    ],
)
def test_every_place_is_given_back_once(needed: tuple[int, ...], kind: type) -> None:
    error, is_free, offsets = asked(*needed)
    assert type(error) is kind
    assert len(set(offsets)) == len(offsets) == len(needed)
    assert is_free
