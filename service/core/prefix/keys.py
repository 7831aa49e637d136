"""Page keys: how pages are named, from a caller's own chain or from token ids."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Final

import numpy as np
from numpy.typing import NDArray

KEY_BYTES: Final = 16
WORDS: Final = KEY_BYTES // 8
"""A key as numbers: it is compared as two uint64."""

Keys = NDArray[np.uint64]
TokenIds = NDArray[np.uint32]


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """The beginning of a prompt, by exactly one of `token_ids` and `page_keys`.

    `token_ids` uint32 [n]; a last page that is not full counts for nothing. `page_keys` uint64
    [n, 2], the 16 bytes of each page's key. `cache_salt` divides a namespace: pages are found again
    under the salt they were committed with. The first `skipped` pages are named elsewhere: ids and
    keys begin behind them.
    """

    token_ids: TokenIds | None = None
    page_keys: Keys | None = None
    cache_salt: str = ""
    skipped: int = 0
    computed: bytes = b""
    computed_from: int = 0
    """With token ids: the keys of its pages from one on, where they were worked out before."""

    def num_pages(self, page_size: int) -> int:
        """Full pages that it names, skipped ones included."""
        if self.page_keys is not None:
            return self.skipped + len(self.page_keys)
        return self.skipped + (0 if self.token_ids is None else self.token_ids.size // page_size)

    def num_tokens(self, page_size: int) -> int:
        """Tokens that it names, skipped ones and those of a last page that is not full included."""
        given = 0 if self.token_ids is None else self.token_ids.size
        return self.skipped * page_size + given

    def ids_of(self, page: int, stop: int, page_size: int) -> TokenIds | None:
        """Token ids of pages `page:stop`."""
        if self.token_ids is None:
            return None
        first, last = (page - self.skipped) * page_size, (stop - self.skipped) * page_size
        return self.token_ids[first:last]

    def keys_of(self, page: int, stop: int) -> Keys | None:
        """Given keys of pages `page:stop`."""
        if self.page_keys is None:
            return None
        return self.page_keys[page - self.skipped : stop - self.skipped]

    def key_at(self, page: int, before: bytes, page_size: int) -> bytes:
        """The key of one page, with the key `before` it."""
        if self.page_keys is not None:
            key: bytes = self.page_keys[page - self.skipped].tobytes()
            return key
        ids = self._ids(page, page + 1, page_size)
        return blake2b(before + ids, digest_size=KEY_BYTES).digest()

    def chain(self, key: bytes, page_size: int) -> Iterator[bytes]:
        """The keys of all pages, one after another; `key` stands before the first. None may be
        skipped."""
        pages = self.num_pages(page_size)
        if self.page_keys is not None:
            every = self.page_keys.tobytes()
            for begin in range(0, len(every), KEY_BYTES):
                yield every[begin : begin + KEY_BYTES]
            return
        ids, width = self._ids(0, pages, page_size) if pages else b"", 4 * page_size
        for begin in range(0, len(ids), width):
            key = blake2b(key + ids[begin : begin + width], digest_size=KEY_BYTES).digest()
            yield key

    def keys_from(self, page: int, key: bytes, stop: int, page_size: int) -> bytes:
        """The keys of pages `page:stop`, one after another; `key` is the first of them."""
        if page + 1 == stop:
            return key
        if self.page_keys is not None:
            return self.page_keys[page - self.skipped : stop - self.skipped].tobytes()
        if self.computed and page >= self.computed_from:
            first, last = page - self.computed_from, stop - self.computed_from
            return self.computed[first * KEY_BYTES : last * KEY_BYTES]
        ids = memoryview(self._ids(page + 1, stop, page_size))
        width, chained = 4 * page_size, [key]
        for begin in range(0, len(ids), width):
            key = blake2b(b"".join((key, ids[begin : begin + width])), digest_size=16).digest()
            chained.append(key)
        return b"".join(chained)

    def hashed(self, first: int, key: bytes, page_size: int) -> Generator[None, None, Prefix]:
        """The same with the keys of the pages of its token ids from `first` on, `key` before that,
        worked out one at a time."""
        chained = []
        for page in range(first, self.num_pages(page_size)):
            key = self.key_at(page, key, page_size)
            chained.append(key)
            yield
        return replace(self, computed=b"".join(chained), computed_from=first)

    def _ids(self, page: int, stop: int, page_size: int) -> bytes:
        ids = self.ids_of(page, stop, page_size)
        if ids is None:
            raise ValueError("a prefix without names: this is a bug")
        return ids.tobytes()


def root_key(namespace: str, cache_salt: str) -> bytes:
    """What stands before the first page's key: nothing is shared across namespaces or salts."""
    return blake2b(f"{namespace}\0{cache_salt}".encode(), digest_size=KEY_BYTES).digest()


def as_keys(raw: bytes) -> Keys:
    """Keys one after another, as uint64 [n, 2]."""
    return np.frombuffer(raw, dtype=np.uint64).reshape(-1, WORDS)
