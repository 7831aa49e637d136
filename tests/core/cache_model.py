"""Random histories of a prefix cache against a plain model: pages as objects, sequences as lists.

    python tests/core/cache_model.py --operations 1000000 --seed 1

Two namespaces use the same sequence ids, tokens, salts and keys. Whatever is read back is checked
by content: a slot holds a number that only its namespace's tokens up to there can have. A token
above `IMAGE` has the id of another one and further key material. A follower
of the events knows the cached pages at any time. Now and then the process dies and restarts empty.
"""

from __future__ import annotations

import argparse
import random
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from core_pool import check_blocks, slots_of, truncate

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from service.core import page_table
from service.core.errors import CoreError, InvalidRequest, OutOfPages, UnknownLease, UnknownPage
from service.core.keys import Prefix, as_keys, extra_by_page, root_key
from service.core.nodes import Retention
from service.core.pool.named_pages import Change, Removed, Stored
from service.core.prefix.inventory import named_in
from service.core.tree import PrefixTree
from service.core.values import NewSpec, RowCopies
from service.engine.store.event_history import EventHistory
from tests.harness.router import read_page

NUM_PAGES = 40
PAGE_SIZE = 2
NAMESPACES = ("a", "b")
SALTS = ("", "salt", "own keys")
IDS = tuple(f"s{i}" for i in range(6))
MAX_TOKENS = 13
IMAGE = 10
TOKENS = (*(1,) * 12, 2, 2, 11, 21)
EVENTS_HISTORY = 10_000
SHORT_HISTORY = 8
DEFAULT_PRIORITY = 35


@dataclass(eq=False)
class Page:
    """One page: its name when it is committed, and when it stopped being held."""

    namespace: str
    name: tuple[str, bytes] | None = None
    above: Page | None = None
    priority: int = DEFAULT_PRIORITY
    priority_ends: float = float("inf")
    lasting: int | None = DEFAULT_PRIORITY
    """The best priority given without an end."""
    soft_ends: float = -float("inf")
    used: int = 0

    def rank(self, now: float) -> int:
        return self.priority + (1000 if self.soft_ends > now else 0)


@dataclass(eq=False)
class Sequence:
    tokens: list[int]
    pages: list[Page]
    ttl_s: float | None = None
    used: float = 0.0


@dataclass(eq=False)
class Model:
    """What ought to be there. A page is held by sequences, leases and hard pins; the rest that have
    names are cached."""

    sequences: dict[str, Sequence] = field(default_factory=dict)
    names: dict[tuple[str, str, bytes], Page] = field(default_factory=dict)
    leases: dict[str, tuple[str, Page | None, float]] = field(default_factory=dict)
    pins: dict[tuple[str, str, bytes], Page] = field(default_factory=dict)
    max_pages: dict[str, int | None] = field(default_factory=lambda: dict.fromkeys(NAMESPACES))
    reserved: dict[str, int] = field(default_factory=lambda: dict.fromkeys(NAMESPACES, 0))
    now: float = 0.0
    uses: int = 0

    def referenced(self) -> set[Page]:
        held: set[Page] = set()
        for sequence in self.sequences.values():
            held.update(sequence.pages)
        for _, page, _ in self.leases.values():
            held.update(path(page))
        return held

    def pinned(self) -> set[Page]:
        return {page for pin in self.pins.values() for page in path(pin)}

    def cached(self) -> set[Page]:
        return set(self.names.values()) - self.referenced() - self.pinned()

    def pages(self) -> set[Page]:
        return self.referenced() | set(self.names.values())

    def release(self, pages: Iterable[Page], held: set[Page]) -> None:
        """Release pages: those without holders count as used now, deepest first."""
        still = self.referenced() | self.pinned()
        for page in sorted(set(pages) & held - still, key=depth, reverse=True):
            self.uses += 1
            page.used = self.uses

    def expire(self) -> None:
        for page in self.names.values():
            if page.priority_ends <= self.now:
                page.priority, page.priority_ends = page.lasting or DEFAULT_PRIORITY, float("inf")
                page.lasting = page.priority
            if page.soft_ends <= self.now:
                page.soft_ends = -float("inf")


def path(page: Page | None) -> list[Page]:
    """A page and all before it, the first one first."""
    found: list[Page] = []
    while page is not None:
        found.append(page)
        page = page.above
    return found[::-1]


