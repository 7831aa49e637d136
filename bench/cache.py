"""Hit rate and CPU time of the prefix cache: a trace of prompts replayed on the core.

    python -m bench.cache [--trace FILE] [--page-size 16] [--sizes 0.01 0.05 0.2] [--quick]

FILE is in the format of Mooncake's published traces: a request a line with the prompt's blocks of
512 tokens, where equal ids mean equal prompts up to there. Every request starts from the cache,
appends the rest of its pages, is committed and deleted. The table compares the token hit rate with
an exact LRU over the same pages and with an unbounded cache. A block determines the content of its
pages, so the replay checks every hit.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from bench.cases.trace import BLOCK_TOKENS, token_ids, trace_of
from bench.core import WARM_UP, nothing, timed
from bench.report.provenance import RESULTS, Results, command_line, provenance, publish
from bench.report.tables import markdown, with_stamp
from config.sections import CacheSettings
from service.core.keys import Prefix
from service.core.tree import PrefixTree
from service.core.values import NewSpec
from service.engine.store.event_history import EventHistory

CACHE_RESULTS: Final = RESULTS / "cache-cpu.json"
SIZES: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
PROMPT_TOKENS: Final = 100_000
TIMED_PAGE_SIZE: Final = 16
CACHED_PAGES: Final = 1_000_000
NODE_PAGES: Final = 64
REPEATS: Final = 200
EVENTS_HISTORY: Final = CacheSettings().events_history

Blocks = NDArray[np.int64]
Requests = Sequence[Blocks]


def pages_of(blocks: Blocks, per_block: int) -> Blocks:
    """A number for each page of a prompt; equal numbers mean equal prompts up to there."""
    return (blocks[:, np.newaxis] * per_block + np.arange(per_block)).ravel()


def endless(requests: Requests) -> float:
    """The hit rate of an unbounded cache."""
    seen: set[int] = set()
    hits = total = 0
    for blocks in requests:
        known = [one in seen for one in blocks.tolist()]
        hits += known.index(False) if False in known else len(known)
        total += len(known)
        seen.update(blocks.tolist())
    return hits / total


def exact_lru(requests: Requests, per_block: int, capacity: int) -> float:
    """The hit rate of an LRU list of pages.

    A prompt uses its pages from the last to the first, so its end is evicted first. Of a prompt
    longer than the cache, the first pages are kept.
    """
    order: OrderedDict[int, None] = OrderedDict()
    hits = total = 0
    for blocks in requests:
        pages = pages_of(blocks, per_block).tolist()
        total += len(pages)
        for page in pages:
            if page not in order:
                break
            hits += 1
        for page in reversed(pages[:capacity]):
            order[page] = None
            order.move_to_end(page)
        while len(order) > capacity:
            order.popitem(last=False)
    return hits / total


class Moves(Protocol):
    """Tiers behind a replay's pool."""

    def load(self, prefix: Prefix) -> None:
        """Load the pages of a prompt that the tiers hold."""

    def extend(self, tokens: int) -> None:
        """Append tokens to the request; pages that are evicted may have to be copied first."""

    def finish(self) -> None:
        """Wait for the copies of committed pages."""


