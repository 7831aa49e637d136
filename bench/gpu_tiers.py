"""Tiers on a GPU: `python -m bench.tiers --backend cuda`.

Pages of 16 tokens, 32 layers, 8 heads of 128, fp16: 2 MiB each.

- 256 of them are stored to host memory and loaded back by the engine's tiers, from the lookup to
  the commit, with digests and without, beside bare copies of 64 MiB pinned pieces in the same run.
- Small decodes of one process, alone and while another client has prompts loaded one after another.
- A cached prompt of 8k tokens from host memory and from disk, beside its attention.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from statistics import median
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import Any, Final

import numpy as np
from attnd import Client, Prefix, Session

from bench.cases.loads import Decode, Heads, fill, random
from bench.driver.servers import Server, attnd
from bench.driver.ways import Target
from bench.driver.worker import Worker
from bench.report.provenance import Results, provenance
from bench.report.tables import markdown, with_stamp
from kernels import make_backend
from kernels.backend import Backend, Int32, PagePlaces, PoolGeometry
from service.core import keys
from service.core.tree import PrefixTree
from service.core.values import NewSpec
from service.engine.handlers.imports import fill as take_pages
from service.engine.tiers.loading import Loading
from service.engine.tiers.loads import UNLIMITED, waiting
from service.engine.tiers.page_records import layout_of
from service.engine.tiers.tiers import Tiers
from service.engine.work.work import WAIT, Slice
from service.metrics import Metrics
from service.tiers.records import RecordLayout

HEADS: Final = Heads(num_qo=32, num_kv=8, dim=128)
LAYERS: Final = 32
PAGE: Final = 16
PAGES: Final = 256
"""Of a prompt."""
LONG: Final = 512
"""Pages of the prompt of 8k tokens."""
PROMPTS: Final = 4
PIECE: Final = 64 * 2**20
REPEATS: Final = 15
GEOMETRY: Final = PoolGeometry(LAYERS, 3 * PAGES, PAGE, HEADS.num_kv, HEADS.dim)
DECODES: Final = ((1, 64), (16, 256))
"""Sequences and tokens of the small decodes."""
LOADED, STORED = "loaded", "stored"
"""Namespaces: one prompt is loaded, the other stored."""
PACKAGES: Final = ("attnd", "cupy-cuda13x", "numpy", "xxhash")


class Undigested(RecordLayout):
    """Records without digests, for comparison."""

    __slots__ = ()

    def _digest(self, head: bytes, block: object, digests: bytes | None = None) -> bytes:
        return bytes(16)


@contextmanager
def undigested(copies: Any) -> Iterator[None]:
    """Copies whose pages get no digests."""
    every = copies.enqueue
    copies.enqueue = lambda entry, *call: None if entry == "digest_pages" else every(entry, *call)
    try:
        yield
    finally:
        del copies.enqueue


def bare_copies() -> dict[str, float]:
    """GB/s of `cudaMemcpyAsync` of pinned pieces, as many bytes as a prompt has."""
    import cupy
    from cupy.cuda import runtime

    count = GEOMETRY.num_layers * GEOMETRY.page_bytes * PAGES // PIECE
    host = [[cupy.cuda.alloc_pinned_memory(PIECE) for _ in range(count)] for _ in range(2)]
    device = [cupy.cuda.alloc(count * PIECE) for _ in range(2)]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]

    kinds = runtime.memcpyDeviceToHost, runtime.memcpyHostToDevice

    def seconds(*ways: int) -> float:
        """Of `kinds`, each by a stream of its own."""
        began = time.perf_counter()
        for way in ways:
            for number, piece in enumerate(host[way]):
                to, source = piece.ptr, device[way].ptr + number * PIECE
                if kinds[way] == runtime.memcpyHostToDevice:
                    to, source = source, to
                runtime.memcpyAsync(to, source, PIECE, kinds[way], streams[way].ptr)
        for stream in streams:
            stream.synchronize()
        return time.perf_counter() - began

    rates, size = {}, count * PIECE / 1e9
    for name, ways in (("load", [1]), ("store", [0]), ("both", [0, 1])):
        took = median(seconds(*ways) for _ in range(REPEATS))
        rates[name] = round(len(ways) * size / took, 2)
    return rates


class Moves:
    """Prompts of a tree with tiers, which are loaded and stored at will."""

    def __init__(self, backend: Backend, layout: RecordLayout, pages: int = PAGES) -> None:
        geometry, self.pages, self.woken = backend.geometry, pages, Event()
        self.backend = backend
        self.tree = PrefixTree(geometry.num_pages, PAGE, geometry.num_layers)
        self.copies = backend.page_copies
        host = (self.tree, self.copies, layout, 2 * pages, self.woken.set, Metrics())
        self.tiers = Tiers(*host)
        self.loading = Loading(self.tiers, self.woken.set)
        self.prompt = keys.Prefix(np.arange(pages * PAGE, dtype=np.uint32))
        self.gigabytes = pages * layout.payload_bytes / 1e9

    def add(self, namespace: str) -> None:
        """Commit the prompt; its pages hold the pool's old content."""
        self.tree.create([NewSpec("new", namespace=namespace)])
        take_pages(self.tree, "new", [self.pages * PAGE] * self.tree.num_layers)
        self.tree.commits.commit("new", self.prompt)
        self.tree.free(["new"])

    def table(self, namespace: str) -> Int32:
        return self.tree.cache.match(namespace, self.prompt).table()

    def run(self, *works: Iterator[Slice]) -> float:
        """Seconds until all works have ended, in turns as the engine gives them."""
        began, left = time.perf_counter(), dict.fromkeys(works)
        while True:
            self.loading.advance()
            left = {work: piece for work in left if (piece := next(work, None)) is not None}
            if not left:
                return time.perf_counter() - began
            is_waiting = all(piece.kind == WAIT for piece in left.values())
            if is_waiting and self.loading.poll_s != 0.0:
                self.woken.wait(1e-3)
            self.woken.clear()

    def store(self, namespace: str) -> Iterator[Slice]:
        pages = self.table(namespace)
        ids = self.tiers.paths.ids_of(pages)
        self.tiers.request_copies(namespace, ids, pages.tolist())
        while self.tiers.is_copying:
            yield waiting()
        if not all(map(self.tiers.host.find, ids)) or len(ids) < self.pages:
            raise RuntimeError("pages were not stored: this is a bug")

    def load(self) -> Iterator[Slice]:
        origin = yield from self.loading.load(LOADED, self.prompt, UNLIMITED)
        if origin["host"] != self.pages:
            raise RuntimeError(f"loaded {origin}, expected {self.pages} pages: this is a bug")

    def forget(self) -> None:
        """Drop the records of the prompt that is stored."""
        for page in self.table(STORED).tolist():
            if (entry := self.tiers.host.find(self.tiers.paths.id_of(page))) is not None:
                self.tiers.drop_from_host(entry)

    def content(self) -> Any:
        """The bytes of the loaded prompt's pages in the pool."""
        geometry, pages = self.backend.geometry, self.table(LOADED)
        size = geometry.num_layers * geometry.page_bytes
        memory = self.copies.memory(len(pages), size)
        self.copies.read(pages, PagePlaces(memory, np.arange(len(pages))), self.copies.mark())()
        return memory

    def rates(self, repeats: int) -> dict[str, float]:
        """GB/s of loads, of stores, and of both at once."""
        self.add(LOADED)
        self.add(STORED)
        before = self.content()
        seconds: dict[str, list[float]] = {"load": [], "store": [], "both": []}
        self.run(self.store(LOADED))
        for turn in range(repeats + 1):
            for name in seconds:
                works = []
                if name != "store":
                    self.tree.cache.evict(LOADED, self.pages)
                    works.append(self.load())
                if name != "load":
                    self.forget()
                    works.append(self.store(STORED))
                took = self.run(*works)
                if turn:  # the first pins the memory
                    seconds[name].append(took)
        if not np.array_equal(before, self.content()):
            raise RuntimeError("loaded pages differ from those stored: this is a bug")
        rates = {name: self.gigabytes / median(took) for name, took in seconds.items()}
        rates["both"] *= 2
        return {name: round(rate, 2) for name, rate in rates.items()}

    def close(self) -> None:
        self.loading.close(writes_pool=False)


