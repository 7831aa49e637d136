"""Sequences that leave an engine: refused to all while they do, and never two of one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from engine_caller import Asked, Caller, Refused, create, outcome, pool
from engine_model import CPU_GEOMETRY, on_cpu
from exported import export, grow, held

LAYERS = CPU_GEOMETRY.num_layers
PAGE = CPU_GEOMETRY.page_size


async def told(caller: Caller, name: str, fields: dict[str, Any]) -> dict[str, Any]:
    answer = await outcome(caller.submit(Asked(name, fields, {})))
    assert not isinstance(answer, Refused), answer.problem
    return dict(answer.fields)


async def code_of(caller: Caller, name: str, fields: dict[str, Any]) -> str:
    answer = await outcome(caller.submit(Asked(name, fields, {})))
    return str(answer.problem["code"]) if isinstance(answer, Refused) else "ok"


async def hand(caller: Caller, state: str, **given: Any) -> str:
    return await code_of(caller, "hand_over", {"id": "a", "state": state} | given)


def test_a_sequence_that_leaves_is_only_exported() -> None:
    async def scenario(caller: Caller) -> None:
        await create(caller, "a", "b")
        await grow(caller, "a", (23, 23), CPU_GEOMETRY)
        before = await held(caller, "a", LAYERS)
        assert await hand(caller, "back") == "invalid_request"
        assert await hand(caller, "leaving") == "ok"
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
            assert await code_of(caller, name, fields) == "sequence_moving", name
        assert await code_of(caller, "get_sequence", {"id": "b"}) == "ok"
        header = (await told(caller, "export_sequence", {"id": "a"}))["header"]
        assert await hand(caller, "back") == "ok"
        again = await held(caller, "a", LAYERS)
        assert [one.tobytes() for one in again] == [one.tobytes() for one in before]
        assert await hand(caller, "leaving") == "ok"
        assert await hand(caller, "handed") == "invalid_request"
        assert await hand(caller, "handed", generation="0" * 32) == "sequence_changed"
        assert await hand(caller, "handed", generation=header["generation"]) == "ok"
        assert await hand(caller, "gone") == "ok"
        assert await code_of(caller, "get_sequence", {"id": "a"}) == "unknown_sequence"
        assert (await pool(caller))["referenced"] == 0

    on_cpu(scenario)


@pytest.mark.parametrize("handed", [False, True])
def test_what_nobody_comes_back_for_stays_or_is_gone_where_it_was_handed_over(
    handed: bool,
) -> None:
    async def scenario(caller: Caller) -> None:
        await create(caller, "a")
        await grow(caller, "a", (PAGE, PAGE), CPU_GEOMETRY)
        header = (await told(caller, "export_sequence", {"id": "a"}))["header"]
        assert await hand(caller, "leaving", for_s=0.05) == "ok"
        if handed:
            given = {"generation": header["generation"], "for_s": 0.05}
            assert await hand(caller, "handed", **given) == "ok"
        await asyncio.sleep(0.1)
        expected = "unknown_sequence" if handed else "ok"
        assert await code_of(caller, "get_sequence", {"id": "a"}) == expected
        assert (await pool(caller))["referenced"] == (0 if handed else 1)

    on_cpu(scenario)


def test_an_import_begins_with_what_its_base_has() -> None:
    async def scenario(caller: Caller) -> None:
        await create(caller, "a")
        await grow(caller, "a", (23, 23), CPU_GEOMETRY)
        fork = {"id": "f", "parent": "a", "length": 2 * PAGE}
        await told(caller, "create_sequences", {"sequences": [fork]})
        asked = {"id": "a", "beside": ["f", "a"]}
        answer = await told(caller, "export_sequence", asked)
        assert answer["shared"][0] == 2 * PAGE
        assert await code_of(caller, "export_sequence", asked | {"beside": ["no"]}) == (
            "unknown_sequence"
        )
        exported = await export(caller, "a", part_bytes=CPU_GEOMETRY.page_bytes * LAYERS)
        free = (await pool(caller))["free"]
        begin = {"id": "c", "header": exported.header, "digest": exported.digest}
        for wrong in ({"base": "f", "base_len": 2 * PAGE + 1}, {"base": "f", "base_len": 24}):
            assert await code_of(caller, "import_sequence", begin | wrong) == "invalid_request"
        assert await code_of(caller, "import_sequence", begin | {"base": "no"}) == (
            "unknown_sequence"
        )
        state = await told(caller, "import_sequence", begin | {"base": "f", "base_len": 2 * PAGE})
        assert (state["next_part"], state["cached_len"]) == (2, 2 * PAGE)
        pages = -(-23 // PAGE)
        assert (await pool(caller))["free"] == free - (pages - 2)
        await told(caller, "drain_engine", {"name": "engine"})
        new = {"sequences": [{"id": "n"}]}
        assert await code_of(caller, "create_sequences", new) == "not_ready"
        fork = {"sequences": [{"id": "n", "parent": "a"}]}
        assert await code_of(caller, "create_sequences", fork) == "ok"
        await told(caller, "drain_engine", {"name": "engine", "stop": True})

    on_cpu(scenario)
