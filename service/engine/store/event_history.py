"""The history of cached pages: numbered events of each namespace, up to a number of pages."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Final

import numpy as np

from service.core.keys import KEY_BYTES, extra_keys
from service.core.pool.named_pages import WINDOW, Change, Cleared, Removed, Stored
from service.core.pool.satellites import GroupShape

TOKENS_AN_EVENT: Final = 2048
PAGES_AN_EVENT: Final = 128
"""A change of more tokens or pages becomes several events, each quick to write and to read."""
EVENT_BYTES: Final = 256
PAGE_BYTES: Final = 2 * KEY_BYTES + 3
TOKEN_BYTES: Final = 8
EXTRA_BYTES: Final = 4
"""Approximate JSON size of an event, a page, a token, and a byte of further key material."""
FULL: Final = {"attention": "full_attention", "latent": "mla_attention"}
SLIDING: Final = {"attention": "sliding_window", "latent": "sliding_window_mla"}
"""vLLM's names of a layer group's kind, without and with a window."""
ANSWER_BYTES: Final = 24 * 2**10
"""Approximate JSON size of one reply: it takes the engine a fraction of a millisecond."""


@dataclass(slots=True, eq=False)
class Pressure:
    """A change of the pool's pressure: the namespace has `free` pages left, and `available` pages
    with evictions."""

    is_high: bool
    free: int
    available: int


Event = Change | Pressure

END: Final = object()
Kept = tuple[Event, int, float]
"""An event, the pages that it takes of the history, and when it was added, in Unix seconds."""
Page = tuple[list[dict[str, Any]], int, bool]
"""Events as JSON, the number of the last one, and whether some were dropped before."""
Inventory = Callable[[str], Iterator[Stored | None]]
"""Lists a namespace's pages of one medium, in parts; None is a pause."""


@dataclass(slots=True)
class Past:
    """One namespace's events; the last one has the number `newest`.

    The events after each number of `bases` report all pages that are there now, once `restating`
    has ended, which makes those that are missing.
    """

    newest: int
    bases: deque[int]
    restating: Iterator[Stored | None] | None = None
    events: deque[Kept] = field(default_factory=deque)
    weight: int = 0

    def add(self, event: Event, weight: int, most: int) -> None:
        self.events.append((event, weight, time.time()))
        self.newest += 1
        self.weight += weight
        while self.weight > most:
            self.weight -= self.events.popleft()[1]

    @property
    def oldest(self) -> int:
        """The number before the first event that is kept."""
        return self.newest - len(self.events)

    @property
    def has_base(self) -> bool:
        """Whether the events that are kept report all pages."""
        while self.bases and self.bases[0] < self.oldest:
            self.bases.popleft()
        return bool(self.bases)


