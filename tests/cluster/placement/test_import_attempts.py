"""Where an import begins, goes on and ends, where engines refuse, forget or have its id as well."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from service.cluster.placement.cost import EngineLoad
from service.cluster.placement.prefixes import POOL, chained_keys, prefix_of
from service.errors import InvalidRequest, NotReady, OutOfPages, Overloaded
from service.operations.schema.page_names import PromptNames
from service.tenants import OPEN
from tests.cluster.fake_engines import FakeCluster, fake_cluster
from tests.cluster.harness import DIM, HEADS, LAYERS, PAGE

DIGEST = "0" * 64
HEADER = {
    "version": 1,
    "generation": "0" * 32,
    "num_layers": LAYERS,
    "page_size": PAGE,
    "num_kv_heads": HEADS,
    "head_dim": DIM,
    "dtype": "fp32",
    "layout": "NHD",
    "k_scale": 1.0,
    "v_scale": 1.0,
    "lengths": [8 * PAGE] * LAYERS,
    "ttl_s": None,
    "num_named": 0,
    "cache_salt": "",
    "part_bytes": 2**20,
    "num_parts": 1,
}
BEGIN = {"header": HEADER, "digest": DIGEST}
FULL = OutOfPages(1, 0, 1000, {})


async def step(cluster: FakeCluster, name: str, more: Any, **arrays: Any) -> tuple[int, str]:
    """Status and code of a step of an import."""
    answer = await cluster.call("import_sequence", {"id": name} | more, **arrays)
    return answer.status, answer.fields.get("code", "")


def begun_at(cluster: FakeCluster, name: str) -> list[str]:
    return [one for one, link in cluster.links.items() if name in link.imports]


@pytest.mark.parametrize(
    ("error", "tried", "expected"),
    [
        (None, [1, 0], (201, "")),
        (FULL, [1, 1], (201, "")),
        (NotReady("the session ended"), [1, 1], (201, "")),
        (InvalidRequest("header", "it", "is refused"), [1, 0], (422, "invalid_request")),
    ],
)
async def test_an_import_begins_where_there_is_room(
    error: Exception | None, tried: list[int], expected: tuple[int, str]
) -> None:
    async with fake_cluster("ab") as cluster:
        cluster.engine_of("b").load = EngineLoad(free=900)
        if error is not None:
            cluster.links["a"].do_next("import_sequence", error)
        found = await step(cluster, "new", BEGIN)
        assert (found[0] // 100, found[1]) == (expected[0] // 100, expected[1])
        assert [len(one.calls("import_sequence")) for one in cluster.links.values()] == tried
        if error is None or tried == [1, 1]:
            (where,) = begun_at(cluster, "new")
            assert cluster.home("new") == where == ("b" if error else "a")
            assert cluster.engine_of(where).promised == 8
        for link in cluster.links.values():
            link.do_next("import_sequence", FULL)
        assert await step(cluster, "other", BEGIN) == (507, "out_of_pages")


async def test_an_import_begins_where_its_pages_are_cached() -> None:
    ids = np.arange(8 * PAGE, dtype=np.uint32)
    prefix = prefix_of(PromptNames(cache_salt=""), {"token_ids": ids}, 4)
    assert prefix is not None
    async with fake_cluster("abc") as cluster:
        known = cluster.router.members.prefixes_of("default")
        keys = {key.hex() for key in chained_keys(prefix, "default", PAGE)}
        known.pages[POOL][8 * "b"] = keys
        begin = BEGIN | {"header": HEADER | {"num_named": 8}}
        await step(cluster, "new", begin, token_ids=ids)
        assert begun_at(cluster, "new") == ["b"]
        assert cluster.engine_of("b").promised == 1, "the cached pages need no room"
        await step(cluster, "whole", begin | {"share": False}, token_ids=ids)
        assert begun_at(cluster, "whole") == ["a"], "a page of b is promised"


@pytest.mark.parametrize("is_forgotten", [False, True])
async def test_an_import_goes_on_and_ends_where_it_was_begun(is_forgotten: bool) -> None:
    async with fake_cluster("abc") as cluster:
        cluster.only_on("b")
        await step(cluster, "new", BEGIN)
        cluster.only_on()
        rows = np.zeros((LAYERS * 8 * PAGE, HEADS, DIM), np.float32)
        part = {"part": 0, "digest": DIGEST}
        for more, arrays in ((BEGIN, {}), (part, {"k": rows, "v": rows}), ({"digest": DIGEST}, {})):
            if is_forgotten:
                cluster.router.ids.entries.clear()
            assert (await step(cluster, "new", more, **arrays))[0] < 300
            assert cluster.home("new") == "b"
        assert cluster.ids_at() == {"a": set(), "b": {"new"}, "c": set()}
        looks = [len(link.calls("get_import")) for link in cluster.links.values()]
        assert looks == ([4, 4, 4] if is_forgotten else [1, 1, 1])
        assert (await step(cluster, "never", {"digest": DIGEST}))[1] == "unknown_import"


async def test_an_import_of_an_id_that_names_an_engine_begins_where_there_is_room() -> None:
    async with fake_cluster("ab") as cluster:
        cluster.engine_of("a").is_draining = True
        cluster.links["a"].do_next(
            "import_sequence", *2 * [Overloaded("drains", retry_after_s=1.0)]
        )
        for name in ("seq-moved.aaaaaaaa", "chat-1"):
            cluster.router.ids.learn(OPEN, [name], 8 * "a")
            assert (await step(cluster, name, BEGIN))[0] // 100 == 2
            assert begun_at(cluster, name) == ["b"]
            assert (await step(cluster, name, {"digest": DIGEST}))[0] // 100 == 2
            assert name in cluster.links["b"].ids


async def test_a_fork_cannot_have_an_id_that_another_engine_imports() -> None:
    async with fake_cluster("ab") as cluster:
        cluster.links["a"].ids.add("parent")
        cluster.only_on("b")
        await step(cluster, "new", BEGIN)
        fork = {"sequences": [{"id": "new", "parent": "parent"}]}
        assert (await cluster.error("create_sequences", fork))[:2] == (409, "sequence_exists")
        assert (await step(cluster, "new", {"digest": DIGEST}))[0] // 100 == 2
        assert cluster.ids_at() == {"a": {"parent"}, "b": {"new"}}
        await cluster.ok("delete_sequence", {"id": "new"})
        await cluster.ok("create_sequences", fork)
        assert cluster.ids_at() == {"a": {"parent", "new"}, "b": set()}
