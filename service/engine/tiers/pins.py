"""Hard pins over restarts: their records are not evicted from disk, and are loaded at the start.

A pin's note names its last page. All pins of a chain share what is known of the pages before it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from service.core.errors import CoreError
from service.core.keys import KEY_BYTES, Prefix, as_keys, root_key
from service.core.nodes import DEFAULT_PRIORITY, named
from service.core.values import Int32
from service.engine.store.ledger import RETRY_S
from service.engine.tiers.loads import UNLIMITED, LoadLimits
from service.engine.tiers.page_records import PageTag, split_ids
from service.engine.tiers.tiers import Tiers
from service.engine.work.work import Slice, empty_slice, in_slices
from service.errors import Overloaded

LOG: Final = logging.getLogger("attnd.tiers")
NOTE: Final = "pinned/"
"""Notes of pins begin so, followed by the records' stamp, namespace, page key and salt. They have
the identity of the page, and the number of pages up to it."""
EARLIER: Final = "pin/"
"""Notes of earlier builds, whose records are of another stamp."""
NOTE_BYTES: Final = 1024
"""What a note takes in the index at most; it counts in `max_disk_bytes`."""
SETTLED_AT_ONCE: Final = 256
"""Pages between two looks at the clock."""


Load = Callable[[str, Prefix, LoadLimits], Generator[Slice, Any, Any]]
"""Loads what the tiers have of a prefix of a namespace: `Loading.load`."""


@dataclass(frozen=True, slots=True)
class Pin:
    """A hard pin of an earlier start: its last page by key and identity, and its pages."""

    name: str
    namespace: str
    key: bytes
    cache_salt: str
    record_id: bytes
    num_pages: int


class Pins:
    """The hard pins of an engine, as its disk keeps them."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._tree = tiers.tree
        self._beginning = f"{NOTE}{tiers.layout.stamp.hex()}/"
        self._names: set[str] = set()
        """Names of the notes."""
        self._restored: list[Pin] = []
        if (store := tiers.disk.store) is not None:
            tiers.disk.is_restoring = True
            for name, value in store.notes().items():
                self._found(name, value)

    def _found(self, name: str, value: str) -> None:
        """A note of an earlier start; those of another stamp stay."""
        if name.startswith(EARLIER):
            self._tiers.disk.note(name.split("/", 2)[1], name, None)
        elif name.startswith(self._beginning):
            _, _, namespace, key, cache_salt = name.split("/", 4)
            record_id, num_pages = value.split()
            last = bytes.fromhex(key), cache_salt, bytes.fromhex(record_id)
            self._restored.append(Pin(name, namespace, *last, int(num_pages)))
            self._count(namespace, name, 1)

    def name_of(self, namespace: str, key: bytes, cache_salt: str) -> str:
        return f"{self._beginning}{namespace}/{key.hex()}/{cache_salt}"

    def refuse(self, namespace: str, key: bytes, cache_salt: str) -> None:
        """Raises Overloaded where the disk cannot keep one more pin of a namespace."""
        name, tiers = self.name_of(namespace, key, cache_salt), self._tiers
        if name in self._names or not self._has_disk(namespace):
            return
        limit, used = tiers.limits_of(namespace)["max_disk_bytes"], tiers.note_bytes[namespace]
        if limit is not None and used + NOTE_BYTES > limit:
            reason = f"notes of this namespace's hard pins take {used} bytes of its max_disk_bytes"
            remedy = f"= {limit}: remove pins, or raise it"
            raise Overloaded(f"{reason} {remedy}", retry_after_s=RETRY_S)
        tiers.disk.refuse_note(namespace, name)

    def keep(self, namespace: str, key: bytes, cache_salt: str) -> Generator[None, None, None]:
        """A page and all before it were pinned: write them down, and keep them there, some pages a
        step."""
        name = self.name_of(namespace, key, cache_salt)
        if name in self._names or not self._has_disk(namespace):
            return
        pages = self._tree.cache.pages(namespace, key, cache_salt)
        self._count(namespace, name, 1)
        value = f"{self._tiers.paths.id_of(pages.item(-1)).hex()} {pages.size}"
        self._tiers.disk.note(namespace, name, value)
        yield from self.settle(namespace, pages)

    def drop(self, namespace: str, key: bytes, cache_salt: str) -> Int32 | None:
        """A pin is removed: its pages in the pool, for `settle`; None where it was not kept."""
        name = self.name_of(namespace, key, cache_salt)
        if name not in self._names:
            return None
        self._count(namespace, name, -1)
        self._tiers.disk.note(namespace, name, None)
        try:
            return self._tree.cache.pages(namespace, key, cache_salt)
        except CoreError:  # it is from before a restart, and not loaded yet
            return np.empty(0, np.int32)

    def settle(self, namespace: str, pages: Int32) -> Generator[None, None, None]:
        """Keep the records of pages that are pinned now, and those of others no longer, some pages
        a step. Whatever is pinned and unpinned meanwhile, the last of all such walks is right."""
        tiers, disk, names = self._tiers, self._tiers.disk, self._tree.cache.named
        rows = tiers.paths.rows_of(pages)
        for first in range(0, pages.size, SETTLED_AT_ONCE):
            part = slice(first, first + SETTLED_AT_ONCE)
            some, new = pages[part], dict[bytes, int]()
            numbers = names.node_of[some]
            numbers[(tiers.paths.rows_of(some) != rows[part]).any(axis=1)] = -1  # others by now
            ids = split_ids(rows[part].tobytes())
            for record_id, page, number in zip(ids, some.tolist(), numbers.tolist(), strict=True):
                node = names.nodes[number] if number >= 0 else None
                if node is None or (named(node).pins > 0) == (record_id in disk.pinned):
                    continue  # a page that left the pool is not pinned
                if record_id in disk.pinned:
                    if disk.is_restoring:
                        continue  # another pin may not be loaded yet; the end of that sees to it
                    disk.pinned.remove(record_id)
                else:
                    disk.pinned.add(record_id)
                    new[record_id] = page
                disk.use(record_id, named(node).keep.priority)
            if new:
                tiers.request_copies(namespace, list(new), list(new.values()))
            yield

    def restore(self, load: Load) -> Generator[Slice, Any, None]:
        """Load the pages of all pins of earlier starts, and pin them again; namespaces in turn."""
        chains, turns = Chains(self._tiers), Counter[str]()
        yield from in_slices(chains.walk(self._restored))
        order: list[tuple[int, Pin]] = []
        for pin in sorted(self._restored, key=lambda pin: -pin.num_pages):
            order.append((turns[pin.namespace], pin))
            turns[pin.namespace] += 1
        for _, pin in sorted(order, key=lambda one: one[0]):
            if pin.name in self._names and not self._pin(pin):
                keys = chains.keys_of(pin.record_id)
                if len(keys) == pin.num_pages * KEY_BYTES:
                    prefix = Prefix(None, as_keys(keys), pin.cache_salt)
                    yield from load(pin.namespace, prefix, UNLIMITED)
                if pin.name in self._names and not self._pin(pin):
                    space = pin.namespace
                    LOG.warning("pages pinned in namespace %s are not on disk any more", space)
                    self.drop(space, pin.key, pin.cache_salt)
            yield empty_slice()
        self._restored = []
        self._tiers.disk.is_restoring = False
        yield from in_slices(self._unpin_records())

    def _unpin_records(self) -> Generator[None, None, None]:
        """Records whose pins are gone meanwhile can be evicted again."""
        disk, names = self._tiers.disk, self._tree.cache.named
        pinned = [one.pages for one in names.nodes if one is not None and named(one).pins]
        held = {one for pages in pinned for one in self._tiers.paths.ids_of(pages)}
        gone = disk.pinned - held
        disk.pinned -= gone
        for record_id in gone:
            disk.use(record_id, DEFAULT_PRIORITY)
            yield

    def _pin(self, pin: Pin) -> bool:
        """Pin a page that the pool has; whether it has it."""
        try:
            self._tree.cache.pin(pin.namespace, pin.key, pin.cache_salt, None)
        except CoreError:
            return False
        return True

    def _has_disk(self, namespace: str) -> bool:
        limit = self._tiers.limits_of(namespace)["max_disk_bytes"]
        return self._tiers.disk.store is not None and limit != 0

    def _count(self, namespace: str, name: str, by: int) -> None:
        """Count a note (-1: no longer)."""
        (self._names.add if by > 0 else self._names.remove)(name)
        self._tiers.count_notes(namespace, by * NOTE_BYTES)


