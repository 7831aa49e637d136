"""The integrity check finds every kind of damage, and says it in numbers."""

import random
import sys
import time
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest
from core_pool import TokenPool, int32

from service.core import integrity
from service.core.errors import CoreError, IntegrityError
from service.core.keys import Prefix
from service.core.nodes import Leaf, Name, Node, Retention, named
from service.core.plans.plan import explicit_levels
from service.core.tree import PrefixTree
from service.core.values import NewSpec


def leaf(pool: TokenPool, name: str) -> Leaf:
    return pool.tree.books.leaf(name)


def node(pool: TokenPool) -> Node:
    """The node that a, b and c share."""
    found = leaf(pool, "a").parent
    assert found is not None
    return found


def other_page_in_table(pool: TokenPool) -> None:
    leaf(pool, "b").table.own[0] = 9


def two_leaves_write_one_page(pool: TokenPool) -> None:
    leaf(pool, "d").table.own[0] = leaf(pool, "b").table.page(2)
    pool.tree.books.set_num_pages(leaf(pool, "d"), 1)


def two_holders_of_one_page(pool: TokenPool) -> None:
    freed = leaf(pool, "d").table.read(0, 1).copy()
    two_leaves_write_one_page(pool)
    pool.tree.allocator.release(freed)


def leaf_moved(pool: TokenPool) -> None:
    leaf(pool, "b").start = 1


def leaf_unknown_above(pool: TokenPool) -> None:
    node(pool).children.remove(leaf(pool, "c"))


def leaf_hangs_elsewhere(pool: TokenPool) -> None:
    leaf(pool, "c").parent = None


def node_with_one_child(pool: TokenPool) -> None:
    node(pool).children.intersection_update({leaf(pool, "a")})


def node_lost_a_page(pool: TokenPool) -> None:
    node(pool).pages = node(pool).pages[:1]


def node_without_pages(pool: TokenPool) -> None:
    node(pool).pages = node(pool).pages[:0]


def node_miscounted(pool: TokenPool) -> None:
    node(pool).children.clear()
    for name in "abc":
        leaf(pool, name).parent = None


def length_past_the_pages(pool: TokenPool) -> None:
    pool.tree.books.lengths[0, leaf(pool, "b").index] += 9


def length_within_the_shared_part(pool: TokenPool) -> None:
    pool.tree.books.lengths[1, leaf(pool, "b").index] = 3


def another_last_page(pool: TokenPool) -> None:
    pool.tree.books.last_page[leaf(pool, "b").index] += 1


def one_serial_for_two(pool: TokenPool) -> None:
    pool.tree.books.serials[:] = 7


def leaked_page(pool: TokenPool) -> None:
    pool.tree.allocator.allocate(1)


def released_page(pool: TokenPool) -> None:
    pool.tree.allocator.release(leaf(pool, "d").table.read(0, 1))


def page_free_twice(pool: TokenPool) -> None:
    pool.tree.allocator._stack[:2] = int32(15, 15)


def never_expires(pool: TokenPool) -> None:
    pool.tree.books.set_ttl(leaf(pool, "d"), 5.0)
    pool.tree.books.expiry.cancel(leaf(pool, "d"))


def pinned_softly(pool: TokenPool) -> Node:
    """The cached node of a deleted sequence, kept for five seconds."""
    prefix = Prefix(np.arange(8, dtype=np.uint32))
    pool.tree.commits.commit("a", prefix, Retention(soft_ends=5.0))
    pool.tree.free(["a", "b", "c"])
    return next(one for one in pool.tree.cache.named.nodes if one is not None)


def never_unpinned(pool: TokenPool) -> None:
    pool.tree.cache.named.retention.ends.cancel(pinned_softly(pool))


def evicted_too_early(pool: TokenPool) -> None:
    found = pinned_softly(pool)
    name = named(found)
    name.root.namespace.order.rank_again(found, name, 0)


def key_material_of_no_page(pool: TokenPool) -> None:
    pool.tree.cache.named.has_extra[9] = True


DAMAGE: list[tuple[Callable[[TokenPool], None], str]] = [
    (other_page_in_table, "b with 3 pages of 4 differs from its parent after page 0"),
    (two_leaves_write_one_page, r"page \d+ has [02] holders and refcount 1 \(2 such pages\)"),
    (two_holders_of_one_page, r"page 2 has 2 holders and refcount 1 \(1 such pages\)"),
    (leaf_moved, "owns them from 1, shares 2"),
    (leaf_unknown_above, "c with 2 pages of 4 is not among its parent's children"),
    (leaf_hangs_elsewhere, "has a child with another parent"),
    (node_with_one_child, "the node of pages 0 to 2 of its path has 1 children"),
    (node_lost_a_page, "owns them from 2, shares 1"),
    (node_without_pages, "has 0 pages and starts after 0"),
    (node_miscounted, "the links count 1 nodes, there are 0"),
    (length_past_the_pages, r"b with 3 pages of 4 has lengths \[20, 11\]"),
    (length_within_the_shared_part, r"lengths \[11, 3\] owns them from 2, shares 2"),
    (another_last_page, "b with 3 pages of 4 ends in page 2, the books say 3"),
    (one_serial_for_two, "4 sequences have 1 serials"),
    (leaked_page, "has 0 holders and refcount 1"),
    (released_page, "has 1 holders and refcount 0"),
    (never_expires, "is looked at at inf, its life ends at"),
    (key_material_of_no_page, "0 pages have key material beside their ids"),
    (never_unpinned, r"is kept until \S+, and looked at at inf"),
    (evicted_too_early, "has rank 0 among those to evict, not 1"),
    (page_free_twice, r"12 pages free \(11 distinct\) \+ 4 referenced != 16 in total"),
]


