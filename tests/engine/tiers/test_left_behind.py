"""What calls leave behind for the disk: counted by namespace, merged, and written in fair turns."""

from __future__ import annotations

import asyncio
import errno
import random
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from service.engine.loop.engine import LAST_ANSWERS_S
from service.engine.loop.long_work import LAST_WAIT_S
from service.engine.loop.scheduler import ABORT_S
from service.engine.store.ledger import Kind
from service.engine.tiers import disk, loading, pins
from service.supervisor import GRACE_S
from service.tiers import record_store
from service.tiers.index import Index
from service.tiers.record_store import RecordStore
from tests.engine.handlers.test_engine_prefix import PAGE, begin
from tests.engine.harness import Caller, NewCall, Reply, until
from tests.engine.tiers.test_tiers import BLOCK, PROMPTS, check_all, create, fill, on_disk, run
from tests.engine.tiers.test_tiers_faults import settle

KEYS: Final = {
    "key-a": ("a", ["read", "append", "admin"]),
    "key-b": ("b", ["read", "append", "admin"]),
}
AT_ONCE: Final = 64


class Transactions:
    """Counts the index's transactions, which wait while `is_open` is not set, take `sleep_s` more,
    or raise an `error`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.is_open = 0, threading.Event()
        self.is_open.set()
        self.sleep_s = 0.0
        self.error: OSError | None = None
        real: Callable[..., AbstractContextManager[None]] = Index._transaction

        @contextmanager
        def counted(index: Index, *how: Any, **named: Any) -> Iterator[None]:
            self.count += 1
            self.is_open.wait(30.0)
            time.sleep(self.sleep_s)
            if self.error is not None:
                raise self.error
            with real(index, *how, **named):
                yield

        monkeypatch.setattr(Index, "_transaction", counted)


@pytest.fixture
def transactions(monkeypatch: pytest.MonkeyPatch) -> Transactions:
    return Transactions(monkeypatch)


async def committed(caller: Caller, name: str, prompt: list[int]) -> dict[str, Any]:
    await begin(caller, name, prompt)
    return (await caller.call("commit", {"id": name, "token_ids": prompt})).fields


async def page_keys(caller: Caller, prompt: list[int]) -> list[str]:
    """Cache a prompt; the keys of its pages."""
    keys = []
    for count in range(1, len(prompt) // PAGE + 1):
        await begin(caller, "keys", prompt[: count * PAGE])
        commit = {"id": "keys", "token_ids": prompt[: count * PAGE]}
        keys.append((await caller.call("commit", commit)).fields["last_key"])
        await caller.call("delete_sequence", {"id": "keys"})
    return keys


def pin(key: str, name: str = "pin") -> NewCall:
    return NewCall(name, {"page_key": key} | ({"hard": True} if name == "pin" else {}))


async def many(caller: Caller, calls: list[NewCall]) -> None:
    for first in range(0, len(calls), AT_ONCE):
        some = [caller.start(call) for call in calls[first : first + AT_ONCE]]
        assert all(reply.status < 300 for reply in await asyncio.gather(*some))


@pytest.mark.parametrize("how", ["pins", "evictions", "quotas"])
def test_a_neighbours_commit_waits_for_few_transactions(
    tmp_path: Path, transactions: Transactions, how: str
) -> None:
    async def scenario(caller: Caller) -> None:
        keys = await page_keys(caller, PROMPTS[0] + PROMPTS[1][: 2 * PAGE])
        await settle(caller)
        calls = {
            "pins": [pin(key, name) for key in keys for name in ("pin", "unpin")] * 8,
            "evictions": [NewCall("evict", {"num_pages": 1})] * 6,
            "quotas": [NewCall("set_namespace", {"name": "b", "max_pages": n}) for n in range(99)],
        }
        async with caller.another("key-b") as other:
            await begin(other, "x", PROMPTS[2])
            before = transactions.count
            transactions.is_open.clear()
            await many(caller, calls[how])
            reply = other.start(NewCall("commit", {"id": "x", "token_ids": PROMPTS[2]}))
            await asyncio.sleep(0.05)
            transactions.is_open.set()
            assert (await reply).fields["durable"]
            assert transactions.count - before <= 5 < len(calls[how])

    run(scenario, on_disk(tmp_path, write="commit"), keys=KEYS, key="key-a")


def test_notes_that_the_disk_has_not_written_are_refused(
    tmp_path: Path, transactions: Transactions, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = Kind("notes that wait for the disk", 8, "try again a moment later")
    monkeypatch.setattr(disk, "NOTES", notes)

    async def scenario(caller: Caller) -> None:
        keys = await page_keys(caller, PROMPTS[0] + PROMPTS[1])
        await settle(caller)
        transactions.is_open.clear()
        await caller.submit(pin(keys[0]))  # in the writer's hands, as are all that join it
        loading = caller.engine.store.loading
        assert loading is not None
        await until(lambda: not loading.tiers.disk._notes)
        await many(caller, [pin(key) for key in keys[1:5]])
        refused = await caller.refused(pin(keys[5]), "overloaded", retry_after_s=1.0)
        assert "notes that wait for the disk" in str(refused)
        quota = NewCall("set_namespace", {"name": "b", "max_pages": 3})
        await caller.refused(quota, "overloaded")
        holds = (await caller.call("holds")).fields["holds"]
        assert {one["page_key"] for one in holds} == set(keys[:5]), "nothing changed"
        assert (await caller.call("get_namespace", {"name": "b"})).fields["max_pages"] is None
        await many(caller, [pin(key, "unpin") for key in keys[:5]])
        async with caller.another("key-b") as other:
            await other.submit(quota)
        transactions.is_open.set()
        await settle(caller)
        await caller.submit(pin(keys[5]))
        await settle(caller)
        assert loading.tiers.disk.store is not None
        stored = loading.tiers.disk.store.notes()
        assert [name.split("/")[3] for name in stored if name.startswith(pins.NOTE)] == [keys[5]]

    run(scenario, on_disk(tmp_path), keys=KEYS, key="key-a", namespace_share=0.5)


def test_the_newest_quota_of_a_name_is_kept_of_several_callers(
    tmp_path: Path, transactions: Transactions
) -> None:
    async def scenario(caller: Caller) -> None:
        transactions.is_open.clear()
        async with caller.another("key-b") as other:
            for number in range(1, 5):
                for one in (caller, other):
                    quota = {"name": "c", "max_pages": 3, "max_disk_bytes": number * BLOCK}
                    await one.call("set_namespace", quota)
            await caller.call("set_namespace", quota | {"max_pages": 5})
            transactions.is_open.set()

    async def found(caller: Caller) -> Any:
        return (await caller.call("get_namespace", {"name": "c"})).fields["max_pages"]

    run(scenario, on_disk(tmp_path), keys=KEYS, key="key-a")
    assert run(found, on_disk(tmp_path), keys=KEYS, key="key-a") == 5


def test_a_clear_leaves_turns_to_others_and_serves_all_who_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_store, "ERASED_AT_ONCE", BLOCK)
    erase, erased, go_on = RecordStore._erase, list[int](), threading.Semaphore(1)

    def erase_slowly(store: RecordStore, slot: int) -> Any:
        assert go_on.acquire(timeout=30.0)
        erased.append(slot)
        return erase(store, slot)

    monkeypatch.setattr(RecordStore, "_erase", erase_slowly)

    async def scenario(caller: Caller) -> None:
        await fill(caller)
        await settle(caller)
        clears = [caller.start(NewCall("clear"), deadline_s=60.0) for _ in range(4)]
        await until(lambda: bool(erased))
        async with caller.another("key-b") as other:
            await begin(other, "x", PROMPTS[8])
            commit = NewCall("commit", {"id": "x", "token_ids": PROMPTS[8]})
            reply = other.start(commit, deadline_s=60.0)
            for _ in range(8):
                await asyncio.sleep(0.05)
                if reply.done():
                    break
                go_on.release()
            assert (await reply).fields["durable"] and len(erased) < 10
        go_on.release(1000)
        await asyncio.gather(*clears)
        assert len(erased) < 60, "the second to the fourth are one"
        assert await check_all(caller) == [0] * 6

    run(scenario, on_disk(tmp_path, write="commit"), keys=KEYS, key="key-a")


def test_a_stop_after_many_pins_loses_no_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transactions: Transactions
) -> None:
    """Notes went first, each in a transaction of its own."""
    monkeypatch.setattr(loading, "CLOSE_S", 1.0)
    transactions.sleep_s = 0.02

    async def scenario(caller: Caller) -> None:
        keys = await page_keys(caller, PROMPTS[0])
        await many(caller, [pin(key, name) for key in keys for name in ("pin", "unpin")] * 32)
        await fill(caller, PROMPTS[1:2])

    async def found(caller: Caller) -> list[int]:
        return await check_all(caller, PROMPTS[:2])

    run(scenario, on_disk(tmp_path))
    assert run(found, on_disk(tmp_path)) == [4 * PAGE] * 2


def test_a_drain_that_takes_all_its_time_leaves_the_time_to_write() -> None:
    assert disk.LAST_S + loading.CLOSE_S >= 10.0
    ends = LAST_ANSWERS_S + ABORT_S + LAST_WAIT_S + loading.CLOSE_S + disk.LAST_S
    assert ends < GRACE_S, "the supervisor kills the engine while it writes"


def test_a_note_that_the_disk_does_not_take_turns_it_off(
    tmp_path: Path, transactions: Transactions
) -> None:
    async def scenario(caller: Caller) -> None:
        keys = await page_keys(caller, PROMPTS[0])
        await settle(caller)
        transactions.error = OSError(errno.ENOSPC, "no space left")
        await many(caller, [pin(key) for key in keys[:2]])
        await until(lambda: caller.metric('attnd_tier_up{tier="disk"}') == 0)
        await many(caller, [pin(key, "unpin") for key in keys[:2]])
        await many(caller, [pin(keys[3])])
        assert len((await caller.call("holds")).fields["holds"]) == 1
        await settle(caller)
        assert (await caller.pool())["integrity"] == "ok"

    run(scenario, on_disk(tmp_path))


def test_a_page_that_is_evicted_and_committed_again_is_durable(
    tmp_path: Path, transactions: Transactions
) -> None:
    """Its old record was still found, and deleted after the reply."""

    async def scenario(caller: Caller) -> None:
        assert (await committed(caller, "x", PROMPTS[0]))["durable"]
        await caller.call("delete_sequence", {"id": "x"})
        transactions.is_open.clear()
        await caller.call("set_namespace", {"name": "b", "max_pages": 3})  # the writer is busy
        await asyncio.sleep(0.05)
        await caller.call("evict", {"num_pages": 4})
        again = asyncio.create_task(committed(caller, "x", PROMPTS[0]))
        await asyncio.sleep(0.1)
        transactions.is_open.set()
        assert (await again)["durable"]
        await settle(caller)
        shutil.copytree(here, there)  # as a kill would leave it

    async def found(caller: Caller) -> list[int]:
        return await check_all(caller, PROMPTS[:1])

    here, there = tmp_path / "here", tmp_path / "there"
    run(scenario, on_disk(here, write="commit"))
    assert run(found, on_disk(there, write="commit")) == [4 * PAGE]


# Pins.


def index_of(path: Path) -> dict[str, str]:
    """The notes in the index."""
    (file,) = path.glob("*.index")
    index = sqlite3.connect(file)
    try:
        return dict(index.execute("select name, value from notes").fetchall())
    finally:
        index.close()


@pytest.mark.parametrize("is_killed", [False, True])
def test_pins_of_one_chain_share_its_pages(tmp_path: Path, is_killed: bool) -> None:
    """Notes have a few bytes, and each pin is there again after a stop or a kill."""
    prompt = PROMPTS[0] + PROMPTS[1]
    here, there = tmp_path / "here", tmp_path / "there"

    async def before(caller: Caller) -> list[str]:
        keys = await page_keys(caller, prompt)
        await many(caller, [pin(key) for key in (*keys, keys[3])])
        await many(caller, [pin(key, "unpin") for key in (keys[2], keys[7])])
        await settle(caller)
        loading = caller.engine.store.loading
        assert loading is not None and len(loading.tiers.disk.pinned) == 7
        assert caller.engine.store.tree.budget.look("default").pinned == 7
        if is_killed:
            shutil.copytree(here, there)
        return [keys[at] for at in (0, 1, 3, 4, 5, 6)]

    async def after(caller: Caller, keys: list[str]) -> None:
        loading = caller.engine.store.loading
        assert loading is not None
        await until(lambda: loading._restoring is None)
        holds = (await caller.call("holds")).fields["holds"]
        assert sorted(one["page_key"] for one in holds) == sorted(keys)
        assert len(loading.tiers.disk.pinned) == 7
        await fill(caller, PROMPTS[8:19])
        found = await create(caller, "x", prompt)
        assert found["cached"]["pool"] == 7 * PAGE
        await caller.call("delete_sequence", {"id": "x"})
        await many(caller, [pin(key, "unpin") for key in keys])
        await settle(caller)
        assert (loading.tiers.disk.pinned, loading.tiers.note_bytes["default"]) == (set(), 0)
        await fill(caller, PROMPTS[2:12])
        await settle(caller)
        assert await check_all(caller, [prompt]) == [0], "its records give way again"
        assert (await caller.pool())["integrity"] == "ok"

    cache = on_disk(here, disk_bytes=16 * BLOCK)
    keys = run(before, cache)
    if is_killed:
        shutil.rmtree(here)
        there.rename(here)
    notes = {name: value for name, value in index_of(here).items() if name.startswith(pins.NOTE)}
    assert len(notes) == 6 and max(map(len, notes.values())) < 40
    run(lambda caller: after(caller, keys), cache)
    assert not any(name.startswith(pins.NOTE) for name in index_of(here))


def test_a_long_pin_is_kept_in_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins, "SETTLED_AT_ONCE", 1)
    for module in ("handlers.prefix", "work.work"):
        monkeypatch.setattr(f"service.engine.{module}.TURN_S", 0.0)

    async def scenario(caller: Caller) -> None:
        keys = await page_keys(caller, PROMPTS[0])
        before = caller.metric("attnd_slices_total")
        await many(caller, [pin(keys[3], name) for name in ("pin", "unpin", "pin")])
        assert caller.metric("attnd_slices_total") > before
        loading = caller.engine.store.loading
        assert loading is not None
        await until(lambda: len(loading.tiers.disk.pinned) == 4)
        holds = (await caller.call("holds")).fields["holds"]
        assert [one["page_key"] for one in holds] == [keys[3]]

    run(scenario, on_disk(tmp_path), slice_ms=1.0)


@pytest.mark.parametrize("seed", range(2))
def test_pins_at_random_keep_the_pages_that_are_pinned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """In slices of one page, with calls between them, over branches and a restart."""
    monkeypatch.setattr(pins, "SETTLED_AT_ONCE", 1)
    for module in ("handlers.prefix", "work.work"):
        monkeypatch.setattr(f"service.engine.{module}.TURN_S", 0.0)
    order = random.Random(seed)
    branches = [PROMPTS[0], PROMPTS[0][: 2 * PAGE] + PROMPTS[1][: 3 * PAGE]]
    held: set[str] = set()

    async def scenario(caller: Caller) -> None:
        loading = caller.engine.store.loading
        assert loading is not None
        await until(lambda: loading._restoring is None)
        keys = list(
            dict.fromkeys([key for one in branches for key in await page_keys(caller, one)])
        )
        for _ in range(4):
            for one in branches:
                await page_keys(caller, one)
            calls = [NewCall("evict", {"num_pages": 2})] * order.randint(0, 1)
            calls += [pin(order.choice(keys), order.choice(("pin", "unpin"))) for _ in range(12)]
            order.shuffle(calls)
            replies = await asyncio.gather(*[caller.attempt(call) for call in calls])
            for call, reply in zip(calls, replies, strict=True):
                if call.name != "evict" and isinstance(reply, Reply):
                    change = held.add if call.name == "pin" else held.discard
                    change(call.fields["page_key"])
            holds = (await caller.call("holds")).fields["holds"]
            assert {one["page_key"] for one in holds} == held
            named = caller.engine.store.tree.cache.named
            pinned = [one for one in named.nodes if one is not None and one.name.pins]  # type: ignore[union-attr]
            paths = loading.tiers.paths
            ids = {record_id for one in pinned for record_id in paths.ids_of(one.pages)}
            assert loading.tiers.disk.pinned == ids
            assert (await caller.pool())["integrity"] == "ok"
        await settle(caller)
        assert loading.tiers.disk.store is not None
        assert {one.key for one in loading.tiers.disk.store.pinned()} == ids

    for _ in range(3):
        run(scenario, on_disk(tmp_path))


def test_pins_count_as_leases_and_their_notes_in_max_disk_bytes(tmp_path: Path) -> None:
    async def scenario(caller: Caller) -> None:
        keys = await page_keys(caller, PROMPTS[0] + PROMPTS[1])
        await caller.call("set_namespace", {"name": "a", "max_disk_bytes": 2 * pins.NOTE_BYTES})
        await many(caller, [pin(key) for key in (keys[0], keys[1], keys[1])])
        refused = await caller.refused(pin(keys[2]), "overloaded", retry_after_s=1.0)
        assert "max_disk_bytes = 2048: remove pins" in str(refused)
        await caller.call("set_namespace", {"name": "a", "max_disk_bytes": 0})
        await caller.submit(pin(keys[2]))  # in the pool alone
        await caller.call("set_namespace", {"name": "a"})
        await caller.submit(pin(keys[3]))
        refused = await caller.refused(pin(keys[4]), "overloaded", retry_after_s=1.0)
        assert "4 leases and pins" in str(refused)
        await caller.submit(pin(keys[3]))
        await caller.submit(pin(keys[2], "unpin"))
        await caller.submit(pin(keys[4]))

    run(scenario, on_disk(tmp_path), keys=KEYS, key="key-a", max_leases=8, namespace_share=0.5)


def test_a_rank_whose_pin_is_gone_does_not_keep_a_record(tmp_path: Path) -> None:
    """As after a kill between the note and the ranks of its pages."""

    async def before(caller: Caller) -> None:
        keys = await page_keys(caller, PROMPTS[0])
        await caller.submit(pin(keys[-1]))

    async def after(caller: Caller) -> None:
        loading = caller.engine.store.loading
        assert loading is not None and loading.tiers.disk.store is not None
        await until(lambda: loading._restoring is None)
        assert loading.tiers.disk.store.pinned() == []

    run(before, on_disk(tmp_path))
    (file,) = tmp_path.glob("*.index")
    index = sqlite3.connect(file)
    with index:
        index.execute("delete from notes")
    index.close()
    run(after, on_disk(tmp_path))


def test_pins_of_another_model_are_left(tmp_path: Path) -> None:
    async def before(caller: Caller) -> None:
        keys = await page_keys(caller, PROMPTS[0])
        await caller.submit(pin(keys[-1]))

    async def other(caller: Caller) -> None:
        await caller.refused(pin("ab" * 16, "unpin"), "unknown_page")

    async def after(caller: Caller) -> None:
        loading = caller.engine.store.loading
        assert loading is not None
        await until(lambda: loading._restoring is None)
        assert len((await caller.call("holds")).fields["holds"]) == 1

    run(before, on_disk(tmp_path))
    run(other, on_disk(tmp_path, model="other"))
    run(after, on_disk(tmp_path))


@pytest.fixture
def may_load(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Pins of an earlier start are found, and loaded once this is set."""
    walk, event = pins.Chains.walk, threading.Event()

    def walk_and_wait(chains: pins.Chains, found: list[pins.Pin]) -> Iterator[None]:
        yield from walk(chains, found)
        while not event.is_set():
            yield

    monkeypatch.setattr(pins.Chains, "walk", walk_and_wait)
    return event


