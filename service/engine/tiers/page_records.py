"""Pages as records: their identity in the tiers, their labels, and the stamp of a pool."""

from __future__ import annotations

import struct
from hashlib import blake2b
from typing import Final, NamedTuple

import numpy as np

from kernels.backend import PoolGeometry
from service.core.keys import EXTRA, KEY_BYTES, WORDS, Keys, as_keys
from service.core.values import Int32
from service.operations.schema.page_names import MAX_EXTRA_A_PAGE, MAX_EXTRA_BYTES
from service.tiers.records import STAMP_BYTES, RecordLayout

TAG: Final = struct.Struct(f"<{KEY_BYTES}s{KEY_BYTES}s{KEY_BYTES}sH?")
"""A page's key, key and identity of the page before it, its priority, and whether its token ids
follow in the label, with the key material beside them."""
EXTRA_ROOM: Final = MAX_EXTRA_A_PAGE * (EXTRA.size + MAX_EXTRA_BYTES)


def next_id(before: bytes, key: bytes) -> bytes:
    """The identity of a page: a digest of the keys of its whole path.

    `before` is the identity of the page before it; before the first it is the key of the root,
    which covers namespace and salt. A page of equal key on another path is another page.
    """
    return blake2b(before + key, digest_size=KEY_BYTES).digest()


class PagePaths:
    """Of each page that has a name: its identity, and key and identity of the page before it."""

    def __init__(self, num_pages: int) -> None:
        self._rows: Keys = np.zeros((num_pages, 3, WORDS), np.uint64)
        self._bytes = self._rows.data.cast("B")

    def add(self, pages: Int32, before: bytes, key: bytes, keys: bytes) -> list[bytes]:
        """The identities of committed pages of these concatenated `keys`. The page before them has
        the identity `before` and this `key`; the root, its key for both."""
        first, record_ids = before, []
        for at in range(0, len(keys), KEY_BYTES):
            before = next_id(before, keys[at : at + KEY_BYTES])
            record_ids.append(before)
        self._rows[pages, 0] = as_keys(b"".join(record_ids))
        self._rows[pages, 1] = as_keys(key + keys[:-KEY_BYTES])
        self._rows[pages, 2] = as_keys(b"".join([first, *record_ids[:-1]]))
        return record_ids

    def id_of(self, page: int) -> bytes:
        return self._part(page, 0)

    def rows_of(self, pages: Int32) -> Keys:
        """The identities of pages, `[n, 2]`."""
        rows: Keys = self._rows[pages, 0]
        return rows

    def ids_of(self, pages: Int32) -> list[bytes]:
        return split_ids(self.rows_of(pages).tobytes())

    def before(self, page: int) -> tuple[bytes, bytes]:
        """Key and identity of the page before one."""
        return self._part(page, 1), self._part(page, 2)

    def _part(self, page: int, number: int) -> bytes:
        first = (3 * page + number) * KEY_BYTES
        return self._bytes[first : first + KEY_BYTES].tobytes()


def split_ids(every: bytes) -> list[bytes]:
    """Concatenated keys or identities, one by one."""
    return [every[at : at + KEY_BYTES] for at in range(0, len(every), KEY_BYTES)]


def layout_of(geometry: PoolGeometry, model: str) -> RecordLayout:
    """Records of a pool's pages. The stamp covers model, shape and formats, also of the labels."""
    shape = (
        *(geometry.num_layers, geometry.page_size, geometry.num_kv_heads, geometry.head_dim),
        *(geometry.layout, geometry.dtype, *geometry.scales, geometry.segment_pieces),
        *geometry.layer_groups,
    )
    text = repr((model, TAG.format, EXTRA.format, shape))
    stamp = blake2b(text.encode(), digest_size=STAMP_BYTES).digest()
    label_bytes = TAG.size + 4 * geometry.page_size + EXTRA_ROOM
    segment_bytes = geometry.segment_pieces * geometry.piece_bytes
    return RecordLayout(label_bytes, geometry.payload_bytes, stamp, segment_bytes)


def names_in(label: bytes, page_size: int) -> tuple[bytes, bytes]:
    """A page's token ids and the key material beside them; empty without ids."""
    end = TAG.size + 4 * page_size
    return label[TAG.size : end], label[end:]


class PageTag(NamedTuple):
    """A page's columns in the index of a tier; the first bytes of its label."""

    key: bytes
    before: bytes
    id_before: bytes
    priority: int
    with_ids: bool

    @classmethod
    def read(cls, tag: bytes) -> PageTag:
        """From a tag or the beginning of a label."""
        return cls._make(TAG.unpack_from(tag))
