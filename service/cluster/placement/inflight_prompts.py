"""Prompts that are being computed. A prompt that begins alike waits until their pages are cached,
so that an engine does not compute them twice."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from service.cluster.membership.engine import DoorCall
from service.operations.rows import APPEND
from service.operations.schema.spec import Operation

MAX_INFLIGHT_S: Final = 5.0
"""Maximum time that a prompt counts as in flight."""
NO_WAIT_S: Final = 60.0
MAX_FRUITLESS: Final = 4
"""After this many fruitless waits in a row, a namespace's prompts do not wait for `NO_WAIT_S`: its
callers commit late or never."""


@dataclass(slots=True, eq=False)
class InflightPrompt:
    """A prompt from its placement until its pages are cached, or never will be."""

    is_begun: bool = False
    """Rows of it have come; before that, its caller may make other sequences first."""
    num_calls: int = 0
    """Calls with rows of it, now."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True)
class Wait:
    """An earlier prompt with the same beginning to wait for, and the limit in seconds."""

    prompt: InflightPrompt
    most_s: float


class InflightPrompts:
    """The inflight prompts of one door, by namespace and id of their sequences."""

    __slots__ = ("by_name", "no_wait_until_s", "num_fruitless")

    def __init__(self) -> None:
        self.by_name: dict[tuple[str, str], InflightPrompt] = {}
        self.num_fruitless: dict[str, int] = {}
        self.no_wait_until_s: dict[str, float] = {}

    def begin(self, space: str, name: str, prompt: InflightPrompt) -> None:
        """The prompt's sequence exists."""
        self.by_name[space, name] = prompt
        asyncio.get_running_loop().call_later(MAX_INFLIGHT_S, self.expire, space, name, prompt)

    def expire(self, space: str, name: str, prompt: InflightPrompt) -> None:
        if self.by_name.get((space, name)) is prompt:
            self.end(space, (name,))

    def end(self, space: str, names: Iterable[str]) -> None:
        """These sequences have been committed or deleted."""
        for name in names:
            if (prompt := self.by_name.pop((space, name), None)) is not None:
                prompt.ended.set()

    def computed_by(
        self, operation: Operation, space: str, names: Iterable[str]
    ) -> list[InflightPrompt]:
        """The prompts of which a call has rows. Their `num_calls` must be decreased after it."""
        if not (self.by_name and (operation is APPEND or operation.appended_with)):
            return []
        found = [one for name in names if (one := self.by_name.get((space, name))) is not None]
        for one in found:
            one.is_begun = True
            one.num_calls += 1
        return found

    def count_fruitless(self, space: str) -> None:
        """A prompt was waited for that is neither computed any more nor committed."""
        self.num_fruitless[space] = self.num_fruitless.get(space, 0) + 1
        if self.num_fruitless[space] >= MAX_FRUITLESS:
            del self.num_fruitless[space]
            self.no_wait_until_s[space] = time.monotonic() + NO_WAIT_S

    async def wait(self, call: DoorCall, waits: Sequence[Wait]) -> None:
        """Waits until these prompts have ended, within their limits and half of the call's
        deadline, which is shortened by the wait."""
        space, begun = call.tenant.namespace, time.monotonic()
        longest_s = min(MAX_INFLIGHT_S, 0.5e-6 * call.deadline_us or MAX_INFLIGHT_S)
        for wait in waits:
            prompt, now = wait.prompt, time.monotonic()
            left_s = begun + min(wait.most_s, longest_s) - now
            may_wait = left_s > 0.0 and now >= self.no_wait_until_s.get(space, 0.0)
            if not may_wait or not prompt.is_begun or prompt.ended.is_set():
                continue
            try:
                async with asyncio.timeout(left_s):
                    await prompt.ended.wait()
            except TimeoutError:
                if not prompt.num_calls:
                    self.count_fruitless(space)
            else:
                self.num_fruitless.pop(space, None)
        if call.deadline_us and waits:
            waited_us = int(1e6 * (time.monotonic() - begun))
            call.deadline_us = max(1, call.deadline_us - waited_us)