class Replay:
    """Replays requests on a tree of `num_pages`; `held[p]` is the content of page p."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.tree = PrefixTree(num_pages, page_size, 1)
        self.page_size = page_size
        self.held = np.full(num_pages, -1, np.int64)
        self.moves: Moves | None = None
        self.spent: dict[str, float] = dict.fromkeys(("begin", "append", "commit", "free"), 0.0)
        self.pages: dict[str, int] = dict.fromkeys(self.spent, 0)
        self.hits = self.total = 0

    def timed(self, phase: str, pages: int, call: Callable[[], Any]) -> None:
        begun = time.process_time()
        call()
        self.spent[phase] += time.process_time() - begun
        self.pages[phase] += pages

    def request(self, pages: Blocks) -> None:
        """One prompt, from match to delete: appended as far as pages suffice."""
        tree, ids, moves = self.tree, token_ids(pages, self.page_size), self.moves
        whole = Prefix(ids)
        if moves is not None:
            moves.load(whole)
        self.timed("begin", pages.size, lambda: tree.create([NewSpec("r", prefix=whole)]))
        leaf = tree.books.leaf("r")
        cached = int(tree.books.num_pages[leaf.index])
        if (self.held[leaf.table.read(0, cached)] != pages[:cached]).any():
            raise RuntimeError("a hit with another page's content: this is a bug")
        self.hits += cached
        self.total += pages.size
        room = tree.allocator.num_free + tree.budget.namespace("default").cached
        stop = min(pages.size, cached + room)
        tokens = (stop - cached) * self.page_size
        extend = self.extend if moves is None else moves.extend
        self.timed("append", stop - cached, lambda: extend(tokens))
        leaf = tree.books.leaf("r")
        self.held[leaf.table.read(cached, stop)] = pages[cached:stop]
        some = Prefix(ids[: stop * self.page_size])
        self.timed("commit", stop - cached, lambda: tree.commits.commit("r", some))
        self.timed("free", stop, lambda: tree.free(["r"]))
        if moves is not None:
            moves.finish()

    def extend(self, tokens: int) -> None:
        self.tree.extend(0, ["r"], np.array([tokens], np.int32))


def replay(requests: Requests, share: float, page_size: int) -> dict[str, float]:
    """The whole trace on a pool that holds `share` of its distinct pages: hit rates, checked hits,
    and microseconds of CPU a page."""
    per_block = BLOCK_TOKENS // page_size
    distinct = len({one for blocks in requests for one in blocks.tolist()}) * per_block
    num_pages = max(1, int(share * distinct))
    run = Replay(num_pages, page_size)
    for blocks in requests:
        run.request(pages_of(blocks, per_block))
    run.tree.check_integrity()
    us = {f"{one}_us": round(1e6 * run.spent[one] / max(1, run.pages[one]), 3) for one in run.spent}
    return {
        "share": share,
        "num_pages": num_pages,
        "hit_rate": round(run.hits / run.total, 4),
        "lru_hit_rate": round(exact_lru(requests, per_block, num_pages), 4),
        "hits_checked": run.hits,
        **us,
    }


def long_prompt(page_size: int = TIMED_PAGE_SIZE) -> dict[str, float]:
    """Match and create for a prompt of 100k cached tokens."""
    ids = np.random.default_rng(0).integers(0, 1 << 17, PROMPT_TOKENS, dtype=np.uint32)
    tree = PrefixTree(PROMPT_TOKENS // page_size + 1, page_size, 1)
    tree.create([NewSpec("r")])
    tree.extend(0, ["r"], np.array([PROMPT_TOKENS], np.int32))
    tree.commits.commit("r", Prefix(ids))
    tree.free(["r"])
    keys = tree.cache.named.keys[tree.cache.match("default", Prefix(ids)).table()].copy()
    times = {}
    for name, prefix in (("token_ids", Prefix(ids)), ("page_keys", Prefix(None, keys))):
        create = [NewSpec("r", prefix=prefix)]
        call = partial(tree.create, create), partial(tree.free, ["r"])
        row = timed(f"match and create, 100k tokens by {name}", call, REPEATS)
        times[row.name] = row.median_us
    return times


def many_pages(num_cached: int, page_size: int = TIMED_PAGE_SIZE) -> dict[str, float]:
    """Commit and evict of one page beside `num_cached` pages, with the event history kept."""
    tree = PrefixTree(num_cached + REPEATS * 2, page_size, 1)
    tree.cache.named.listener = EventHistory(page_size, EVENTS_HISTORY).hear
    rng = np.random.default_rng(1)
    one = np.array([NODE_PAGES * page_size], np.int32)
    for _ in range(num_cached // NODE_PAGES):
        tree.create([NewSpec("r")])
        tree.extend(0, ["r"], one)
        ids = rng.integers(0, 1 << 32, NODE_PAGES * page_size, dtype=np.uint32)
        tree.commits.commit("r", Prefix(ids))
        tree.free(["r"])
    names = [f"r{i}" for i in range(REPEATS + WARM_UP)]
    tree.create([NewSpec(name) for name in names])
    tree.extend(0, names, np.full(len(names), page_size, np.int32))
    prompts = [rng.integers(0, 1 << 32, page_size, dtype=np.uint32) for _ in names]
    todo = iter(zip(names, map(Prefix, prompts), strict=True))
    cached = "a million" if num_cached == 10**6 else f"{num_cached:,}"
    commit = (lambda: tree.commits.commit(*next(todo))), nothing
    evict = (lambda: tree.cache.evict("default", 1)), nothing
    rows = [
        timed(f"commit of one page beside {cached}", commit, REPEATS),
        timed(f"evict of one page of {cached}", evict, REPEATS),
    ]
    return {row.name: row.median_us for row in rows}


def table(results: Results) -> str:
    """Hit rates by pool size beside exact LRU and an unbounded cache, then single times."""
    rows = []
    for row in results["rows"]:
        rates = (row["hit_rate"], row["lru_hit_rate"], results["endless"])
        times = (row[name] for name in ("begin_us", "append_us", "commit_us", "free_us"))
        cells = [f"{row['share']:.0%}", f"{row['num_pages']:,}"]
        cells += [*(f"{rate:.3f}" for rate in rates), f"{row['hits_checked']:,}"]
        rows.append([*cells, ", ".join(f"{us:.2f}" for us in times)])
    head = ["of all pages", "pages", "hit rate", "exact LRU", "unbounded"]
    head += ["hits checked", "µs a page"]
    single = [(name, f"{us:.1f}") for name, us in results["times_us"].items()]
    text = f"{markdown(head, rows)}\n\n{markdown(('call', 'median µs'), single)}"
    note = f"{results['trace']}, pages of {results['page_size']} tokens"
    return with_stamp(text, results, f"{note}; µs of begin, append, commit, delete")


def main() -> None:
    parser = command_line(__doc__ or "", trace=True)
    parser.add_argument("--page-size", type=int, default=16, choices=(16, 32, 64, 128, 256, 512))
    parser.add_argument("--sizes", type=float, nargs="+", default=SIZES)
    chosen = parser.parse_args()
    trace = trace_of(chosen.trace, 300 if chosen.quick else 3000)
    requests = [np.array(request.blocks, np.int64) for request in trace]
    best = endless(requests)
    print(f"{len(requests)} requests, unbounded cache {best:.4f}")
    rows = []
    for share in chosen.sizes:
        row = replay(requests, share, chosen.page_size)
        print(row, flush=True)
        rows.append(row)
    cached = 20_000 if chosen.quick else CACHED_PAGES
    results = provenance(["numpy"]) | {
        "trace": chosen.trace.name if chosen.trace else "a generated trace",
        "page_size": chosen.page_size,
        "endless": round(best, 4),
        "rows": rows,
        "times_us": long_prompt() | many_pages(cached),
    }
    publish(results, table(results), CACHE_RESULTS, chosen)


if __name__ == "__main__":
    main()
