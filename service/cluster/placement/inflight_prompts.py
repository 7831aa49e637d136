"""Prompts that are being computed: one that begins alike waits until their pages are cached, rather
than have an engine compute them again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from service.cluster.membership.engine import Call
from service.operations.rows import APPEND
from service.operations.schema.spec import Operation

LONGEST_S: Final = 5.0
"""No prompt counts as under way for longer."""
VAIN_S: Final = 60.0
MOST_VAIN: Final = 4
"""Where so many prompts in a row were waited for in vain, as their callers commit late or never,
nobody of that namespace waits again for `VAIN_S`."""


@dataclass(slots=True, eq=False)
class Underway:
    """A prompt from its placing until its pages are cached, or never will be."""

    is_begun: bool = False
    """Rows of it have come: before that, its caller may be about to make other sequences first."""
    num_calls: int = 0
    """Those that bring rows of it now."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True)
class Wait:
    """What a prompt that begins like another should wait for, and for how long."""

    underway: Underway
    most_s: float


class Prompts:
    """Those of one door that are under way, by namespace and id of their sequences."""

    __slots__ = ("by_name", "num_vain", "vain_until_s")

    def __init__(self) -> None:
        self.by_name: dict[tuple[str, str], Underway] = {}
        self.num_vain: dict[str, int] = {}
        self.vain_until_s: dict[str, float] = {}

    def begin(self, space: str, name: str, underway: Underway) -> None:
        """The sequence is made that the prompt is for."""
        self.by_name[space, name] = underway
        asyncio.get_running_loop().call_later(LONGEST_S, self.give_up, space, name, underway)

    def give_up(self, space: str, name: str, underway: Underway) -> None:
        """That was long ago."""
        if self.by_name.get((space, name)) is underway:
            self.end(space, (name,))

    def end(self, space: str, names: Iterable[str]) -> None:
        """These sequences have been committed, or are gone."""
        for name in names:
            if (underway := self.by_name.pop((space, name), None)) is not None:
                underway.ended.set()

    def computed_by(self, operation: Operation, space: str, names: Iterable[str]) -> list[Underway]:
        """The prompts of which a call brings rows; `num_calls` of each is to be taken back when it
        is over."""
        if not (self.by_name and (operation is APPEND or operation.appended_with)):
            return []
        found = [one for name in names if (one := self.by_name.get((space, name))) is not None]
        for one in found:
            one.is_begun = True
            one.num_calls += 1
        return found

    def was_vain(self, space: str) -> None:
        """A prompt is not being computed any more, and was not committed in time."""
        self.num_vain[space] = self.num_vain.get(space, 0) + 1
        if self.num_vain[space] >= MOST_VAIN:
            del self.num_vain[space]
            self.vain_until_s[space] = time.monotonic() + VAIN_S

    async def wait(self, call: Call, waits: Sequence[Wait]) -> None:
        """Until all have ended that have begun, or for as long as that is worth it; half of the
        call's deadline at most, which has so much less left then."""
        space, begun = call.tenant.namespace, time.monotonic()
        longest_s = min(LONGEST_S, 0.5e-6 * call.deadline_us or LONGEST_S)
        for wait in waits:
            underway, now = wait.underway, time.monotonic()
            left_s = begun + min(wait.most_s, longest_s) - now
            is_vain = left_s <= 0.0 or now < self.vain_until_s.get(space, 0.0)
            if is_vain or not underway.is_begun or underway.ended.is_set():
                continue
            try:
                async with asyncio.timeout(left_s):
                    await underway.ended.wait()
            except TimeoutError:
                if not underway.num_calls:
                    self.was_vain(space)
            else:
                self.num_vain.pop(space, None)
        if call.deadline_us and waits:
            call.deadline_us -= int(1e6 * (time.monotonic() - begun))
            call.deadline_us = max(1, call.deadline_us)