def moves(backend: Backend, repeats: int, pages: int = PAGES) -> dict[str, dict[str, float]]:
    """Rates with digests and without, in turns."""
    layout = layout_of(backend.geometry, "bench")
    bare = Undigested(*(getattr(layout, one.name) for one in fields(layout) if one.init))
    found: dict[str, list[dict[str, float]]] = {"digests": [], "no digests": []}
    for _ in range(3):
        for name, one in (("digests", layout), ("no digests", bare)):
            with nullcontext() if one is layout else undigested(backend.page_copies):
                run = Moves(backend, one, pages)
                found[name].append(run.rates(repeats))
                run.close()
    return {
        name: {way: median(rates[way] for rates in runs) for way in runs[0]}
        for name, runs in found.items()
    }


def prompt(number: int, pages: int) -> Prefix:
    first = (number + 1) << 20
    return Prefix(token_ids=np.arange(first, first + pages * PAGE, dtype=np.uint32))


def keep(session: Any, heads: Heads, named: Prefix, pages: int, layers: int) -> None:
    """Fill and commit a prompt."""
    (name,) = fill(session, 1, heads, pages * PAGE, layers)
    session.commit(name, named)
    session.delete_sequence(name)


def beside_loads(
    server: Server, heads: Heads, layers: int, pages: int, seconds: float
) -> Iterator[dict[str, Any]]:
    """Small decodes alone, and while prompts are loaded that do not fit the pool together."""
    target = Target("road", socket=server.socket)
    with Session(server.socket, arena_bytes=2**28) as session, Worker() as worker:
        prompts = [prompt(number, pages) for number in range(PROMPTS)]
        for named in prompts:
            keep(session, heads, named, pages, layers)
        for rows, tokens in DECODES:
            names = fill(session, rows, heads, tokens, layers)
            worker.open("small", target, Decode(names, heads, tokens, 2 * layers, layers))
            alone = worker.loop("small", 10**6, seconds)
            with loads(server, prompts) as loaded:
                time.sleep(0.5)
                began, before = time.perf_counter(), loaded[0]
                beside = worker.loop("small", 10**6, seconds)
                moved = (loaded[0] - before) / (time.perf_counter() - began)
            row = {"sequences": rows, "tokens": tokens, "loaded_pages_per_s": round(moved)}
            for name, run in (("alone", alone), ("beside", beside)):
                times = [sample.seconds * 1e3 for sample in run.samples]
                for percent in (50, 99):
                    row[f"{name}_p{percent}_ms"] = round(float(np.percentile(times, percent)), 3)
            print(row, flush=True)
            session.delete_sequences(names)
            yield row


