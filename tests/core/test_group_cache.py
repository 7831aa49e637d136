"""The prefix cache with layer groups: hits need what windows reach, pressure takes the middle."""

from __future__ import annotations

import random
from collections import defaultdict

import numpy as np
import pytest
from core_pool import EMPTY, TokenPool

from service.core.errors import OutOfPages, WindowReturned
from service.core.keys import Prefix
from service.core.nodes import FOREVER
from service.core.outline import page_states
from service.core.plans.plan import make_plan
from service.core.pool.named_pages import Change, Removed, Stored
from service.core.pool.satellites import GroupShape
from service.core.prefix.inventory import named_in
from service.core.values import NewSpec
from service.engine.store.event_history import EventHistory, group_fields
from tests.harness.router import read_page

SIZE = 4
"""Tokens of a leading page."""
NAMES = tuple("abcdef")


def shapes(window: int) -> list[GroupShape]:
    return [GroupShape((1,), 2, window), GroupShape((0,), SIZE), GroupShape((2,), SIZE)]


def prefix(tokens: list[int], salt: str = "") -> Prefix:
    return Prefix(np.array(tokens, np.uint32), None, salt)


def settle(pool: TokenPool, *names: str) -> None:
    assert pool.tree.windows is not None
    pool.tree.windows.settle([pool.tree.books.leaf(name) for name in names])


class Cached:
    """A pool of tokens with a cache, and followers of its events by group."""

    def __init__(self, window: int, num_pages: int = 400, slack: int = 0) -> None:
        self.pool = TokenPool(num_pages, SIZE, 3, shapes(window), slack)
        self.tree, self.window = self.pool.tree, window
        self.reported: defaultdict[int, set[bytes]] = defaultdict(set)
        self.tree.cache.named.listener = self.hear

    def hear(self, change: Change) -> None:
        if isinstance(change, Stored | Removed):
            assert change.group is not None
            keys = {change.keys[at : at + 16] for at in range(0, len(change.keys), 16)}
            known = self.reported[change.group]
            if isinstance(change, Stored):
                assert not keys & known
                known |= keys
            else:
                assert keys <= known
                known -= keys

    def begin(self, name: str, tokens: list[int]) -> int:
        """A sequence of the tokens, as much as is cached of them from the cache; returns that."""
        self.pool.create(NewSpec(name, prefix=prefix(tokens)))
        found = self.tree.describe(name).length
        self.pool.append(name, tokens[found:])
        return found

    def store(self, name: str, tokens: list[int]) -> None:
        """Cache tokens, with all of their pages."""
        self.begin(name, tokens)
        full = len(tokens) // SIZE * SIZE
        self.tree.commits.commit(name, prefix(tokens[:full]))
        settle(self.pool, name)
        self.tree.free([name])

    def bundles(self) -> set[bytes]:
        """The keys of cached pages that the group with a window has."""
        named, satellites = self.tree.cache.named, self.tree.satellites
        assert satellites is not None
        pages = np.flatnonzero(named.node_of >= 0).astype(np.int32)
        held = pages[satellites.has(satellites.windows[0], pages)]
        return {named.key_of(page) for page in held.tolist()}

    def check(self) -> None:
        self.tree.check_integrity()
        self.pool.poison()
        named = self.tree.cache.named
        every = {named.key_of(page) for page in np.flatnonzero(named.node_of >= 0).tolist()}
        assert self.reported[1] == every
        assert self.reported[0] == self.bundles()
        listed: defaultdict[int | None, set[bytes]] = defaultdict(set)
        for one in filter(None, named_in(named, "default", 2)):
            listed[one.group] |= {one.keys[at : at + 16] for at in range(0, len(one.keys), 16)}
        assert (listed[1], listed[0]) == (every, self.bundles())


def test_a_hit_is_the_longest_beginning_whose_window_is_there() -> None:
    cached = Cached(window=6)
    cached.store("a", [*range(40)])
    assert cached.tree.cache.match("default", prefix([*range(40)])).num_pages == 10
    assert cached.tree.cache.match("default", prefix([*range(22), 9, 9])).num_pages == 5
    cached.tree.cache.evict("default", 1)  # from the middle: the first bundle of two
    assert cached.tree.cache.match("default", prefix([*range(40)])).num_pages == 10
    assert cached.tree.cache.match("default", prefix([*range(8)])).num_pages == 0
    assert cached.tree.cache.match("default", prefix([*range(12)])).num_pages == 3
    cached.check()


