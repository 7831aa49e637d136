"""Disks that fail, fill up or hang below a running engine: a miss or less, never a wrong row."""

from __future__ import annotations

import asyncio
import errno
import shutil
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from service.engine.tiers import disk, setup
from service.tiers.record_store import RecordStore
from tests.engine.handlers.test_engine_prefix import PAGE, begin, check, keep
from tests.engine.harness import Caller, NewCall, creation, until
from tests.engine.tiers.test_tiers import BLOCK, PROMPTS, check_all, create, fill, on_disk, run
from tests.tiers.faulty_files import FaultyFiles


def make_faulty(caller: Caller, files: FaultyFiles) -> FaultyFiles:
    """Put `files` below the engine's disk tier."""
    loading = caller.engine.store.loading
    assert loading is not None and isinstance(loading.tiers.disk.store, RecordStore)
    loading.tiers.disk.store._files = files
    return files


class SlowFiles(FaultyFiles):
    """Writes that take a while."""

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        time.sleep(0.005)
        return super().write(fd, data, offset)


class SlowReads(FaultyFiles):
    """Reads that take a while."""

    def read(self, fd: int, into: memoryview, offset: int) -> int:
        time.sleep(0.05)
        return super().read(fd, into, offset)


async def settle(caller: Caller) -> None:
    """Wait until all copies and writes under way are done."""
    loading = caller.engine.store.loading
    assert loading is not None
    tiers = loading.tiers
    await until(lambda: not tiers.is_copying)


@dataclass
class HungFiles(FaultyFiles):
    """Reads that wait until `ended`."""

    ended: threading.Event = field(default_factory=threading.Event)

    def read(self, fd: int, into: memoryview, offset: int) -> int:
        self.ended.wait(30.0)
        return super().read(fd, into, offset)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_takes_no_more_is_off_and_host_memory_serves_on(
    tmp_path: Path, code: int
) -> None:
    async def scenario(caller: Caller) -> None:
        await fill(caller, PROMPTS[:2])
        files = make_faulty(caller, FaultyFiles())
        files.write_error = code
        await fill(caller, PROMPTS[2:8])
        await until(lambda: caller.metric('attnd_tier_up{tier="disk"}') == 0)
        assert await check_all(caller, PROMPTS[:6]) == [4 * PAGE] * 6
        info = (await caller.call("info")).fields["tiers"]
        assert [one["total_bytes"] for one in info] == [64 * BLOCK, 0]

    run(scenario, on_disk(tmp_path, host_bytes=64 * BLOCK))


def test_a_clear_reaches_a_disk_that_is_off(tmp_path: Path) -> None:
    async def scenario(caller: Caller) -> None:
        await fill(caller)
        await settle(caller)
        files = make_faulty(caller, FaultyFiles(write_error=errno.EIO))
        await fill(caller, PROMPTS[6:9])
        await until(lambda: caller.metric('attnd_tier_up{tier="disk"}') == 0)
        refused = await caller.refused(NewCall("clear"), "not_erased")
        assert "delete the files in cache.disk_path" in str(refused)
        files.write_error = None
        await caller.call("clear")

    async def next_start(caller: Caller) -> None:
        assert await check_all(caller) == [0] * 6

    run(scenario, on_disk(tmp_path))
    (data,) = tmp_path.rglob("*.data")
    assert not any(data.read_bytes())
    run(next_start, on_disk(tmp_path))


@pytest.mark.parametrize("is_known", [True, False])
def test_a_disk_whose_directory_was_removed_has_nothing_to_erase(
    tmp_path: Path, is_known: bool
) -> None:
    async def scenario(caller: Caller) -> None:
        await fill(caller)
        await settle(caller)
        shutil.rmtree(tmp_path)
        if is_known:
            await fill(caller, PROMPTS[6:9])
            await until(lambda: caller.metric('attnd_tier_up{tier="disk"}') == 0)
        await caller.call("clear")
        assert await check_all(caller) == [0] * 6

    run(scenario, on_disk(tmp_path))