@contextmanager
def loads(server: Server, prompts: Sequence[Prefix]) -> Iterator[list[int]]:
    """Another client that prefetches prompts in turn; the pages that came from host memory."""
    has_ended, loaded = Event(), [0]

    def run() -> None:
        with Client(server.url) as client:
            while not has_ended.is_set():
                for named in prompts:
                    loaded[0] += client.prefetch(named).cached["host"] // PAGE

    thread = Thread(target=run)
    thread.start()
    try:
        yield loaded
    finally:
        has_ended.set()
        thread.join()


def cached_prompt(server: Server, heads: Heads, layers: int, pages: int, tier: str) -> float | None:
    """Seconds to load a prompt from a tier, the median; None where it did not come from there."""
    with Session(server.socket, arena_bytes=2**28) as session:
        prompts = [prompt(10 + number, pages) for number in range(3)]
        for named in prompts:
            keep(session, heads, named, pages, layers)
        times = []
        for turn in range(9):
            began = time.perf_counter()
            reply = session.prefetch(prompts[turn % 3])
            took = time.perf_counter() - began
            print(tier, reply.cached, f"{took:.4f} s", flush=True)
            if reply.cached[tier] == pages * PAGE:
                times.append(took)
        return round(median(times[2:]), 4) if times[2:] else None


