"""Random programs of several callers on a small pool with tiers: all that is found is right."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from config.sections import CacheSettings
from service.engine.tiers import lookup
from tests.engine.handlers.test_engine_prefix import PAGE, begin, check
from tests.engine.harness import Caller, NewCall, Reply, creation, outcome, until
from tests.engine.tiers.test_tiers import BLOCK, on_disk, run

COMMON = [list(range(base, base + 2 * PAGE)) for base in (100, 200, 300)]
NAMED = ("match_prefix", "prefetch")


def prompt_of(chosen: random.Random) -> list[int]:
    """One of some prompts with common beginnings."""
    tail = chosen.randrange(12)
    own = [1000 + 50 * tail + at for at in range(chosen.randrange(1, 3) * PAGE)]
    return chosen.choice(COMMON) + own


async def program(caller: Caller, name: str, seed: int, num_steps: int) -> None:
    """Prompts are computed, found, checked, committed, evicted, and given up midway."""
    chosen = random.Random(seed)
    for step in range(num_steps):
        prompt, kind = prompt_of(chosen), chosen.random()
        id = f"{name}-{step}"
        named: dict[str, Any] = {"token_ids": prompt}
        if kind < 0.65:
            try:
                await begin(caller, id, prompt)
                await check(caller, id, prompt)
                await caller.call("commit", {"id": id, "token_ids": prompt})
            except Exception as error:
                assert getattr(error, "code", "") == "out_of_pages", error
            await outcome(caller.call("delete_sequence", {"id": id}))
        elif kind < 0.8:
            await outcome(caller.call(chosen.choice(NAMED), named | {"lease_s": 0.05}))
        elif kind < 0.9:
            task = caller.start(creation({"id": id, "prefix": named}))
            await asyncio.sleep(chosen.random() * 0.01)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await outcome(caller.call("delete_sequence", {"id": id}))
        elif kind < 0.95:
            call = NewCall("prefetch", named | {"max_load_pages": chosen.randrange(4)})
            await outcome(caller.submit(call, deadline_s=chosen.choice((0.0005, 0.01))))
        elif kind < 0.99:
            await caller.call("evict", {"num_pages": chosen.randrange(8)})
        else:
            await caller.call("clear")


def settings(kind: str, path: Path) -> CacheSettings:
    match kind:
        case "host":
            return CacheSettings(host_bytes=10 * BLOCK)
        case "disk":
            return on_disk(path, disk_bytes=20 * BLOCK)
        case _:
            both = {"host_bytes": 8 * BLOCK, "disk_bytes": 16 * BLOCK}
            return on_disk(path, **both, write="commit" if kind == "commit" else "evict")


@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        *(("both", 1), ("commit", 0)),
        *(pytest.param(kind, 0, marks=pytest.mark.long) for kind in ("host", "disk")),
    ],
)
def test_random_programs_find_only_what_is_right(
    tmp_path: Path, kind: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if seed:
        monkeypatch.setattr(lookup, "LOOKED_UP", 1)
    keys = {
        "key-a": ("a", ["read", "append"]),
        "key-b": ("b", ["read", "append"]),
        "key-root": ("root", ["read", "append", "admin"]),
    }

    async def scenario(caller: Caller) -> None:
        async with caller.another("key-a") as a, caller.another("key-b") as b:
            programs = [
                program(one, f"{name}{number}", 100 * seed + number, 25)
                for number in range(2)
                for one, name in ((a, "a"), (b, "b"))
            ]
            await asyncio.gather(*programs)
            await asyncio.sleep(0.1)
            tree = caller.engine.store.tree
            await until(lambda: not tree.num_sequences and not tree.cache.num_leases)
            pool = await caller.pool()
            assert (pool["integrity"], pool["referenced"], pool["sequences"]) == ("ok", 0, 0)
            held = tree.allocator.num_pages - tree.allocator.num_free
            assert held == tree.cache.named.num_cached
            reply: Reply = await caller.call("engines", {})
            assert reply.fields["engines"][0]["sequences"] == 0

    run(scenario, settings(kind, tmp_path), keys=keys, key="key-root", slice_ms=5.0)
