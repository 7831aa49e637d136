"""The prefix cache of the core, behaviour by behaviour; the model has random histories."""

from __future__ import annotations

from contextlib import nullcontext
from hashlib import blake2b
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from service.cluster.placement.prefixes import chained_keys
from service.core.errors import (
    CoreError,
    InvalidRequest,
    KeyMismatch,
    OutOfPages,
    UnknownLease,
    UnknownPage,
)
from service.core.keys import Prefix, as_keys, extra_by_page, root_key
from service.core.nodes import Retention
from service.core.plans.plan import make_plan
from service.core.pool.budget import NO_LIMIT, EvictionPaused
from service.core.pool.named_pages import Change, Cleared, Removed, Stored
from service.core.prefix import matching
from service.core.tree import PrefixTree
from service.core.values import NewSpec
from service.engine.store.event_history import EventHistory
from service.engine.store.store import Store

PAGE = 4


def ids(*pages: int) -> Any:
    """Token ids of pages, each of one token repeated."""
    return np.repeat(np.array(pages, np.uint32), PAGE)


def own(*pages: int) -> Prefix:
    """The same pages by keys of a caller's own."""
    return Prefix(None, as_keys(b"".join(bytes([page]) * 16 for page in pages)))


def grow(tree: PrefixTree, name: str, count: int) -> None:
    for layer in range(tree.num_layers):
        tree.extend(layer, [name], np.array([count], np.int32))


def keep(tree: PrefixTree, *pages: int, keep: Any = None, namespace: str = "default") -> None:
    """Begin, complete, commit and free a sequence of these pages."""
    prefix = Prefix(ids(*pages))
    tree.create([NewSpec("kept", prefix=prefix, namespace=namespace)])
    grow(tree, "kept", len(pages) * PAGE - tree.describe("kept").length)
    tree.commits.commit("kept", prefix, *([keep] if keep else []))
    tree.free(["kept"])


def found(tree: PrefixTree, *pages: int, namespace: str = "default") -> int:
    return tree.cache.match(namespace, Prefix(ids(*pages))).num_pages


@pytest.fixture
def tree() -> PrefixTree:
    return PrefixTree(8, PAGE, 2)


def test_only_pages_full_at_every_layer_can_be_committed(tree: PrefixTree) -> None:
    tree.create([NewSpec("a")])
    tree.extend(0, ["a"], np.array([8], np.int32))
    tree.extend(1, ["a"], np.array([7], np.int32))
    for names, field, most in ((Prefix(ids(1, 2)), "token_ids", 7), (own(1, 2), "page_keys", 1)):
        with pytest.raises(InvalidRequest, match=f"at most {most}") as refused:
            tree.commits.commit("a", names)
        assert refused.value.field == field
    assert tree.commits.commit("a", Prefix(ids(1, 2)[:7])) == 1
    assert found(tree, 1, 2) == 1


def test_keys_are_chained_as_the_page_says(tree: PrefixTree) -> None:
    keep(tree, 5, 6)
    first = blake2b(root_key("default", "") + ids(5).tobytes(), digest_size=16).digest()
    second = blake2b(first + ids(6).tobytes(), digest_size=16).digest()
    assert root_key("default", "") == blake2b(b"default\0", digest_size=16).digest()
    keys = Prefix(None, as_keys(first + second))
    assert tree.cache.match("default", keys).num_pages == 2, "by the service's own keys"


def test_further_keys_enter_the_names_of_their_page_and_of_those_behind_it(
    tree: PrefixTree,
) -> None:
    """As the API's page says: behind the ids, of each its place in the page, length and bytes."""
    key = root_key("default", "")
    wanted, extra = [], extra_by_page([(PAGE + 1, b"cat"), (PAGE + 2, b"dog")], PAGE)
    for page, names in enumerate((b"", b"\1\0\3cat\2\0\3dog", b"")):
        key = blake2b(key + ids(page).tobytes() + names, digest_size=16).digest()
        wanted.append(key)
    named = Prefix(ids(0, 1, 2), extra=extra)
    assert list(named.chain(root_key("default", ""), PAGE)) == wanted
    assert list(chained_keys(named, "default", PAGE)) == wanted, "a cluster's router agrees"
    tree.create([NewSpec("a")])
    grow(tree, "a", 3 * PAGE)
    assert tree.commits.commit("a", named) == 3
    tree.free(["a"])
    lengths = {}
    for name, given in ((b"cat", 1), (b"cat", 2), (b"ca", 1)):
        other = extra_by_page([(PAGE + given, name), (PAGE + 3, b"dog")], PAGE)
        lengths[name, given] = tree.cache.match("default", Prefix(ids(0, 1, 2), extra=other))
    assert [one.num_pages for one in lengths.values()] == [1, 1, 1]
    assert found(tree, 0, 1, 2) == 1, "nor without any"
    assert tree.cache.match("default", named).num_pages == 3
    assert tree.cache.match("default", Prefix(None, as_keys(b"".join(wanted)))).num_pages == 3
    assert tree.cache.evict("default", 2) == 2
    assert not tree.cache.named.extra, "they go with their pages"
    tree.check_integrity()


