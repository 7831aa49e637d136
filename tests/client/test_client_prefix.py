"""The prefix cache by every client, against a service: found, held, pinned, evicted, deleted."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from attnd import (
    Hold,
    InvalidRequest,
    KeyMismatch,
    NewSequence,
    Prefix,
    UnknownLease,
    UnknownPage,
)

PAGE = 16
IDS = list(range(1000, 1000 + 4 * PAGE))


def fill(caller: Any, name: str, count: int) -> None:
    """Append `count` tokens at both layers."""
    for layer in range(2):
        rows = np.full((count, 2, 64), layer + 1.0, np.float32)
        caller.append(layer, [name], rows, -rows, append_indptr=[0, count])


def store(caller: Any, prefix: Prefix, tokens: int = len(IDS)) -> str:
    """Commit a prompt and delete its sequence; the key of its last page."""
    name = caller.create_sequence().id
    fill(caller, name, tokens)
    reply = caller.commit(name, prefix)
    assert (reply.committed_len, reply.num_pages) == (tokens, tokens // PAGE)
    caller.delete_sequence(name)
    assert reply.last_key is not None
    return reply.last_key


def test_a_prompt_is_found_again_by_ids_and_by_keys(caller: Any) -> None:
    keys = np.arange(64, dtype=np.uint8).reshape(4, 16)
    store(caller, Prefix(token_ids=IDS))
    assert store(caller, Prefix(page_keys=keys, cache_salt="own")) == keys[3].tobytes().hex()
    assert caller.pool().cached == 8
    made = caller.create_sequences(
        [
            NewSequence("a", prefix=Prefix(token_ids=np.array([*IDS, 5]))),
            NewSequence("empty"),
            NewSequence("b", prefix=Prefix(token_ids=IDS[:40])),
        ]
    )
    assert [one.cached_len for one in made] == [64, 0, 32]
    by_hex = [key.tobytes().hex() for key in keys[:2]]
    found = caller.match_prefix(Prefix(page_keys=by_hex, cache_salt="own"), lease_s=0)
    assert (found.matched_len, found.lease) == (32, None)
    assert caller.match_prefix(Prefix(page_keys=by_hex)).matched_len == 0
    assert caller.match_prefix(Prefix(token_ids=[])).num_pages == 0


def test_another_image_is_another_prompt_that_shares_the_text_before_it(caller: Any) -> None:
    def length(extra: Any, ids: Any = IDS) -> int:
        return caller.match_prefix(Prefix(ids, extra=extra), lease_s=0).matched_len

    cat, dog = bytes(range(32)), "0d" * 32
    events = caller.event_page().next
    store(caller, Prefix(IDS, extra=[(PAGE + 3, cat)]))
    assert [length([(PAGE + 3, one)]) for one in (cat, cat.hex(), dog)] == [64, 64, PAGE]
    assert [length([(at, cat)]) for at in (PAGE + 2, PAGE + 4, 2 * PAGE)] == [PAGE] * 3
    assert length(()) == length([(PAGE + 3, dog)]) == PAGE
    twice = [(PAGE + 3, cat), (3 * PAGE, dog)]
    new = [
        NewSequence("b", prefix=Prefix(IDS, extra=twice)),
        NewSequence("none", prefix=Prefix(IDS[:20])),
        NewSequence("a", prefix=Prefix(IDS, extra=twice[:1])),
    ]
    assert [one.cached_len for one in caller.create_sequences(new)] == [48, 16, 64]
    fill(caller, "b", PAGE)
    fill(caller, "none", 2 * PAGE)
    prefixes = [
        Prefix(IDS[48:], extra=[(0, dog)]),
        Prefix(IDS[PAGE : 3 * PAGE], extra=[(3, dog)]),
        Prefix(IDS, extra=twice[:1]),
    ]
    committed = caller.commit_sequences(["b", "none", "a"], prefixes, offsets=[48, PAGE, 0])
    assert [one.committed_len for one in committed] == [64, 48, 64]
    assert (length(twice), length([(PAGE + 3, dog)])) == (64, 48)
    with pytest.raises(KeyMismatch):
        caller.commit("a", Prefix(IDS))
    stored = [one for one in caller.event_page(events).events if one.type == "stored"]
    assert stored[0].extra_keys == (None, [{"first_token": 3, "key": cat.hex()}], None, None)
    assert [one.extra_keys for one in stored[1:]] == [
        ([{"first_token": 0, "key": dog}],),
        ([{"first_token": 3, "key": dog}], None),
    ]
    for wrong in ([cat], [(1.5, cat)], [(1, 2)]):
        with pytest.raises(TypeError, match="pairs of a token's index"):
            length(wrong)
    with pytest.raises(InvalidRequest, match="goes with token_ids"):
        caller.match_prefix(Prefix(page_keys=[cat[:16]], extra=[(0, cat)]))
    with pytest.raises(InvalidRequest, match="must be above 9, the one before"):
        length([(9, cat), (9, dog)])


def test_a_view_with_a_salt_salts_every_prefix_and_page_key_without_one(caller: Any) -> None:
    def length(one: Any, prefix: Prefix) -> int:
        return one.match_prefix(prefix, lease_s=0).matched_len

    salted = caller.with_options(cache_salt="model-a")
    key = store(salted, Prefix(token_ids=IDS))
    assert length(caller, Prefix(token_ids=IDS)) == 0
    assert length(salted, Prefix(token_ids=IDS, cache_salt="other")) == 0
    named = Prefix(token_ids=IDS, cache_salt="model-a")
    assert length(caller, named) == len(IDS)
    later = salted.with_options(deadline=60.0)
    assert later.prefetch(Prefix(token_ids=IDS)).matched_len == len(IDS)
    new = [NewSequence("a", prefix=Prefix(token_ids=IDS[:40])), NewSequence("b")]
    assert [one.cached_len for one in later.create_sequences(new)] == [32, 0]
    assert later.pin(key, hard=True) == 4
    with pytest.raises(UnknownPage):
        caller.unpin(key)
    later.unpin(key)
    more = [*IDS, *range(PAGE)]
    fill(caller, "b", len(more))
    (done,) = later.commit_sequences(["b"], [Prefix(token_ids=more)])
    assert done.committed_len == len(more)
    assert length(caller, Prefix(token_ids=more)) == 0
    assert length(salted, Prefix(token_ids=more)) == len(more)
    plain = salted.with_options(cache_salt="")
    assert length(plain, Prefix(token_ids=IDS)) == 0


def test_leases_and_pins_hold_cached_pages(caller: Any) -> None:
    key = store(caller, Prefix(token_ids=IDS))
    lease = caller.match_prefix(Prefix(token_ids=IDS[:PAGE])).lease
    assert lease is not None
    assert caller.evict(100) == 3
    (held,) = caller.holds()
    assert (held.lease, held.num_pages) == (lease.id, 1) and 5.0 < (held.left_s or 0.0) <= 10.0
    assert caller.renew_lease(lease.id, 60.0).expires_at > lease.expires_at
    caller.release_lease(lease.id)
    with pytest.raises(UnknownLease, match=lease.id):
        caller.renew_lease(lease.id)
    with pytest.raises(UnknownPage):
        caller.pin(key, hard=True)
    assert caller.clear() == 1
    key = store(caller, Prefix(token_ids=IDS))
    assert caller.pin(bytes.fromhex(key), hard=True) == 4
    assert caller.clear() == 0
    assert caller.pool().pinned == 4
    assert caller.holds() == (Hold(None, None, key, "", 4),)
    caller.unpin(key)
    with pytest.raises(UnknownPage, match=key):
        caller.unpin(key)
    assert caller.pin(key, soft_ttl_s=5.0) == 4


def test_a_snapshot_shows_every_page_and_the_tree(caller: Any) -> None:
    store(caller, Prefix(token_ids=IDS))
    name = caller.create_sequence().id
    fill(caller, name, 2 * PAGE)
    time.sleep(0.25)  # a younger snapshot is returned again
    seen = caller.snapshot()
    assert (seen.cached, seen.referenced, seen.sequences, seen.page_step) == (4, 2, 1, 1)
    assert np.bincount(seen.page_states, minlength=4).tolist() == [seen.free, 2, 0, 4]
    assert seen.tree.namespaces == ("default",)
    assert sorted(seen.tree.totals.tolist()) == [2, 4, 6]
    assert seen.tree.parents.tolist() == [-1, 0, 0] and (seen.tree.idle_s < 60.0).all()


def test_quotas_are_set_and_returned(caller: Any) -> None:
    reply = caller.set_namespace("else", max_pages=20, reserved_pages=10)
    assert (reply.max_pages, reply.reserved_pages, reply.used) == (20, 10, 0)
    assert caller.pool().free == 128 - 10
    reply = caller.set_namespace("else")
    assert (reply.max_pages, reply.reserved_pages) == (None, 0)
    assert caller.get_namespace("default").cached == caller.pool().cached


def test_events_report_changes_of_pages(caller: Any) -> None:
    last = caller.event_page().next
    key = store(caller, Prefix(token_ids=IDS))
    caller.clear()
    reply = caller.events(last, poll_s=0.01)
    stored, removed, cleared = next(reply), next(reply), next(reply)
    assert [one.type for one in (stored, removed, cleared)] == ["stored", "removed", "cleared"]
    assert stored.token_ids == tuple(IDS) and stored.page_keys[-1] == key
    assert removed.page_keys == stored.page_keys and stored.page_size == PAGE
    assert caller.event_page(last, 1).events == (stored,)
    store(caller, Prefix(token_ids=IDS))
    assert next(reply).id == last + 4
    assert next(caller.events(last + 99)).type == "too_old"
