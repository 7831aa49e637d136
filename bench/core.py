"""CPU time of the core: page allocator, forks, its share of a decode step, cold plans.

    python -m bench.core [--quick] [--out FILE]

Prints the median and the fastest of many repeats in microseconds, and writes them to
bench/results/core.json. Pages hold 16 tokens; batches have 256 sequences unless a row says more.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Final

import numpy as np

from bench.report.provenance import RESULTS, Results, command_line, provenance, publish
from bench.report.tables import markdown, with_stamp
from service.core.plans.plan import CascadeMode, make_plan
from service.core.pool.allocator import PageAllocator
from service.core.tree import PrefixTree
from service.core.values import Extension, Int32, NewSpec

CORE_RESULTS: Final = RESULTS / "core.json"
PAGE_SIZE: Final = 16
BATCH: Final = 256
WARM_UP: Final = 3
NUM_PAGES: Final = 1 << 18
IDS: Final = [f"sequence-{i}" for i in range(BATCH)]
ONE_EACH: Final[Int32] = np.ones(BATCH, dtype=np.int32)
ROWS: Final[Int32] = np.arange(BATCH + 1, dtype=np.int32)

Case = tuple[Callable[[], object], Callable[[], object]]
"""The call to time, and the call that undoes its effect."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of one call."""

    name: str
    median_us: float
    fastest_us: float


def nothing() -> None:
    """For a call that leaves nothing to undo."""


def timed(name: str, case: Case, repeats: int, per: int = 1) -> Timing:
    """Times `repeats` calls, each of which repeats its work `per` times."""
    call, restore = case
    seconds = []
    for _ in range(repeats + WARM_UP):
        begun = time.perf_counter()
        call()
        seconds.append((time.perf_counter() - begun) * 1e6 / per)
        restore()
    kept = seconds[WARM_UP:]
    return Timing(name, round(statistics.median(kept), 3), round(min(kept), 3))


def tree_of(ids: list[str], tokens: int, parent: str | None = None) -> PrefixTree:
    """One layer of sequences of `tokens` tokens, behind a shared prefix of 4k with a parent."""
    tree = PrefixTree(NUM_PAGES, PAGE_SIZE, 1)
    if parent is not None:
        tree.create([NewSpec(parent)])
        tree.extend(0, [parent], np.array([4096], dtype=np.int32))
    tree.create([NewSpec(name, parent) for name in ids])
    tree.extend(0, ids, np.full(len(ids), tokens, dtype=np.int32))
    return tree


def three_levels() -> PrefixTree:
    """A root of 4k tokens, 32 nodes of 512, and 256 sequences with 64 of their own."""
    tree = tree_of([f"node-{i}" for i in range(32)], 512, "root")
    tree.create([NewSpec(name, f"node-{i // 8}") for i, name in enumerate(IDS)])
    tree.extend(0, IDS, 64 * ONE_EACH)
    return tree


def allocate_and_free(count: int) -> Case:
    allocator = PageAllocator(NUM_PAGES)
    return lambda: allocator.release(allocator.allocate(count)), nothing


def long_fork(length: int) -> Case:
    """A fork of a sequence of 128k tokens."""
    tree = PrefixTree(NUM_PAGES, PAGE_SIZE, 1)
    tree.create([NewSpec("parent")])
    tree.extend(0, ["parent"], np.array([1 << 17], dtype=np.int32))
    return lambda: tree.create([NewSpec("child", "parent", length)]), lambda: tree.free(["child"])


def decode_step(tokens: int) -> Case:
    tree = tree_of(IDS, tokens)
    done: list[Extension] = []

    def extend() -> None:
        done.append(tree.extend(0, IDS, ONE_EACH))

    return extend, lambda: tree.undo(done.pop())


def plan(tree: PrefixTree, mode: CascadeMode, ids: list[str]) -> Case:
    return lambda: make_plan(tree, ids, 0, ROWS, True, mode), nothing


def measure(repeats: int) -> Iterator[Timing]:
    for count in (1, 8192):
        case = allocate_and_free(count)
        yield timed(f"allocate and free, per page, {count} at once", case, repeats, count)
    yield timed("fork 128k tokens at a page's end", long_fork(1 << 17), repeats)
    yield timed("fork 128k tokens within a page", long_fork((1 << 17) - 1), repeats)
    yield timed("decode step: extend 256", decode_step(4095), repeats)
    yield timed("decode step: extend 256, each a new page", decode_step(4096), repeats)
    flat, shared, three = tree_of(IDS, 4096), tree_of(IDS, 64, "root"), three_levels()
    yield timed("plan key, 256", (lambda: flat.plan_key(IDS, 0), nothing), repeats)
    yield timed("cold plan, 256 x 4k, nothing shared", plan(flat, "auto", IDS), repeats)
    yield timed("cold plan, 256 x (4k shared + 64)", plan(shared, "auto", IDS), repeats)
    yield timed("the same without cascade", plan(shared, "never", IDS), repeats)
    yield timed("cold plan, 256 x (4k + 32 x 512 + 64)", plan(three, "auto", IDS), repeats)
    mixed = [IDS[i] for i in np.random.default_rng(0).permutation(BATCH)]
    yield timed("the same, ids shuffled", plan(three, "auto", mixed), repeats)
    yield timed("integrity check, 288 sequences", (three.check_integrity, nothing), repeats // 10)


def table(results: Results) -> str:
    """Microseconds of each call."""
    rows = [
        (row["name"], f"{row['median_us']:.2f}", f"{row['fastest_us']:.2f}")
        for row in results["rows"]
    ]
    return with_stamp(markdown(("call", "median µs", "fastest µs"), rows), results)


def main() -> None:
    chosen = command_line(__doc__ or "").parse_args()
    rows = []
    print(f"{'median us':>12}{'fastest us':>12}")
    for row in measure(20 if chosen.quick else 200):
        rows.append(asdict(row))
        print(f"{row.median_us:12.3f}{row.fastest_us:12.3f}  {row.name}", flush=True)
    results = provenance(["numpy"]) | {"rows": rows}
    publish(results, table(results), CORE_RESULTS, chosen)


if __name__ == "__main__":
    main()
