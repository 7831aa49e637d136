"""Exports and imports through a router over two real engines."""

from __future__ import annotations

from typing import Any

import numpy as np

from service.cluster.placement.cost import FULL
from tests.cluster.harness import (
    DIM,
    FLOAT,
    HEADS,
    LAYERS,
    PAGE,
    PAGES,
    Answer,
    Cluster,
    rows,
)

LENGTH = 5 * PAGE + 1


async def exported(cluster: Cluster, name: str) -> tuple[Answer, list[Answer]]:
    """The header, and every part."""
    head = await cluster.ok("export_sequence", {"id": name, "part_bytes": 4096})
    header, before, parts = head.fields["header"], head.fields["digest"], []
    for number in range(header["num_parts"]):
        fields = {"id": name, "part": number, "before": before}
        fields |= {key: header[key] for key in ("generation", "part_bytes")}
        parts.append(await cluster.ok("export_sequence", fields))
        before = parts[-1].fields["digest"]
    return head, parts


async def fill(cluster: Cluster, name: str) -> None:
    """Leave an engine no room, beside a sequence that it has."""
    await cluster.ok("create_sequences", {"sequences": [{"id": "filling", "parent": name}]})
    count = (PAGES - 2) * PAGE - LENGTH
    for layer in range(LAYERS):
        numbers = np.zeros((count, HEADS, DIM), FLOAT)
        fields = {"layer": layer, "sequences": ["filling"], "append_indptr": [0, count]}
        await cluster.ok("append", fields, k=numbers, v=numbers)


async def brought(cluster: Cluster, name: str, parts: list[Answer], first: int = 0) -> None:
    for number, part in enumerate(parts[first:], first):
        fields: dict[str, Any] = {"id": name, "part": number, "digest": part.fields["digest"]}
        await cluster.ok("import_sequence", fields, **part.arrays)


async def test_an_import_is_placed_and_continued_by_a_router_that_has_forgotten_it(
    cluster: Cluster, rng: np.random.Generator
) -> None:
    (name,) = await cluster.create(1)
    for layer in range(LAYERS):
        k, v = rows(rng, LENGTH), rows(rng, LENGTH)
        fields = {"layer": layer, "sequences": [name], "append_indptr": [0, LENGTH]}
        await cluster.ok("append", fields, k=k, v=v)
    head, parts = await exported(cluster, name)
    assert len(parts) > 2
    begin = {"header": head.fields["header"], "digest": head.fields["digest"]}
    taken = await cluster.call("import_sequence", {"id": name} | begin)
    assert (taken.status, taken.fields["code"]) == (409, "sequence_exists")
    full_one = cluster.router.members.by_name[cluster.home(name)].engine
    assert full_one is not None
    await fill(cluster, name)
    await cluster.until(lambda: full_one.load.held > FULL * PAGES, "the router to hear of it")
    await cluster.ok("import_sequence", {"id": "moved"} | begin)
    assert cluster.home("moved") != cluster.home(name), "there is no room beside it"
    await brought(cluster, "moved", parts[:1])
    cluster.router.ids.entries.clear()
    reply = await cluster.ok("get_import", {"id": "moved"})
    assert reply.fields["next_part"] == 1
    cluster.router.ids.entries.clear()
    again = await cluster.ok("import_sequence", {"id": "moved"} | begin)
    assert again.fields["next_part"] == 1
    assert (await cluster.fields("pool"))["imports"] == 1
    await brought(cluster, "moved", parts, 1)
    await cluster.ok("import_sequence", {"id": "moved", "digest": parts[-1].fields["digest"]})
    for layer in range(LAYERS):
        both = {"layer": layer, "sequences": [name, "moved"]}
        k = (await cluster.ok("gather", both)).arrays["k"]
        np.testing.assert_array_equal(k[:LENGTH], k[LENGTH:])
    absent = await cluster.call("get_import", {"id": "moved"})
    assert (absent.status, absent.fields["code"]) == (404, "unknown_import")
    never = await cluster.call("cancel_import", {"id": "never"})
    assert (never.status, never.fields["code"]) == (404, "unknown_import")
