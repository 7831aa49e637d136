"""Prompts that begin alike: the second waits for the first one's pages, where that is worth it."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from service.cluster.membership.engine import DoorCall
from service.cluster.placement import inflight_prompts, placer
from service.cluster.placement.inflight_prompts import (
    MAX_FRUITLESS,
    MAX_INFLIGHT_S,
    InflightPrompt,
    InflightPrompts,
    Wait,
)
from service.operations.rows import APPEND, GATHER
from service.operations.sequences import CREATE_SEQUENCES
from service.tenants import tenant_of
from tests.cluster.harness import LAYERS, PAGE, Answer, Cluster, rows

LENGTH = 4 * PAGE
LONG_S = 60.0


def begun(prompts: InflightPrompts) -> InflightPrompt:
    one = InflightPrompt()
    prompts.begin("default", "a", one)
    assert prompts.computed_by(GATHER, "default", ["a"]) == []
    assert prompts.computed_by(APPEND, "default", ["a", "other"]) == [one]
    return one


def call_of(space: str = "default", deadline_us: int = 0) -> DoorCall:
    tenant = tenant_of(space, ("append",))
    return DoorCall(CREATE_SEQUENCES, memoryview(b""), 0, deadline_us, bytes(16), tenant)


async def waited(prompts: InflightPrompts, *waits: Wait, space: str = "default") -> bool:
    """Whether it took more than a turn of the loop."""
    waiting = asyncio.ensure_future(prompts.wait(call_of(space), waits))
    for _ in range(5):
        await asyncio.sleep(0)
    had_to = not waiting.done()
    prompts.end("default", ["a"])
    async with asyncio.timeout(MAX_INFLIGHT_S):
        await waiting
    return had_to


async def test_a_prompt_that_has_begun_is_waited_for_until_it_is_committed() -> None:
    prompts = InflightPrompts()
    one = begun(prompts)
    assert await waited(prompts, Wait(one, LONG_S))
    assert not await waited(prompts, Wait(one, LONG_S)), "it is over"
    assert not prompts.by_name
    assert not await waited(prompts)


async def test_a_caller_that_makes_many_before_it_sends_rows_is_not_held_up() -> None:
    prompts, one = InflightPrompts(), InflightPrompt()
    prompts.begin("default", "a", one)
    assert not await waited(prompts, Wait(one, LONG_S))


async def test_no_prompt_waits_soon_again_for_a_caller_that_commits_late() -> None:
    prompts = InflightPrompts()
    one = begun(prompts)
    for _ in range(2 * MAX_FRUITLESS):
        await prompts.wait(call_of(), [Wait(one, 0.001)])
    assert not prompts.num_fruitless, "its rows are on their way still"
    one.num_calls -= 1
    for _ in range(MAX_FRUITLESS - 1):
        await prompts.wait(call_of(), [Wait(one, 0.001)])
    assert await waited(prompts, Wait(begun(prompts), LONG_S))
    assert not prompts.num_fruitless, "it came in time"
    one = begun(prompts)
    one.num_calls -= 1
    for _ in range(MAX_FRUITLESS):
        await prompts.wait(call_of(), [Wait(one, 0.001)])
    assert not await waited(prompts, Wait(begun(prompts), LONG_S))
    assert await waited(prompts, Wait(begun(prompts), LONG_S), space="other")


async def test_a_wait_takes_at_most_half_of_the_callers_deadline() -> None:
    prompts, call = InflightPrompts(), call_of(deadline_us=200_000)
    async with asyncio.timeout(LONG_S):
        await prompts.wait(call, [Wait(begun(prompts), LONG_S)])
    assert 1 <= call.deadline_us <= 100_000, "the engine gets the rest"


async def test_a_prompt_that_never_ends_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inflight_prompts, "MAX_INFLIGHT_S", 0.05)
    prompts = InflightPrompts()
    one, other = begun(prompts), InflightPrompt()
    prompts.begin("default", "a", other)  # deleted, and created again
    await asyncio.sleep(0.03)
    prompts.expire("default", "a", one)
    assert not other.ended.is_set()
    async with asyncio.timeout(LONG_S):
        await other.ended.wait()
    assert not prompts.by_name


async def appended(cluster: Cluster, name: str, layer: int, rng: np.random.Generator) -> None:
    fields = {"layer": layer, "sequences": [name], "append_indptr": [0, LENGTH]}
    await cluster.ok("append", fields, k=rows(rng, LENGTH), v=rows(rng, LENGTH))


async def test_a_prompt_finds_the_pages_of_one_that_is_being_computed(
    cluster: Cluster, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placer, "WORTH_WAITING", 1e9)
    prefix: dict[str, Any] = {"token_ids": list(range(LENGTH))}

    async def made(cluster: Cluster) -> Answer:
        return await cluster.ok("create_sequences", {"sequences": [{"prefix": prefix}]})

    first, same = [(await made(cluster)).fields["sequences"][0] for _ in range(2)]
    assert cluster.home(first["id"]) == cluster.home(same["id"])
    await appended(cluster, first["id"], 0, rng)
    second = asyncio.ensure_future(made(cluster))
    for layer in range(1, LAYERS):
        await asyncio.sleep(0.05)
        assert not second.done(), "it waits"
        await appended(cluster, first["id"], layer, rng)
    await cluster.ok("commit", {"id": first["id"]} | prefix)
    (view,) = (await second).fields["sequences"]
    assert view["cached_len"] == LENGTH
    assert cluster.home(view["id"]) == cluster.home(first["id"])
