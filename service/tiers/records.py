"""Records: a header, a label and a payload in one block, with a digest over all of it.

A payload is a run of segments, and the record's digest covers theirs. Code that moves the payload
can compute those on the way, so that the processor need not read it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from xxhash import xxh3_128, xxh3_128_digest

MAGIC: Final = b"atr2"
HEADER: Final = struct.Struct("<4sHHQ16s16s16s")
"""Magic; bytes of namespace, label and payload; key; stamp; digest of everything else: XXH3-128 of
the rest of the head, and of the XXH3-128 of each segment of the payload's place."""
DIGEST_BYTES: Final = 16
KEY_BYTES: Final = 16
STAMP_BYTES: Final = 16
MAX_NAMESPACE: Final = 64
ALIGNMENT: Final = 64

Reason = Literal["torn", "foreign", "corrupt"]


class InvalidRecord(Exception):
    """A block is not the record it must be: cut short, another one, or changed."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason: Reason = reason


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """The size of blocks, and the stamp that all their records have.

    A block is a head of `head_bytes` (header, namespace, label, zeros) and then the payload of up
    to `payload_bytes`, in segments of `segment_bytes`. `stamp` (16 bytes) identifies the payloads'
    format: records with another stamp are never read.

    `spans`: records can take several places, and neither head nor digest is among their bytes.
    `digests` are those of all segments, one after the other, where the caller has them.
    """

    label_bytes: int
    payload_bytes: int
    stamp: bytes
    segment_bytes: int = 2**20
    spans: bool = False
    head_bytes: int = field(init=False)
    block_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        used = HEADER.size + MAX_NAMESPACE + self.label_bytes
        head_bytes = -(-used // ALIGNMENT) * ALIGNMENT
        object.__setattr__(self, "head_bytes", head_bytes)
        object.__setattr__(self, "block_bytes", head_bytes + self.payload_bytes)

    def seal(
        self,
        block: memoryview,
        key: bytes,
        namespace: str,
        label: bytes,
        length: int,
        digests: bytes | None = None,
    ) -> None:
        """Complete the block of a payload of `length` bytes, which is in its place already.

        Raises ValueError for a namespace, label or payload that does not fit.
        """
        owner = namespace.encode()
        fits = len(owner) <= MAX_NAMESPACE and len(label) <= self.label_bytes
        if not fits or not 0 <= length <= self.payload_bytes or len(key) != KEY_BYTES:
            sizes = f"{len(owner)}, {len(label)}, {len(key)} and {length} bytes"
            raise ValueError(f"namespace, label, key and payload of {sizes} do not fit a record")
        if length < self.payload_bytes:
            block[self.head_bytes + length :] = bytes(self.payload_bytes - length)
        sizes_of, text = (len(owner), len(label), length), owner + label
        header = HEADER.pack(MAGIC, *sizes_of, key, self.stamp, bytes(DIGEST_BYTES))
        head = header + text.ljust(self.head_bytes - HEADER.size, b"\0")
        block[: self.head_bytes] = head
        block[HEADER.size - DIGEST_BYTES : HEADER.size] = self._digest(head, block, digests)

    def check(
        self, block: memoryview | bytes, key: bytes, namespace: str, digests: bytes | None = None
    ) -> tuple[bytes, int]:
        """The label, and the length of the payload, of the record in a block; with `digests` its
        head is enough.

        Raises `InvalidRecord` unless it is the record of `key` in `namespace`, to the bit.
        """
        head = bytes(block[: self.head_bytes])
        magic, owner_len, label_len, length, found, stamp, digest = HEADER.unpack_from(head)
        text = HEADER.size + owner_len
        sizes_fit = text + label_len <= self.head_bytes and length <= self.payload_bytes
        if magic != MAGIC or not sizes_fit:
            raise InvalidRecord("torn")
        owner = head[HEADER.size : text]
        if found != key or stamp != self.stamp or owner != namespace.encode():
            raise InvalidRecord("foreign")
        if self._digest(head, block, digests) != digest:
            raise InvalidRecord("corrupt")
        return head[text : text + label_len], length

    def payload(self, block: memoryview) -> memoryview:
        return block[self.head_bytes :]

    def _digest(self, head: bytes, block: memoryview | bytes, digests: bytes | None) -> bytes:
        if digests is None:
            starts = range(self.head_bytes, self.block_bytes, self.segment_bytes)
            ends = (min(at + self.segment_bytes, self.block_bytes) for at in starts)
            parts = (xxh3_128_digest(block[at:end]) for at, end in zip(starts, ends, strict=True))
            digests = b"".join(parts)
        return xxh3_128_digest(head[: HEADER.size - DIGEST_BYTES] + head[HEADER.size :] + digests)


def digest_of(key: bytes, size: int) -> xxh3_128:
    """The digest of a record without a head, to be updated with its bytes."""
    return xxh3_128(size.to_bytes(8, "little") + key)


@dataclass(frozen=True, slots=True, eq=False)
class NewRecord:
    """A record to keep, with its columns of the index: its bytes are `parts`, one after another,
    all but the last one a multiple of a place's size, and take `size` places."""

    key: bytes
    namespace: str
    rank: int
    tag: bytes
    parts: Sequence[memoryview]
    size: int = 1