def test_forks_that_differ_in_further_keys_are_not_committed_alike(tree: PrefixTree) -> None:
    tree.create([NewSpec("a")])
    grow(tree, "a", 2 * PAGE)
    tree.create([NewSpec("b", "a")])
    with_cat, with_dog = (
        Prefix(ids(1, 2), extra=extra_by_page([(PAGE, key)], PAGE)) for key in (b"cat", b"dog")
    )
    for second in (with_dog, Prefix(ids(1, 2))):
        with pytest.raises(KeyMismatch, match="another sequence of the call"):
            tree.commits.commit_all(["a", "b"], [with_cat, second])
    tree.commits.commit("a", with_cat)
    with pytest.raises(KeyMismatch, match="it is committed under another name") as refused:
        tree.commits.commit("b", with_dog)
    assert refused.value.args[0] == 1
    tree.check_integrity()


@pytest.mark.parametrize("before", [(), (4,)], ids=["the first page", "a later page"])
def test_pages_committed_by_key_are_not_believed_to_have_ids(
    tree: PrefixTree, before: tuple[int, ...]
) -> None:
    pages = (*before, 5)
    keep(tree, *pages)
    keys = tree.cache.named.keys[tree.cache.match("default", Prefix(ids(*pages))).table()].copy()
    other = PrefixTree(8, PAGE, 2)
    for name in ("a", "b"):
        other.create([NewSpec(name)])
        grow(other, name, len(pages) * PAGE)
        other.commits.commit(name, Prefix(ids(*before)))
    other.commits.commit("a", Prefix(None, keys))
    assert found(other, *pages) == len(before)
    with pytest.raises(KeyMismatch, match="with other token ids, or with none"):
        other.commits.commit("b", Prefix(ids(*pages)))
    other.check_integrity()


@pytest.mark.parametrize("max_pages", [None, 8], ids=["the pool is full", "the quota is"])
def test_pages_are_taken_in_parts_where_many_have_to_be_evicted(max_pages: int | None) -> None:
    tree = PrefixTree(8 if max_pages is None else 100, PAGE, 1)
    tree.budget.set_quota("default", max_pages, 0)
    for page in range(8):
        keep(tree, page)
    tree.create([NewSpec("new")])
    tree.budget.most_evicted = 3
    for left in (5, 2):
        with pytest.raises(EvictionPaused):
            grow(tree, "new", 7 * PAGE)
        assert tree.describe("new").length == 0
        assert sum(found(tree, page) for page in range(8)) == left
        tree.check_integrity()
    with pytest.raises(OutOfPages):
        grow(tree, "new", 9 * PAGE)
    assert sum(found(tree, page) for page in range(8)) == 2, "a refusal evicts nothing"
    grow(tree, "new", 7 * PAGE)
    assert tree.describe("new").length == 7 * PAGE
    assert sum(found(tree, page) for page in range(8)) == 1


@pytest.mark.parametrize(("most", "urgency"), [(8, "wait"), (NO_LIMIT, "now")])
@pytest.mark.parametrize("victim", ["default", "other"])
def test_copies_are_waited_for_in_turns_that_can_wait(
    tree: PrefixTree, most: int, urgency: str, victim: str
) -> None:
    seen: list[str] = []

    class Keeper:
        def num_ready(self, node: Any, size: int, how: str) -> int:
            seen.append(how)
            return size

    for page in range(8):
        keep(tree, page, namespace=victim)
    tree.budget.keeper, tree.budget.most_evicted = Keeper(), most
    tree.create([NewSpec("new")])
    grow(tree, "new", 2 * PAGE)
    assert set(seen) == {urgency}