def attention(server: Server, heads: Heads, layers: int, pages: int) -> float:
    """Seconds of a prompt's attention in all layers, by the kernels' own time."""
    tokens = pages * PAGE
    with Session(server.socket, arena_bytes=2**28) as session:
        (name,) = fill(session, 1, heads, tokens, layers)
        q = random((tokens, heads.num_qo, heads.dim))
        times = []
        for _ in range(3):
            answer = session.prefill(0, [name], q, qo_indptr=[0, tokens])
            times.append(answer.meta.timings["kernel"])
        session.delete_sequence(name)
        return round(layers * median(times), 4)


def services(
    kind: str, heads: Heads, layers: int, pages: tuple[int, int], seconds: float
) -> dict[str, Any]:
    """Figures of a running service, with prompts of `pages[0]` pages and one of `pages[1]`."""
    small, long = pages
    page_bytes = 4 * layers * PAGE * heads.num_kv * heads.dim + 2**12
    pool = (*heads.pool(layers), "--pool.num-pages", str(long + small))
    size = str((3 * long + PROMPTS * small) * page_bytes)
    with attnd(*pool, "--cache.host-bytes", size, kind=kind) as server:
        decodes = list(beside_loads(server, heads, layers, small, seconds))
        host_s = cached_prompt(server, heads, layers, long, "host")
        attention_s = attention(server, heads, layers, long)
    with TemporaryDirectory(prefix="attnd-bench-") as folder:
        disk = ("--cache.disk-path", folder, "--cache.disk-bytes", size, "--cache.model", "bench")
        with attnd(*pool, *disk, kind=kind) as server:
            disk_s = cached_prompt(server, heads, layers, long, "disk")
    times = {"from_host_s": host_s, "from_disk_s": disk_s, "attention_s": attention_s}
    print(times, flush=True)
    return {"decodes": decodes, "prompt_tokens": long * PAGE, "prompt": times}


def measure(quick: bool) -> Results:
    from bench.cases.kernel_calls import fill_pool

    results = provenance(PACKAGES)
    backend: Any = make_backend("cuda", GEOMETRY)
    fill_pool(backend)
    results |= {"device": backend.device, "bare": bare_copies()}
    print(results["bare"], flush=True)
    results |= {"moves": moves(backend, 3 if quick else REPEATS)}
    print(results["moves"], flush=True)
    results["bare_after"] = bare_copies()
    backend.close()
    del backend
    return results | services("cuda", HEADS, LAYERS, (PAGES, LONG), 2.0 if quick else 6.0)


def table(results: Results) -> str:
    """Moves beside bare copies, decodes beside loads, and the long prompt."""
    rows = []
    for way, name in (("load", "load"), ("store", "store"), ("both", "both at once")):
        bare = results["bare"][way]
        rates = [results["moves"][kind][way] for kind in ("digests", "no digests")]
        shares = [f"{rates[0] / bare:.2f}", f"{100 * (rates[1] / rates[0] - 1):.1f} %"]
        rows.append((name, f"{bare:.1f}", f"**{rates[0]:.1f}**", f"{rates[1]:.1f}", *shares))
    head = ["256 pages", "bare copies, GB/s", "tiers, GB/s", "without digests", "share of bare"]
    parts = [markdown([*head, "digests cost"], rows)]
    rows = []
    for row in results["decodes"]:
        what = f"{row['sequences']} of {row['tokens']} tokens"
        times = [f"{row[f'{name}_p{p}_ms']:.3f}" for p in (50, 99) for name in ("alone", "beside")]
        share = f"{row['beside_p99_ms'] / row['alone_p99_ms']:.2f}"
        rows.append((what, *times, share, f"{row['loaded_pages_per_s']:,}"))
    head = ["decodes", "p50 ms", "beside loads", "p99 ms", "beside loads", "p99 ratio"]
    parts.append(markdown([*head, "loaded pages/s"], rows))
    names = {
        "from_host_s": "from host memory",
        "from_disk_s": "from disk, cached by the system",
        "attention_s": f"attention of its {LAYERS} layers alone",
    }
    times = ((name, results["prompt"][key]) for key, name in names.items())
    rows = [(name, "not measured" if took is None else f"{took * 1e3:.1f}") for name, took in times]
    parts.append(markdown([f"prompt of {results['prompt_tokens']:,} tokens", "ms"], rows))
    return with_stamp("\n\n".join(parts), results, "pages of 2 MiB, fp16")
