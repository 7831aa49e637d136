"""Tiers: hit rates of a trace with and without them, and the time of moves on the CPU.

    python -m bench.tiers [--trace FILE] [--page-size 512] [--quick]
    python -m bench.tiers --backend cuda [--quick]    (bench/gpu_tiers.py)

The trace is replayed as `bench.cache` does, on a pool of 5 % of the distinct pages, alone, with
host memory for 20 %, and with a disk for all. Pages are numbers here, so every hit is checked and
the moves cost nothing. Then pages of a model's size are stored and loaded, with their digests.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from bench import gpu_tiers
from bench.cache import Replay, Requests, endless, exact_lru, pages_of
from bench.cases.trace import BLOCK_TOKENS, trace_of
from bench.report.provenance import RESULTS, Results, command_line, device_name, provenance, publish
from bench.report.tables import markdown, with_stamp
from kernels import make_backend
from kernels.backend import EndOfCopies, Int32, PagePlaces, PoolGeometry
from service.core.keys import Prefix
from service.core.pool.budget import NO_LIMIT, EvictionPaused
from service.engine.tiers.loading import Loading
from service.engine.tiers.loads import UNLIMITED, Origin
from service.engine.tiers.page_records import TAG, layout_of
from service.engine.tiers.tiers import Tiers
from service.metrics import Metrics
from service.tiers.record_store import RecordStore
from service.tiers.records import NewRecord, RecordLayout

TIERS_RESULTS: Final = RESULTS / "tiers-cpu.json"
POOL_SHARE: Final = 0.05
HOST_SHARE: Final = 0.20
MOST_EVICTED: Final = 2**20
MOVED: Final = 64
"""Pages that are stored and loaded: 16 tokens, 32 layers, 8 heads of 128, fp16; 2 MiB each."""
RECORDS: Final = 100_000
UInt8 = NDArray[np.uint8]


class Numbers:
    """Copies of pages whose content is a number: `held[p]` is that of page p."""

    calls = 1

    def __init__(self, held: NDArray[np.int64]) -> None:
        self.held = held

    def is_prepared(self, places: PagePlaces) -> bool:
        return True

    def prepare(self, places: PagePlaces) -> None:
        pass

    def memory(self, count: int, size: int) -> UInt8:
        return np.zeros((count, size), np.uint8)

    def mark(self) -> None:
        return None

    def read(self, pages: Int32, to: PagePlaces, after: object) -> EndOfCopies:
        for page, row in zip(pages.tolist(), to.rows.tolist(), strict=True):
            to.blocks[row, to.skip :] = self.held[page : page + 1].view(np.uint8)
        return EndOfCopies(lambda: [b""] * len(pages))

    def write(self, pages: Int32, source: PagePlaces, after: object) -> EndOfCopies:
        for page, row in zip(pages.tolist(), source.rows.tolist(), strict=True):
            self.held[page] = source.blocks[row, source.skip :].view(np.int64)[0]
        return EndOfCopies(lambda: [b""] * len(pages))


class TierMoves:
    """Tiers behind a replay's pool: `host_pages` of host memory, and a disk at `disk`."""

    def __init__(self, run: Replay, host_pages: int, disk: Path | None) -> None:
        self.tree = run.tree
        layout = RecordLayout(TAG.size + 4 * run.page_size, 8, bytes(16))
        tiers = Tiers(run.tree, Numbers(run.held), layout, host_pages, lambda: None, Metrics())
        if disk is not None:
            tiers.disk.open(RecordStore(disk, 2**40, layout, evicted=tiers.disk.evicted))
        self.loading = Loading(tiers, lambda: None)
        self.found = Origin()

    def load(self, prefix: Prefix) -> None:
        steps = self.loading.load("default", prefix, UNLIMITED)
        try:
            while True:
                next(steps)
                self.advance()
        except StopIteration as end:
            self.found.update(end.value)

    def extend(self, tokens: int) -> None:
        budget = self.tree.budget
        while True:
            budget.most_evicted = MOST_EVICTED
            try:
                self.tree.extend(0, ["r"], np.array([tokens], np.int32))
                return
            except EvictionPaused:
                self.advance()
            finally:
                budget.most_evicted = NO_LIMIT

    def advance(self) -> None:
        self.loading.advance()
        time.sleep(0)

    def finish(self) -> None:
        while self.loading.tiers.is_copying:
            self.advance()


def hit_rates(requests: Requests, page_size: int) -> list[dict[str, Any]]:
    """The trace on the pool alone, with host memory, and with a disk behind it."""
    per_block = BLOCK_TOKENS // page_size
    distinct = len({one for blocks in requests for one in blocks.tolist()}) * per_block
    pool, host = int(POOL_SHARE * distinct), int(HOST_SHARE * distinct)
    rows = []
    with tempfile.TemporaryDirectory(prefix="attnd-bench-") as folder:
        for name, host_pages, disk, capacity in (
            ("pool", 0, None, pool),
            ("pool, host", host, None, pool + host),
            ("pool, host, disk", host, Path(folder) / "tier", distinct),
        ):
            run = Replay(pool, page_size)
            tiers = TierMoves(run, host_pages, disk) if host_pages else None
            run.moves = tiers
            began = time.monotonic()
            for blocks in requests:
                run.request(pages_of(blocks, per_block))
            run.tree.check_integrity()
            found = Origin() if tiers is None else tiers.found
            if tiers is not None:
                tiers.loading.close(writes_pool=False)
            row = {
                "tiers": name,
                "hit_rate": round(run.hits / run.total, 4),
                "lru_hit_rate": round(exact_lru(requests, per_block, capacity), 4),
                "hits_checked": run.hits,
                "from_host": found["host"],
                "from_disk": found["disk"],
                "seconds": round(time.monotonic() - began, 1),
            }
            print(row, flush=True)
            rows.append(row)
    return rows