def test_a_low_priority_goes_first_until_its_time_is_over(tree: PrefixTree) -> None:
    tree.tick(0.0)
    keep(tree, 1, keep=Retention(80, 10.0))
    keep(tree, 2)
    keep(tree, 3, keep=Retention(5, 10.0))
    tree.cache.evict("default", 1)
    assert [found(tree, page) for page in (1, 2, 3)] == [1, 1, 0]
    tree.tick(10.0)
    assert tree.cache.named.retention.ends.next_due == float("inf")
    tree.cache.evict("default", 1)
    assert [found(tree, page) for page in (1, 2)] == [0, 1], "equal now: the older goes"


@pytest.mark.parametrize(
    ("given", "left"),
    [
        (((90, None), (91, 10.0)), 90),
        (((91, 10.0), (90, None)), 90),
        (((10, None), (91, 10.0)), 10),
        (((91, 10.0), (92, 20.0)), 92),
        (((91, 20.0), (90, 10.0)), 91),
        (((91, 10.0), (90, None), (92, 12.0)), 90),
        (((91, 10.0),), 35),
    ],
)
def test_the_best_priority_without_an_end_counts_when_one_with_an_end_is_over(
    tree: PrefixTree, given: list[tuple[int, float | None]], left: int
) -> None:
    tree.tick(0.0)
    tree.create([NewSpec("a")])
    grow(tree, "a", PAGE)
    for priority, ends in given:
        kept = Retention(priority) if ends is None else Retention(priority, ends)
        tree.commits.commit("a", Prefix(ids(1)), kept)
    (node,) = (one for one in tree.cache.named.nodes if one is not None and one.name is not None)
    tree.tick(15.0)
    assert node.name is not None and node.name.keep.priority == left
    tree.check_integrity()


def test_a_parent_waits_for_its_children_whatever_their_priority(tree: PrefixTree) -> None:
    keep(tree, 1, keep=Retention(10))
    tree.create([NewSpec("a", prefix=Prefix(ids(1)))])
    grow(tree, "a", PAGE)
    tree.commits.commit("a", Prefix(ids(1, 2)))
    tree.free(["a"])
    keep(tree, 3, keep=Retention(20))
    tree.cache.evict("default", 1)
    assert (found(tree, 1, 2), found(tree, 3)) == (2, 0), "10 waits for its child of 35"
    tree.cache.evict("default", 1)
    assert found(tree, 1, 2) == 1
    tree.cache.evict("default", 1)
    assert tree.links.count == 0


def test_soft_pins_go_last_and_hard_ones_never(tree: PrefixTree) -> None:
    for page in (1, 2, 3):
        keep(tree, page)
    keys = [bytes(tree.cache.named.keys[node.pages[0]]) for node in tree.cache.named.nodes if node]
    tree.tick(0.0)
    tree.cache.pin("default", keys[0], "", 5.0)
    tree.cache.pin("default", keys[1], "", None)
    assert tree.cache.evict("default", 1) == 1
    assert [found(tree, page) for page in (1, 2, 3)] == [1, 1, 0]
    assert tree.cache.evict("default", 9) == 1
    assert [found(tree, page) for page in (1, 2)] == [0, 1]
    with pytest.raises(UnknownPage):
        tree.cache.unpin("other", keys[1], "")
    tree.cache.unpin("default", keys[1], "")
    assert tree.cache.evict("default", 9) == 1


def test_turns_of_a_chat_become_one_node(tree: PrefixTree) -> None:
    for turn in range(1, 6):
        keep(tree, *range(turn))
    assert tree.links.count == 1
    tree.create([NewSpec("a", prefix=Prefix(ids(0, 1))), NewSpec("b", prefix=Prefix(ids(0, 1)))])
    assert tree.links.count == 2
    rows = np.arange(3, dtype=np.int32)
    assert make_plan(tree, ["a", "b"], 0, rows, True, "always").is_cascade, "read once for both"
    tree.check_integrity()


def test_a_commit_while_decoding_makes_no_chain(tree: PrefixTree) -> None:
    tree.create([NewSpec("a")])
    for turn in range(1, 6):
        grow(tree, "a", PAGE)
        tree.commits.commit("a", Prefix(ids(*range(turn))))
    assert tree.links.count == 1


def test_forks_keep_their_pages_when_the_other_finds_them_cached(tree: PrefixTree) -> None:
    tree.create([NewSpec("a")])
    grow(tree, "a", 2 * PAGE)
    tree.create([NewSpec("b", "a")])
    keep(tree, 1)
    before = tree.page_table(["a", "b"], 0).kv_indices.tolist()
    assert tree.commits.commit("a", Prefix(ids(1, 2))) == 0
    assert tree.page_table(["a", "b"], 0).kv_indices.tolist() == before
    tree.free(["b"])
    assert tree.commits.commit("a", Prefix(ids(1, 2))) == 2
    tree.check_integrity()