@pytest.mark.parametrize(
    ("damage", "message"),
    [pytest.param(damage, message, id=damage.__name__) for damage, message in DAMAGE],
)
def test_damage_is_reported_with_its_numbers(damage, message) -> None:
    pool = TokenPool(num_pages=16, page_size=4, num_layers=2)
    pool.start("a", range(8))
    pool.fork("b", "a")
    pool.fork("c", "a")
    pool.append("b", range(3))
    pool.start("d", range(2))
    pool.tree.check_integrity()
    damage(pool)
    with pytest.raises(IntegrityError, match=message) as found:
        pool.tree.check_integrity()
    assert str(found.value).endswith("this is a bug")


def chain(depth: int) -> TokenPool:
    """A chain of forks, each with a page of its own; the last sequence has all the nodes above."""
    pool = TokenPool(num_pages=depth + 1, page_size=1, num_layers=1)
    pool.start("n0", [0])
    for number in range(1, depth):
        pool.fork(f"n{number}", f"n{number - 1}")
        pool.append(f"n{number}", [number])
    return pool


def test_neither_the_check_nor_a_plan_imports_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """An import needs a file descriptor, and callers may have all."""
    pool = chain(3)
    monkeypatch.delattr(np, "ma", raising=False)
    monkeypatch.setitem(sys.modules, "numpy.ma", None)
    pool.tree.check_integrity()
    levels = [(["n0", "n1"], int32(0, 1, 3))]
    assert explicit_levels(pool.tree, 0, levels, False).tokens_flat == 1 + 2


@pytest.mark.timing
def test_a_chain_of_forks_is_checked_in_pieces_and_in_linear_time() -> None:
    """Four times the depth takes about four times as long, and no piece takes long."""
    took = []
    for depth in (1000, 4000):
        pool = chain(depth)
        started = longest = time.process_time()
        longest = 0.0
        pieces, before = 0, started
        for _ in pool.tree.integrity_steps():
            now = time.process_time()
            longest, before = max(longest, now - before), now
            pieces += 1
        took.append(time.process_time() - started)
        assert depth < pieces < 10 * depth
        assert longest < 0.02
    assert took[1] < 10 * took[0]


@pytest.mark.parametrize("whole", [True, False])
def test_a_check_passes_whatever_changes_between_its_pieces(whole: bool) -> None:
    """Sequences come, go, are cut and committed, and pages are evicted, at every piece."""
    chance = random.Random(3)
    for _ in range(20):
        pool = TokenPool(num_pages=200, page_size=2, num_layers=1)
        tree, names = pool.tree, ["r"]
        pool.start("r", range(20))

        def change(number: int, tree: PrefixTree = tree, names: list[str] = names) -> None:
            kind, name = chance.randrange(6), chance.choice(names)
            if kind < 3 and len(names) < 60:
                length = tree.describe(name).length
                tree.create([NewSpec(f"s{number}", name, chance.randint(0, length))])
                names.append(f"s{number}")
                tree.extend(0, [names[-1]], int32(chance.randrange(4)))
            elif kind == 3 and len(names) > 1:
                tree.free([names.pop(chance.randrange(1, len(names)))])
            elif kind == 4:
                count = tree.describe(name).length // 2 * 2
                ids = np.arange(count, dtype=np.uint32)
                with suppress(CoreError):
                    tree.commits.commit(name, Prefix(ids, None, str(chance.randrange(2))))
            else:
                tree.cache.evict("default", 3)

        for number in range(40):
            change(number)
        tree.check_integrity()
        for number, _ in enumerate(tree.integrity_steps(None if whole else "default")):
            if chance.random() < 0.3:
                change(1000 + number)
        tree.check_integrity()


@pytest.mark.parametrize("finishes", [True, False], ids=["finished", "cancelled"])
def test_a_cut_that_moves_its_rows_in_slices_is_no_damage(finishes: bool) -> None:
    pool = TokenPool(num_pages=16, page_size=2, num_layers=2)
    pool.start("a", range(8))
    pool.fork("b", "a")
    cuts = pool.tree.cuts
    prepared = cuts.prepare(["b"], [1], [int32(3, 5, 7)])
    assert sum(cut.fresh.size for cut in prepared) == 2
    pool.tree.check_integrity()  # the cut has its pages, and the sequence does not have them yet
    (cuts.finish if finishes else cuts.release)(prepared)
    pool.tree.check_integrity()
    pool.tree.free(["a", "b"])
    assert pool.tree.allocator.num_free == 16
    pool.tree.check_integrity()


def test_no_piece_of_the_check_looks_at_many_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    tree, count = PrefixTree(64, 1, 1), 64
    for number in range(count):
        tree.create([NewSpec("a")])
        tree.extend(0, ["a"], int32(1))
        tree.commits.commit("a", Prefix(np.array([number], np.uint32)))
        tree.free(["a"])
    looks = 0
    named = integrity.named

    def counted(node: Node) -> Name:
        nonlocal looks
        looks += 1
        return named(node)

    monkeypatch.setattr(integrity, "named", counted)
    most = 0
    for _ in tree.integrity_steps():
        most, looks = max(most, looks), 0
    assert max(most, looks) < 8
