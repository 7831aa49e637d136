"""Calls that a router forwards by their headers' bytes alone."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from service.cluster.routing.ids import MAX_IDS, Ids
from service.cluster.routing.sequence_calls import MAX_REMEMBERED, MAX_REMEMBERED_BYTES, ids_in
from service.operations.table import BY_NAME
from service.tenants import OPEN
from tests.cluster.fake_engines import fake_cluster
from tests.cluster.harness import rows

HERE, THERE = "00000000", "11111111"
TENANT: Any = SimpleNamespace(namespace="")
DECODE = BY_NAME["decode"]


def header(**fields: Any) -> bytes:
    return json.dumps({"__metadata__": {"request": json.dumps(fields)}}).encode()


@pytest.fixture
def entries() -> Ids:
    members: Any = SimpleNamespace(by_tag={HERE: "here", THERE: "there"}, changes=0)
    return Ids(members)


def test_the_ids_of_a_call_are_read_from_its_header() -> None:
    assert ids_in(DECODE, header(layer=0, sequences=["a", "b"])) == ("a", "b")
    assert ids_in(BY_NAME["get_sequence"], header(id="c")) == ("c",)


def test_sequences_of_one_engine_are_known_to_be_there(entries: Ids) -> None:
    ids = (f"a.{HERE}", f"b.{HERE}")
    assert entries.known_places(ids, TENANT) == {"here": [0, 1]}
    ids = (f"a.{THERE}", f"b.{HERE}", f"c.{THERE}")
    assert entries.known_places(ids, TENANT) == {"there": [0, 2], "here": [1]}


@pytest.mark.parametrize(
    "ids",
    [["unknown"], [f"a.{HERE}", "unknown"], ["a.22222222"]],
    ids=["unknown", "one unknown", "lost engine"],
)
def test_a_batch_is_not_known_where_one_of_its_sequences_is_not(
    entries: Ids, ids: list[str]
) -> None:
    assert entries.known_places(ids, TENANT) is None


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"{",
        b"\xff",
        b"[]",
        b"1",
        b"{}",
        b'{"__metadata__": 1}',
        b'{"__metadata__": {"request": 1}}',
        b'{"__metadata__": {"request": "[]"}}',
        header(layer=0),
        header(sequences=1),
        header(sequences=[1]),
        header(sequences={"a": 1}),
        b'{"__metadata__": {"request": "' + b"[" * 100_000 + b'"}}',
        b"[" * 100_000,
    ],
)
def test_calls_with_a_malformed_header_are_parsed(bad: bytes) -> None:
    assert ids_in(DECODE, bad) == ()


def test_places_are_those_of_the_namespace_and_of_now(entries: Ids) -> None:
    members: Any = entries.members
    entries.learn(TENANT, ["mine"], HERE)
    assert entries.known_places([f"tagged.{HERE}"], TENANT) == {"here": [0]}
    assert entries.known_places(["mine"], TENANT) == {"here": [0]}
    red: Any = SimpleNamespace(namespace="red")
    assert entries.known_places(["mine"], red) is None, "of another namespace"
    entries.learn(TENANT, ["mine", f"tagged.{HERE}"], THERE)
    assert entries.known_places(["mine"], TENANT) == {"there": [0]}
    assert entries.known_places([f"tagged.{HERE}"], TENANT) == {"there": [0]}
    del members.by_tag[THERE]
    members.changes += 1
    assert entries.known_places(["mine"], TENANT) is None


def test_the_memory_of_places_is_bounded(entries: Ids) -> None:
    for number in range(100):
        ids = [f"{number}-{at}.{HERE}" for at in range(MAX_IDS // 32)]
        assert entries.known_places(ids, TENANT) == {"here": list(range(len(ids)))}
        assert sum(len(names) for _, names in entries.batches) <= MAX_IDS + len(ids)


async def test_headers_are_remembered_within_bounds(rng: np.random.Generator) -> None:
    k = rows(rng, 1)
    async with fake_cluster("a") as cluster:
        link, remembered = cluster.links["a"], cluster.router.sequences.remembered
        for number in range(MAX_REMEMBERED + 2):
            link.ids.add(f"s{number}")
            cluster.router.ids.learn(OPEN, [f"s{number}"], 8 * "a")
            fields = {"layer": 0, "sequences": [f"s{number}"]}
            for _ in range(2):
                await cluster.ok("append", fields, k=k, v=k)
        info = remembered.cache_info()
        assert (info.hits, info.currsize) == (MAX_REMEMBERED + 2, MAX_REMEMBERED)
        ids = [f"s{number}-{100 * 'x'}" for number in range(MAX_REMEMBERED_BYTES // 100)]
        link.ids.update(ids)
        k = rows(rng, len(ids))
        await cluster.ok("append", {"layer": 0, "sequences": ids}, k=k, v=k)
        assert remembered.cache_info().misses == info.misses, "it is too long"
