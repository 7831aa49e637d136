"""Events of pages in all tiers, followed as a router follows them."""

from __future__ import annotations

import errno
from pathlib import Path

from tests.engine.harness import Caller, until
from tests.engine.tiers.test_tiers import BLOCK, PROMPTS, create, fill, on_disk, run
from tests.engine.tiers.test_tiers_faults import make_faulty, settle
from tests.harness.router import BlockIndex, blocks_of
from tests.tiers.faulty_files import FaultyFiles


def test_a_follower_of_a_short_history_knows_what_every_tier_has(tmp_path: Path) -> None:
    """Also after a restart, a disk quota that evicts, a clear, and a disk that fails."""
    cache = on_disk(tmp_path, write="commit", host_bytes=8 * BLOCK, events_history=3)
    index = BlockIndex()

    async def follow(caller: Caller) -> None:
        while True:
            page = (await caller.call("events", {"after": index.last})).fields
            index.take_page(page)
            if not page["events"]:
                return

    async def check(caller: Caller) -> None:
        await settle(caller)
        await follow(caller)
        assert index.by_medium == blocks_of(caller.engine.store)

    async def before(caller: Caller) -> None:
        for number, prompt in enumerate(PROMPTS[:6]):
            await fill(caller, [prompt])
            if number % 2:
                await follow(caller)
        await check(caller)
        await caller.call("set_namespace", {"name": "default", "max_disk_bytes": 4 * BLOCK})
        await fill(caller, PROMPTS[6:9])
        await check(caller)
        await create(caller, "held", PROMPTS[8])
        await caller.call("clear")
        await check(caller)
        assert index.by_medium["GPU"] and not index.by_medium["DISK"]
        await caller.call("delete_sequences", {"prefix": ""})
        await fill(caller, PROMPTS[:3])
        await check(caller)

    async def after(caller: Caller) -> None:
        await check(caller)
        assert index.by_medium["DISK"] and not index.by_medium["GPU"]
        await fill(caller, PROMPTS[3:6])
        make_faulty(caller, FaultyFiles(write_error=errno.EIO))
        await fill(caller, PROMPTS[6:9])
        await until(lambda: caller.metric('attnd_tier_up{tier="disk"}') == 0)
        await check(caller)
        assert index.by_medium["GPU"] and not index.by_medium["DISK"]

    run(before, cache)
    run(after, cache)
