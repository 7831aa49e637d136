"""Reserves: pages that are kept for a sequence until it writes, releases or leaves them."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

from service.engine.handlers import sequences as sequences_module
from tests.engine.fake_backend import GEOMETRY, FakeBackend
from tests.engine.harness import (
    Caller,
    NewCall,
    append,
    code,
    creation,
    delete,
    fake_engine,
    truncate,
)

SIZE, PAGES = GEOMETRY.page_size, GEOMETRY.num_pages
KEYS = {
    "ours": ("ours", ["read", "append"]),
    "theirs": ("theirs", ["read", "append"]),
    "operator": ("ours", ["read", "append", "admin"]),
}
keyed = partial(fake_engine, keys=KEYS, key="ours")


def reserving(name: str, count: int, **fields: Any) -> NewCall:
    return creation({"id": name, "reserve": count} | fields)


async def numbers(caller: Caller) -> tuple[int, int, int]:
    """Pages in reserves, free and referenced pages, in a pool whose books are right."""
    pool = await caller.pool()
    assert pool["integrity"] == "ok", pool
    return pool["reserved"], pool["free"], pool["referenced"]


@keyed()
async def test_available_tokens_are_the_largest_reserve_that_is_accepted(
    ours: Caller, operator: Caller, theirs: Caller
) -> None:
    async def has_room(caller: Caller, tokens: int) -> None:
        assert (await caller.pool())["available_tokens"] == tokens
        before = await caller.pool()
        error = await caller.refused(reserving("large", tokens + 1), "out_of_pages")
        given = [error.problem[one] * SIZE for one in ("needed", "available")]
        assert given == [tokens + SIZE, tokens] and await caller.pool() == before
        if tokens:
            made = await caller.submit(reserving("large", tokens))
            assert made.fields["sequences"][0]["reserved_len"] == tokens
            assert (await caller.pool())["available_tokens"] == 0
            await caller.submit(delete("large"))
        assert (await caller.pool())["available_tokens"] == tokens

    await has_room(ours, PAGES * SIZE)
    await ours.fill(a=9)
    await has_room(ours, (PAGES - 3) * SIZE)
    await ours.submit(NewCall("commit", {"id": "a", "token_ids": [*range(9)]}))
    await ours.submit(delete("a"))  # two pages are cached: they are evicted for a reserve
    await has_room(theirs, PAGES * SIZE)
    await operator.call("set_namespace", {"name": "ours", "reserved_pages": 8, "max_pages": 10})
    await has_room(ours, 10 * SIZE)
    await has_room(theirs, (PAGES - 8) * SIZE)
    await ours.submit(reserving("inside", 7 * SIZE))  # counts within the 8 pages, not beside them
    await has_room(theirs, (PAGES - 8) * SIZE)
    await has_room(ours, 3 * SIZE)


@keyed()
async def test_other_sequences_get_no_reserved_pages_and_their_own_gets_all_of_them(
    ours: Caller, theirs: Caller
) -> None:
    await ours.create("other")
    await ours.submit(reserving("a", 5 * SIZE))
    await theirs.fill(b=(PAGES - 5) * SIZE)
    for caller, name in ((theirs, "b"), (ours, "other")):
        assert await caller.code(append(name, 1)) == "out_of_pages"
    for layer in range(GEOMETRY.num_layers):
        await ours.submit(append("a", 4 * SIZE + 1, layer))
        assert await numbers(ours) == (0, 0, 5)
    assert await ours.code(append("a", SIZE)) == "out_of_pages"  # 1 of 4 is behind its reserve
    await ours.submit(append("a", SIZE - 1))


CUTS = [  # what of 4 reserved pages, after 9 tokens were written, each call leaves
    (truncate("a", 5), 2),
    (truncate("a", 0), 4),
    (truncate("a", 5).but(reserve=4), 1),
    (truncate("a", 5).but(reserve=99), 2),
    (truncate("a", 9).but(reserve=0), 0),
    (truncate("a", 5).but(layer=1), 1),
    (NewCall("truncate_sequences", {"sequences": ["a"], "lengths": [0], "reserve": 0}), 0),
    (delete("a"), 0),
    (NewCall("delete_sequences", {"prefix": "a"}), 0),
]


@pytest.mark.parametrize(("call", "left"), CUTS)
@fake_engine()
async def test_a_reserve_lasts_until_it_is_written_released_or_deleted(
    caller: Caller, call: NewCall, left: int
) -> None:
    await caller.submit(reserving("a", 4 * SIZE))
    for layer in range(GEOMETRY.num_layers):
        await caller.submit(append("a", 9, layer))
    assert await numbers(caller) == (1, PAGES - 4, 4)
    await caller.submit(call)
    assert (await numbers(caller))[0] == left


@fake_engine()
async def test_a_truncation_with_keep_in_a_full_pool_takes_its_page_from_the_reserve(
    caller: Caller,
) -> None:
    for name, reserve in (("a", 3 * SIZE), ("b", 2 * SIZE)):
        await caller.submit(reserving(name, reserve))
        for layer in range(GEOMETRY.num_layers):
            await caller.submit(append(name, 2 * SIZE, layer))
        await caller.submit(creation({"id": f"fork-{name}", "parent": name}))
    free = (await caller.pool())["free"]
    await caller.submit(reserving("rest", free * SIZE))
    kept = {"length": 1, "keep": [3, 6]}
    assert await caller.code(truncate("b", 0).but(**kept)) == "out_of_pages"
    assert (await caller.submit(truncate("a", 0).but(**kept))).fields["length"] == 3
    assert (await numbers(caller))[0] == free


@fake_engine()
async def test_a_failed_launch_gives_its_pages_back_to_the_reserve(
    caller: Caller, backend: FakeBackend
) -> None:
    backend.failures["append"] = [RuntimeError("a bug")]
    await caller.submit(reserving("a", 3 * SIZE))
    assert await caller.code(append("a", 2 * SIZE)) == "internal"
    assert await numbers(caller) == (3, PAGES - 3, 3)


@fake_engine()
async def test_a_sliced_creation_evicts_for_its_reserves_some_pages_at_a_time(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequences_module, "EVICTED_AT_ONCE", 2)
    await caller.fill(a=(PAGES - 1) * SIZE)
    await caller.submit(NewCall("commit", {"id": "a", "token_ids": [*range((PAGES - 1) * SIZE)]}))
    await caller.submit(delete("a"))
    names = [f"n{number}" for number in range(40)]  # more than one turn makes
    many = creation(*({"id": name, "reserve": SIZE * (name == "n39") * 20} for name in names))
    made, other = await asyncio.gather(caller.attempt(many), caller.attempt(append("n0", 1)))
    assert (code(made), code(other)) in (("ok", "ok"), ("ok", "unknown_sequence"))
    assert (await numbers(caller))[0] == 20