class Chains:
    """The pages of pins of earlier starts, found by their records; pins share those they have in
    common."""

    def __init__(self, tiers: Tiers) -> None:
        self._disk = tiers.disk
        self._parts: list[tuple[bytes, bytes]] = []
        """Runs of pages: the identity of the page before them, and their keys."""
        self.places: dict[bytes, tuple[int, int]] = {}
        """By a page's identity, its run, and the pages of that up to it."""

    def walk(self, pins: list[Pin]) -> Generator[None, None, None]:
        """Find all pages, which are not evicted from now on, one a step; others can be again."""
        for pin in pins:
            keys, ids = list[bytes](), list[bytes]()
            record_id, root = pin.record_id, root_key(pin.namespace, pin.cache_salt)
            while record_id != root and record_id not in self.places:
                if (entry := self._disk.find(record_id)) is None:
                    break
                tag = PageTag.read(entry.tag)
                self._disk.pinned.add(record_id)
                self._disk.use(record_id, tag.priority)
                keys.append(tag.key)
                ids.append(record_id)
                record_id = tag.id_before
                yield
            number = len(self._parts)
            self._parts.append((record_id, b"".join(reversed(keys))))
            self.places |= {one: (number, len(ids) - at) for at, one in enumerate(ids)}
        store = self._disk.store
        for entry in [] if store is None else store.pinned():
            if entry.key not in self._disk.pinned:  # its note was deleted, its rank not yet
                self._disk.use(entry.key, PageTag.read(entry.tag).priority)
                yield

    def keys_of(self, record_id: bytes) -> bytes:
        """The concatenated keys of a page and of those before it, as far as they are known."""
        runs: list[bytes] = []
        while (place := self.places.get(record_id)) is not None:
            record_id, keys = self._parts[place[0]]
            runs.append(keys[: place[1] * KEY_BYTES])
        return b"".join(reversed(runs))