def test_pressure_takes_the_middle_of_nodes_before_any_page_of_the_leading_group() -> None:
    cached = Cached(window=6)
    for name, first in (("a", 0), ("b", 100)):
        cached.store(name, [*range(first, first + 40)])
    cached.check()
    assert cached.tree.cache.evict("default", 32) == 32  # of 10 pages 2 are within the window
    for first in (0, 100):
        tokens = [*range(first, first + 40)]
        assert cached.tree.cache.match("default", prefix(tokens)).num_pages == 10
        assert cached.tree.cache.match("default", prefix(tokens[:36])).num_pages == 0
    assert cached.begin("c", [*range(40), 7, 7]) == 40
    assert cached.pool.read_slots("c", 1) == [EMPTY] * 32 + [*range(32, 40), 7, 7]
    cached.check()
    assert cached.tree.cache.evict("default", 400) == 10 * 2 + 2 * 2
    cached.check()


def test_the_middle_of_a_sequence_that_runs_can_be_evicted_and_its_end_not() -> None:
    cached = Cached(window=5, num_pages=4 * 12)
    cached.begin("a", [*range(32)])
    cached.tree.commits.commit("a", prefix([*range(32)]))
    assert cached.tree.budget.obtainable(cached.tree.budget.look("default")) == 16 + 12
    cached.pool.append("a", [*range(32, 35)])
    cached.begin("b", [50, *range(51, 70)])  # of 24 pages 8 are evicted
    cached.check()
    rows = np.arange(2, dtype=np.int32)
    seen = cached.pool.expand(make_plan(cached.tree, ["a"], 1, rows, True, "auto"), True, 1)[0]
    assert [token for _, token in seen][-5:] == [30, 31, 32, 33, 34]
    with pytest.raises(WindowReturned):
        cached.pool.fork("c", "a", 6)