class EventHistory:
    """Listens to the changes of the cache. Numbers begin with the microseconds at the start, so
    that a number from before a restart is too old.

    A reader that missed some gets all that are kept. Where these do not report all pages, `stored`
    events of what the `inventories` list are added to the history as they are read, between the
    changes of that time. To other readers they say nothing new.
    """

    def __init__(
        self, page_size: int, most_pages: int, groups: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """Changes of `most_pages` are kept for each namespace; with 0, none. `groups`: further
        fields of events, by layer group."""
        self.groups = groups
        self.page_size = page_size
        self.pages_an_event = max(1, min(PAGES_AN_EVENT, TOKENS_AN_EVENT // page_size))
        self.most_pages = most_pages
        self._begin = time.time_ns() // 1000
        self._pasts: dict[str, Past] = {}
        self.inventories: list[Inventory] = []
        self.begins_empty = True
        """Whether there was no page before the first event."""
        self.is_high = False
        """The pressure by the last event."""

    @property
    def is_kept(self) -> bool:
        return self.most_pages > 0

    def hear(self, change: Change) -> None:
        """Keep a change; it is turned into JSON when it is read. After `Cleared` the pages that are
        left are reported again."""
        past = self._pasts.get(change.namespace) or self._begun(change.namespace)
        weight = weight_of(change)
        if weight > self.pages_an_event:
            for part in parts_of(change, self.pages_an_event):
                past.add(part, weight_of(part), self.most_pages)
            return
        past.add(change, weight, self.most_pages)
        if isinstance(change, Cleared):
            self._restate(change.namespace, past)
            past.restating = past.restating if change.has_left else None

    def press(self, is_high: bool, left: dict[str, tuple[int, int]]) -> None:
        """Add an event of changed pressure for all namespaces; `left` has the pages that are free
        and available to each."""
        self.is_high = is_high
        if self.is_kept:
            for namespace, pages in left.items():
                past = self._pasts.get(namespace) or self._begun(namespace)
                past.add(Pressure(is_high, *pages), 1, self.most_pages)

    def read(self, namespace: str, after: int, limit: int) -> Generator[None, None, Page]:
        """Up to `limit` events after a number, the number to continue after, and whether some were
        dropped; in small steps where events are made first. No events: there are no more."""
        past = self._pasts.get(namespace) or self._begun(namespace)
        if after < 0:
            return [], past.newest, False
        start = after if after and past.oldest <= after <= past.newest else past.oldest
        if start != after and not past.has_base:
            self._restate(namespace, past)
        page: list[dict[str, Any]] = []
        size = 0
        while len(page) < limit:
            if start + len(page) < past.oldest:  # too much has changed meanwhile
                if page:
                    break
                start = past.oldest
                if not past.has_base:
                    self._restate(namespace, past)
            at = start + len(page) - past.oldest
            if at < len(past.events):
                event, _, when = past.events[at]
                size += num_bytes(event)
                if page and size > ANSWER_BYTES:
                    break
                known = {"id": start + len(page) + 1, "namespace": namespace, "time": when}
                page.append(known | fields(event, self.page_size, self.groups))
            elif (restating := past.restating) is None:
                break
            else:
                made = next(restating, END)
                if isinstance(made, Stored):
                    past.add(made, 0, self.most_pages)
                    if not page:  # it is taken before it can be dropped
                        continue
                elif made is END:
                    past.restating = None
                yield
        return page, start + len(page), start != (after or self._begin)

    def _restate(self, namespace: str, past: Past) -> None:
        """Report all pages again, after what is kept now."""
        past.bases.append(past.newest)
        past.restating = chain.from_iterable(make(namespace) for make in self.inventories)

    def _begun(self, namespace: str) -> Past:
        past = self._pasts[namespace] = Past(self._begin, deque([self._begin]))
        if not self.begins_empty:
            self._restate(namespace, past)
        return past


def weight_of(event: Event) -> int:
    """Weight of an event in a history: the number of its pages, at least 1."""
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
            for at, (part, parent, some) in enumerate(zip(keys, before, ids, strict=True)):
                own = range(at * pages, (at + 1) * pages)
                extra = {n - own.start: key for n, key in (change.extra or {}).items() if n in own}
                yield replace(change, keys=part, parent_key=parent, token_ids=some, extra=extra)
        case Removed():
            for part in cut(change.keys, pages * KEY_BYTES):
                yield replace(change, keys=part)
        case Cleared():
            yield change


def cut(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


def group_fields(shapes: Sequence[GroupShape], kinds: Sequence[str]) -> list[dict[str, Any]]:
    """For each layer group the fields of its events, by vLLM's names; `kinds` are the groups'."""
    found = []
    for at, (shape, kind) in enumerate(zip(shapes, kinds, strict=True)):
        own: dict[str, Any] = {"group_idx": at, "kv_cache_spec_kind": FULL[kind]}
        if shape.window is not None:
            own["kv_cache_spec_kind"] = SLIDING[kind]
            own[WINDOW] = shape.window
        found.append(own)
    return found


def fields(
    event: Event, page_size: int, groups: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    match event:
        case Stored():
            pages: dict[str, Any] = {"page_keys": hex_keys(event.keys)}
            pages["parent_key"] = event.parent_key.hex()
            if event.token_ids is not None:
                pages["token_ids"] = np.frombuffer(event.token_ids, np.uint32).tolist()
            if event.extra:
                every = [event.extra.get(at, b"") for at in range(weight_of(event))]
                pages["extra_keys"] = [extra_fields(one) if one else None for one in every]
            pages |= {"page_size": page_size, "medium": event.medium}
            own = {} if event.group is None else groups[event.group]
            return {"type": "stored"} | pages | dict(own)
        case Removed():
            pages = {"page_keys": hex_keys(event.keys), "medium": event.medium}
            own = {} if event.group is None else groups[event.group]
            return {"type": "removed"} | pages | dict(own)
        case Cleared():
            return {"type": "cleared"}
        case Pressure():
            left = {"free": event.free, "available": event.available}
            return {"type": "pressure", "is_high": event.is_high} | left


def num_bytes(event: Event) -> int:
    """Approximate size of an event as JSON."""
    size = EVENT_BYTES + PAGE_BYTES * weight_of(event)
    if isinstance(event, Stored) and event.token_ids is not None:
        size += TOKEN_BYTES * len(event.token_ids) // 4
        size += EXTRA_BYTES * sum(map(len, (event.extra or {}).values()))
    return size


def extra_fields(material: bytes) -> list[dict[str, Any]]:
    return [{"first_token": at, "key": key.hex()} for at, key in extra_keys(material)]


def hex_keys(keys: bytes) -> list[str]:
    return [key.hex() for key in cut(keys, KEY_BYTES)]