def test_out_of_pages_reports_the_namespaces_pages(tree: PrefixTree) -> None:
    keep(tree, 1, 2, namespace="other")
    tree.cache.lease("other", Prefix(ids(1, 2)), "lease-1", 10.0)
    tree.create([NewSpec("a")])
    grow(tree, "a", 3 * PAGE)
    with pytest.raises(OutOfPages) as refusal:
        grow(tree, "a", 4 * PAGE)
    error = refusal.value
    assert error.args[:3] == (4, 3, 8)
    assert error.extra["held"] == {"referenced": 3, "cached": 0, "pinned": 0, "leases": 0}
    assert error.extra["available"] == tree.budget.obtainable(tree.budget.namespace("default")) == 3
    with pytest.raises(UnknownLease):
        tree.cache.close_lease("default", "lease-1")


def test_reserved_pages_are_for_their_namespace_only(tree: PrefixTree) -> None:
    tree.budget.set_quota("other", None, 3)
    tree.create([NewSpec("a")])
    with pytest.raises(OutOfPages):
        grow(tree, "a", 6 * PAGE)
    grow(tree, "a", 5 * PAGE)
    keep(tree, 1, 2, 3, namespace="other")
    with pytest.raises(OutOfPages):
        grow(tree, "a", PAGE)
    assert found(tree, 1, 2, 3, namespace="other") == 3


@pytest.mark.parametrize(
    ("most", "reserved", "rule"),
    [(4, 4, ""), (4, 5, "max_pages 4"), (None, 5, ""), (None, 6, "reserved for others")],
)
def test_a_quota_reserves_what_it_may_have_and_others_leave(
    tree: PrefixTree, most: int | None, reserved: int, rule: str
) -> None:
    tree.budget.set_quota("other", None, 3)
    with pytest.raises(InvalidRequest, match=rule) if rule else nullcontext():
        tree.budget.set_quota("third", most, reserved)
    held = tree.budget.look("third")
    assert (held.max_pages, held.reserved_pages) == ((None, 0) if rule else (most, reserved))


def test_a_client_that_is_over_its_share_loses_its_own_pages_first() -> None:
    tree = PrefixTree(8, PAGE, 1)
    keep(tree, 1, 2, 3, namespace="small")
    for page in range(10, 15):
        keep(tree, page, namespace="large")
    keep(tree, 20, namespace="large")
    assert found(tree, 1, 2, 3, namespace="small") == 3
    keep(tree, 4, namespace="small")
    assert found(tree, 4, namespace="small") == 1
    assert (tree.budget.namespace("small").used, tree.budget.namespace("large").used) == (4, 4)


def test_changes_are_reported_to_a_client_that_listens(tree: PrefixTree) -> None:
    keep(tree, 1)
    reply: list[Change] = []
    tree.cache.named.listener = reply.append
    keep(tree, 1, 2)
    tree.cache.evict("default", 2)
    tree.cache.cleared("default")
    stored, *removed, cleared = reply
    assert isinstance(stored, Stored) and isinstance(cleared, Cleared)
    assert stored.token_ids == ids(2).tobytes()
    assert (
        stored.parent_key
        == blake2b(root_key("default", "") + ids(1).tobytes(), digest_size=16).digest()
    )
    evicted = [one.keys for one in removed if isinstance(one, Removed)]
    assert stored.keys == evicted[0][-16:]


def test_nothing_is_left_of_a_namespace_or_salt_that_has_nothing(tree: PrefixTree) -> None:
    for number in range(20):
        salted = Prefix(ids(1), None, f"salt-{number}")
        tree.create([NewSpec("a", namespace=f"n{number}")])
        grow(tree, "a", PAGE)
        tree.commits.commit("a", salted)
        tree.free(["a"])
        assert tree.cache.match("default", salted).num_pages == 0
        tree.cache.evict(f"n{number}", 1)
        assert not tree.budget.namespaces[f"n{number}"].roots
    assert len(tree.budget.namespaces) <= 2


def begun(tree: PrefixTree, name: str, *pages: int) -> None:
    """A sequence of these pages, not committed."""
    tree.create([NewSpec(name)])
    grow(tree, name, len(pages) * PAGE)


