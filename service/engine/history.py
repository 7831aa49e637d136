"""What became of cached pages lately: numbered events of each namespace, as many as are kept."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

import numpy as np

from service.core.changes import Change, Changes, Cleared, Removed
from service.core.keys import KEY_BYTES

TOKENS_AN_EVENT: Final = 2048
PAGES_AN_EVENT: Final = 128
"""More are told by several events, so that each is soon written and read."""
EVENT_BYTES: Final = 256
PAGE_BYTES: Final = 2 * KEY_BYTES + 3
TOKEN_BYTES: Final = 8
"""About what an event, a page and a token take as JSON."""
ANSWER_BYTES: Final = 24 * 2**10
"""About so much JSON is told at once: it takes the engine a fraction of a millisecond."""


@dataclass(frozen=True, slots=True, eq=False)
class Event:
    """Keys and ids as bytes of their own: what they came in may be much larger."""

    type: str
    keys: bytes = b""
    parent: bytes = b""
    ids: bytes | None = None
    is_high: bool = False
    free: int = 0

    @property
    def num_pages(self) -> int:
        return len(self.keys) // KEY_BYTES

    @property
    def weight(self) -> int:
        """What it counts for in the history."""
        return max(1, self.num_pages)

    @property
    def num_bytes(self) -> int:
        """About what it takes as JSON."""
        num_ids = len(self.ids or b"") // 4
        return EVENT_BYTES + PAGE_BYTES * self.num_pages + TOKEN_BYTES * num_ids

    def fields(self, page_size: int) -> dict[str, Any]:
        match self.type:
            case "stored":
                told = {"page_keys": hex_keys(self.keys), "parent_key": self.parent.hex()}
                if self.ids is not None:
                    told["token_ids"] = np.frombuffer(self.ids, np.uint32).tolist()
                return told | {"page_size": page_size}
            case "removed":
                return {"page_keys": hex_keys(self.keys)}
            case "pressure":
                return {"is_high": self.is_high, "free": self.free}
            case _:
                return {}


@dataclass(slots=True)
class Past:
    """One namespace's events: the last of them has the number `newest`."""

    newest: int
    events: deque[Event] = field(default_factory=deque)
    weight: int = 0
    has_forgotten: bool = False

    def add(self, event: Event, most: int) -> None:
        self.events.append(event)
        self.newest += 1
        self.weight += event.weight
        while self.weight > most:
            self.weight -= self.events.popleft().weight
            self.has_forgotten = True


class History:
    """Listens to the changes of the cache. Numbers begin with the microseconds at the start, so
    that one from before a restart is too old."""

    __slots__ = ("_begin", "_changes", "_most_pages", "_page_size", "_pasts", "is_high")

    def __init__(self, changes: Changes, page_size: int, most_pages: int) -> None:
        """`most_pages` are kept for each namespace; with 0 nobody listens."""
        changes.listened = most_pages > 0
        self._changes = changes
        self._page_size = page_size
        self._most_pages = most_pages
        self._begin = time.time_ns() // 1000
        self._pasts: dict[str, Past] = {}
        self.is_high = False
        """The pressure that was told last."""

    @property
    def is_kept(self) -> bool:
        return self._changes.listened

    def take(self) -> None:
        """Take in what has changed since the last time."""
        for change in self._changes.drain():
            for event in events_of(change, self._page_size):
                self._add(change.namespace, event)

    def press(self, is_high: bool, free: dict[str, int]) -> None:
        """Tell all namespaces, by what is `free` for them, that the pressure has changed."""
        self.is_high = is_high
        self.take()
        for namespace, pages in free.items():
            self._add(namespace, Event("pressure", is_high=is_high, free=pages))

    def page(
        self, namespace: str, after: int, limit: int
    ) -> tuple[list[dict[str, Any]], int, bool]:
        """Up to `limit` events after a number, where to go on, and whether some are forgotten."""
        self.take()
        past = self._pasts.get(namespace) or Past(self._begin)
        if after < 0:
            return [], past.newest, False
        before_first = past.newest - len(past.events)
        too_old = past.has_forgotten if after == 0 else not before_first <= after <= past.newest
        start = before_first if too_old else max(after, before_first)
        told: list[dict[str, Any]] = []
        size = 0
        for event in islice(past.events, start - before_first, None):
            size += event.num_bytes
            if told and (size > ANSWER_BYTES or len(told) == limit):
                break
            number = start + len(told) + 1
            named = {"id": number, "type": event.type, "namespace": namespace}
            told.append(named | event.fields(self._page_size))
        return told, start + len(told), too_old

    def _add(self, namespace: str, event: Event) -> None:
        if not self.is_kept:
            return
        past = self._pasts.get(namespace)
        if past is None:
            past = self._pasts[namespace] = Past(self._begin)
        past.add(event, self._most_pages)


def events_of(change: Change, page_size: int) -> Iterator[Event]:
    """A change as events that are not too long."""
    if isinstance(change, Cleared):
        yield Event("cleared")
        return
    step = max(1, min(PAGES_AN_EVENT, TOKENS_AN_EVENT // page_size))
    parent = b"" if isinstance(change, Removed) else change.parent_key
    for first in range(0, len(change.keys), step):
        keys = change.keys[first : first + step].tobytes()
        if isinstance(change, Removed):
            yield Event("removed", keys)
            continue
        ids = change.token_ids
        if ids is not None:
            ids = ids[first * page_size : (first + step) * page_size]
        yield Event("stored", keys, parent, None if ids is None else ids.tobytes())
        parent = keys[-KEY_BYTES:]


def hex_keys(keys: bytes) -> list[str]:
    return [keys[at : at + KEY_BYTES].hex() for at in range(0, len(keys), KEY_BYTES)]
