"""Page keys: names of pages, given by the caller or derived from token ids."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import Final

import numpy as np
from numpy.typing import NDArray

KEY_BYTES: Final = 16
WORDS: Final = KEY_BYTES // 8
"""A key is compared as two uint64."""

EXTRA: Final = struct.Struct("<HB")
"""Before each further key of a page: the token in the page that it begins at, and its bytes."""

Keys = NDArray[np.uint64]
TokenIds = NDArray[np.uint32]
Extra = Mapping[int, bytes]
"""Key material beside the token ids, by page: of each further key its `EXTRA` and the key."""


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """The beginning of a prompt, named by exactly one of `token_ids` and `page_keys`.

    `token_ids` uint32 [n]; a partial last page is ignored. `page_keys` uint64 [n, 2], 16 bytes per
    key. `cache_salt` divides a namespace: pages are only found under the salt they were committed
    with. Ids and keys start after the first `skipped` pages, which are committed already.
    `extra` is further key material of pages with token ids, counted from the prompt's first page.
    """

    token_ids: TokenIds | None = None
    page_keys: Keys | None = None
    cache_salt: str = ""
    skipped: int = 0
    computed: bytes = b""
    computed_from: int = 0
    """With token ids: the keys of its pages from `computed_from` on, if computed before."""
    extra: Extra | None = None

    def num_pages(self, page_size: int) -> int:
        """Named full pages, skipped ones included."""
        if self.page_keys is not None:
            return self.skipped + len(self.page_keys)
        return self.skipped + (0 if self.token_ids is None else self.token_ids.size // page_size)

    def num_tokens(self, page_size: int) -> int:
        """Named tokens, including skipped ones and a partial last page's."""
        given = 0 if self.token_ids is None else self.token_ids.size
        return self.skipped * page_size + given

    def ids_of(self, page: int, stop: int, page_size: int) -> TokenIds | None:
        if self.token_ids is None:
            return None
        first, last = (page - self.skipped) * page_size, (stop - self.skipped) * page_size
        return self.token_ids[first:last]

    def keys_of(self, page: int, stop: int) -> Keys | None:
        if self.page_keys is None:
            return None
        return self.page_keys[page - self.skipped : stop - self.skipped]

    def key_at(self, page: int, before: bytes, page_size: int) -> bytes:
        """The key of one page; `before` is the key of the page before it."""
        if self.page_keys is not None:
            key: bytes = self.page_keys[page - self.skipped].tobytes()
            return key
        ids = self._ids(page, page + 1, page_size) + self.extra_at(page)
        return blake2b(before + ids, digest_size=KEY_BYTES).digest()

    def extra_at(self, page: int) -> bytes:
        """The further key material of a page."""
        return b"" if self.extra is None else self.extra.get(page, b"")

    def chain(self, key: bytes, page_size: int, first: int = 0) -> Iterator[bytes]:
        """Yield the keys of the pages from `first` on; `key` precedes them, none may be skipped."""
        pages = self.num_pages(page_size)
        if self.page_keys is not None:
            every = self.page_keys[first - self.skipped :].tobytes()
            for begin in range(0, len(every), KEY_BYTES):
                yield every[begin : begin + KEY_BYTES]
            return
        ids, width = self._ids(first, pages, page_size) if pages > first else b"", 4 * page_size
        for begin in range(0, len(ids), width):
            names = key + ids[begin : begin + width]
            if self.extra is not None:
                names += self.extra_at(first + begin // width)
            key = blake2b(names, digest_size=KEY_BYTES).digest()
            yield key

    def keys_from(self, page: int, key: bytes, stop: int, page_size: int) -> bytes:
        """The keys of pages `page:stop`, concatenated; `key` is the first of them."""
        if self.page_keys is not None:
            return self.page_keys[page - self.skipped : stop - self.skipped].tobytes()
        if self.computed and page >= self.computed_from:
            first, last = page - self.computed_from, stop - self.computed_from
            return self.computed[first * KEY_BYTES : last * KEY_BYTES]
        if self.extra is not None:
            after = islice(self.chain(key, page_size, page + 1), stop - page - 1)
            return b"".join((key, *after))
        ids = memoryview(self._ids(page + 1, stop, page_size))
        width, chained = 4 * page_size, [key]
        for begin in range(0, len(ids), width):
            key = blake2b(b"".join((key, ids[begin : begin + width])), digest_size=16).digest()
            chained.append(key)
        return b"".join(chained)

    def _ids(self, page: int, stop: int, page_size: int) -> bytes:
        ids = self.ids_of(page, stop, page_size)
        if ids is None:
            raise ValueError("a prefix without names: this is a bug")
        return ids.tobytes()


def extra_by_page(
    keys: Iterable[tuple[int, bytes]], page_size: int, skipped: int = 0
) -> dict[int, bytes] | None:
    """Further keys as key material by page: each from a token on, counted behind the first
    `skipped` pages. None without any."""
    extra: dict[int, bytes] = {}
    for token, key in keys:
        page, at = divmod(token, page_size)
        extra[skipped + page] = extra.get(skipped + page, b"") + EXTRA.pack(at, len(key)) + key
    return extra or None


def extra_keys(material: bytes) -> list[tuple[int, bytes]]:
    """The further keys of a page, each with the token in the page that it begins at."""
    keys, at = [], 0
    while at < len(material):
        token, size = EXTRA.unpack_from(material, at)
        at += EXTRA.size + size
        keys.append((token, material[at - size : at]))
    return keys


def root_key(namespace: str, cache_salt: str) -> bytes:
    """The key before the first page's: it differs by namespace and salt, so they share no pages."""
    return blake2b(f"{namespace}\0{cache_salt}".encode(), digest_size=KEY_BYTES).digest()


def as_keys(raw: bytes) -> Keys:
    """Concatenated keys as uint64 [n, 2]."""
    return np.frombuffer(raw, dtype=np.uint64).reshape(-1, WORDS)
