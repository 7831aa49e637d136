"""Hard pins over restarts: their records are not evicted from disk, and are loaded at the start."""

from __future__ import annotations

import logging
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Final

from service.core.errors import CoreError
from service.core.prefix.keys import Prefix, as_keys, root_key
from service.engine.loop.job import Slice, empty_slice
from service.engine.tiers.loads import UNLIMITED
from service.engine.tiers.page_records import next_id
from service.engine.tiers.tiers import Tiers

if TYPE_CHECKING:
    from service.engine.tiers.loading import Loading

LOG: Final = logging.getLogger("attnd.tiers")
NOTE: Final = "pin/"
"""Notes of pins begin so, followed by namespace, page key and salt; they have the keys of all pages
of the pin."""


class Pins:
    """The hard pins of an engine, as its disk keeps them."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._tree = tiers.tree
        self._ids: dict[str, list[bytes]] = {}
        """Identities of the pages of each pin, by the name of its note."""

    def keep(self, namespace: str, key: bytes, cache_salt: str) -> None:
        """A page and all before it were pinned: write them down, and keep them there."""
        name, tiers = name_of(namespace, key, cache_salt), self._tiers
        if tiers.disk.store is None or name in self._ids:
            return
        chain = self._tree.cache.chain(namespace, key, cache_salt)
        pages = self._tree.cache.match(namespace, chain).table()
        self._ids[name] = ids = tiers.paths.ids_of(pages)
        tiers.disk.pin(ids, 1)
        tiers.request_copies(namespace, ids, pages.tolist())
        tiers.disk.note(name, b"".join(chain.chain(b"", self._tree.page_size)).hex())

    def drop(self, namespace: str, key: bytes, cache_salt: str) -> bool:
        """A pin was removed; whether it was kept."""
        name = name_of(namespace, key, cache_salt)
        ids = self._ids.pop(name, None)
        if ids is None:
            return False
        self._tiers.disk.note(name, None)
        self._tiers.disk.pin(ids, -1)
        return True

    def restore(self, notes: dict[str, str], loading: Loading) -> Generator[Slice, Any, None]:
        """Load the pages of all pins, and pin them again."""
        chains = {
            name: bytes.fromhex(keys) for name, keys in notes.items() if name.startswith(NOTE)
        }
        for name, keys in chains.items():
            _, namespace, _, cache_salt = name.split("/", 3)
            record_id, self._ids[name] = root_key(namespace, cache_salt), []
            for key in Prefix(None, as_keys(keys)).chain(b"", self._tree.page_size):
                record_id = next_id(record_id, key)
                self._ids[name].append(record_id)
            self._tiers.disk.pin(self._ids[name], 1)
            yield empty_slice()
        for name, keys in chains.items():
            _, namespace, key_text, cache_salt = name.split("/", 3)
            yield from loading.load(namespace, Prefix(None, as_keys(keys), cache_salt), UNLIMITED)
            if name in self._ids:
                try:
                    self._tree.cache.pin(namespace, bytes.fromhex(key_text), cache_salt, None)
                except CoreError:
                    LOG.warning("pages pinned in namespace %s are not on disk any more", namespace)
                    self.drop(namespace, bytes.fromhex(key_text), cache_salt)


def name_of(namespace: str, key: bytes, cache_salt: str) -> str:
    return f"{NOTE}{namespace}/{key.hex()}/{cache_salt}"
