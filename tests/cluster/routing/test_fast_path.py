"""Calls that a router forwards by their headers' bytes alone."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from service.cluster.routing.fast_path import MAX_BYTES, MAX_HEADER_BYTES, FastPath, ids_in
from service.cluster.routing.tags import Tags
from service.operations.schema.fields import MAX_SEQUENCES
from service.operations.table import BY_NAME
from tests.cluster.fake_engines import fake_cluster
from tests.cluster.harness import rows

HERE, THERE = "00000000", "11111111"


def header(**fields: Any) -> bytes:
    return json.dumps({"__metadata__": {"request": json.dumps(fields)}}).encode()


def call(name: str = "decode", namespace: str = "") -> Any:
    return SimpleNamespace(operation=BY_NAME[name], tenant=SimpleNamespace(namespace=namespace))


@pytest.fixture
def fast_path() -> FastPath:
    members = SimpleNamespace(by_tag={HERE: "here", THERE: "there"}, changes=0)
    locator: Any = SimpleNamespace(members=members, tags=Tags())
    return FastPath(locator)


def test_a_call_about_sequences_of_one_engine_goes_there(fast_path: FastPath) -> None:
    ids = (f"a.{HERE}", f"b.{HERE}")
    assert fast_path.target(call(), header(layer=0, sequences=ids)) == (ids, "here")
    assert fast_path.target(call("get_sequence"), header(id=f"c.{THERE}")) == (
        (f"c.{THERE}",),
        "there",
    )


@pytest.mark.parametrize(
    "ids",
    [
        [f"a.{HERE}", f"b.{THERE}"],
        ["unknown"],
        [f"a.{HERE}", "unknown"],
        ["a.22222222"],
        [f"a.{HERE}-{THERE}"],
        [],
    ],
    ids=["two engines", "unknown", "one unknown", "lost engine", "over ranks", "none"],
)
def test_calls_not_known_to_be_for_one_engine_are_parsed(
    fast_path: FastPath, ids: list[str]
) -> None:
    assert fast_path.target(call(), header(layer=0, sequences=ids)) is None


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
def test_calls_with_a_malformed_header_are_parsed(fast_path: FastPath, bad: bytes) -> None:
    assert ids_in(BY_NAME["decode"], bad) == ()
    assert fast_path.target(call(), bad) is None


def test_other_operations_are_parsed(fast_path: FastPath) -> None:
    for name in ("cascade", "create_sequences", "pool", "merge"):
        assert fast_path.target(call(name), header(sequences=[f"a.{HERE}"])) is None


def test_targets_are_forgotten_when_an_engine_leaves_or_a_sequence_moves(
    fast_path: FastPath,
) -> None:
    text = header(layer=0, sequences=["mine"])
    members: Any = fast_path.locator.members
    fast_path.locator.tags.learn(("", "mine"), HERE)
    assert fast_path.target(call(), text) == (("mine",), "here")
    assert fast_path.target(call(namespace="red"), text) is None, "of another namespace"
    fast_path.locator.tags.learn(("", "mine"), THERE)
    assert fast_path.target(call(), text) == (("mine",), "there")
    del members.by_tag[THERE]
    members.changes += 1
    assert fast_path.target(call(), text) is None


def test_the_memory_is_bounded(fast_path: FastPath) -> None:
    for number in range(40):
        ids = [f"a.{HERE}", f"{number}{'x' * (MAX_BYTES // 32)}.{HERE}"]
        assert fast_path.target(call(), header(sequences=ids)) is not None
        assert sum(len(key[2]) for key in fast_path.known) <= MAX_BYTES
    assert fast_path.known


def test_ids_of_a_header_too_long_to_remember_are_not_looked_up(fast_path: FastPath) -> None:
    def tag(named: tuple[str, str]) -> str:
        raise RuntimeError(f"{named} is looked up")

    locator: Any = fast_path.locator
    locator.tags = SimpleNamespace(tag=tag)
    prepared: Any = SimpleNamespace(fields=SimpleNamespace(sequences=(f"a.{HERE}",)))
    fast_path.learn(call(), b" " * (MAX_HEADER_BYTES + 1), prepared)
    assert not fast_path.known


def test_a_header_that_was_read_in_pieces_is_remembered(fast_path: FastPath) -> None:
    ids, text = (f"a.{HERE}",), b"too long to be read here"
    prepared: Any = SimpleNamespace(fields=SimpleNamespace(sequences=ids))
    fast_path.learn(call(), text, prepared)
    assert fast_path.target(call(), text) == (ids, "here")


async def test_a_long_call_is_forwarded_unread_once_its_sequences_are_known(
    rng: np.random.Generator,
) -> None:
    ids = [f"s{number}" for number in range(MAX_SEQUENCES)]
    fields, k = {"layer": 0, "sequences": ids, "offsets": [0] * len(ids)}, rows(rng, len(ids))
    async with fake_cluster("a") as cluster:
        link, found = cluster.links["a"], cluster.router.sequences.fast_path.known
        link.ids.update(ids)
        for known in (0, 1, 1):
            link.served.clear()
            await cluster.ok("append", fields, k=k, v=k)
            assert len(found) == known
        assert len(link.served) == 1


def test_a_call_that_is_learned_again_takes_no_more_memory(fast_path: FastPath) -> None:
    ids = [f"a.{HERE}", f"b.{THERE}"]
    prepared: Any = SimpleNamespace(fields=SimpleNamespace(sequences=ids))
    for _ in range(2):
        fast_path.learn(call(), header(layer=0, sequences=ids), prepared)
        taken = fast_path.num_bytes
    fast_path.learn(call(), header(layer=0, sequences=ids), prepared)
    assert fast_path.num_bytes == taken < MAX_HEADER_BYTES
