"""`PageCopies` of a pool on a device: pages to and from host memory, beside all other work.

Kernels of a few blocks copy, each way on a stream of its own. Others digest what is in the pool
then, beside the copies of the next pages.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from threading import Lock, local
from typing import Any, Final

import cupy
import numpy as np
from cupy.cuda import runtime

from kernels.backend import EndOfCopies, Int32, Int64, PagePlaces, PoolGeometry, UInt8
from kernels.compile import Spec, spec
from kernels.cuda import checks
from kernels.cuda.common.structs import PAGE_MOVES, packed
from kernels.cuda.device.host_memory import pinned_memory
from kernels.cuda.device.launch import Launcher, Library
from kernels.cuda.device.lazy_pinned import LazyPinned
from kernels.cuda.device.pending import Guard
from kernels.cuda.device.transfer import Transfers, mark, passed
from kernels.digests import DIGEST_BYTES, host_digests, num_segments

PAGES_SPEC: Final[Spec] = spec("pages/pages")
MOST_PAGES: Final = 64
"""`kMostPages`."""
THREADS: Final = 512
LOAD_BLOCKS: Final = 6
STORE_BLOCKS: Final = 2
"""Blocks that copy: as many as the bus needs. With more, other copies wait longer."""
SHARED_LOAD_BLOCKS: Final = 12
"""Blocks that load beside stores: with fewer, stores take more than their half of the bus."""
MOST_UNITS: Final = 2**31
"""Units of 16 bytes that a launch copies: kernels number them in 32 bits."""
LEAST_DIGESTED: Final = 241
STRIPE: Final = 64
"""The kernel digests no shorter segments, and layers that are whole stripes."""


@dataclass(slots=True, eq=False)
class Way:
    """Loads or stores: their kernel, its blocks, and the kind of copies without it; the streams of
    copies and of digests."""

    entry: str
    blocks: int
    kind: int
    stream: Any
    digesting: Any
    lock: Lock = field(default_factory=Lock)
    digests: dict[int, Any] = field(default_factory=dict)
    """Pinned memory for digests of copies that were not waited for yet, by its address."""


class CudaPageCopies:
    """`PageCopies` on a device."""

    calls = 2

    def __init__(
        self,
        geometry: PoolGeometry,
        pool: int,
        library: Library,
        transfers: Transfers,
        guarded: Guard,
    ) -> None:
        """`pool`: the address of the first layer's page 0."""
        self._geometry, self._pool = geometry, pool
        self._num_segments = num_segments(geometry)
        self._most = max(1, min(MOST_PAGES, MOST_UNITS // (geometry.payload_bytes // 16)))
        """Pages of one launch."""
        self._struct = partial(
            packed,
            PAGE_MOVES,
            pool=pool,
            page_units=geometry.piece_bytes // 16,
            pool_pages=geometry.num_pages,
            num_layers=geometry.num_pieces,
            segment_layers=geometry.segment_pieces,
        )
        self._library, self._transfers, self._guarded = library, transfers, guarded
        self._device, self._here = cupy.cuda.Device(), local()
        self._memory = LazyPinned()
        streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(4)]
        up, down = runtime.memcpyHostToDevice, runtime.memcpyDeviceToHost
        self._loads = Way("load_pages", LOAD_BLOCKS, up, *streams[:2])
        self._stores = Way("store_pages", STORE_BLOCKS, down, *streams[2:])
        self._digest_bytes = DIGEST_BYTES * self._num_segments
        last = geometry.num_pieces % geometry.segment_pieces or geometry.segment_pieces
        is_short = last * geometry.piece_bytes < LEAST_DIGESTED
        self._on_host = is_short or geometry.piece_bytes % STRIPE > 0
        """Whether digests are computed on the host."""
        nothing = np.empty(0, np.int32), np.empty(0, np.int64)
        for way in (self._loads, self._stores):  # a first launch later could wait for steps
            with way.stream:
                self.enqueue(way.entry, 1, *nothing, 0)
            with way.digesting:
                self.enqueue("digest_pages", 1, *nothing, 0)

    @property
    def num_streams(self) -> int:
        return 4

    def memory(self, count: int, size: int) -> UInt8:
        return self._memory.allocate(count, size)

    def is_prepared(self, places: PagePlaces) -> bool:
        return self._memory.is_prepared(places.blocks, places.rows)

    def prepare(self, places: PagePlaces) -> None:
        with self._guarded():
            self._use_device()
            self._memory.pin(places.blocks, places.rows)

    def mark(self) -> object:
        with self._guarded():
            return mark(self._transfers.compute)

    def read(self, pages: Int32, to: PagePlaces, after: object) -> EndOfCopies:
        return self._begin(self._stores, pages, to, after)

    def write(self, pages: Int32, source: PagePlaces, after: object) -> EndOfCopies:
        return self._begin(self._loads, pages, source, after)

    def close(self) -> None:
        """Wait for all copies, and unpin the memory."""
        for way in (self._loads, self._stores):
            way.stream.synchronize()
            way.digesting.synchronize()
        self._memory.clear()

    def _begin(self, way: Way, pages: Int32, places: PagePlaces, after: object) -> EndOfCopies:
        hosts, size, most = self._hosts(pages, places), self._digest_bytes, self._most
        with self._guarded(), way.lock:
            digests = pinned_memory(max(1, len(pages) * size))
            way.digests[digests.ptr] = digests
            starts = [slice(at, at + most) for at in range(0, len(pages), most)]
            parts = [(pages[one], hosts[one], digests.ptr + one.start * size) for one in starts]
            shares = way is self._loads and self._stores.digests
            num_blocks = SHARED_LOAD_BLOCKS if shares else way.blocks
            way.stream.wait_event(after)
            with way.stream:
                for part in parts:
                    if self._memory.is_pinned:
                        self.enqueue(way.entry, num_blocks, *part)
                    else:
                        self._copy_pageable(way, *part[:2])
            if not self._on_host:
                way.digesting.wait_event(mark(way.stream))
                with way.digesting:
                    for part in parts:
                        blocks = len(part[0]) * self._num_segments
                        self.enqueue("digest_pages", blocks, *part)
            end = _end(way.stream if self._on_host else way.digesting)

        def wait() -> list[bytes]:
            with self._guarded():
                self._use_device()
                end.synchronize()
            del way.digests[digests.ptr]
            if self._on_host:
                return host_digests(places, self._geometry)
            every = bytes(np.ndarray((len(pages) * size,), np.uint8, digests))
            return [every[at : at + size] for at in range(0, len(every), size)]

        def has_come() -> bool:
            with self._guarded():
                return passed(end)

        return EndOfCopies(wait, None if self._on_host else has_come)

    def enqueue(self, entry: str, blocks: int, pages: Int32, hosts: Int64, digests: int) -> None:
        """Copy or digest up to `MOST_PAGES` pages, on CuPy's current stream."""
        struct = self._struct(digests=digests, num_pages=len(pages))
        places = hosts.tobytes().ljust(8 * MOST_PAGES, b"\0")
        places += pages.tobytes().ljust(4 * MOST_PAGES, b"\0")
        function = self._library.function(PAGES_SPEC, entry)
        Launcher(function, blocks, THREADS, 0, struct + places, (0, len(struct)))()

    def _copy_pageable(self, way: Way, pages: Int32, hosts: Int64) -> None:
        """Copy pages that kernels do not reach in host memory, a piece at a time."""
        g = self._geometry
        for page, host in zip(pages.tolist(), hosts.tolist(), strict=True):
            for piece in range(g.num_pieces):
                stored = self._pool + (piece * g.num_pages + page) * g.piece_bytes
                both = (stored, host + piece * g.piece_bytes)
                to, source = both if way is self._loads else both[::-1]
                runtime.memcpyAsync(to, source, g.piece_bytes, way.kind, way.stream.ptr)

    def _hosts(self, pages: Int32, places: PagePlaces) -> Int64:
        """The host addresses of pages, once they are pinned."""
        checks.check_pages(pages, self._geometry, "pages")
        needed = places.skip + self._geometry.payload_bytes
        checks.require(places.blocks.shape[1] >= needed, "blocks", needed, "bytes of a page")
        with self._guarded():
            self._use_device()
            return self._memory.pin(places.blocks, places.rows) + places.skip

    def _use_device(self) -> None:
        """Make the pool's device the calling thread's own."""
        if not getattr(self._here, "is_set", False):
            self._device.use()
            self._here.is_set = True


def _end(stream: Any) -> Any:
    """An event after all work of the stream; the thread that waits for it sleeps."""
    return stream.record(cupy.cuda.Event(block=True, disable_timing=True))
