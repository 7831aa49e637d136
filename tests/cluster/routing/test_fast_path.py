"""Calls that a router forwards by their headers' bytes alone."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from service.cluster.routing.fast_path import MAX_BYTES, MAX_HEADER_BYTES, FastPath, ids_in
from service.cluster.routing.ids import MAX_IDS, Ids
from service.operations.schema.fields import MAX_SEQUENCES
from service.operations.table import BY_NAME
from tests.cluster.fake_engines import fake_cluster
from tests.cluster.harness import rows

HERE, THERE = "00000000", "11111111"
TENANT: Any = SimpleNamespace(namespace="")


def header(**fields: Any) -> bytes:
    return json.dumps({"__metadata__": {"request": json.dumps(fields)}}).encode()


def call(name: str = "decode") -> Any:
    return SimpleNamespace(operation=BY_NAME[name])


@pytest.fixture
def entries() -> Ids:
    members: Any = SimpleNamespace(by_tag={HERE: "here", THERE: "there"}, changes=0)
    return Ids(members)


def test_the_ids_of_a_call_are_read_from_its_header() -> None:
    fast_path, ids = FastPath(), ("a", "b")
    assert fast_path.ids(call(), header(layer=0, sequences=ids)) == ids
    assert fast_path.ids(call("get_sequence"), header(id="c")) == ("c",)


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
    assert not entries.batches


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
    fast_path = FastPath()
    assert ids_in(BY_NAME["decode"], bad) == fast_path.ids(call(), bad) == ()
    assert not fast_path.known


def test_other_operations_are_parsed() -> None:
    for name in ("cascade", "create_sequences", "pool", "merge"):
        assert FastPath().ids(call(name), header(sequences=["a"])) == ()


def test_places_are_forgotten_when_an_engine_leaves_or_the_map_changes(entries: Ids) -> None:
    members: Any = entries.members
    entries.learn(TENANT, ["mine"], HERE)
    assert entries.known_places(["mine"], TENANT) == {"here": [0]}
    red: Any = SimpleNamespace(namespace="red")
    assert entries.known_places(["mine"], red) is None, "of another namespace"
    entries.learn(TENANT, ["mine"], THERE)
    assert entries.known_places(["mine"], TENANT) == {"there": [0]}
    del members.by_tag[THERE]
    members.changes += 1
    assert entries.known_places(["mine"], TENANT) is None


def test_the_memory_of_headers_is_bounded() -> None:
    fast_path = FastPath()
    for number in range(40):
        ids = ("a", f"{number}{'x' * (MAX_BYTES // 32)}")
        assert fast_path.ids(call(), header(sequences=ids)) == ids
        assert sum(len(text) for _, text in fast_path.known) <= MAX_BYTES
    assert fast_path.known


def test_the_memory_of_places_is_bounded(entries: Ids) -> None:
    for number in range(100):
        ids = [f"{number}-{at}.{HERE}" for at in range(MAX_IDS // 32)]
        assert entries.known_places(ids, TENANT) == {"here": list(range(len(ids)))}
        assert sum(len(names) for _, names in entries.batches) <= MAX_IDS + len(ids)


def test_a_header_that_is_too_long_is_not_remembered() -> None:
    prepared: Any = SimpleNamespace(fields=SimpleNamespace(sequences=("a",)))
    fast_path, text = FastPath(), b" " * (MAX_HEADER_BYTES + 1)
    fast_path.learn(call(), text, prepared)
    assert not fast_path.known and fast_path.ids(call(), text) == ()


def test_a_header_that_was_read_in_pieces_is_remembered() -> None:
    fast_path, ids, text = FastPath(), ("a",), b"too long to be read here"
    prepared: Any = SimpleNamespace(fields=SimpleNamespace(sequences=ids))
    fast_path.learn(call(), text, prepared)
    assert fast_path.ids(call(), text) == ids


async def test_a_long_call_is_forwarded_unread_once_its_sequences_are_known(
    rng: np.random.Generator,
) -> None:
    ids = [f"s{number}" for number in range(MAX_SEQUENCES)]
    fields, k = {"layer": 0, "sequences": ids, "offsets": [0] * len(ids)}, rows(rng, len(ids))
    async with fake_cluster("a") as cluster:
        link, found = cluster.links["a"], cluster.router.sequences.fast_path.known
        link.ids.update(ids)
        for _ in range(2):
            link.served.clear()
            await cluster.ok("append", fields, k=k, v=k)
            assert list(found.values()) == [tuple(ids)]
        assert len(link.served) == 1


def test_a_call_that_is_learned_again_takes_no_more_memory() -> None:
    fast_path, ids = FastPath(), ["a", "b"]
    prepared: Any = SimpleNamespace(fields=SimpleNamespace(sequences=ids))
    for _ in range(2):
        fast_path.learn(call(), header(layer=0, sequences=ids), prepared)
        taken = fast_path.num_bytes
    fast_path.learn(call(), header(layer=0, sequences=ids), prepared)
    assert fast_path.num_bytes == taken < MAX_HEADER_BYTES