@pytest.mark.parametrize("most", [400, 90])
def test_the_picture_of_the_pool_shows_satellites_as_their_leading_pages(most: int) -> None:
    cached = Cached(window=6)
    cached.store("a", [*range(40)])
    cached.begin("b", [*range(60, 69)])
    states, step = page_states(cached.tree, most)
    assert step == -(-400 // most)
    if step == 1:
        assert np.bincount(states, minlength=4).tolist() == [400 - 40 - 12, 12, 0, 40]
    assert states.tolist() == page_states(cached.tree)[0][::step].tolist()


def test_a_lease_and_a_hard_pin_keep_what_a_hit_needs() -> None:
    cached = Cached(window=6)
    cached.store("a", [*range(40)])
    assert cached.tree.cache.lease("default", prefix([*range(24)]), "lease", FOREVER) == 6
    key = prefix([*range(12)])
    (*_, last) = key.chain(cached.tree.budget.look("default").root("").key, SIZE)
    assert cached.tree.cache.pin("default", last, "", None) == 3
    cached.tree.cache.evict("default", 400)
    cached.check()
    for length in (24, 12):
        tokens = [*range(length)]
        assert cached.tree.cache.match("default", prefix(tokens)).num_pages == length // SIZE
    assert cached.tree.cache.match("default", prefix([*range(20)])).num_pages == 3
    cached.tree.cache.close_lease("default", "lease")
    cached.tree.cache.unpin("default", last, "")
    cached.tree.cache.evict("default", 400)
    assert cached.tree.allocator.num_free == 400


def test_a_commit_onto_cached_pages_gives_them_the_bundles_that_they_lack() -> None:
    cached = Cached(window=6)
    cached.store("a", [*range(40)])
    cached.tree.cache.evict("default", 16)
    cached.pool.start("b", [*range(24)])
    assert cached.tree.commits.commit("b", prefix([*range(24)])) == 6
    cached.check()
    assert cached.tree.cache.match("default", prefix([*range(24)])).num_pages == 6
    cached.pool.append("b", [60])
    assert cached.pool.read_slots("b", 1) == [*range(24), 60]
    cached.tree.free(["b"])
    cached.tree.cache.evict("default", 400)
    assert cached.tree.allocator.num_free == 400


def test_events_name_the_group_as_vllm_does() -> None:
    cached = Cached(window=6)
    history = EventHistory(SIZE, 1000, group_fields(shapes(6), ["attention", "latent", "latent"]))
    cached.tree.cache.named.listener = history.hear
    read_page(history, "default", 0, 1)
    cached.store("a", [*range(16)])
    cached.tree.cache.evict("default", 4)
    events, _, _ = read_page(history, "default", 0, 100)
    found = [
        (one["type"], one["group_idx"], one["kv_cache_spec_kind"], len(one["page_keys"]))
        for one in events
    ]
    assert found == [
        ("stored", 1, "mla_attention", 4),
        ("stored", 0, "sliding_window", 4),
        ("removed", 0, "sliding_window", 2),
    ]
    assert [one.get("kv_cache_spec_sliding_window") for one in events] == [None, 6, 6]


@pytest.mark.parametrize("window", [1, 3, 6, 11])
@pytest.mark.parametrize("seed", range(3))
def test_any_history_reads_what_was_written_and_hits_what_is_there(window: int, seed: int) -> None:
    """Contents are functions of the tokens before them, and free pages are poisoned: a page too few
    or of another sequence cannot go unnoticed."""
    random_ = random.Random(1000 * window + seed)
    cached = Cached(window, num_pages=4 * 26, slack=seed)
    pool, tree = cached.pool, cached.tree
    tokens: dict[str, list[int]] = {}
    hits = refused = 0

    def value(some: list[int], at: int) -> int:
        return hash(tuple(some[: at + 1])) >> 8

    def write(name: str, more: list[int]) -> None:
        nonlocal refused
        old = tokens[name]
        every = old + more
        owner = tree.budget.look("default")
        new = -(-len(every) // SIZE) - int(tree.books.num_pages[tree.books.leaf(name).index])
        able = new * 4 <= tree.budget.obtainable(owner)
        try:
            pool.append(name, [value(every, at) for at in range(len(old), len(every))])
        except OutOfPages:
            assert not able
            refused += 1
        else:
            assert able
            tokens[name] = every

    def draw() -> list[int]:
        return [random_.choice((1, 1, 1, 1, 2)) for _ in range(random_.randint(0, 40))]

    def expected(some: list[int]) -> int:
        """The hit, page by page."""
        found = tree.cache.named
        root, keys = tree.budget.look("default").roots.get(""), []
        if root is not None:
            keys = [*prefix(some).chain(root.key, SIZE)]
        there = {found.key_of(page) for page in np.flatnonzero(found.node_of >= 0).tolist()}
        most = next((at for at, key in enumerate(keys) if key not in there), len(keys))
        held, reach = cached.bundles(), -(-(window - 1) // SIZE)
        fits = [n for n in range(most + 1) if set(keys[max(0, n - reach) : n]) <= held]
        return max(fits)

    for _ in range(220):
        name, kind = random_.choice(NAMES), random_.random()
        if name not in tokens and kind < 0.8:
            prompt = draw()
            hit = expected(prompt)
            pool.create(NewSpec(name, prefix=prefix(prompt)))
            assert tree.describe(name).length == hit * SIZE
            hits += hit
            tokens[name] = prompt[: hit * SIZE]
            write(name, prompt[hit * SIZE :])
        elif name not in tokens and tokens:
            parent = random_.choice(sorted(tokens))
            length = random_.randint(0, len(tokens[parent]))
            try:
                pool.fork(name, parent, length)
                tokens[name] = tokens[parent][:length]
            except (OutOfPages, WindowReturned):
                refused += 1
        elif name in tokens:
            if kind < 0.3:
                write(name, draw()[:9])
            elif kind < 0.5:
                length = random_.randint(0, len(tokens[name])) // SIZE * SIZE
                tree.commits.commit(name, prefix(tokens[name][:length]))
            elif kind < 0.6:
                length = random_.randint(0, len(tokens[name]))
                try:
                    pool.truncate(name, length)
                    tokens[name] = tokens[name][:length]
                except (OutOfPages, WindowReturned):
                    refused += 1
            elif kind < 0.75:
                settle(pool, name)
            elif kind < 0.8:
                tree.cache.evict("default", random_.randint(1, 30))
            else:
                tree.free([name])
                del tokens[name]
        cached.check()
        for one, held in tokens.items():
            wanted = [value(held, at) for at in range(len(held))]
            first = max(0, len(held) - window + 1)
            assert pool.read_slots(one, 0) == pool.read_slots(one, 2) == wanted
            assert pool.read_slots(one, 1)[first:] == wanted[first:]
    assert hits
    assert refused
    tree.free(list(tokens))
    tree.cache.evict("default", 1000)
    assert tree.allocator.num_free == 4 * 26