def depth(page: Page) -> int:
    return len(path(page))


def content(namespace: str, tokens: Iterable[int]) -> list[int]:
    """The content of the slots of these tokens: nothing else has the same numbers."""
    value, values = hash(namespace), []
    for token in tokens:
        value = hash((value, token))
        values.append(value)
    return values


def page_keys(namespace: str, salt: str, tokens: list[int]) -> list[bytes]:
    """The keys of the full pages: chained here again, or a caller's own."""
    own = salt == SALTS[-1]
    key, keys = b"\0" * 16 if own else root_key(namespace, salt), []
    for begin in range(0, len(tokens) - PAGE_SIZE + 1, PAGE_SIZE):
        page = tokens[begin : begin + PAGE_SIZE]
        ids = np.array(page, dtype="<u4") % IMAGE
        images = [struct.pack("<HB1s", *one) for one in further(page, lambda at, key: (at, 1, key))]
        key = blake2b(key + ids.tobytes() + b"".join(images), digest_size=16).digest()
        keys.append(key)
    return keys


def further(tokens: list[int], form: Callable[[int, bytes], Any]) -> list[Any]:
    """The further keys of tokens, each with its place, in a `form`."""
    above = [(at, token // IMAGE) for at, token in enumerate(tokens) if token > IMAGE]
    return [form(at, bytes([image])) for at, image in above]


@dataclass
class LateFollower:
    """Reads a short history now and then, while it changes, and learns all that it missed."""

    namespace: str
    at: int = 0
    known: set[bytes] = field(default_factory=set)
    resets: int = 0

    def read(self, history: EventHistory, limit: int) -> bool:
        """Read up to `limit` events; whether there were any."""
        events, self.at, too_old = read_page(history, self.namespace, self.at, limit)
        if too_old:
            self.known.clear()
            self.resets += 1
        for event in events:
            keys = set(map(bytes.fromhex, event["page_keys"]))
            self.known = self.known | keys if event["type"] == "stored" else self.known - keys
        return bool(events) or too_old


class Driver:
    """Applies each operation to a tree and to the model, and compares the results."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.stored = np.zeros(NUM_PAGES * PAGE_SIZE, dtype=np.int64)
        self.model = Model()
        self.counts: Counter[str] = Counter()
        self.hits = 0
        self.at = dict.fromkeys(NAMESPACES, -1)
        self.known: dict[str, set[bytes]] = {namespace: set() for namespace in NAMESPACES}
        self.late = [LateFollower(namespace) for namespace in NAMESPACES]
        self.begin()
        self.follow()

    def begin(self) -> None:
        """A tree with nothing in it, and a listener."""
        self.tree = PrefixTree(NUM_PAGES, PAGE_SIZE, 1)
        self.history = EventHistory(PAGE_SIZE, EVENTS_HISTORY)
        self.short = EventHistory(PAGE_SIZE, SHORT_HISTORY)
        self.short.inventories.append(lambda one: named_in(self.tree.cache.named, one, 2))
        self.changes: list[Change] = []
        self.tree.cache.named.listener = self.hear
        for namespace in NAMESPACES:
            self.tree.budget.set_quota(namespace, None, 0)

    def hear(self, change: Change) -> None:
        self.changes.append(change)
        self.history.hear(change)
        self.short.hear(change)

    def step(self) -> None:
        kind = self.random.choices(
            ["create", "begin", "append", "fork", "commit", "free", "truncate", "lease", "renew",
             "close", "pin", "unpin", "evict", "tick", "quota", "steal", "die"],
            [3, 10, 8, 3, 12, 9, 2, 5, 2, 3, 1, 1, 1, 5, 0.3, 3, 0.03],
        )[0]  # fmt: skip
        self.counts[kind] += 1
        before = self.model.referenced() | self.model.pinned()
        getattr(self, f"do_{kind}")(self.random.choice(NAMESPACES), before)
        if self.random.random() < 0.2:
            self.random.choice(self.late).read(self.short, self.random.choice((1, 2, 5)))

    # What callers do.

    def prompt(self) -> list[int]:
        """Tokens that often begin like others."""
        length = self.random.randint(0, MAX_TOKENS)
        return [self.random.choice(TOKENS) for _ in range(length)]

    def prefix(self, namespace: str, tokens: list[int], salt: str) -> Prefix:
        if salt != SALTS[-1]:
            extra = extra_by_page(further(tokens, lambda at, key: (at, key)), PAGE_SIZE)
            return Prefix(np.array(tokens, dtype=np.uint32) % IMAGE, None, salt, extra=extra)
        return Prefix(None, as_keys(b"".join(page_keys(namespace, salt, tokens))), salt)

    def id(self, namespace: str, *, known: bool) -> str | None:
        """An id of the namespace's that is there, or that is not."""
        names = [f"{namespace}/{one}" for one in IDS]
        fit = [name for name in names if (name in self.model.sequences) == known]
        return self.random.choice(fit) if fit else None

    def do_create(self, namespace: str, before: set[Page]) -> None:
        name = self.id(namespace, known=False)
        if name is None:
            return
        ttl_s = self.random.choice((None, None, 3.0))
        self.tree.create([NewSpec(name, namespace=namespace, ttl_s=ttl_s)])
        self.model.sequences[name] = Sequence([], [], ttl_s, self.model.now)

    def do_begin(self, namespace: str, before: set[Page]) -> None:
        """A sequence from a prefix, the rest of the prompt appended, and perhaps committed."""
        name = self.id(namespace, known=False)
        if name is None:
            return
        tokens, salt = self.prompt(), self.random.choice(SALTS)
        found = self.expected(namespace, tokens, salt)
        prefix = self.prefix(namespace, tokens, salt)
        self.tree.create([NewSpec(name, namespace=namespace, prefix=prefix)])
        length = len(found) * PAGE_SIZE
        assert self.tree.describe(name).length == length, (name, tokens, salt)
        self.hits += len(found)
        self.model.sequences[name] = Sequence(tokens[:length], found)
        self.read(name)
        self.append(name, tokens[length:])

    def do_append(self, namespace: str, before: set[Page]) -> None:
        name = self.id(namespace, known=True)
        if name is not None:
            room = MAX_TOKENS - len(self.model.sequences[name].tokens)
            self.append(name, [self.random.choice(TOKENS) for _ in range(min(room, 3))])

    def append(self, name: str, tokens: list[int]) -> None:
        sequence = self.model.sequences[name]
        sequence.used = self.model.now
        namespace = name.split("/")[0]
        total = -(-(len(sequence.tokens) + len(tokens)) // PAGE_SIZE)
        new = total - len(sequence.pages)
        before = self.state()
        refused = new > 0 and new > self.obtainable(namespace)
        try:
            counts = np.array([len(tokens)], dtype=np.int32)
            extension = self.tree.extend(0, [name], counts)
        except OutOfPages as error:
            assert refused, error
            assert self.state() == before
            self.counts["out of pages"] += 1
            return
        assert not refused, (name, new, before)
        self.take_evicted()
        sequence.pages += [Page(namespace) for _ in range(new)]
        sequence.tokens += tokens
        every = content(namespace, sequence.tokens)
        self.stored[extension.slots] = every[len(every) - len(tokens) :]
        if self.random.random() < 0.05 and tokens:
            self.tree.undo(extension)
            del sequence.tokens[len(sequence.tokens) - len(tokens) :]
            del sequence.pages[len(sequence.pages) - new :]

    def do_fork(self, namespace: str, before: set[Page]) -> None:
        name, parent = self.id(namespace, known=False), self.id(namespace, known=True)
        if name is None or parent is None:
            return
        of = self.model.sequences[parent]
        length = self.random.randint(0, len(of.tokens))
        tail = length % PAGE_SIZE > 0
        of.used = self.model.now
        refused = tail and self.obtainable(namespace) < 1
        try:
            copies = self.tree.create([NewSpec(name, parent, length, namespace=namespace)])
        except OutOfPages as error:
            assert refused, error
            return
        assert not refused
        self.take_evicted()
        self.copy(copies)
        pages = of.pages[: length // PAGE_SIZE] + [Page(namespace)] * tail
        self.model.sequences[name] = Sequence(of.tokens[:length], pages)

    def do_truncate(self, namespace: str, before: set[Page]) -> None:
        name = self.id(namespace, known=True)
        if name is None:
            return
        sequence = self.model.sequences[name]
        length = self.random.randint(0, len(sequence.tokens))
        kept = -(-length // PAGE_SIZE)
        full = length // PAGE_SIZE
        sequence.used = self.model.now
        cut = sequence.pages[full] if length % PAGE_SIZE else None
        shared = cut is not None and (cut.name is not None or self.holders(cut) > 1)
        try:
            copies = truncate(self.tree, name, length)
        except OutOfPages:
            assert shared
            assert self.obtainable(namespace) < 1
            return
        self.take_evicted()
        self.copy(copies)
        released = sequence.pages[full if shared else kept :]
        sequence.pages = sequence.pages[: full if shared else kept]
        sequence.pages += [Page(namespace)] * shared
        sequence.tokens = sequence.tokens[:length]
        self.model.release(released, before)

    def do_free(self, namespace: str, before: set[Page]) -> None:
        name = self.id(namespace, known=True)
        if name is not None:
            self.tree.free([name])
            self.model.release(self.model.sequences.pop(name).pages, before)

    def do_commit(self, namespace: str, before: set[Page]) -> None:
        name = self.id(namespace, known=True)
        if name is None:
            return
        sequence = self.model.sequences[name]
        sequence.used = self.model.now
        named = [page for page in sequence.pages if page.name is not None]
        salt = named[0].name[0] if named and named[0].name else self.random.choice(SALTS)
        length = self.random.randint(0, len(sequence.tokens))
        if self.random.random() < 0.5:
            length = len(sequence.tokens)
        if self.random.random() < 0.1:
            self.commit_wrongly(name, sequence, salt, bool(named))
        priority = self.random.choice((None, None, None, 1, 50, 80))
        ends = self.model.now + self.random.choice((2.0, 5.0, float("inf")))
        keep = [] if priority is None else [Retention(priority, ends)]
        prefix = self.prefix(namespace, sequence.tokens[:length], salt)
        count = self.tree.commits.commit(name, prefix, *keep)
        keys = page_keys(namespace, salt, sequence.tokens)
        stop, done = length // PAGE_SIZE, len(named)
        if stop > done:
            found = self.expected(namespace, sequence.tokens[: stop * PAGE_SIZE], salt)
            shared = self.holders(sequence.pages[done]) > 1
            if len(found) > done and shared:
                assert count == done
                self.counts["left to forks"] += 1
                stop = done
            else:
                self.counts["moved"] += len(found) > done
                sequence.pages[done : len(found)] = found[done:]
                above = found[-1] if found else None
                for at in range(len(found), stop):
                    page = sequence.pages[at]
                    page.name, page.above = (salt, keys[at]), above
                    if priority is not None:
                        page.priority, page.priority_ends = priority, ends
                        page.lasting = priority if ends == float("inf") else None
                    self.model.names[namespace, salt, keys[at]] = above = page
        assert count == min(stop, length // PAGE_SIZE)
        for page in sequence.pages[: count if priority is not None else 0]:
            if ends == float("inf"):
                page.lasting = max(page.lasting or 0, priority)
            if priority > page.priority:
                page.priority, page.priority_ends = priority, ends
            elif priority == page.priority:
                page.priority_ends = max(page.priority_ends, ends)
        self.read(name)

    def commit_wrongly(self, name: str, sequence: Sequence, salt: str, is_named: bool) -> None:
        """More than there is, another salt, other tokens: refused, and nothing changes."""
        before = self.state()
        namespace = name.split("/")[0]
        wrong = [(sequence.tokens + [1] * PAGE_SIZE, salt)]
        if is_named:
            wrong.append((sequence.tokens, next(one for one in SALTS if one != salt)))
            wrong.append(([9] * PAGE_SIZE, salt))
        for tokens, under in wrong:
            try:
                self.tree.commits.commit(name, self.prefix(namespace, tokens, under))
            except CoreError:
                assert self.state() == before
                continue
            raise AssertionError(f"committed {tokens} under {under} for {sequence}")

    def do_lease(self, namespace: str, before: set[Page]) -> None:
        tokens, salt = self.prompt(), self.random.choice(SALTS)
        found = self.expected(namespace, tokens, salt)
        prefix = self.prefix(namespace, tokens, salt)
        if self.random.random() < 0.3:
            assert self.tree.cache.use(namespace, prefix) == len(found)
            self.model.release(found, set(found))
            return
        lease = f"lease-{self.random.randrange(10**9)}"
        seconds = self.random.choice((1.0, 4.0))
        assert self.tree.cache.lease(namespace, prefix, lease, seconds) == len(found)
        if found:
            self.model.leases[lease] = (namespace, found[-1], self.model.now + seconds)

    def lease(self, namespace: str) -> tuple[str, bool]:
        """Some lease, and whether it is the namespace's."""
        known = sorted(self.model.leases) or ["lease-none"]
        name = self.random.choice(known)
        return name, self.model.leases.get(name, ("", None, 0.0))[0] == namespace

    def do_renew(self, namespace: str, before: set[Page]) -> None:
        name, is_own = self.lease(namespace)
        ends = self.model.now + 3.0
        try:
            self.tree.cache.renew_lease(namespace, name, ends)
        except UnknownLease:
            assert not is_own
            return
        assert is_own
        of, page, _ = self.model.leases.pop(name)
        self.model.leases[name] = of, page, ends  # of equal ends the latest given comes last

    def do_close(self, namespace: str, before: set[Page]) -> None:
        name, is_own = self.lease(namespace)
        try:
            self.tree.cache.close_lease(namespace, name)
        except UnknownLease:
            assert not is_own
            return
        assert is_own
        self.model.release(path(self.model.leases.pop(name)[1]), before)

    def key(self, namespace: str) -> tuple[str, bytes, Page | None]:
        """A key that was committed, and the page if it is the namespace's."""
        known = sorted(self.model.names) or [("a", "", b"\0" * 16)]
        _, salt, key = self.random.choice(known)
        return salt, key, self.model.names.get((namespace, salt, key))

    def do_pin(self, namespace: str, before: set[Page]) -> None:
        salt, key, page = self.key(namespace)
        soft = self.random.choice((None, 2.0, 6.0)) if len(self.model.pins) < 3 else 2.0
        try:
            covered = self.tree.cache.pin(namespace, key, salt, soft)
        except UnknownPage:
            assert page is None
            return
        assert page is not None
        assert covered == depth(page)
        if soft is None:
            self.model.pins[namespace, salt, key] = page
            return
        for one in path(page):
            one.soft_ends = max(one.soft_ends, self.model.now + soft)

    def do_unpin(self, namespace: str, before: set[Page]) -> None:
        salt, key, page = self.key(namespace)
        pinned = (namespace, salt, key) in self.model.pins
        soft = page is not None and page.soft_ends > self.model.now
        try:
            self.tree.cache.unpin(namespace, key, salt)
        except UnknownPage:
            assert not pinned
            assert not soft
            return
        assert page is not None
        self.model.pins.pop((namespace, salt, key), None)
        self.model.release(path(page), before)
        ends = page.soft_ends
        for one in path(page):
            if one.soft_ends <= ends:
                one.soft_ends = -float("inf")

    def do_evict(self, namespace: str, before: set[Page]) -> None:
        count = self.random.choice((1, 2, 3, NUM_PAGES))
        able = sum(page.namespace == namespace for page in self.model.cached())
        assert self.tree.cache.evict(namespace, count) == min(count, able)
        self.take_evicted()

    def do_tick(self, namespace: str, before: set[Page]) -> None:
        model = self.model
        model.now += self.random.choice((0.5, 1.0, 2.0))
        self.tree.tick(model.now)
        due = [one for one in model.leases.items() if one[1][2] <= model.now]
        for name, (_, page, _) in sorted(due, key=lambda one: one[1][2]):
            del model.leases[name]
            model.release(path(page), before)
        model.expire()
        over = self.tree.books.expired(lambda name: name.endswith("/s0"))
        for name, one in model.sequences.items():
            if one.ttl_s is None:
                continue
            if name.endswith("/s0"):
                one.used = model.now if one.used + one.ttl_s <= model.now else one.used
            else:
                assert (name in over) == (one.used + one.ttl_s <= model.now), name
        for name in over:
            held = model.referenced() | model.pinned()
            self.tree.free([name])
            self.counts["outlived"] += 1
            model.release(model.sequences.pop(name).pages, held)

    def do_quota(self, namespace: str, before: set[Page]) -> None:
        most = self.random.choice((None, 18, 26, 30))
        reserved = self.random.choice((0, 0, 8, 14))
        other = next(one for one in NAMESPACES if one != namespace)
        try:
            self.tree.budget.set_quota(namespace, most, reserved)
        except InvalidRequest:
            assert reserved + self.model.reserved[other] > NUM_PAGES or reserved > (most or 99)
            return
        self.model.max_pages[namespace], self.model.reserved[namespace] = most, reserved

    def do_steal(self, namespace: str, before: set[Page]) -> None:
        """A namespace finds only pages that it committed itself under another's prompts."""
        known = sorted(self.model.names)
        if not known:
            return
        _, salt, key = self.random.choice(known)
        own = self.model.names.get((namespace, salt, key))
        own = own if own is not None and own.above is None else None
        found = self.tree.cache.match(namespace, Prefix(None, as_keys(key), salt))
        assert found.num_pages == (own is not None), (namespace, salt, key)

    def do_die(self, namespace: str, before: set[Page]) -> None:
        """The process dies, and another begins: it knows no sequences, pages or leases."""
        lost = self.model
        self.model = Model(now=lost.now, uses=lost.uses)
        self.begin()
        self.tree.tick(lost.now)
        for name in lost.sequences:
            assert name not in self.tree.books
        for lease, (owner, _, _) in lost.leases.items():
            with suppress(UnknownLease):
                self.tree.cache.renew_lease(owner, lease, lost.now + 1.0)
                raise AssertionError(f"{lease} outlived the process")
        for owner, salt, key in lost.names:
            assert self.tree.cache.match(owner, Prefix(None, as_keys(key), salt)).num_pages == 0
        for owner in NAMESPACES:
            _, self.at[owner], too_old = read_page(self.history, owner, self.at[owner], 1)
            assert too_old, "a follower must learn that its events were dropped"
            self.known[owner].clear()

    # What must be so.

    def follow(self) -> None:
        """Read the events since the last time, as a router does."""
        for namespace, known in self.known.items():
            reply, at, too_old = read_page(self.history, namespace, self.at[namespace], 1000)
            while reply:
                assert not too_old
                for event in reply:
                    keys = set(map(bytes.fromhex, event["page_keys"]))
                    if event["type"] == "stored":
                        assert not keys & known
                        known |= keys
                    else:
                        assert keys <= known
                        known -= keys
                reply, at, too_old = read_page(self.history, namespace, at, 1000)
            self.at[namespace] = at

    def check_inventory(self, namespace: str) -> None:
        """It names every page once, after the page before it."""
        roots = {root_key(namespace, salt) for salt in SALTS}
        seen: list[bytes] = []
        for stored in filter(None, named_in(self.tree.cache.named, namespace, 2)):
            assert stored.parent_key in roots or stored.parent_key in seen
            seen += [stored.keys[at : at + 16] for at in range(0, len(stored.keys), 16)]
        assert sorted(seen) == sorted(self.known[namespace])

    def expected(self, namespace: str, tokens: list[int], salt: str) -> list[Page]:
        """The pages expected for a prompt."""
        found: list[Page] = []
        for key in page_keys(namespace, salt, tokens):
            page = self.model.names.get((namespace, salt, key))
            if page is None:
                break
            found.append(page)
        return found

    def holders(self, page: Page) -> int:
        return sum(page in sequence.pages for sequence in self.model.sequences.values())

    def used(self, namespace: str) -> int:
        return sum(page.namespace == namespace for page in self.model.pages())

    def obtainable(self, namespace: str) -> int:
        """Pages that the namespace could get by evicting all that may go for it."""
        model = self.model
        cached = Counter(page.namespace for page in model.cached())
        used = {one: self.used(one) for one in NAMESPACES}
        room = NUM_PAGES - sum(used.values()) + cached[namespace]
        for other in NAMESPACES:
            if other != namespace:
                room -= max(0, model.reserved[other] - used[other])
                room += min(cached[other], max(0, used[other] - model.reserved[other]))
        most = model.max_pages[namespace]
        return room if most is None else min(room, most - used[namespace] + cached[namespace])

    def take_evicted(self) -> None:
        """Every page that was evicted was the one to go, one after another."""
        model = self.model
        by_key = {(ns, key): (ns, salt, key) for ns, salt, key in model.names}
        for change in self.changes:
            if isinstance(change, Stored):
                continue
            assert isinstance(change, Removed)
            for at in range(len(change.keys) - 16, -1, -16):
                name = by_key[change.namespace, change.keys[at : at + 16]]
                cached = [one for one in model.cached() if one.namespace == change.namespace]
                parents = {one.above for one in model.names.values()}
                ready = [one for one in cached if one not in parents]
                page = model.names[name]
                first = min(ready, key=lambda one: (one.rank(model.now), one.used))
                assert page is first, (name, page, first)
                del model.names[name]
                self.counts["evicted"] += 1
        self.changes.clear()

    def state(self) -> list[Any]:
        """All that a refused change must leave as it is."""
        tree = self.tree
        held = tree.books.num_pages.tolist()
        pages = [leaf.table.read(0, held[leaf.index]).tolist() for leaf in tree.books]
        every = [(one.used, one.cached, one.pinned) for one in tree.budget.namespaces.values()]
        lengths = [view.lengths for view in tree.list(None, 100)]
        return [pages, lengths, every, tree.allocator.free_pages.tolist(), tree.links.count]

    def read(self, name: str) -> None:
        """The sequence's slots hold what its tokens say."""
        tokens = self.model.sequences[name].tokens
        stored = self.stored[slots_of(self.tree, name)].tolist()
        assert stored == content(name.split("/")[0], tokens), name

    def copy(self, copies: RowCopies) -> None:
        columns = (copies.src_pages, copies.dst_pages, copies.num_rows)
        for source, to, rows in zip(*(column.tolist() for column in columns), strict=True):
            a, b = source * PAGE_SIZE, to * PAGE_SIZE
            self.stored[b : b + rows] = self.stored[a : a + rows]

    def check(self) -> None:
        """Everything at once: integrity, counts, every sequence by content."""
        self.tree.check_integrity()
        model = self.model
        self.follow()
        for namespace, known in self.known.items():
            assert known == {key for owner, _, key in model.names if owner == namespace}
            self.check_inventory(namespace)
        for late in self.late:
            while late.read(self.short, 3):
                pass
            assert late.known == self.known[late.namespace], "a follower that missed events"
        self.counts["resets"] = sum(late.resets for late in self.late)
        assert {leaf.id for leaf in self.tree.books} == set(model.sequences)
        cached, pinned = model.cached(), model.pinned() - model.referenced()
        for namespace in NAMESPACES:
            books = self.tree.budget.namespaces.get(namespace)
            found = (0, 0, 0) if books is None else (books.used, books.cached, books.pinned)
            wanted = [sum(p.namespace == namespace for p in some) for some in (cached, pinned)]
            assert found == (self.used(namespace), *wanted), namespace
            if books is not None:
                able = max(0, self.obtainable(namespace))
                assert self.tree.budget.obtainable(books) == able, namespace
        used = self.used("a") + self.used("b")
        assert self.tree.allocator.num_free == NUM_PAGES - used
        assert self.tree.cache.named.num_cached == len(cached)
        times = self.tree.books.used.copy()
        for name in model.sequences:
            self.read(name)
        self.tree.books.used[:] = times
        check_blocks(self.tree)

    def end(self) -> None:
        """With all sequences deleted and all pages evicted, every page is free."""
        for name in list(self.model.sequences):
            self.tree.free([name])
        self.tree.tick(self.model.now + 1e6)
        for namespace, salt, key in list(self.model.pins):
            self.tree.cache.unpin(namespace, key, salt)
        for namespace in NAMESPACES:
            self.tree.cache.evict(namespace, NUM_PAGES)
        self.tree.check_integrity()
        assert self.tree.allocator.num_free == NUM_PAGES
        assert self.tree.links.count == 0


def run(operations: int, seed: int, check_every: int = 50) -> Driver:
    """That many random operations; raises where tree and model differ."""
    driver = Driver(seed)
    before, page_table.BLOCK_PAGES = page_table.BLOCK_PAGES, (2, 1, 3, 512)[seed % 4]
    try:
        for number in range(operations):
            try:
                driver.step()
                if number % check_every == 0:
                    driver.check()
            except Exception as error:
                raise AssertionError(f"seed {seed}, operation {number}: {error!r}") from error
        driver.check()
        driver.end()
    finally:
        page_table.BLOCK_PAGES = before
    return driver


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check-every", type=int, default=50)
    given = parser.parse_args()
    begun = time.perf_counter()
    over = run(given.operations, given.seed, given.check_every)
    spent = time.perf_counter() - begun
    print(f"{given.operations} operations in {spent:.1f} s: {dict(over.counts)}, {over.hits} hits")
