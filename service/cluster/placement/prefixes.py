"""The cached pages of a namespace by engine, from the engines' events and recent placements; and
the cluster's own events, made from the engines'."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final

import numpy as np
from attnd.wire.dtypes import Array

from service.cluster.placement.inflight_prompts import InflightPrompt
from service.cluster.routing.replies import run_in_background
from service.core.keys import Prefix, as_keys, extra_by_page, root_key
from service.core.pool.named_pages import POOL, WINDOW
from service.operations.schema.page_names import keys_of

MAX_LOGGED: Final = 16_384
"""Pages of a namespace for which a door keeps events: as many as an engine does by default."""
PAGES_PER_EVENT: Final = 128
EXPECTED_S: Final = 5.0
"""For how long pages are expected where their prompt was placed. Prompts that begin alike often
come together, before the first is committed and its events arrive."""
EXPECTED_PAGES: Final = 512
"""Maximum number of expected pages per prompt, from the first unknown one: keys take time."""
MAX_EXPECTED: Final = 2**16
KEYS_PER_PIECE: Final = 256
"""Keys that are computed and looked up, or freed, in one pass of the loop: 1 ms."""
Event = dict[str, Any]
Expected = tuple[str, float, InflightPrompt | None]
"""The tag of a page's future engine, until when it is expected, and the prompt that brings it."""
NOT_EXPECTED: Final[Expected] = ("", 0.0, None)


class Prefixes:
    """The pages of one namespace that each engine has."""

    __slots__ = ("expected", "log", "pages")

    def __init__(self) -> None:
        self.pages: dict[str, dict[str, set[str]]] = {POOL: {}, "CPU": {}, "DISK": {}}
        """By medium (an engine's pool and its lower tiers) and the engine's tag."""
        self.expected: dict[str, Expected] = {}
        """The oldest first."""
        self.log = EventLog()

    def add(self, tag: str, event: Event) -> None:
        """Adds an event of an engine. The cluster has an event of its own where no engine had a
        page in its pool before, or none has it there any more; none of a group with a window, whose
        pages say where a prefix can be cut, not where it is."""
        if WINDOW in event:
            return
        namespace, medium = event["namespace"], event.get("medium", POOL)
        there = self.pages[medium].setdefault(tag, set())
        match event:
            case {"type": "stored", "page_keys": keys}:
                if medium == POOL:
                    self.expected_no_more(tag, keys)
                    if not all(map(self.is_in_a_pool, keys)):
                        self.log.add(event)
                there.update(keys)
            case {"type": "removed", "page_keys": keys}:
                removed = [key for key in keys if key in there]
                there.difference_update(removed)
                if medium == POOL:
                    self.expected_no_more(tag, keys)
                    self.log_removed(removed, namespace)
            case {"type": "cleared"}:
                self.forget(tag, namespace)

    def add_again(self, event: Event) -> None:
        """Logs what an engine repeats, for readers that missed events."""
        if WINDOW in event:
            return
        keys = event.get("page_keys", ()) if event["type"] == "stored" else ()
        if event.get("medium", POOL) == POOL and any(map(self.is_in_a_pool, keys)):
            self.log.add(event, is_new=False)
            self.log_removed(keys, event["namespace"], is_new=False)  # those that are gone since

    def is_in_a_pool(self, key: str) -> bool:
        return any(key in pages for pages in self.pages[POOL].values())

    def forget(self, tag: str, namespace: str) -> None:
        """Removes all pages of an engine, which has lost them or will list them again. All but the
        first of many are freed in the background: a million takes a second."""
        lost = {medium: by_tag.pop(tag, set()) for medium, by_tag in self.pages.items()}
        found = [key for key, (of, *_) in self.expected.items() if of == tag and key in lost[POOL]]
        self.expected_no_more(tag, found)
        if any(lost.values()):
            run_in_background(self.free(lost, namespace))

    async def free(self, lost: Mapping[str, set[str]], namespace: str) -> None:
        """Frees pages that an engine has lost, by medium, and logs those of its pool."""
        for medium, pages in lost.items():
            while pages:
                some = [pages.pop() for _ in range(min(len(pages), KEYS_PER_PIECE))]
                if medium == POOL:
                    self.log_removed(some, namespace)
                await asyncio.sleep(0)

    def log_removed(self, removed: Sequence[str], namespace: str, is_new: bool = True) -> None:
        """Logs those of the pages that an engine has lost which no other has in its pool."""
        removed = [key for key in removed if not self.is_in_a_pool(key)]
        for first in range(0, len(removed), PAGES_PER_EVENT):
            some = removed[first : first + PAGES_PER_EVENT]
            event = {"type": "removed", "namespace": namespace, "page_keys": some}
            self.log.add(event | {"medium": POOL, "time": time.time()}, is_new)

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

    def expected_no_more(self, tag: str, keys: Iterable[str]) -> None:
        """Events of the engine have replaced the expectation."""
        for key in keys:
            if key in self.expected and self.expected[key][0] == tag:
                del self.expected[key]

    async def matched(
        self, keys: Iterable[bytes], now: float = 0.0
    ) -> tuple[dict[str, int], Counter[str]]:
        """The number of a chain's first pages that each engine has in any tier, or is
        expected to have, and how many of them are not in its pool. Reads no more keys than some
        engine has."""
        found: dict[str, int] = {}
        loaded: Counter[str] = Counter()
        left: set[str] | None = None
        _, *lower = self.pages.values()
        for count, key in enumerate(keys, 1):
            name = key.hex()
            tags = pool = self.tags(name, now, left)
            if any(lower):
                below = {tag for one in lower for tag, pages in one.items() if name in pages}
                tags = pool | below
            left = tags if left is None else left & tags
            if not left:
                break
            found |= dict.fromkeys(left, count)
            if tags is not pool:
                loaded.update(left - pool)
            if count % KEYS_PER_PIECE == 0:
                await asyncio.sleep(0)
        return found, loaded

    def awaited(self, tag: str, keys: Sequence[bytes]) -> tuple[int, InflightPrompt | None]:
        """Of a chain that an engine has or is expected to have: the number of first pages that it
        has, and the prompt that brings the next one."""
        if not self.expected:
            return len(keys), None
        count = len(keys)
        there = [by_tag[tag] for by_tag in self.pages.values() if tag in by_tag]
        while count and all(keys[count - 1].hex() not in pages for pages in there):
            count -= 1
        if count == len(keys):
            return count, None
        return count, self.expected.get(keys[count].hex(), NOT_EXPECTED)[2]

    def tags(self, key: str, now: float, among: Iterable[str] | None) -> set[str]:
        """The engines of these (None: of all) that have a page in their pools, or any one that is
        expected to."""
        pools = self.pages[POOL]
        there = {tag for tag in (pools if among is None else among) if key in pools.get(tag, ())}
        tag, until, _ = self.expected.get(key, NOT_EXPECTED)
        return there | {tag} if until > now else there


