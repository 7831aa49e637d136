"""New sequences go where their prompt is in host memory, or on disk since before a restart."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cluster.harness import (
    DIM,
    FLOAT,
    HEADS,
    LAYERS,
    PAGE,
    PAGES,
    SETTINGS,
    Cluster,
    num_pages,
)
from tests.cluster.local_engines import LocalEngines, local_engines

LENGTH = 8 * PAGE


@pytest.fixture(scope="module")
def engines_with_tiers() -> Iterator[LocalEngines]:
    cache = SETTINGS.cache.model_copy(update={"host_bytes": 4 * 2**20})
    with local_engines(2, SETTINGS.model_copy(update={"cache": cache})) as engines:
        yield engines


@pytest.fixture(scope="module")
def engines_with_disks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalEngines]:
    path: Path = tmp_path_factory.mktemp("tiers")
    disk = {"disk_path": str(path), "disk_bytes": 4 * 2**20, "model": "m", "write": "commit"}
    cache = SETTINGS.cache.model_copy(update=disk)
    with local_engines(2, SETTINGS.model_copy(update={"cache": cache})) as engines:
        yield engines


async def keep(cluster: Cluster, ids: list[int]) -> dict[str, Any]:
    """Create a sequence with a prompt, compute the missing rest, commit and delete it."""
    new = {"sequences": [{"prefix": {"token_ids": ids}}]}
    (made,) = (await cluster.fields("create_sequences", new))["sequences"]
    k = np.full((len(ids) - made["cached_len"], HEADS, DIM), ids[0], FLOAT)
    for layer in range(LAYERS):
        fields = {"layer": layer, "sequences": [made["id"]], "append_indptr": [0, len(k)]}
        await cluster.ok("append", fields, k=k, v=k)
    await cluster.ok("commit", {"id": made["id"], "token_ids": ids})
    await cluster.ok("delete_sequence", {"id": made["id"]})
    found: dict[str, Any] = made | {"home": cluster.home(made["id"])}
    return found


@pytest.mark.parametrize("cluster", ["engines_with_tiers"], indirect=True)
async def test_a_prompt_in_an_engines_host_memory_goes_there_and_is_loaded(
    cluster: Cluster,
) -> None:
    prompts = [[number] * LENGTH for number in range(1, PAGES // 8 + 5)]
    cluster.only_on("engine-1")
    for ids in prompts:  # more than the pool has pages for
        assert (await keep(cluster, ids))["home"] == "engine-1"
    cluster.only_on()
    known = cluster.router.members.prefixes["default"]
    pages = 8 * len(prompts)
    await cluster.until(lambda: num_pages(known, "CPU") >= pages - PAGES, "events of copies")
    await cluster.until(lambda: num_pages(known, "GPU") <= PAGES, "events of evictions")
    found = await keep(cluster, prompts[0])
    assert (found["home"], found["cached_len"]) == ("engine-1", LENGTH)
    assert found["cached"]["host"] == LENGTH
    for name in ("engine-0", "engine-1"):
        cluster.only_on(name)
        await cluster.ok("clear")
    cluster.only_on()


@pytest.mark.parametrize("cluster", ["engines_with_disks"], indirect=True)
@pytest.mark.long
async def test_a_prompt_on_an_engines_disk_since_before_its_start_goes_there(
    cluster: Cluster,
) -> None:
    ids = [7] * LENGTH
    cluster.only_on("engine-1")
    assert (await keep(cluster, ids))["home"] == "engine-1"
    engines, members = cluster.engines, cluster.router.members
    engines.kill("engine-1")
    await cluster.until(lambda: len(members.engines) == 1, "the engine is lost")
    engines.start("engine-1")
    await cluster.until(lambda: len(members.engines) == 2, "the engine is back")
    cluster.only_on()
    known = members.prefixes["default"]
    await cluster.until(lambda: num_pages(known, "DISK") == 8, "events of records")
    found = await keep(cluster, ids)
    assert (found["home"], found["cached"]["disk"]) == ("engine-1", LENGTH)
