"""The prefix cache through the engine: found again, held, pinned, evicted, and read back right."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.engine.harness import Caller, NewCall, Refused, creation, until
from tests.engine.pool_model import CPU_GEOMETRY, cpu_engine

PAGE = CPU_GEOMETRY.page_size
PROMPT = list(range(100, 100 + 4 * PAGE))
OTHER = PROMPT[: 2 * PAGE] + list(range(2 * PAGE))


def content(tokens: list[int], layer: int) -> Any:
    """K rows that only these tokens have at this layer: each depends on all before it."""
    seeds = [hash((layer, *tokens[: end + 1])) % 2**32 for end in range(len(tokens))]
    shape = (CPU_GEOMETRY.num_kv_heads, CPU_GEOMETRY.head_dim)
    rows = [np.random.default_rng(seed).standard_normal(shape) for seed in seeds]
    half = np.array(rows, np.float16)  # which every pool holds to the bit
    return half.astype(np.float32).reshape(len(tokens), *shape)


async def begin(caller: Caller, name: str, tokens: list[int], **prefix: Any) -> int:
    """A sequence from the cache, the rest of the prompt appended; how much was cached."""
    named = {"prefix": {"token_ids": tokens} | prefix}
    reply = await caller.submit(creation({"id": name} | named))
    cached: int = reply.fields["sequences"][0]["cached_len"]
    for layer in range(CPU_GEOMETRY.num_layers):
        k = content(tokens, layer)[cached:]
        fields = {"layer": layer, "sequences": [name], "append_indptr": [0, len(k)]}
        await caller.call("append", fields, k=k, v=-k)
    return cached


async def keep(caller: Caller, name: str, tokens: list[int], **fields: Any) -> int:
    """Begin a sequence, commit it and delete it; how much was cached before."""
    cached = await begin(caller, name, tokens)
    await caller.call("commit", {"id": name, "token_ids": tokens} | fields)
    await caller.call("delete_sequence", {"id": name})
    return cached


async def check(caller: Caller, name: str, tokens: list[int]) -> None:
    """The sequence holds what its tokens say, at every layer."""
    for layer in range(CPU_GEOMETRY.num_layers):
        fields = {"layer": layer, "sequences": [name], "dtype": "fp32"}
        reply = await caller.call("gather", fields)
        np.testing.assert_array_equal(reply.tensors["k"], content(tokens, layer))
        np.testing.assert_array_equal(reply.tensors["v"], -content(tokens, layer))


@cpu_engine()
async def test_committed_pages_are_found_by_the_next_prompt_with_that_prefix(
    caller: Caller,
) -> None:
    assert await keep(caller, "first", PROMPT) == 0
    numbers = await caller.pool()
    assert (numbers["cached"], numbers["referenced"], numbers["sequences"]) == (4, 0, 0)
    assert await begin(caller, "again", [*PROMPT, 7]) == 4 * PAGE
    assert await begin(caller, "branch", OTHER) == 2 * PAGE
    await check(caller, "again", [*PROMPT, 7])
    await check(caller, "branch", OTHER)
    numbers = await caller.pool()
    assert numbers["integrity"] == "ok"
    assert (numbers["cached"], numbers["referenced"]) == (0, 4 + 1 + 2)
    assert sum(numbers[name] for name in ("free", "referenced", "cached", "pinned")) == 96


@cpu_engine()
async def test_a_prompt_that_is_cached_whole_attends_for_its_last_token_without_k_and_v(
    caller: Caller,
) -> None:
    heads = CPU_GEOMETRY.num_kv_heads, CPU_GEOMETRY.head_dim
    q = np.random.default_rng(0).standard_normal((1, *heads)).astype(np.float32)
    await begin(caller, "computed", PROMPT[:-1])
    last = content(PROMPT, 0)[-1:]
    decode = {"layer": 0, "sequences": ["computed"]}
    wanted = await caller.call("decode", decode, q=q, k=last, v=-last)
    await keep(caller, "kept", PROMPT)
    assert await begin(caller, "whole", PROMPT) == len(PROMPT)
    found = await caller.call("decode", decode | {"sequences": ["whole"]}, q=q)
    np.testing.assert_allclose(found.tensors["o"], wanted.tensors["o"], rtol=0, atol=1e-5)
    assert (await caller.view("whole"))["length"] == len(PROMPT)


@pytest.mark.parametrize("count", [2 * PAGE, 5000])
@cpu_engine()
async def test_a_sequence_with_a_prefix_is_forked_in_the_request_that_makes_it(
    caller: Caller, count: int
) -> None:
    tokens = list(range(count))
    await keep(caller, "kept", tokens[: 2 * PAGE])
    new = creation({"id": "a", "prefix": {"token_ids": tokens}}, {"id": "b", "parent": "a"}, {})
    made = (await caller.submit(new)).fields["sequences"]
    assert [one["length"] for one in made] == [2 * PAGE, 2 * PAGE, 0]
    assert [one["cached_len"] for one in made] == [2 * PAGE, 0, 0]


@cpu_engine()
async def test_token_ids_and_keys_come_as_tensors_too(caller: Caller) -> None:
    ids = np.array(PROMPT, np.uint32)
    await begin(caller, "a", PROMPT)
    await caller.call("commit", {"id": "a"}, token_ids=ids)
    new = {"sequences": [{"id": "b", "prefix": {}}]}
    reply = await caller.call("create_sequences", new, token_ids=ids)
    assert reply.fields["sequences"][0]["cached_len"] == 4 * PAGE
    two = {"sequences": [{"id": "c"}, {"id": "d", "prefix": {}}, {"prefix": {}}]}
    two["prefix_indptr"] = [0, 0, 2 * PAGE, 4 * PAGE]  # type: ignore[assignment]
    reply = await caller.call("create_sequences", two, token_ids=ids)
    lens = [one["cached_len"] for one in reply.fields["sequences"]]
    assert lens == [0, 2 * PAGE, 0], "the last one begins in the middle of the prompt"
    keys = np.arange(64, dtype=np.uint8).reshape(4, 16)
    await caller.call("commit", {"id": "c"}, page_keys=keys[:0])
    for layer in range(CPU_GEOMETRY.num_layers):
        k = content(PROMPT, layer)
        fields = {"layer": layer, "sequences": ["c"], "append_indptr": [0, len(k)]}
        await caller.call("append", fields, k=k, v=-k)
    reply = await caller.call("commit", {"id": "c"}, page_keys=keys)
    assert reply.fields["last_key"] == keys[3].tobytes().hex()
    named = {"page_keys": [key.tobytes().hex() for key in keys]}
    reply = await caller.call("match_prefix", named)
    assert reply.fields["num_pages"] == 4


@cpu_engine()
async def test_a_lease_holds_matched_pages_until_it_ends_or_is_released(caller: Caller) -> None:
    await keep(caller, "a", PROMPT)
    reply = await caller.call("match_prefix", {"token_ids": OTHER})
    assert reply.fields["matched_len"] == 2 * PAGE
    lease = reply.fields["lease"]["id"]
    evicted = await caller.call("evict", {"num_pages": 10})
    assert evicted.fields == {"num_pages": 2}, "only pages that the lease does not hold"
    assert (await caller.pool())["leases"] == 1
    renewed = await caller.call("renew_lease", {"id": lease, "lease_s": 60.0})
    assert renewed.fields["expires_at"] > reply.fields["lease"]["expires_at"]
    await caller.call("release_lease", {"id": lease})
    assert (await caller.call("clear")).fields == {"num_pages": 2}
    await caller.refused(NewCall("renew_lease", {"id": lease}), "unknown_lease", status=404)


@cpu_engine()
async def test_a_lease_of_a_scheduler_that_died_ends_by_itself(
    caller: Caller, later: Callable[[float], None]
) -> None:
    await keep(caller, "a", PROMPT)
    await caller.call("match_prefix", {"token_ids": PROMPT, "lease_s": 60.0})
    assert (await caller.pool())["cached"] == 0
    later(61.0)
    assert (await caller.pool())["cached"] == 4


@cpu_engine()
async def test_an_allocation_evicts_before_it_is_refused_and_a_refusal_says_who_holds_the_pages(
    caller: Caller,
) -> None:
    await keep(caller, "a", PROMPT)
    held = await begin(caller, "held", OTHER)
    assert held == 2 * PAGE
    key = (await caller.call("commit", {"id": "held", "token_ids": OTHER})).fields["last_key"]
    await caller.call("pin", {"page_key": key, "hard": True})
    await caller.call("delete_sequence", {"id": "held"})
    assert await begin(caller, "large", [1] * (90 * PAGE)) == 0
    with pytest.raises(Refused) as refusal:
        await begin(caller, "more", [2] * (5 * PAGE))
    assert refusal.value.code == "out_of_pages"
    assert refusal.value.problem["held"]["pinned"] == 4
    assert refusal.value.problem["held"]["referenced"] == 90
    assert (await caller.pool())["pinned"] == 4
    await caller.call("unpin", {"page_key": key})
    assert await begin(caller, "still", [2] * (4 * PAGE)) == 0


@cpu_engine()
async def test_pages_go_ahead_of_need_above_the_watermark(caller: Caller) -> None:
    await keep(caller, "a", list(range(95 * PAGE)))
    numbers = await caller.pool()
    for _ in range(3):
        numbers = await caller.pool()
    assert numbers["free"] == 96 - int(0.9 * 96)
    # metrics are recorded soon after the replies
    await until(lambda: caller.metric('attnd_kv_pages{state="cached"}') == numbers["cached"])
    await until(lambda: caller.metric("attnd_pages_evicted_total") == 95 - numbers["cached"])


@cpu_engine()
async def test_an_idle_sequence_is_deleted_when_its_time_is_over(
    caller: Caller, later: Callable[[float], None]
) -> None:
    new = [{"id": "short", "ttl_s": 60.0}, {"id": "used", "ttl_s": 60.0}, {"id": "for-good"}]
    reply = await caller.submit(creation(*new))
    assert [one["ttl_s"] for one in reply.fields["sequences"]] == [60.0, 60.0, None]
    for _ in range(2):
        later(40.0)
        await caller.call("get_sequence", {"id": "used"})
    result = await caller.call("list_sequences")
    assert [one["id"] for one in result.fields["sequences"]] == ["for-good", "used"]


@cpu_engine()
async def test_the_longest_times_to_live_are_no_trouble(caller: Caller) -> None:
    year = 365 * 86400.0

    await caller.submit(creation({"id": "a", "ttl_s": year}))
    await begin(caller, "b", PROMPT)
    fields = {"id": "b", "token_ids": PROMPT, "priority": 50, "duration_s": year}
    key = (await caller.call("commit", fields)).fields["last_key"]
    await caller.call("pin", {"page_key": key, "soft_ttl_s": year})
    await asyncio.sleep(0.05)  # the engine waits for the first of these ends
    assert (await caller.pool())["sequences"] == 2


@cpu_engine()
async def test_many_sequences_are_deleted_at_once_by_id_or_by_how_their_ids_begin(
    caller: Caller,
) -> None:
    names = [f"run-1:{i}" for i in range(2000)] + ["run-2:0", "else"]
    for first in range(0, len(names), 200):
        new = [{"id": name} for name in names[first : first + 200]]
        await caller.submit(creation(*new))
    reply = await caller.call("delete_sequences", {"ids": ["else", "missing"]})
    assert reply.fields == {"num_deleted": 1}
    reply = await caller.call("delete_sequences", {"prefix": "run-1:"})
    assert reply.fields == {"num_deleted": 2000}
    reply = await caller.call("list_sequences")
    assert [one["id"] for one in reply.fields["sequences"]] == ["run-2:0"]


NAMED: dict[str, Any] = {"id": "a", "token_ids": PROMPT}
BOTH = {"parent": "a", "prefix": {"token_ids": []}}
REFUSED: list[tuple[str, dict[str, Any], int, str, str]] = [
    ("commit", {"id": "a", "page_keys": ["0" * 31]}, 422, "invalid_request", "page_keys"),
    ("commit", {"id": "a", "token_ids": [*PROMPT, 1]}, 422, "invalid_request", "at most 20"),
    ("commit", {"id": "a", "page_keys": ["0" * 32] * 5}, 422, "invalid_request", "at most 4"),
    ("commit", {"id": "a", "token_ids": OTHER}, 409, "key_mismatch", "page 2"),
    ("commit", {"id": "a", "token_ids": PROMPT, "cache_salt": "x"}, 409, "key_mismatch", "salt"),
    ("commit", {"id": "a"}, 422, "invalid_request", "give either"),
    ("commit", {"id": "b", "token_ids": []}, 404, "unknown_sequence", "b"),
    ("commit", {"id": "a", "token_ids": [-1]}, 422, "invalid_request", "token_ids"),
    ("commit", NAMED | {"priority": 101}, 422, "invalid_request", "priority"),
    ("commit", {"id": "a", "token_ids": [], "duration_s": 1.0}, 422, "invalid_request", "priority"),
    ("match_prefix", {"token_ids": [], "page_keys": []}, 422, "invalid_request", "either"),
    ("match_prefix", {"token_ids": [], "lease_s": -1.0}, 422, "invalid_request", "lease_s"),
    ("renew_lease", {"id": "lease-1"}, 404, "unknown_lease", "lease-1"),
    ("release_lease", {"id": "lease-1"}, 404, "unknown_lease", "lease-1"),
    ("pin", {"page_key": "0" * 32, "hard": True}, 404, "unknown_page", "0000"),
    ("pin", {"page_key": "0" * 32}, 422, "invalid_request", "soft_ttl_s"),
    ("unpin", {"page_key": "0" * 32}, 404, "unknown_page", "0000"),
    ("set_namespace", {"name": "x", "reserved_pages": 97}, 422, "invalid_request", "reserved"),
    (
        "set_namespace",
        {"name": "x", "max_pages": 1, "reserved_pages": 2},
        422,
        "invalid_request",
        "most",
    ),
    ("delete_sequences", {}, 422, "invalid_request", "ids or prefix"),
    ("create_sequences", {"sequences": [BOTH]}, 422, "invalid_request", "cannot be combined"),
    ("create_sequences", {"sequences": [{"prefix": {}}]}, 422, "invalid_request", "give either"),
    ("create_sequences", {"sequences": [{"ttl_s": 0.0}]}, 422, "invalid_request", "ttl_s"),
]


@pytest.mark.parametrize(("name", "fields", "status", "code", "reply"), REFUSED)
@cpu_engine()
async def test_errors_name_the_field_and_change_nothing(
    caller: Caller, name: str, fields: dict[str, Any], status: int, code: str, reply: str
) -> None:
    await begin(caller, "a", PROMPT)
    await caller.call("commit", {"id": "a", "token_ids": PROMPT})
    before = await caller.pool()
    refusal = await caller.refused(NewCall(name, fields), code, status=status)
    assert reply in refusal.problem["detail"]
    assert await caller.pool() == before


@cpu_engine()
async def test_quotas_are_shown_and_enforced(caller: Caller) -> None:
    reply = await caller.call("set_namespace", {"name": "default", "max_pages": 6})
    assert reply.fields["max_pages"] == 6
    await keep(caller, "a", PROMPT)
    assert await begin(caller, "b", [3] * (5 * PAGE)) == 0, "evicts its own"
    reply = await caller.call("get_namespace", {"name": "default"})
    assert (reply.fields["used"], reply.fields["cached"], reply.fields["referenced"]) == (6, 1, 5)
    with pytest.raises(Refused) as refusal:
        await begin(caller, "c", [4] * (2 * PAGE))
    assert refusal.value.problem["total"] == 6
    pool = await caller.pool()
    assert (pool["total"], pool["max_pages"], pool["reserved_pages"]) == (6, 6, 0)
