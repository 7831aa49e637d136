"""`PageCopies` of a pool on a device: pages to and from host memory, beside all other work.

A kernel gathers pages into a chunk of device memory, from where they go to the host in one copy
each; loads go the other way. Each way has two chunks with streams of their own, which take turns:
one is copied while the kernel works on the other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from threading import Lock, local
from typing import Any, Final, NamedTuple

import cupy
import numpy as np
from cupy.cuda import runtime
from numpy.typing import NDArray

from kernels.backend import Int32, Int64, PagePlaces, PoolGeometry, UInt8
from kernels.compile import Spec, spec
from kernels.cuda import checks
from kernels.cuda.common.structs import PAGE_MOVES, packed
from kernels.cuda.device.copying import copy_all
from kernels.cuda.device.launch import Launcher, Library
from kernels.cuda.device.lazy_pinned import LazyPinned
from kernels.cuda.device.pending import Guard
from kernels.cuda.device.transfer import Transfers, mark

PAGES_SPEC: Final[Spec] = spec("pages/pages")
CHUNK: Final = 1 << 24
"""Bytes that one launch moves: decodes beside it are not held up."""
CHUNKS: Final = 2
"""Chunks, and streams, of each way."""
MOST_PAGES: Final = 64
"""`kMostPages`."""
THREADS: Final = 256
PIECE: Final = 16 * THREADS * 4
"""Bytes that a block moves at once."""
MOST_BLOCKS: Final = 64
MOST_CALLS: Final = 4


class Part(NamedTuple):
    """What one chunk takes of a call: some pages, and some of their layers."""

    pages: slice
    first_layer: int
    num_layers: int


@dataclass(slots=True, eq=False)
class Way:
    """The chunks of loads or of stores, used by one thread at a time: (stream, memory) each."""

    chunks: Iterator[tuple[Any, Any]]
    lock: Lock = field(default_factory=Lock)


class CudaPageCopies:
    """`PageCopies` on a device. Raises MemoryError where it has no room for the chunks."""

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
        self._library, self._transfers, self._guarded = library, transfers, guarded
        self._device, self._here = cupy.cuda.Device(), local()
        self._memory = LazyPinned()
        self._streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2 * CHUNKS)]
        size = max(CHUNK, geometry.page_bytes)
        try:
            chunks = [(stream, _allocated(stream, size)) for stream in self._streams]
        except cupy.cuda.memory.OutOfMemoryError as error:
            needed = f"copies of pages need {len(self._streams) * size} bytes of device memory"
            raise MemoryError(f"{needed}: lower pool.num_pages or pool.memory_fraction") from error
        self._loads, self._stores = Way(cycle(chunks[:CHUNKS])), Way(cycle(chunks[CHUNKS:]))
        for stream, chunk in chunks:  # a first launch later could wait for the callers of steps
            with stream:
                self.enqueue("gather_pages", chunk.ptr, np.empty(0, np.int32), 0, 1)

    @property
    def calls(self) -> int:
        return max(2, min(MOST_CALLS, (os.cpu_count() or 1) // 4))

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    def memory(self, count: int, size: int) -> UInt8:
        return self._memory.allocate(count, size)

    def mark(self) -> object:
        with self._guarded():
            return mark(self._transfers.compute)

    def read(self, pages: Int32, to: PagePlaces, after: object) -> Callable[[], None]:
        hosts, kind, ends = self._hosts(pages, to), runtime.memcpyDeviceToHost, {}
        with self._guarded(), self._stores.lock:
            for part in self._parts(len(pages)):
                stream, chunk = next(self._stores.chunks)
                self._launch("gather_pages", stream, chunk, pages, part, after)
                table = self._table(part, hosts, chunk.ptr)
                copy_all(table, kind, stream, self._memory.is_pinned)
                ends[stream.ptr] = _end(stream)
        return partial(self._wait, tuple(ends.values()))

    def write(self, pages: Int32, source: PagePlaces, after: object) -> Callable[[], None]:
        hosts, kind, ends = self._hosts(pages, source), runtime.memcpyHostToDevice, {}
        with self._guarded(), self._loads.lock:
            for part in self._parts(len(pages)):
                stream, chunk = next(self._loads.chunks)
                table = self._table(part, hosts, chunk.ptr)[[1, 0, 2]]
                copy_all(table, kind, stream, self._memory.is_pinned)
                self._launch("scatter_pages", stream, chunk, pages, part, after)
                ends[stream.ptr] = _end(stream)
        return partial(self._wait, tuple(ends.values()))

    def close(self) -> None:
        """Wait for all copies, and unpin the memory."""
        for stream in self._streams:
            stream.synchronize()
        self._memory.clear()

    def _launch(
        self, entry: str, stream: Any, chunk: Any, pages: Int32, part: Part, after: object
    ) -> None:
        stream.wait_event(after)
        with stream:
            self.enqueue(entry, chunk.ptr, pages[part.pages], part.first_layer, part.num_layers)

    def enqueue(
        self, entry: str, chunk: int, pages: Int32, first_layer: int, num_layers: int
    ) -> None:
        """Move layers of pages between pool and chunk, on CuPy's current stream."""
        g = self._geometry
        struct = packed(
            PAGE_MOVES,
            pool=self._pool,
            staged=chunk,
            page_units=g.page_bytes // 16,
            pool_pages=g.num_pages,
            first_layer=first_layer,
            num_layers=num_layers,
            num_pages=len(pages),
        )
        ids = pages.tobytes().ljust(4 * MOST_PAGES, b"\0")
        pieces = len(pages) * num_layers * -(-g.page_bytes // PIECE)
        function = self._library.function(PAGES_SPEC, entry)
        grid = min(max(pieces, 1), MOST_BLOCKS)
        Launcher(function, grid, THREADS, 0, struct + ids, (0, len(struct)))()

    def _parts(self, num_pages: int) -> Iterator[Part]:
        g = self._geometry
        per_chunk = min(CHUNK // (g.num_layers * g.page_bytes), MOST_PAGES)
        if per_chunk:
            for first in range(0, num_pages, per_chunk):
                yield Part(slice(first, first + per_chunk), 0, g.num_layers)
            return
        layers = max(1, CHUNK // g.page_bytes)
        for page in range(num_pages):
            for first in range(0, g.num_layers, layers):
                num_layers = min(layers, g.num_layers - first)
                yield Part(slice(page, page + 1), first, num_layers)

    def _hosts(self, pages: Int32, places: PagePlaces) -> Int64:
        """The host addresses of pages, once they are pinned."""
        checks.check_pages(pages, self._geometry, "pages")
        needed = places.skip + self._geometry.num_layers * self._geometry.page_bytes
        checks.require(places.blocks.shape[1] >= needed, "blocks", needed, "bytes of a page")
        with self._guarded():
            self._use_device()
            return self._memory.pin(places.blocks, places.rows) + places.skip

    def _table(self, part: Part, hosts: Int64, chunk: int) -> NDArray[np.uint64]:
        """Host addresses, addresses in the chunk, and sizes of the copies of a part."""
        size = part.num_layers * self._geometry.page_bytes
        places = hosts[part.pages] + part.first_layer * self._geometry.page_bytes
        table = np.empty((3, len(places)), np.uint64)
        table[0], table[2] = places, size
        table[1] = chunk + size * np.arange(len(places))
        return table

    def _use_device(self) -> None:
        """Make the pool's device the calling thread's own."""
        if not getattr(self._here, "is_set", False):
            self._device.use()
            self._here.is_set = True

    def _wait(self, ends: Sequence[Any]) -> None:
        with self._guarded():
            for end in ends:
                end.synchronize()


def _allocated(stream: Any, size: int) -> Any:
    with stream:
        return cupy.cuda.alloc(size)


def _end(stream: Any) -> Any:
    """An event after all work of the stream; the thread that waits for it sleeps."""
    return stream.record(cupy.cuda.Event(block=True, disable_timing=True))
