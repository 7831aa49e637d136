"""What a namespace has cached, by the engines that have it, as their events tell and as it has been
placed since; and the cluster's own events, made of theirs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, Final

from service.cluster.placement.inflight_prompts import Underway
from service.core.prefix.keys import Prefix, root_key

MOST_EVENTS: Final = 16_384
PAGES_AN_EVENT: Final = 128
EXPECTED_S: Final = 5.0
"""How long pages are expected where their prompt was placed: their events come later, once they are
committed, and prompts that begin alike come together."""
EXPECTED_PAGES: Final = 512
"""Of one prompt, from the first that is not known on: naming them takes time."""
MOST_EXPECTED: Final = 2**16
Event = dict[str, Any]
Expected = tuple[str, float, Underway | None]
"""The engine that a page is to come to, until when that is believed, and what it comes with."""
NOBODY: Final[frozenset[str]] = frozenset()
NOT_EXPECTED: Final[Expected] = ("", 0.0, None)


class Prefixes:
    """Page keys of one namespace, and the tags of the engines that have them."""

    __slots__ = ("engines_with", "expected", "log")

    def __init__(self) -> None:
        self.engines_with: dict[str, frozenset[str]] = {}
        self.expected: dict[str, Expected] = {}
        """The oldest first."""
        self.log = EventLog()

    def take(self, tag: str, event: Event) -> None:
        """An event of an engine, as the operation `events` tells it. The cluster's event follows
        when no engine had a page before, or none has it any more."""
        match event["type"]:
            case "stored":
                keys = event["page_keys"]
                is_news = any(key not in self.engines_with for key in keys)
                for key in keys:
                    there = self.engines_with.get(key, NOBODY)
                    self.engines_with[key] = together(there | {tag})
                    self.met(tag, key)
                if is_news:
                    self.log.add(event)
            case "removed":
                self.drop(tag, event["page_keys"], event["namespace"])
            case "cleared":
                self.forget(tag, event["namespace"])

    def forget(self, tag: str, namespace: str) -> None:
        """An engine has nothing any more, or what it has must be learned anew."""
        self.drop(tag, [key for key, tags in self.engines_with.items() if tag in tags], namespace)

    def drop(self, tag: str, keys: Iterable[str], namespace: str) -> None:
        gone: list[str] = []
        for key in keys:
            self.met(tag, key)
            left = self.engines_with.get(key, NOBODY) - {tag}
            if left:
                self.engines_with[key] = together(left)
            elif self.engines_with.pop(key, None) is not None:
                gone.append(key)
        for first in range(0, len(gone), PAGES_AN_EVENT):
            some = gone[first : first + PAGES_AN_EVENT]
            self.log.add({"type": "removed", "namespace": namespace, "page_keys": some})

    def expect(
        self, tag: str, keys: Iterable[bytes], now: float, underway: Underway | None = None
    ) -> None:
        """A prompt with these pages was placed on an engine; they come with what is `underway`."""
        expected = self.expected
        for key in islice(keys, EXPECTED_PAGES):
            name = key.hex()
            expected.pop(name, None)
            expected[name] = tag, now + EXPECTED_S, underway
        while expected:
            oldest = next(iter(expected))
            if len(expected) <= MOST_EXPECTED and expected[oldest][1] > now:
                break
            del expected[oldest]

    def met(self, tag: str, key: str) -> None:
        """An engine has told what became of a page: that is known better from now on."""
        if key in self.expected and self.expected[key][0] == tag:
            del self.expected[key]

    def matched(self, keys: Iterable[bytes], now: float = 0.0) -> dict[str, int]:
        """How many pages of a chain each engine has, or is to have, from its first page on. No more
        keys are asked for than somebody has."""
        found: dict[str, int] = {}
        left: frozenset[str] | None = None
        for count, key in enumerate(keys, 1):
            tags = self.tags(key.hex(), now)
            left = tags if left is None or left is tags else left & tags
            if not left:
                break
            for tag in left:
                found[tag] = count
        return found

    def awaited(self, tag: str, keys: Sequence[bytes]) -> tuple[int, Underway | None]:
        """How many of a chain's first pages an engine has already, of those that it has or is to
        have, and what the next one comes with."""
        if not self.expected:
            return len(keys), None
        count = len(keys)
        while count and tag not in self.engines_with.get(keys[count - 1].hex(), NOBODY):
            count -= 1
        if count == len(keys):
            return count, None
        return count, self.expected.get(keys[count].hex(), NOT_EXPECTED)[2]

    def tags(self, key: str, now: float) -> frozenset[str]:
        """The engines of one page."""
        there = self.engines_with.get(key, NOBODY)
        if not self.expected:
            return there
        tag, until, _ = self.expected.get(key, NOT_EXPECTED)
        return there | {tag} if until > now and tag not in there else there


@lru_cache(maxsize=4096)
def together(tags: frozenset[str]) -> frozenset[str]:
    """The one set of these tags that all pages share: millions of pages are on few engines."""
    return tags


class EventLog:
    """Events with numbers that begin at the microseconds of the start, so that one from another
    door, or from before a restart, is too old."""

    __slots__ = ("begin", "events", "most", "newest")

    def __init__(self, most: int = MOST_EVENTS) -> None:
        self.begin = self.newest = time.time_ns() // 1000
        self.most = most
        self.events: deque[Event] = deque()

    def add(self, event: Event) -> None:
        self.newest += 1
        self.events.append(event | {"id": self.newest})
        if len(self.events) > self.most:
            self.events.popleft()

    def page(self, after: int, limit: int) -> Event:
        """Up to `limit` events after a number, where to go on, and whether some are forgotten."""
        if after < 0:
            return {"events": [], "next": self.newest, "too_old": False}
        first = self.newest - len(self.events)
        forgotten = first > self.begin
        too_old = forgotten if after == 0 else not first <= after <= self.newest
        start = first if too_old else max(after, first)
        told = list(islice(self.events, start - first, start - first + limit))
        return {"events": told, "next": start + len(told), "too_old": too_old}


def chained_keys(prefix: Prefix, namespace: str, page_size: int) -> Iterator[bytes]:
    """The keys of a prompt's full pages, one after another."""
    return prefix.chain(root_key(namespace, prefix.cache_salt), page_size)