@pytest.mark.parametrize("kind", ["token ids", "page keys"])
def test_a_commit_with_an_offset_names_the_remaining_pages(kind: str) -> None:
    tree = PrefixTree(16, PAGE, 2)

    def names(*pages: int, skipped: int = 0) -> Prefix:
        whole = Prefix(ids(*pages)) if kind == "token ids" else own(*pages)
        return Prefix(whole.token_ids, whole.page_keys, "", skipped)

    begun(tree, "a", 1, 2, 3, 4)
    assert tree.commits.commit("a", names(1, 2)) == 2
    assert tree.commits.commit("a", names(3, skipped=2)) == 3
    assert tree.commits.commit("a", names(3, 4, skipped=2)) == 4
    assert tree.commits.commit("a", names(skipped=4)) == 4
    assert tree.cache.match("default", names(1, 2, 3, 4)).num_pages == 4
    with pytest.raises(KeyMismatch) as refused:
        tree.commits.commit("a", names(9, 4, skipped=2))
    assert refused.value.extra["page"] == 2
    tree.check_integrity()


def test_pages_that_are_not_committed_cannot_be_skipped(tree: PrefixTree) -> None:
    begun(tree, "a", 1, 2, 3)
    tree.commits.commit("a", Prefix(ids(1)))
    with pytest.raises(InvalidRequest, match="at most 4, the sequence's committed tokens"):
        tree.commits.commit("a", Prefix(ids(3), skipped=2))
    assert found(tree, 1, 2, 3) == 1


def test_skipped_pages_count_towards_the_length_of_the_sequence(tree: PrefixTree) -> None:
    begun(tree, "a", 1, 2)
    tree.commits.commit("a", Prefix(ids(1, 2)))
    with pytest.raises(InvalidRequest, match="at most 8"):
        tree.commits.commit("a", Prefix(ids(3), skipped=2))


def test_many_sequences_are_committed_in_one_call_and_share_equal_pages(
    tree: PrefixTree,
) -> None:
    begun(tree, "a", 1, 2)
    begun(tree, "b", 1, 3)
    prefixes = [Prefix(ids(1, 2)), Prefix(ids(1, 3))]
    assert tree.commits.commit_all(["a", "b"], prefixes) == [2, 2]
    assert (found(tree, 1, 2), found(tree, 1, 3)) == (2, 2)
    assert tree.allocator.num_free == 8 - 3
    tree.check_integrity()


@pytest.mark.parametrize("order", ["first", "last"])
def test_a_commit_of_many_that_fails_for_one_commits_none(tree: PrefixTree, order: str) -> None:
    begun(tree, "a", 1, 2)
    begun(tree, "b", 1, 3)
    wrong = {
        "unknown": ("none", Prefix(ids(1))),
        "too long": ("b", Prefix(ids(1, 3, 4))),
        "not committed": ("b", Prefix(ids(3), skipped=1)),
    }
    for name, prefix in wrong.values():
        batch = [("a", Prefix(ids(1, 2))), (name, prefix)]
        names, prefixes = zip(*(batch if order == "last" else batch[::-1]), strict=True)
        with pytest.raises(CoreError):
            tree.commits.commit_all(names, prefixes)
        assert found(tree, 1, 2) == 0
        tree.check_integrity()


def test_a_commit_of_many_leaves_no_trace_of_a_salt_when_it_fails(tree: PrefixTree) -> None:
    begun(tree, "a", 1)
    salted = Prefix(ids(1), cache_salt="new")
    with pytest.raises(InvalidRequest):
        tree.commits.commit_all(["a"], [Prefix(ids(1, 2), cache_salt="new")])
    begun(tree, "b", 1)
    with pytest.raises(InvalidRequest):
        tree.commits.commit_all(["a", "b"], [salted, Prefix(ids(1, 2), cache_salt="new")])
    assert not tree.budget.namespace("default").roots


@pytest.mark.parametrize("shared", [1, 2])
def test_forks_that_name_shared_pages_differently_are_all_rejected(
    tree: PrefixTree, shared: int
) -> None:
    begun(tree, "a", 1, 2)
    tree.create([NewSpec("b", "a", shared * PAGE)])
    grow(tree, "b", (2 - shared) * PAGE)
    for names in ([ids(1, 2), ids(9, 3)], [ids(9, 3), ids(1, 2)]):
        with pytest.raises(KeyMismatch) as refused:
            tree.commits.commit_all(["a", "b"], [Prefix(one) for one in names])
        assert refused.value.extra == {"page": 0, "sequences": ["b"]}
        assert (found(tree, 1), found(tree, 9)) == (0, 0)
    assert tree.commits.commit_all(["a", "b"], [Prefix(ids(1, 2)), Prefix(ids(1))]) == [2, 1]
    tree.check_integrity()


