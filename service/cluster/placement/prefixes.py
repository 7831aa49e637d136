"""The cached pages of a namespace by engine, from the engines' events and recent placements; and
the cluster's own events, made from the engines'."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, Final

import numpy as np
from attnd.wire.dtypes import Array

from service.cluster.placement.inflight_prompts import InflightPrompt
from service.core.prefix.keys import Prefix, as_keys, root_key
from service.core.prefix.named_pages import POOL
from service.image.json_pieces import Pieces

MAX_LOGGED: Final = 16_384
"""Pages of a namespace for which a door keeps events: as many as an engine does by default."""
PAGES_PER_EVENT: Final = 128
EXPECTED_S: Final = 5.0
"""For how long pages are expected where their prompt was placed. Prompts that begin alike often
come together, before the first is committed and its events arrive."""
EXPECTED_PAGES: Final = 512
"""Maximum number of expected pages per prompt, from the first unknown one: keys take time."""
MAX_EXPECTED: Final = 2**16
KEYS_PER_PIECE: Final = 1024
"""Keys that are computed and looked up in one piece of a match: 3 ms."""
Event = dict[str, Any]
Expected = tuple[str, float, InflightPrompt | None]
"""The tag of a page's future engine, until when it is expected, and the prompt that brings it."""
NO_TAGS: Final[frozenset[str]] = frozenset()
NOT_EXPECTED: Final[Expected] = ("", 0.0, None)


class Prefixes:
    """The tags of the engines that have each page of one namespace."""

    __slots__ = ("below", "engines_with", "expected", "log")

    def __init__(self) -> None:
        self.engines_with: dict[str, frozenset[str]] = {}
        """In their pools."""
        self.below: dict[str, dict[str, frozenset[str]]] = {"CPU": {}, "DISK": {}}
        """In their lower tiers, by medium."""
        self.expected: dict[str, Expected] = {}
        """The oldest first."""
        self.log = EventLog()

    def add(self, tag: str, event: Event) -> None:
        """Adds an event of an engine. The cluster has an event of its own where no engine had a
        page in its pool before, or none has it there any more."""
        if (below := self.below.get(event.get("medium", POOL))) is not None:
            for key in event["page_keys"]:
                tags = below.get(key, NO_TAGS)
                left = tags | {tag} if event["type"] == "stored" else tags - {tag}
                if left:
                    below[key] = shared_set(left)
                else:
                    below.pop(key, None)
            return
        match event["type"]:
            case "stored":
                keys = event["page_keys"]
                is_news = any(key not in self.engines_with for key in keys)
                for key in keys:
                    there = self.engines_with.get(key, NO_TAGS)
                    self.engines_with[key] = shared_set(there | {tag})
                    self.expected_no_more(tag, key)
                if is_news:
                    self.log.add(event)
            case "removed":
                self.remove(tag, event["page_keys"], event["namespace"])
            case "cleared":
                self.forget(tag, event["namespace"])

    def forget(self, tag: str, namespace: str) -> None:
        """Removes all pages of an engine, which has lost them or will list them again."""
        before = self.engines_with
        for key in [key for key, one in self.expected.items() if one[0] == tag]:
            if tag in before.get(key, NO_TAGS):
                del self.expected[key]
        self.engines_with = without(tag, before)
        if len(self.engines_with) < len(before):
            self.log_removed([key for key in before if key not in self.engines_with], namespace)
        self.below = {medium: without(tag, there) for medium, there in self.below.items()}

    def remove(self, tag: str, keys: Iterable[str], namespace: str) -> None:
        removed: list[str] = []
        for key in keys:
            self.expected_no_more(tag, key)
            left = self.engines_with.get(key, NO_TAGS) - {tag}
            if left:
                self.engines_with[key] = shared_set(left)
            elif self.engines_with.pop(key, None) is not None:
                removed.append(key)
        self.log_removed(removed, namespace)

    def log_removed(self, removed: Sequence[str], namespace: str) -> None:
        """No engine has these pages in its pool any more."""
        for first in range(0, len(removed), PAGES_PER_EVENT):
            some = removed[first : first + PAGES_PER_EVENT]
            event = {"type": "removed", "namespace": namespace, "page_keys": some}
            self.log.add(event | {"medium": POOL})

    def expect(
        self, tag: str, keys: Iterable[bytes], now: float, prompt: InflightPrompt | None = None
    ) -> None:
        """A prompt with these pages was placed on an engine."""
        expected = self.expected
        for key in islice(keys, EXPECTED_PAGES):
            name = key.hex()
            expected.pop(name, None)
            expected[name] = tag, now + EXPECTED_S, prompt
        while expected:
            oldest = next(iter(expected))
            if len(expected) <= MAX_EXPECTED and expected[oldest][1] > now:
                break
            del expected[oldest]

    def expected_no_more(self, tag: str, key: str) -> None:
        """An event of the engine has replaced the expectation."""
        if key in self.expected and self.expected[key][0] == tag:
            del self.expected[key]

    def matched(
        self, keys: Iterable[bytes], now: float = 0.0
    ) -> Pieces[tuple[dict[str, int], Counter[str]]]:
        """In pieces: the number of a chain's first pages that each engine has in any tier, or is
        expected to have, and how many of them are not in its pool. Reads no more keys than some
        engine has."""
        found: dict[str, int] = {}
        loaded: Counter[str] = Counter()
        left: frozenset[str] | None = None
        for count, key in enumerate(keys, 1):
            name = key.hex()
            pool = tags = self.tags(name, now)
            for there in self.below.values():
                if name in there:
                    tags = tags | there[name]
            left = tags if left is None or left is tags else left & tags
            if not left:
                break
            for tag in left:
                found[tag] = count
            if tags is not pool:
                loaded.update(left - pool)
            if count % KEYS_PER_PIECE == 0:
                yield
        return found, loaded

    def awaited(self, tag: str, keys: Sequence[bytes]) -> tuple[int, InflightPrompt | None]:
        """Of a chain that an engine has or is expected to have: the number of first pages that it
        has, and the prompt that brings the next one."""
        if not self.expected:
            return len(keys), None
        count = len(keys)
        media = (self.engines_with, *self.below.values())
        while count and all(tag not in one.get(keys[count - 1].hex(), NO_TAGS) for one in media):
            count -= 1
        if count == len(keys):
            return count, None
        return count, self.expected.get(keys[count].hex(), NOT_EXPECTED)[2]

    def tags(self, key: str, now: float) -> frozenset[str]:
        there = self.engines_with.get(key, NO_TAGS)
        if not self.expected:
            return there
        tag, until, _ = self.expected.get(key, NOT_EXPECTED)
        return there | {tag} if until > now and tag not in there else there