class EventLog:
    """Events numbered from the microseconds of the start, so that a number from another door, or
    from before a restart, is too old. Those after `base` report all pages of the engines' pools."""

    def __init__(self, most_pages: int = MAX_LOGGED) -> None:
        self.begin = self.newest = self.base = time.time_ns() // 1000
        self.events: deque[Event] = deque()
        self.weights: deque[int] = deque()
        self.most_pages = most_pages
        self.num_pages = 0
        self.restating = asyncio.Lock()

    @property
    def oldest(self) -> int:
        """The number before the first event that is kept."""
        return self.newest - len(self.events)

    def add(self, event: Event, is_new: bool = True) -> None:
        """`is_new`: not a repetition, which makes no other give way."""
        self.newest += 1
        self.events.append(event | {"id": self.newest})
        self.weights.append(len(event["page_keys"]) if is_new else 0)
        self.num_pages += self.weights[-1]
        while self.num_pages > self.most_pages:
            self.events.popleft()
            self.num_pages -= self.weights.popleft()

    def is_kept(self, after: int) -> bool:
        return after < 0 or (after > 0 and self.oldest <= after <= self.newest)

    def lacks(self, after: int) -> bool:
        """Whether a reader cannot learn of all pages from the events that are kept."""
        return not self.is_kept(after) and self.base < self.oldest

    def page(self, after: int, limit: int) -> Event:
        """Up to `limit` events after a number, the number to continue after, and whether events in
        between were dropped."""
        if after < 0:
            return {"events": [], "next": self.newest, "too_old": False}
        start = after if self.is_kept(after) else self.oldest
        events = list(islice(self.events, start - self.oldest, start - self.oldest + limit))
        too_old = start != (after or self.begin)
        return {"events": events, "next": start + len(events), "too_old": too_old}


def chained_keys(prefix: Prefix, namespace: str, page_size: int) -> Iterator[bytes]:
    """The keys of a prompt's full pages."""
    return prefix.chain(root_key(namespace, prefix.cache_salt), page_size)


def prefix_of(names: Any, rows: Mapping[str, Array], page_size: int) -> Prefix | None:
    """The prefix of `names` (`PromptNames`), whose ids or keys may be in tensors."""
    if names is None:
        return None
    ids = rows.get("token_ids", names.ids_array)
    keys = rows.get("page_keys", names.keys_array)
    raw = None if keys is None else as_keys(np.ascontiguousarray(keys).tobytes())
    extra = extra_by_page(keys_of(names.extra), page_size)
    return Prefix(ids, raw, names.cache_salt, extra=extra)