def test_nodes_that_become_cached_together_are_one_again(tree: PrefixTree) -> None:
    """A match splits a prompt's node; the parts join once both have lost their last holder."""
    prefix = Prefix(ids(1, 2, 3))
    tree.create([NewSpec("long", prefix=prefix)])
    grow(tree, "long", 3 * PAGE)
    tree.commits.commit("long", prefix)
    tree.create([NewSpec("short", prefix=Prefix(ids(1, 2)))])
    tree.free(["short"])
    assert tree.links.count == 2
    tree.free(["long"])
    assert tree.links.count == 1
    tree.check_integrity()
    assert found(tree, 1, 2, 3) == 3


def test_computed_keys_equal_the_keys_of_the_committed_pages(tree: PrefixTree) -> None:
    prefix = Prefix(ids(5, 6, 7))
    keep(tree, 5, 6, 7)
    pages = tree.cache.match("default", prefix).table()
    keys = [tree.cache.named.keys[page].tobytes() for page in pages]
    assert list(prefix.chain(root_key("default", ""), PAGE)) == keys
    assert list(Prefix(None, as_keys(b"".join(keys))).chain(b"", PAGE)) == keys


def test_a_page_is_found_without_a_look_at_pages_of_similar_keys(
    tree: PrefixTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(tree, "a", *range(8))
    similar = [bytes(8) + bytes([number]) * 8 for number in range(8)]
    tree.commits.commit("a", Prefix(None, as_keys(b"".join(similar))))
    looked_at: list[Any] = []

    class Watched(list[Any]):
        def __getitem__(self, number: Any) -> Any:
            looked_at.append(number)
            return super().__getitem__(number)

    monkeypatch.setattr(tree.cache.named, "nodes", Watched(tree.cache.named.nodes))
    assert tree.cache.pin("default", similar[5], "", None) == 6
    assert len(looked_at) == 1
    with pytest.raises(UnknownPage):
        tree.cache.pin("default", bytes(8) + b"8" * 8, "", None)


def test_what_is_left_for_each_namespace_is_found_in_one_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tree, count = PrefixTree(64, PAGE, 1), 16
    for number in range(count):
        keep(tree, 1, namespace=f"n{number}")
        tree.create([NewSpec(f"s{number}", namespace=f"n{number}")])
        tree.budget.set_quota(f"n{number}", (None, 4)[number % 2], number % 3)
    budget = tree.budget
    every = [(name, budget.namespaces[name]) for name in budget.namespaces]
    wanted = {name: (max(0, budget.available(one)), budget.obtainable(one)) for name, one in every}
    looks: list[str] = []
    spare_of = budget._spare

    def counted(victim: Any, taker: Any) -> int:
        looks.append(victim.name)
        return spare_of(victim, taker)

    monkeypatch.setattr(budget, "_spare", counted)
    store = SimpleNamespace(tree=tree, history=EventHistory(PAGE, 100), _watermark=0)
    Store.emit_pressure_event(store, {"referenced": 1, "pinned": 0})  # type: ignore[arg-type]
    assert len(looks) <= 2 * count
    for name, left in wanted.items():
        with pytest.raises(StopIteration) as end:
            next(store.history.read(name, 0, 10))
        (event,) = end.value.value[0]
        assert (event["free"], event["available"]) == left


def test_a_commit_of_many_finds_the_nodes_that_it_has_made_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(matching, "MOST_MATCHED", 2)
    tree = PrefixTree(16, PAGE, 1)
    for count in range(1, 5):
        begun(tree, f"s{count}", *range(count))
    many = ["s1", "s2", "s3", "s4"]
    names = [Prefix(ids(*range(count))) for count in range(1, 5)]
    assert tree.commits.commit_all(many, names) == [1, 2, 3, 4]
    tree.check_integrity()
    begun(tree, "s5", *range(5))
    before = tree.cache.named.num_changes
    with pytest.raises(InvalidRequest, match="cached in 1024 nodes"):
        tree.commits.commit_all(["s5"], [Prefix(ids(*range(5)))])
    assert tree.cache.named.num_changes == before