def without(tag: str, there: Mapping[str, frozenset[str]]) -> dict[str, frozenset[str]]:
    """The pages that other engines have: half a second for a million."""
    left = {tags: shared_set(tags - {tag}) for tags in set(there.values())}
    return {key: others for key, tags in there.items() if (others := left[tags])}


@lru_cache(maxsize=4096)
def shared_set(tags: frozenset[str]) -> frozenset[str]:
    """The same object for equal sets: millions of pages are on few engines."""
    return tags


class EventLog:
    """Events numbered from the microseconds of the start, so that a number from another door, or
    from before a restart, is too old."""

    def __init__(self, most_pages: int = MAX_LOGGED) -> None:
        self.begin = self.newest = time.time_ns() // 1000
        self.events: deque[Event] = deque()
        self.most_pages = most_pages
        self.num_pages = 0

    def add(self, event: Event) -> None:
        self.newest += 1
        self.events.append(event | {"id": self.newest})
        self.num_pages += len(event["page_keys"])
        while self.num_pages > self.most_pages:
            self.num_pages -= len(self.events.popleft()["page_keys"])

    def page(self, after: int, limit: int) -> Event:
        """Up to `limit` events after a number, the number to continue after, and whether events in
        between were dropped."""
        if after < 0:
            return {"events": [], "next": self.newest, "too_old": False}
        first = self.newest - len(self.events)
        has_dropped = first > self.begin
        too_old = has_dropped if after == 0 else not first <= after <= self.newest
        start = first if too_old else max(after, first)
        events = list(islice(self.events, start - first, start - first + limit))
        return {"events": events, "next": start + len(events), "too_old": too_old}


def chained_keys(prefix: Prefix, namespace: str, page_size: int) -> Iterator[bytes]:
    """The keys of a prompt's full pages."""
    return prefix.chain(root_key(namespace, prefix.cache_salt), page_size)


def prefix_of(names: Any, rows: Mapping[str, Array]) -> Prefix | None:
    """The prefix of `names` (`PageNames`), whose ids or keys may be in tensors."""
    if names is None:
        return None
    ids = rows.get("token_ids", names.ids_array)
    keys = rows.get("page_keys", names.keys_array)
    raw = None if keys is None else as_keys(np.ascontiguousarray(keys).tobytes())
    return Prefix(ids, raw, names.cache_salt)
