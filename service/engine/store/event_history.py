"""What became of cached pages lately: numbered events of each namespace, as many as are kept."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

import numpy as np

from service.core.prefix.changes import Change, Cleared, Removed, Stored
from service.core.prefix.keys import KEY_BYTES

TOKENS_AN_EVENT: Final = 2048
PAGES_AN_EVENT: Final = 128
"""More are told by several events, so that each is soon written and read."""
EVENT_BYTES: Final = 256
PAGE_BYTES: Final = 2 * KEY_BYTES + 3
TOKEN_BYTES: Final = 8
"""About what an event, a page and a token take as JSON."""
ANSWER_BYTES: Final = 24 * 2**10
"""About so much JSON is told at once: it takes the engine a fraction of a millisecond."""


@dataclass(slots=True, eq=False)
class Pressure:
    """The pool's pressure has changed; `free` pages are left to the namespace, and `available` ones
    with those that would be evicted for it."""

    is_high: bool
    free: int
    available: int


Event = Change | Pressure


@dataclass(slots=True)
class Past:
    """One namespace's events: the last of them has the number `newest`."""

    newest: int
    events: deque[Event] = field(default_factory=deque)
    weight: int = 0
    has_forgotten: bool = False

    def add(self, event: Event, weight: int, most: int) -> None:
        self.events.append(event)
        self.newest += 1
        self.weight += weight
        while self.weight > most:
            self.weight -= weight_of(self.events.popleft())
            self.has_forgotten = True


class EventHistory:
    """Listens to the changes of the cache. Numbers begin with the microseconds at the start, so
    that one from before a restart is too old."""

    __slots__ = ("_begin", "_most_pages", "_page_size", "_pages_an_event", "_pasts", "is_high")

    def __init__(self, page_size: int, most_pages: int) -> None:
        """`most_pages` are kept for each namespace; with 0, none."""
        self._page_size = page_size
        self._pages_an_event = max(1, min(PAGES_AN_EVENT, TOKENS_AN_EVENT // page_size))
        self._most_pages = most_pages
        self._begin = time.time_ns() // 1000
        self._pasts: dict[str, Past] = {}
        self.is_high = False
        """The pressure that was told last."""

    @property
    def is_kept(self) -> bool:
        return self._most_pages > 0

    def hear(self, change: Change) -> None:
        """Keep a change, which is made ready to be read only when somebody reads."""
        past = self._pasts.get(change.namespace) or self._begun(change.namespace)
        weight = weight_of(change)
        if weight <= self._pages_an_event:
            past.add(change, weight, self._most_pages)
            return
        for part in parts_of(change, self._pages_an_event):
            past.add(part, weight_of(part), self._most_pages)

    def press(self, is_high: bool, left: dict[str, tuple[int, int]]) -> None:
        """Tell all namespaces, by the pages free and available to each, that the pressure has
        changed."""
        self.is_high = is_high
        if self.is_kept:
            for namespace, pages in left.items():
                past = self._pasts.get(namespace) or self._begun(namespace)
                past.add(Pressure(is_high, *pages), 1, self._most_pages)

    def page(
        self, namespace: str, after: int, limit: int
    ) -> tuple[list[dict[str, Any]], int, bool]:
        """Up to `limit` events after a number, where to go on, and whether some are forgotten."""
        past = self._pasts.get(namespace) or Past(self._begin)
        if after < 0:
            return [], past.newest, False
        before_first = past.newest - len(past.events)
        too_old = past.has_forgotten if after == 0 else not before_first <= after <= past.newest
        start = before_first if too_old else max(after, before_first)
        told: list[dict[str, Any]] = []
        size = 0
        for event in islice(past.events, start - before_first, None):
            size += num_bytes(event)
            if told and (size > ANSWER_BYTES or len(told) == limit):
                break
            number = start + len(told) + 1
            told.append({"id": number, "namespace": namespace} | fields(event, self._page_size))
        return told, start + len(told), too_old

    def _begun(self, namespace: str) -> Past:
        past = self._pasts[namespace] = Past(self._begin)
        return past


def weight_of(event: Event) -> int:
    """What it counts for in a history: its pages, or 1 where it tells of none."""
    match event:
        case Stored() | Removed():
            return len(event.keys) // KEY_BYTES
        case _:
            return 1


def parts_of(change: Change, pages: int) -> Iterator[Change]:
    """A change of many pages as several, of up to `pages` each."""
    match change:
        case Stored():
            keys = cut(change.keys, pages * KEY_BYTES)
            before = [change.parent_key, *(part[-KEY_BYTES:] for part in keys[:-1])]
            ids: list[bytes] | list[None] = [None] * len(keys)
            if change.token_ids is not None:
                ids = cut(change.token_ids, pages * len(change.token_ids) // weight_of(change))
            for part, parent, some in zip(keys, before, ids, strict=True):
                yield Stored(change.namespace, part, parent, some)
        case Removed():
            for part in cut(change.keys, pages * KEY_BYTES):
                yield Removed(change.namespace, part)
        case Cleared():
            yield change


def cut(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


def fields(event: Event, page_size: int) -> dict[str, Any]:
    """An event as it is told."""
    match event:
        case Stored():
            told = {"page_keys": hex_keys(event.keys), "parent_key": event.parent_key.hex()}
            if event.token_ids is not None:
                told["token_ids"] = np.frombuffer(event.token_ids, np.uint32).tolist()
            return {"type": "stored"} | told | {"page_size": page_size}
        case Removed():
            return {"type": "removed", "page_keys": hex_keys(event.keys)}
        case Cleared():
            return {"type": "cleared"}
        case Pressure():
            left = {"free": event.free, "available": event.available}
            return {"type": "pressure", "is_high": event.is_high} | left


def num_bytes(event: Event) -> int:
    """About what it takes as JSON."""
    size = EVENT_BYTES + PAGE_BYTES * weight_of(event)
    if isinstance(event, Stored) and event.token_ids is not None:
        size += TOKEN_BYTES * len(event.token_ids) // 4
    return size


def hex_keys(keys: bytes) -> list[str]:
    return [key.hex() for key in cut(keys, KEY_BYTES)]
