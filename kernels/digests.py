"""Digests of pages, by which a later reader knows whether they are as they were.

A page has an XXH3-128 for each `PoolGeometry.segment_pieces` of its pieces; the last ones can be
fewer.
"""

from __future__ import annotations

from typing import Final

from xxhash import xxh3_128_digest

from kernels.backend import PagePlaces, PoolGeometry

DIGEST_BYTES: Final = 16


def num_segments(geometry: PoolGeometry) -> int:
    """Digests of a page."""
    return -(-geometry.num_pieces // geometry.segment_pieces)


def host_digests(places: PagePlaces, geometry: PoolGeometry) -> list[bytes]:
    """The digests of pages in host memory, `16 * num_segments` bytes for each page."""
    size, end = geometry.segment_pieces * geometry.piece_bytes, geometry.payload_bytes
    found = []
    for row in places.rows.tolist():
        page = places.blocks[row, places.skip : places.skip + end].data
        parts = [xxh3_128_digest(page[at : at + size]) for at in range(0, end, size)]
        found.append(b"".join(parts))
    return found
