"""Exports and imports through the engine: to the bit, in parts, refused with nothing changed."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kernels.backend import PoolGeometry
from service.engine.handlers.exports import header_digest
from service.operations.transfer import MAX_IDLE_S, Header
from tests.engine.exports import Exported, ask_part, bring, export, grow, held, same
from tests.engine.handlers.test_engine_prefix import PAGE, PROMPT, begin, check, keep
from tests.engine.harness import Caller, NewCall, code, creation, delete, get, outcome, truncate
from tests.engine.pool_model import CPU_GEOMETRY, cpu_engine, on_cpu

LAYERS = CPU_GEOMETRY.num_layers
PAGE_BYTES = CPU_GEOMETRY.page_bytes
LENGTHS = (23, 23)


def taken(lengths: Sequence[int] = LENGTHS, geometry: PoolGeometry = CPU_GEOMETRY) -> Exported:
    """An export of `a` from an engine of its own, a page at all layers in each part."""

    async def scenario(caller: Caller) -> Exported:
        await caller.create("a")
        await grow(caller, "a", lengths, geometry)
        return await export(caller, "a", part_bytes=geometry.page_bytes * LAYERS)

    result: Exported = on_cpu(scenario, geometry)
    return result


@pytest.fixture
def given() -> Exported:
    return taken()


async def refused(caller: Caller, call: NewCall) -> dict[str, Any]:
    """The problem that answers an operation, which has changed nothing."""
    before = await caller.pool()
    reply = await caller.refused(call)
    assert await caller.pool() == before, call
    return reply.problem


@pytest.mark.parametrize(
    ("dtype", "layout"),
    [
        ("fp32", "NHD"),
        ("bf16", "HND"),
        ("fp8_e4m3", "NHD"),
        pytest.param("fp16", "HND", marks=pytest.mark.long),
        pytest.param("fp8_e5m2", "HND", marks=pytest.mark.long),
    ],
)
@cpu_engine()
async def test_an_import_equals_its_export_to_the_bit(
    caller: Caller, geometry: PoolGeometry, slice_ms: float
) -> None:
    await caller.create("a")
    await grow(caller, "a", (23, 18), geometry)
    given = await export(caller, "a", part_bytes=2 * geometry.page_bytes * LAYERS)
    assert given.header["num_parts"] == 3 and given.header["lengths"] == [23, 18]
    await bring(caller, given, "b")
    reply = await caller.view("b")
    assert (reply["lengths"], reply["pages"], reply["parent"]) == ([23, 18], 5, None)
    assert await same(caller, "a", "b", LAYERS)
    await grow(caller, "b", (1, 1), geometry)
    assert not await same(caller, "a", "b", LAYERS)
    assert (await export(caller, "a")).last != given.last, "parts are cut otherwise"
    assert (await caller.pool())["integrity"] == "ok"


@cpu_engine()
async def test_a_sequence_of_any_length_is_cut_at_any_size(caller: Caller) -> None:
    async def check_cut(caller: Caller, part_bytes: int, lengths: Sequence[int]) -> None:
        given = await export(caller, "a", part_bytes=part_bytes)
        sizes = [sum(one.nbytes for one in tensors.values()) for _, tensors in given.parts]
        assert max(sizes, default=0) <= max(part_bytes, PAGE_BYTES)
        assert sum(sizes) == sum(lengths) * CPU_GEOMETRY.token_bytes
        await bring(caller, given, "b")
        assert await same(caller, "a", "b", LAYERS), (part_bytes, lengths)
        await caller.submit(delete("b"))

    for lengths in ((0, 0), (1, 1), (5, 5), (6, 6), (0, 7), (11, 3), (10, 5)):
        await caller.create("a")
        await grow(caller, "a", lengths, CPU_GEOMETRY)
        for part_bytes in (1, PAGE_BYTES, 3 * PAGE_BYTES, 2**20):
            await check_cut(caller, part_bytes, lengths)
        await caller.submit(delete("a"))
    assert (await caller.pool())["referenced"] == 0


def test_an_export_goes_from_one_layout_to_another() -> None:
    given = taken(geometry=replace(CPU_GEOMETRY, layout="HND"))

    async def scenario(caller: Caller) -> None:
        await caller.create("a")
        await grow(caller, "a", LENGTHS, CPU_GEOMETRY)
        await bring(caller, given, "b")
        assert await same(caller, "a", "b", LAYERS)

    on_cpu(scenario)


@cpu_engine()
async def test_an_import_is_no_sequence_until_it_is_done(caller: Caller, given: Exported) -> None:
    began = (await caller.submit(given.begin("b"))).fields
    assert (began["state"], began["next_part"], began["num_parts"]) == ("receiving", 0, 5)
    at_first = await caller.pool()
    assert (at_first["imports"], at_first["sequences"], at_first["referenced"]) == (1, 0, 5)
    namespace = await caller.call("get_namespace", {"name": "default"})
    assert (namespace.fields["sequences"], namespace.fields["referenced"]) == (0, 5)
    for call in (
        get("b"),
        NewCall("gather", {"layer": 0, "sequences": ["b"]}),
        creation({"id": "c", "parent": "b"}),
        delete("b"),
    ):
        assert await caller.code(call) == "unknown_sequence", call
    assert (await refused(caller, create_of("b")))["code"] == "sequence_exists"
    listed = await caller.call("list_sequences")
    assert listed.fields == {"sequences": [], "next": None}
    swept = await caller.call("delete_sequences", {"prefix": ""})
    assert swept.fields == {"num_deleted": 0}
    await caller.submit(given.part("b", 0))
    state = (await caller.call("get_import", {"id": "b"})).fields
    assert state["next_part"] == 1 and state["expires_at"] >= began["expires_at"]
    assert (await caller.submit(given.begin("b"))).fields["next_part"] == 1, "it is resumed"
    for number in range(1, 5):
        await caller.submit(given.part("b", number))
    done = (await caller.submit(given.end("b"))).fields
    assert (done["state"], done["next_part"], done["expires_at"]) == ("done", 5, None)
    assert await caller.code(NewCall("get_import", {"id": "b"})) == "unknown_import"
    after = await caller.pool()
    assert (after["imports"], after["sequences"], after["referenced"]) == (0, 1, 5)


def create_of(name: str) -> NewCall:
    return creation({"id": name})


@cpu_engine()
async def test_an_import_that_is_given_up_or_left_alone_leaves_nothing(
    caller: Caller, given: Exported, later: Callable[[float], None]
) -> None:
    await caller.submit(given.begin("b"))
    await caller.submit(given.part("b", 0))
    await caller.call("cancel_import", {"id": "b"})
    assert (await caller.pool())["referenced"] == 0
    await caller.submit(given.begin("b", idle_s=60.0))
    for number in range(2):
        await caller.submit(given.part("b", number))
    later(61.0)
    async with asyncio.timeout(60):
        while (await caller.pool())["imports"]:
            await asyncio.sleep(0.001)
    reply = await caller.pool()
    assert (reply["referenced"], reply["integrity"]) == (0, "ok")
    for call in (given.part("b", 2), given.end("b"), NewCall("get_import", {"id": "b"})):
        assert await caller.code(call) == "unknown_import"
    await caller.create("b")


@cpu_engine()
async def test_parts_that_are_missing_twice_or_out_of_order_are_refused(
    caller: Caller, given: Exported
) -> None:
    await caller.submit(given.begin("b"))
    await caller.submit(given.part("b", 0))
    for number in (0, 2, 4):
        problem = await refused(caller, given.part("b", number))
        assert (problem["code"], problem["next_part"]) == ("part_mismatch", 1)
    problem = await refused(caller, given.end("b"))
    assert (problem["code"], problem["next_part"], problem["num_parts"]) == (
        *("part_mismatch", 1),
        5,
    )
    for number in range(1, 5):
        await caller.submit(given.part("b", number))
    past = given.part("b", 4).but(part=5)
    assert (await refused(caller, past))["code"] == "part_mismatch"
    await caller.submit(given.end("b"))


def test_a_digest_that_fails_is_refused_and_the_right_part_is_taken_after_it() -> None:
    given, other = taken(), taken((23, 22))

    async def scenario(caller: Caller) -> None:
        header = given.begin("b").but(header=given.header | {"generation": "0" * 32})
        assert (await refused(caller, header))["code"] == "digest_mismatch"
        await caller.submit(given.begin("b"))
        right = given.part("b", 0)
        wrong = np.array(right.tensors["k"])
        wrong[0, 0, 0] += 1
        assert (await refused(caller, right.but(k=wrong)))["of"] == "part 0"
        swapped = right.but(k=right.tensors["v"], v=right.tensors["k"])
        assert (await refused(caller, swapped))["code"] == "digest_mismatch"
        strange = other.part("b", 0)
        assert (await refused(caller, strange))["code"] == "digest_mismatch"
        await caller.submit(right)
        before = given.part("b", 1, before=given.digest)
        assert (await refused(caller, before))["of"] == "before"
        for number in range(1, 5):
            await caller.submit(given.part("b", number))
        assert (await refused(caller, given.end("b", digest="0" * 64)))["of"] == "digest"
        await caller.submit(given.end("b"))
        await caller.create("a")
        await grow(caller, "a", LENGTHS, CPU_GEOMETRY)
        assert await same(caller, "a", "b", LAYERS)

    on_cpu(scenario)


@cpu_engine()
async def test_a_header_of_another_pool_or_at_odds_with_itself_is_refused(
    caller: Caller, given: Exported
) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"num_layers": 3, "lengths": [23, 23, 23]}, "num_layers"),
        ({"page_size": 4}, "page_size"),
        ({"num_kv_heads": 4}, "num_kv_heads"),
        ({"head_dim": 8}, "head_dim"),
        ({"dtype": "fp16"}, "dtype"),
        ({"lengths": [23]}, "lengths"),
        ({"lengths": [23, -1]}, "lengths.1"),
        ({"num_parts": 4}, "num_parts"),
        ({"part_bytes": 0}, "part_bytes"),
        ({"part_bytes": 1}, "num_parts"),
        ({"num_named": 5}, "num_named"),
        ({"version": 2}, "version"),
        ({"cache_salt": "\n"}, "cache_salt"),
        ({"pages": 1}, "pages"),
    ]

    names = {"token_ids": np.zeros(25, np.uint32)}
    for changes, field in cases:
        call = given.begin("b").but(header=given.header | changes)
        tensors = names if "num_named" in changes else {}
        problem = await refused(caller, replace(call, tensors=tensors))
        reply = (problem["code"], problem["field"], bool(problem["rule"]))
        assert reply == ("invalid_request", f"header.{field}", True)


def test_scales_are_of_account_to_a_pool_of_fp8() -> None:
    geometry = replace(CPU_GEOMETRY, dtype="fp8_e4m3", k_scale=0.5)
    given = taken(geometry=geometry)

    async def scenario(caller: Caller) -> None:
        problem = await refused(caller, given.begin("b"))
        assert (problem["field"], problem["value"]) == ("header.k_scale", 0.5)

    on_cpu(scenario, replace(geometry, k_scale=0.25))


@cpu_engine(replace(CPU_GEOMETRY, num_pages=9), max_sequences=4)
async def test_an_id_that_is_taken_and_a_pool_that_is_full_refuse_the_beginning(
    caller: Caller, given: Exported
) -> None:
    await caller.create("b")
    assert (await refused(caller, given.begin("b")))["code"] == "sequence_exists"
    await caller.submit(given.begin("c"))
    other = taken_later(given)
    assert (await refused(caller, other.begin("c")))["code"] == "import_exists"
    problem = await refused(caller, given.begin("d"))
    assert (problem["code"], problem["needed"], problem["free"]) == ("out_of_pages", 5, 4)
    await caller.create("e", "f")
    problem = await refused(caller, given.begin("g"))
    assert problem["code"] == "out_of_sequences"


def taken_later(given: Exported) -> Exported:
    """The same export with a digest of its own."""
    header = given.header | {"generation": "1" * 32}
    digest = header_digest(Header.model_validate(header), {}).hex()
    return replace(given, header=header, digest=digest)


@pytest.mark.parametrize("change", ["append", "truncate", "recreated", "deleted"])
@cpu_engine()
async def test_a_sequence_that_changes_between_parts_is_noticed(
    caller: Caller, change: str
) -> None:
    await caller.create("a")
    await grow(caller, "a", LENGTHS, CPU_GEOMETRY)
    reply = await caller.call("export_sequence", {"id": "a", "part_bytes": 2 * PAGE_BYTES})
    header, before = reply.fields["header"], reply.fields["digest"]
    first = await ask_part(caller, "a", header, 0, before)
    again = await ask_part(caller, "a", header, 0, before)
    assert first.fields == again.fields, "a part can be requested again"
    if change == "append":
        await grow(caller, "a", (0, 1), CPU_GEOMETRY)
    elif change == "truncate":
        await caller.submit(truncate("a", 22))
        await grow(caller, "a", (1, 1), CPU_GEOMETRY)
    else:
        await caller.submit(delete("a"))
    if change == "recreated":
        await caller.create("a")
        await grow(caller, "a", LENGTHS, CPU_GEOMETRY)
    got = await outcome(ask_part(caller, "a", header, 1, first.fields["digest"]))
    wanted = "unknown_sequence" if change == "deleted" else "sequence_changed"
    assert code(got) == wanted


@cpu_engine()
async def test_a_fork_is_exported_while_its_parent_grows(caller: Caller) -> None:
    await caller.create("a")
    await grow(caller, "a", LENGTHS, CPU_GEOMETRY)
    await caller.create("still", parent="a")
    task = asyncio.create_task(export(caller, "still", part_bytes=PAGE_BYTES))
    for _ in range(3):
        await grow(caller, "a", (1, 1), CPU_GEOMETRY)
    await bring(caller, await task, "b")
    assert await same(caller, "still", "b", LAYERS)


@pytest.mark.parametrize("share", [True, False])
@cpu_engine()
async def test_pages_that_the_cache_has_by_name_are_shared_and_not_sent(
    caller: Caller, share: bool
) -> None:
    await begin(caller, "a", [*PROMPT, 1, 2])
    await caller.call("commit", {"id": "a", "token_ids": PROMPT})
    given = await export(caller, "a", part_bytes=3 * PAGE_BYTES * LAYERS)
    assert given.names["token_ids"].tolist() == PROMPT
    assert given.header["num_named"] == 4 and given.header["num_parts"] == 2
    before = await caller.pool()
    reply = await bring(caller, given, "b", share=share)
    after = await caller.pool()
    cached = 4 * PAGE if share else 0
    assert (reply["cached_len"], reply["next_part"]) == (cached, 1 if share else 0)
    assert before["free"] - after["free"] == (1 if share else 5)
    await check(caller, "b", [*PROMPT, 1, 2])
    assert after["integrity"] == "ok"


def test_another_pool_shares_its_cached_pages_and_imports_the_rest() -> None:
    async def source(caller: Caller) -> Exported:
        await begin(caller, "a", PROMPT)
        await caller.call("commit", {"id": "a", "token_ids": PROMPT})
        return await export(caller, "a", part_bytes=PAGE_BYTES * LAYERS)

    given: Exported = on_cpu(source)

    async def scenario(caller: Caller) -> None:
        await keep(caller, "old", PROMPT[: 2 * PAGE])
        first = (await caller.submit(given.begin("b"))).fields
        assert (first["cached_len"], first["next_part"]) == (2 * PAGE, 2)
        lacking = await refused(caller, given.part("b", 2))
        assert lacking["field"] == "before"
        await caller.submit(given.part("b", 2, before=given.parts[1][0]))
        await caller.submit(given.part("b", 3))
        assert (await refused(caller, given.end("b", digest="0" * 64)))["of"] == "digest"
        await caller.submit(given.end("b"))
        await check(caller, "b", PROMPT)
        committed = await caller.call("commit", {"id": "b", "token_ids": PROMPT})
        assert committed.fields["committed_len"] == len(PROMPT)
        whole = (await caller.submit(given.begin("c"))).fields
        assert (whole["cached_len"], whole["next_part"]) == (4 * PAGE, 4)
        await caller.submit(given.end("c"))
        await check(caller, "c", PROMPT)

    on_cpu(scenario)


@cpu_engine()
async def test_names_of_another_prompt_are_refused_by_the_digest(caller: Caller) -> None:
    await begin(caller, "a", PROMPT)
    await caller.call("commit", {"id": "a", "token_ids": PROMPT})
    given = await export(caller, "a")
    wrong = given.names["token_ids"] + np.uint32(1)
    problem = await refused(caller, given.begin("b").but(token_ids=wrong))
    assert (problem["code"], problem["of"]) == ("digest_mismatch", "header")
    short = given.begin("b").but(token_ids=wrong[:-1])
    assert (await refused(caller, short))["field"] == "token_ids.shape"


@cpu_engine()
async def test_keys_of_the_callers_own_travel_as_keys(caller: Caller) -> None:
    await begin(caller, "a", PROMPT)
    keys = [f"{number:032x}" for number in range(3)]
    await caller.call("commit", {"id": "a", "page_keys": keys, "cache_salt": "x"})
    given = await export(caller, "a")
    assert given.header["cache_salt"] == "x"
    assert [row.tobytes().hex() for row in given.names["page_keys"]] == keys
    assert (await bring(caller, given, "b"))["cached_len"] == 3 * PAGE
    await check(caller, "b", PROMPT)


@cpu_engine()
async def test_fields_that_make_no_form_of_an_operation_are_refused(caller: Caller) -> None:
    zeros = "0" * 64
    imports: list[tuple[dict[str, Any], dict[str, int], str]] = [
        ({}, {}, "digest"),
        ({"digest": "x"}, {}, "digest"),
        ({"digest": zeros}, {"k": 1, "v": 1}, "tensors.k"),
        ({"digest": zeros, "part": 0}, {"k": 1}, "tensors.v"),
        ({"digest": zeros, "part": 0, "before": "1"}, {"k": 1, "v": 1}, "before"),
        ({"digest": zeros, "before": zeros}, {}, "before"),
        ({"digest": zeros, "idle_s": MAX_IDLE_S + 1}, {}, "idle_s"),
        ({"digest": zeros, "part": 0}, {"k": 2, "v": 1}, "v.shape"),
        ({"digest": zeros, "part": 2**31}, {"k": 1, "v": 1}, "part"),
    ]
    exports: list[tuple[dict[str, Any], str]] = [
        ({"part": 0}, "generation"),
        ({"part": 0, "generation": "0" * 32}, "before"),
        ({"generation": "0" * 32}, "generation"),
        ({"part_bytes": 0}, "part_bytes"),
    ]
    shape = (CPU_GEOMETRY.num_kv_heads, CPU_GEOMETRY.head_dim)

    await caller.create("a")
    for fields, counts, field in imports:
        given = {name: np.zeros((count, *shape), np.float32) for name, count in counts.items()}
        problem = await refused(caller, NewCall("import_sequence", {"id": "b"} | fields, given))
        assert (problem["code"], problem["field"]) == ("invalid_request", field), fields
    for fields, field in exports:
        problem = await refused(caller, NewCall("export_sequence", {"id": "a"} | fields))
        assert (problem["code"], problem["field"]) == ("invalid_request", field), fields


@cpu_engine(max_answer_bytes=2**15)
async def test_a_part_that_is_not_there_or_does_not_fit_is_refused(caller: Caller) -> None:
    await caller.create("a")
    await grow(caller, "a", LENGTHS, CPU_GEOMETRY)
    reply = await caller.call("export_sequence", {"id": "a"})
    header = reply.fields["header"]
    assert header["part_bytes"] == 2**15 - 8 * 2**10, "a part fits an answer"
    got = await outcome(ask_part(caller, "a", header, 1, reply.fields["digest"]))
    assert code(got) == "invalid_request"


@cpu_engine()
async def test_rows_of_another_dtype_or_count_are_refused(caller: Caller, given: Exported) -> None:
    await caller.submit(given.begin("b"))
    right = given.part("b", 0)
    half = {name: one.astype(np.float16) for name, one in right.tensors.items()}
    assert (await refused(caller, right.but(**half)))["field"] == "k.dtype"
    less = {name: one[:-1] for name, one in right.tensors.items()}
    assert (await refused(caller, right.but(**less)))["field"] == "k.shape"


@cpu_engine(slice_ms=1e-6)
async def test_a_part_is_taken_once_however_many_bring_it_at_a_time(
    caller: Caller, given: Exported
) -> None:
    await caller.submit(given.begin("b"))
    for number in range(5):
        three = [outcome(caller.submit(given.part("b", number))) for _ in range(3)]
        codes = sorted(map(code, await asyncio.gather(*three)))
        assert codes == ["ok", "part_mismatch", "part_mismatch"]
    await caller.submit(given.end("b"))
    assert len(await held(caller, "b", LAYERS)) == 2 * LAYERS


@cpu_engine()
async def test_imports_in_any_order_with_flaws_leave_complete_sequences(caller: Caller) -> None:
    seed = secrets.randbits(40)
    print(f"seed {seed}")
    rng = random.Random(seed)
    names = ("x", "y", "z")

    def flawed(call: NewCall) -> NewCall:
        """An operation that is right, or wrong in one of many ways."""
        flaw = rng.randrange(8)
        if flaw == 0:
            return call.but(digest=f"{rng.getrandbits(256):064x}")
        if flaw == 1 and call.tensors:
            name = rng.choice(sorted(call.tensors))
            return call.but(**{name: call.tensors[name][rng.randrange(2) :] * 1})
        if flaw == 2 and "k" in call.tensors:
            return call.but(k=call.tensors["v"])
        if flaw == 3 and "part" in call.fields:
            return call.but(part=rng.randrange(9))
        if flaw == 4 and "header" in call.fields:
            header = dict(call.fields["header"])
            header[rng.choice(sorted(header))] = rng.choice((0, 1, "", None, [3, 3], 2**40))
            return call.but(header=header)
        return call

    exports = []
    for number, length in enumerate((0, 3, 17, 23)):
        await caller.create(f"a{number}")
        await grow(caller, f"a{number}", (length, length), CPU_GEOMETRY, seed=number)
        size = PAGE_BYTES * rng.choice((1, 2, 4))
        exports.append((f"a{number}", await export(caller, f"a{number}", part_bytes=size)))
    begun: dict[str, int] = {}
    codes: Counter[str] = Counter()
    for _ in range(600):
        name = rng.choice(names)
        number = begun.get(name, rng.randrange(4))
        given = exports[number][1]
        parts = [given.part(name, part) for part in range(len(given.parts))]
        call = rng.choice((given.begin(name), *parts, *parts, given.end(name)))
        call = flawed(call)
        if rng.random() < 0.05:
            call = rng.choice((NewCall("cancel_import", {"id": name}), delete(name)))
        reply = await outcome(caller.submit(call))
        codes[code(reply)] += 1
        assert code(reply) != "internal"
        if code(reply) != "ok":
            continue
        if "header" in call.fields:
            begun[name] = number
        elif call.name != "import_sequence" or reply.fields["state"] == "done":
            begun.pop(name, None)
        if call.name == "import_sequence" and reply.fields["state"] == "done":
            assert await same(caller, exports[number][0], name, LAYERS)
    assert codes["ok"] > 20 and codes["digest_mismatch"] and codes["part_mismatch"], codes
    for name in names:
        for call in (NewCall("cancel_import", {"id": name}), delete(name)):
            await outcome(caller.submit(call))
    reply = await caller.pool()
    assert (reply["imports"], reply["referenced"], reply["integrity"]) == (0, 10, "ok")