def test_a_removed_directory_is_noticed_where_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pages are not durable any more."""
    monkeypatch.setattr(disk, "LOOK_S", 0.01)

    async def scenario(caller: Caller) -> None:
        await begin(caller, "a", PROMPTS[0])
        commit = {"id": "a", "token_ids": PROMPTS[0]}
        assert (await caller.call("commit", commit)).fields["durable"]
        shutil.rmtree(tmp_path)
        async with asyncio.timeout(10.0):
            while (await caller.call("commit", commit)).fields["durable"]:
                await asyncio.sleep(0.02)
        assert caller.metric('attnd_tier_up{tier="disk"}') == 0

    run(scenario, on_disk(tmp_path, write="commit"))


def test_reads_that_fail_are_misses(tmp_path: Path) -> None:
    async def scenario(caller: Caller) -> None:
        await fill(caller)
        await settle(caller)
        files = make_faulty(caller, FaultyFiles())
        files.read_error = errno.EIO
        found = await create(caller, "a", PROMPTS[0])
        assert found["cached_len"] == 0
        assert caller.metric('attnd_tier_misses_total{reason="unreadable"}') == 1
        files.read_error = None
        assert (await create(caller, "b", PROMPTS[1]))["cached_len"] == 4 * PAGE
        await check(caller, "b", PROMPTS[1])

    run(scenario, on_disk(tmp_path))


def test_torn_writes_are_misses(tmp_path: Path) -> None:
    async def scenario(caller: Caller) -> None:
        make_faulty(caller, FaultyFiles(lost_bytes=BLOCK // 3))
        await fill(caller)
        await settle(caller)
        assert set(await check_all(caller, PROMPTS[:3])) <= {0, PAGE, 2 * PAGE, 3 * PAGE}

    run(scenario, on_disk(tmp_path))


def test_a_load_from_a_disk_that_hangs_ends_before_the_deadline(tmp_path: Path) -> None:
    async def scenario(caller: Caller) -> None:
        await fill(caller)
        await settle(caller)
        files = make_faulty(caller, HungFiles())
        began = time.monotonic()
        new = creation({"id": "a", "prefix": {"token_ids": PROMPTS[0]}})
        reply = await caller.submit(new, deadline_s=2.0)
        assert reply.fields["sequences"][0]["cached_len"] == 0
        assert time.monotonic() - began < 2.0
        other = NewCall("prefetch", {"token_ids": PROMPTS[1]})
        waiting = caller.start(other, deadline_s=20.0)
        await asyncio.sleep(0.05)
        assert (await create(caller, "b", PROMPTS[10]))["cached_len"] == 0, "others do not wait"
        pool = await caller.pool()
        assert (pool["integrity"], pool["sequences"]) == ("ok", 2)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await caller.call("delete_sequences", {"prefix": ""})
        assert isinstance(files, HungFiles)
        files.ended.set()
        tree = caller.engine.store.tree
        await until(lambda: tree.num_sequences == 0)
        assert (await create(caller, "c", PROMPTS[2]))["cached_len"] == 4 * PAGE
        await check(caller, "c", PROMPTS[2])
        assert (await caller.pool())["integrity"] == "ok"

    run(scenario, on_disk(tmp_path))


def test_a_clear_reaches_pages_that_a_load_under_way_has_committed(tmp_path: Path) -> None:
    async def scenario(caller: Caller) -> None:
        await fill(caller)
        await settle(caller)
        make_faulty(caller, SlowReads())
        loading, named = caller.engine.store.loading, caller.engine.store.tree.cache.named
        assert loading is not None
        loading.tiers.at_once = 1
        waiting = caller.start(NewCall("prefetch", {"token_ids": PROMPTS[0]}), deadline_s=20.0)
        await until(lambda: any(load.committed for load in loading._loads))
        await caller.call("clear")
        assert (named.num_pages, loading._loads) == (0, set())
        assert (await waiting).fields["matched_len"] <= 3 * PAGE
        assert await check_all(caller, PROMPTS[:1]) == [0]

    run(scenario, on_disk(tmp_path))


def test_pages_wait_for_room_on_their_way_to_a_slow_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "STAGING_BYTES", 0)
    monkeypatch.setattr(setup, "LEAST_STAGING", 2)

    async def scenario(caller: Caller) -> None:
        make_faulty(caller, SlowFiles())
        await fill(caller, PROMPTS[:10])
        assert await check_all(caller, PROMPTS[:10]) == [4 * PAGE] * 10

    run(scenario, on_disk(tmp_path))


def test_loads_from_host_memory_wait_for_no_disk(tmp_path: Path) -> None:
    async def scenario(caller: Caller) -> None:
        await fill(caller)
        await settle(caller)
        files = make_faulty(caller, HungFiles())
        from_disk = {"token_ids": PROMPTS[0], "tiers": ["disk"]}
        waiting = caller.start(NewCall("prefetch", from_disk), deadline_s=30.0)
        await asyncio.sleep(0.05)
        from_host = NewCall("prefetch", {"token_ids": PROMPTS[1], "tiers": ["host"]})
        reply = await caller.submit(from_host, deadline_s=20.0)
        assert reply.fields["cached"]["host"] == 4 * PAGE
        assert isinstance(files, HungFiles)
        files.ended.set()
        assert (await waiting).fields["cached"]["disk"] == 4 * PAGE

    run(scenario, on_disk(tmp_path, host_bytes=64 * BLOCK))


def test_pages_of_one_prompt_come_from_several_tiers_in_order(tmp_path: Path) -> None:
    async def scenario(caller: Caller) -> None:
        await fill(caller)
        await settle(caller)
        loading = caller.engine.store.loading
        assert loading is not None
        for number, entry in enumerate(list(loading.tiers.host)):
            if number % 2:
                loading.tiers.drop_from_host(entry)
        make_faulty(caller, SlowReads())
        assert await check_all(caller) == [4 * PAGE] * 6

    run(scenario, on_disk(tmp_path, host_bytes=64 * BLOCK))


def test_a_stop_writes_down_other_namespaces_beside_one_without_room(tmp_path: Path) -> None:
    keys = {"key-a": ("a", ["read", "append", "admin"]), "key-b": ("b", ["read", "append"])}

    async def computed(caller: Caller) -> None:
        await caller.call("set_namespace", {"name": "a", "max_host_bytes": 0})
        await keep(caller, "x", PROMPTS[0])
        async with caller.another("key-b") as other:
            await keep(other, "y", PROMPTS[1])

    async def found(caller: Caller) -> int:
        async with caller.another("key-b") as other:
            named = {"token_ids": PROMPTS[1], "lease_s": 0.0}
            return int((await other.call("match_prefix", named)).fields["matched_len"])

    run(computed, on_disk(tmp_path), keys=keys, key="key-a")
    assert run(found, on_disk(tmp_path), keys=keys, key="key-a") == 4 * PAGE