def moves(folder: Path) -> dict[str, float]:
    """GB/s of pages to host memory, to the disk, and back, by one thread, with their digests."""
    geometry = PoolGeometry(32, MOVED, 16, 8, 128)
    layout = layout_of(geometry, "model")
    backend = make_backend("cpu", geometry)
    copies = backend.page_copies
    pages = np.arange(MOVED, dtype=np.int32)
    memory = copies.memory(MOVED, layout.block_bytes)
    payloads = PagePlaces(memory, np.arange(MOVED), layout.head_bytes)
    keys = [number.to_bytes(16, "little") for number in range(MOVED)]
    copies.write(pages, payloads, None)()
    gigabytes, rates = MOVED * layout.payload_bytes / 1e9, {}

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        rates[name] = round(gigabytes / (time.perf_counter() - began), 2)

    copies.read(pages, payloads, None)()
    with timed("pool to host memory, with digests"):
        copies.read(pages, payloads, None)()
    with timed("digests"):
        for key, block in zip(keys, memory, strict=True):
            layout.seal(block.data, key, "a", b"", layout.payload_bytes)
    size = MOVED * layout.block_bytes
    with closing(RecordStore(folder / "moves", size, layout)) as store:
        with timed("host memory to disk, synced"):
            for first in range(0, MOVED, 16):
                some = zip(keys[first : first + 16], memory[first : first + 16], strict=True)
                store.put([NewRecord(key, "a", 35, b"", (block.data,)) for key, block in some])
        with timed("disk (cached by the system) to host memory, verified"):
            for key, block in zip(keys, memory, strict=True):
                entry = store.find(key)
                if entry is None or store.get(entry, block.data) is None:
                    raise RuntimeError("a record is missing: this is a bug")
    with timed("host memory to pool, verified"):
        digests = copies.write(pages, payloads, None)()
        for key, block, own in zip(keys, memory, digests, strict=True):
            layout.check(block.data, key, "a", own)
    backend.close()
    return rates


def start(folder: Path) -> float:
    """Seconds to open a store of `RECORDS` records."""
    layout = RecordLayout(0, 8, bytes(16))
    block = memoryview(bytearray(layout.block_bytes))
    place = folder / "start", RECORDS * layout.block_bytes, layout
    with closing(RecordStore(*place)) as store:
        for first in range(0, RECORDS, 1000):
            numbers = range(first, first + 1000)
            store.put(
                [NewRecord(n.to_bytes(16, "little"), "a", 35, b"", (block,)) for n in numbers]
            )
    began = time.perf_counter()
    with closing(RecordStore(*place)):
        return round(time.perf_counter() - began, 3)


def table(results: Results) -> str:
    counts = ("hits_checked", "from_host", "from_disk")
    rows = [
        [row["tiers"]]
        + [f"{row[name]:.3f}" for name in ("hit_rate", "lru_hit_rate")]
        + [f"{row[name]:,}" for name in counts]
        for row in results["rows"]
    ]
    head = ["tiers", "hit rate", "exact LRU", "hits checked", "from host", "from disk"]
    moved = [(name, f"{rate:.2f}") for name, rate in results["gb_per_s"].items()]
    moved.append((f"start with {RECORDS:,} records, s", f"{results['start_s']:.3f}"))
    text = f"{markdown(head, rows)}\n\n{markdown(('move', 'GB/s'), moved)}"
    shares = f"pool {POOL_SHARE:.0%}, host memory {HOST_SHARE:.0%} of the distinct pages"
    of = f"{results['trace']}, pages of {results['page_size']} tokens, {shares}"
    return with_stamp(text, results, of)


def main() -> None:
    parser = command_line(__doc__ or "", trace=True)
    parser.add_argument("--page-size", type=int, default=512, choices=(16, 32, 64, 128, 256, 512))
    parser.add_argument("--backend", choices=("cpu", "cuda"), default="cpu")
    chosen = parser.parse_args()
    if chosen.backend == "cuda":
        found = gpu_tiers.measure(chosen.quick)
        path = RESULTS / f"tiers-{device_name(found['device'])}.json"
        publish(found, gpu_tiers.table(found), path, chosen)
        return
    trace = trace_of(chosen.trace, 3000)[: 300 if chosen.quick else None]
    requests = [np.array(request.blocks, np.int64) for request in trace]
    print(f"{len(requests)} requests, unbounded cache {endless(requests):.4f}")
    with tempfile.TemporaryDirectory(prefix="attnd-bench-") as folder:
        results = provenance(["numpy"]) | {
            "trace": chosen.trace.name if chosen.trace else "a generated trace",
            "page_size": chosen.page_size,
            "rows": hit_rates(requests, chosen.page_size),
            "gb_per_s": moves(Path(folder)),
            "start_s": start(Path(folder)),
        }
    publish(results, table(results), TIERS_RESULTS, chosen)


if __name__ == "__main__":
    main()
