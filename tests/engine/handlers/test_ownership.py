"""Sequences that leave an engine: refused to all while they do, and never two of one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.engine.exports import bring, export, grow, held
from tests.engine.harness import Caller, NewCall
from tests.engine.pool_model import CPU_GEOMETRY, cpu_engine

LAYERS = CPU_GEOMETRY.num_layers
PAGE = CPU_GEOMETRY.page_size


async def hand(caller: Caller, state: str, **given: Any) -> str:
    return await caller.code(NewCall("hand_over", {"id": "a", "state": state} | given))


@cpu_engine()
async def test_a_sequence_that_leaves_is_only_exported(caller: Caller) -> None:
    await caller.create("a", "b")
    await grow(caller, "a", (23, 23), CPU_GEOMETRY)
    before = await held(caller, "a", LAYERS)
    back = NewCall("hand_over", {"id": "a", "state": "back"})
    await caller.refused(back, "invalid_request", field="state", value="back")
    assert await hand(caller, "leaving") == "ok"
    leaving = back.but(state="leaving")
    await caller.refused(leaving, "sequence_moving", sequences=["a"], handed=None)
    read = {"layer": 0, "sequences": ["b", "a"]}
    for name, fields in (
        ("get_sequence", {"id": "a"}),
        ("gather", read),
        ("truncate", {"id": "a", "length": 1}),
        ("delete_sequence", {"id": "a"}),
        ("delete_sequences", {"ids": ["a"]}),
        ("delete_sequences", {"prefix": ""}),
        ("create_sequences", {"sequences": [{"id": "f", "parent": "a"}]}),
        ("create_sequences", {"sequences": [{"id": "a"}]}),
        ("hand_over", {"id": "a", "state": "leaving"}),
    ):
        assert await caller.code(NewCall(name, fields)) == "sequence_moving", name
    assert await caller.code(NewCall("get_sequence", {"id": "b"})) == "ok"
    header = (await caller.call("export_sequence", {"id": "a"})).fields["header"]
    assert await hand(caller, "back") == "ok"
    again = await held(caller, "a", LAYERS)
    assert [one.tobytes() for one in again] == [one.tobytes() for one in before]
    assert await hand(caller, "leaving") == "ok"
    assert await hand(caller, "handed") == "invalid_request"
    assert await hand(caller, "handed", generation="0" * 32) == "sequence_changed"
    assert await hand(caller, "handed", generation=header["generation"]) == "ok"
    await caller.refused(leaving, "sequence_moving", sequences=["a"], handed=["a"])
    assert await hand(caller, "gone") == "ok"
    assert await caller.code(NewCall("get_sequence", {"id": "a"})) == "unknown_sequence"
    assert (await caller.pool())["referenced"] == 0


@cpu_engine()
async def test_a_sequence_that_stays_after_all_has_been_used(caller: Caller) -> None:
    await caller.call("create_sequences", {"sequences": [{"id": "a", "ttl_s": 600.0}]})
    assert await hand(caller, "leaving", for_s=60.0) == "ok"
    used = caller.engine.store.tree.books.used.max()
    assert await hand(caller, "back") == "ok"
    assert caller.engine.store.tree.books.used.max() > used


@cpu_engine(slice_ms=1e-6)
async def test_a_new_sequence_answers_no_call_before_it_is_confirmed(caller: Caller) -> None:
    await caller.create("b")
    await grow(caller, "b", (23, 23), CPU_GEOMETRY)
    given = await export(caller, "b")

    async def create(for_s: float) -> None:
        new = {"sequences": [{"id": "a", "parent": "b"}], "confirm_s": for_s}
        await caller.call("create_sequences", new)

    async def take(for_s: float) -> None:
        begun = (await caller.submit(given.begin("a", share=False))).fields
        for number in range(begun["num_parts"]):
            await caller.submit(given.part("a", number))
        await caller.submit(given.end("a", confirm_s=for_s))

    look = NewCall("get_sequence", {"id": "a"})
    for make in (create, take):
        await make(60.0)
        assert await caller.code(look) == await hand(caller, "leaving") == "sequence_moving"
        assert await caller.code(NewCall("delete_sequences", {"ids": ["a"]})) == "sequence_moving"
        assert await hand(caller, "back") == await caller.code(look) == "ok"
        assert await hand(caller, "gone") == "invalid_request", "it is confirmed"
        await caller.call("delete_sequence", {"id": "a"})
        await make(60.0)
        assert (await hand(caller, "gone"), await caller.code(look)) == ("ok", "unknown_sequence")
        await make(0.05)
        await asyncio.sleep(0.3)
        assert await caller.code(look) == await hand(caller, "back") == "unknown_sequence"
    many = [{"id": f"n-{number}"} for number in range(40)]  # in slices
    await caller.call("create_sequences", {"sequences": many, "confirm_s": 0.05})
    assert await caller.code(NewCall("get_sequence", {"id": "n-39"})) == "sequence_moving"
    await asyncio.sleep(0.3)
    assert (await caller.pool())["sequences"] == 1
    assert not caller.engine.store.move_marks.marks


@cpu_engine()
async def test_an_engine_says_what_has_arrived_also_after_it_was_deleted(caller: Caller) -> None:
    await caller.create("b")
    await grow(caller, "b", (23, 23), CPU_GEOMETRY)
    given = await export(caller, "b")
    generation = given.header["generation"]
    assert await hand(caller, "arrived", generation=generation) == "unknown_import"
    await bring(caller, given, "a")
    for _ in range(2):
        assert await hand(caller, "arrived", generation=generation) == "ok"
        assert await hand(caller, "arrived", generation="0" * 32) == "unknown_import"
        await caller.call("delete_sequences", {"ids": ["a"]})


@cpu_engine()
async def test_a_bulk_delete_may_skip_what_is_moving(caller: Caller) -> None:
    await caller.create("a", "a-2", "b")
    assert await hand(caller, "leaving", for_s=60.0) == "ok"
    skipped = {"ids": ["a", "a-2", "missing"], "skip": True}
    deleted = (await caller.call("delete_sequences", skipped)).fields
    assert deleted == {"num_deleted": 1, "skipped": ["a"]}
    assert await caller.code(NewCall("delete_sequences", {"ids": ["b", "a"]})) == "sequence_moving"
    assert await caller.code(NewCall("delete_sequences", {"prefix": "a"})) == "sequence_moving"
    deleted = (await caller.call("delete_sequences", {"prefix": "", "skip": True})).fields
    assert deleted == {"num_deleted": 1, "skipped": ["a"]}
    assert await hand(caller, "back") == "ok"
    assert (await caller.call("delete_sequences", {"prefix": ""})).fields == {"num_deleted": 1}


@cpu_engine()
async def test_pins_and_leases_are_listed_and_can_be_made_at_another_engine(caller: Caller) -> None:
    await caller.create("a")
    await grow(caller, "a", (4 * PAGE,) * LAYERS, CPU_GEOMETRY)
    before = await held(caller, "a", LAYERS)
    ids = list(range(4 * PAGE))
    named = {"token_ids": ids, "cache_salt": "x"}
    key = (await caller.call("commit", {"id": "a"} | named)).fields["last_key"]
    await caller.call("delete_sequence", {"id": "a"})
    page = {"page_key": key, "cache_salt": "x"}
    assert (await caller.call("holds")).fields == {"holds": []}
    await caller.call("pin", page | {"hard": True})
    short = {"token_ids": ids[: 2 * PAGE], "cache_salt": "x", "lease_s": 60.0}
    lease = (await caller.call("match_prefix", short)).fields["lease"]["id"]
    pin, leased = (await caller.call("holds")).fields["holds"]
    assert pin == {"lease": None, "left_s": None, "num_pages": 4} | page
    assert (leased["lease"], leased["num_pages"]) == (lease, 2)
    assert 50.0 < leased["left_s"] <= 60.0
    await caller.call("drain_engine", {"name": "engine"})
    for name, fields in (
        ("pin", page | {"hard": True}),
        ("renew_lease", {"id": "lease-y"} | page),
        ("create_sequences", {"sequences": [{"id": "new"}]}),
    ):
        assert await caller.code(NewCall(name, fields)) == "not_ready", name
    matched = (await caller.call("match_prefix", short)).fields
    assert matched == {"matched_len": 2 * PAGE, "num_pages": 2, "lease": None}
    assert await caller.code(NewCall("renew_lease", {"id": lease})) == "ok"
    new = {"sequences": [{"id": "a", "held": page}]}
    made = (await caller.call("create_sequences", new)).fields
    assert made["sequences"][0]["cached_len"] == 4 * PAGE
    again = await held(caller, "a", LAYERS)
    assert [one.tobytes() for one in again] == [one.tobytes() for one in before]
    await caller.call("drain_engine", {"name": "engine", "stop": True})
    await caller.call("renew_lease", {"id": "lease-y", "lease_s": 9.0} | page)
    assert [one["lease"] for one in (await caller.call("holds")).fields["holds"]] == [
        *(None, lease, "lease-y")
    ]
    for one in (lease, "lease-y"):
        await caller.call("release_lease", {"id": one})
    unknown = {"page_key": "0" * 32}
    assert await caller.code(NewCall("renew_lease", {"id": "z"} | unknown)) == "unknown_page"
    both = {"sequences": [{"held": page, "prefix": named}]}
    assert await caller.code(NewCall("create_sequences", both)) == "invalid_request"
    await caller.call("unpin", page)
    await caller.call("delete_sequence", {"id": "a"})
    assert (await caller.pool())["cached"] == 4


@pytest.mark.parametrize("handed", [False, True])
@cpu_engine()
async def test_when_a_mark_expires_the_sequence_stays_or_is_deleted_if_it_was_transferred(
    caller: Caller, handed: bool
) -> None:
    await caller.create("a")
    await grow(caller, "a", (PAGE, PAGE), CPU_GEOMETRY)
    header = (await caller.call("export_sequence", {"id": "a"})).fields["header"]
    assert await hand(caller, "leaving", for_s=0.05) == "ok"
    if handed:
        given = {"generation": header["generation"], "for_s": 0.05}
        assert await hand(caller, "handed", **given) == "ok"
    await asyncio.sleep(0.1)
    expected = "unknown_sequence" if handed else "ok"
    assert await caller.code(NewCall("get_sequence", {"id": "a"})) == expected
    assert (await caller.pool())["referenced"] == (0 if handed else 1)


@cpu_engine()
async def test_an_import_begins_with_what_its_base_has(caller: Caller) -> None:
    await caller.create("a")
    await grow(caller, "a", (23, 23), CPU_GEOMETRY)
    fork = {"id": "f", "parent": "a", "length": 2 * PAGE}
    await caller.call("create_sequences", {"sequences": [fork]})
    call = {"id": "a", "beside": ["f", "a"]}
    answer = (await caller.call("export_sequence", call)).fields
    assert answer["shared"][0] == 2 * PAGE
    missing = NewCall("export_sequence", call | {"beside": ["no"]})
    assert await caller.code(missing) == "unknown_sequence"
    exported = await export(caller, "a", part_bytes=CPU_GEOMETRY.page_bytes * LAYERS)
    free = (await caller.pool())["free"]
    begin = {"id": "c", "header": exported.header, "digest": exported.digest}
    for wrong in ({"base": "f", "base_len": 2 * PAGE + 1}, {"base": "f", "base_len": 24}):
        assert await caller.code(NewCall("import_sequence", begin | wrong)) == "invalid_request"
    missing = NewCall("import_sequence", begin | {"base": "no"})
    assert await caller.code(missing) == "unknown_sequence"
    begun = await caller.call("import_sequence", begin | {"base": "f", "base_len": 2 * PAGE})
    state = begun.fields
    assert (state["next_part"], state["cached_len"]) == (2, 2 * PAGE)
    pages = -(-23 // PAGE)
    assert (await caller.pool())["free"] == free - (pages - 2)
    await caller.call("drain_engine", {"name": "engine"})
    new = {"sequences": [{"id": "n"}]}
    assert await caller.code(NewCall("create_sequences", new)) == "not_ready"
    fork = {"sequences": [{"id": "n", "parent": "a"}]}
    assert await caller.code(NewCall("create_sequences", fork)) == "ok"
    await caller.call("drain_engine", {"name": "engine", "stop": True})


@cpu_engine()
async def test_a_drain_of_another_engine_does_not_drain_this_one(caller: Caller) -> None:
    drain = NewCall("drain_engine", {"name": "engine-1"})
    await caller.refused(drain, "invalid_request", field="name", value="engine-1")
    await caller.create("a")
    await caller.call("drain_engine", {"name": "engine"})
    await caller.refused(drain.but(stop=True), "invalid_request", field="name")
    assert await caller.code(NewCall("create_sequences", {"sequences": [{}]})) == "not_ready"


@cpu_engine()
async def test_who_exports_a_part_keeps_a_sequence_leaving(caller: Caller) -> None:
    await caller.create("a")
    await grow(caller, "a", (PAGE, PAGE), CPU_GEOMETRY)
    assert await hand(caller, "leaving", for_s=0.3) == "ok"
    for _ in range(3):
        await asyncio.sleep(0.2)
        await caller.call("export_sequence", {"id": "a"})
    assert await caller.code(NewCall("get_sequence", {"id": "a"})) == "sequence_moving"
    await asyncio.sleep(0.4)
    assert await caller.code(NewCall("get_sequence", {"id": "a"})) == "ok"