def test_pages_of_a_pin_stay_on_disk_while_it_is_not_loaded(
    tmp_path: Path, may_load: threading.Event
) -> None:
    """Also where shorter pins of its pages come and go."""

    async def before(caller: Caller) -> str:
        may_load.set()
        keys = await page_keys(caller, PROMPTS[0])
        await caller.submit(pin(keys[-1]))
        return keys[-1]

    async def after(caller: Caller, key: str) -> None:
        loading = caller.engine.store.loading
        assert loading is not None and loading.tiers.disk.store is not None
        keys = await page_keys(caller, PROMPTS[0][: 2 * PAGE])
        await many(caller, [pin(keys[1], name) for name in ("pin", "unpin")])
        await fill(caller, PROMPTS[2:6])
        assert len(loading.tiers.disk.pinned) == len(loading.tiers.disk.store.pinned()) == 4
        may_load.set()
        await until(lambda: loading._restoring is None)
        assert [one["page_key"] for one in (await caller.call("holds")).fields["holds"]] == [key]
        await caller.submit(pin(key, "unpin"))
        assert (loading.tiers.disk.pinned, loading.tiers.disk.store.pinned()) == (set(), [])

    key = run(before, on_disk(tmp_path))
    may_load.clear()
    run(lambda caller: after(caller, key), on_disk(tmp_path))


def test_a_pin_that_is_removed_before_it_is_loaded_again_keeps_nothing(
    tmp_path: Path, may_load: threading.Event
) -> None:
    async def before(caller: Caller) -> str:
        may_load.set()
        keys = await page_keys(caller, PROMPTS[0])
        await caller.submit(pin(keys[-1]))
        return keys[-1]

    async def after(caller: Caller, key: str) -> None:
        loading = caller.engine.store.loading
        assert loading is not None
        await caller.submit(pin(key, "unpin"))
        await caller.refused(pin(key, "unpin"), "unknown_page")
        may_load.set()
        await until(lambda: loading._restoring is None)
        assert loading.tiers.disk.pinned == set()
        assert loading.tiers.disk.store is not None
        assert loading.tiers.disk.store.pinned() == []
        assert (await caller.call("holds")).fields["holds"] == []

    key = run(before, on_disk(tmp_path))
    may_load.clear()
    run(lambda caller: after(caller, key), on_disk(tmp_path))
