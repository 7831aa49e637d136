"""Tiers through the engine: pages leave the pool and come back to the bit, or are a miss."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from functools import partial, partialmethod
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import pytest

from config.sections import CacheSettings
from kernels import make_backend
from kernels.backend import EndOfCopies, PagePlaces
from kernels.cpu.pool import HostPageCopies
from service.core.keys import Prefix, root_key
from service.core.nodes import Node
from service.core.tree import PrefixTree
from service.core.values import NewSpec
from service.engine.handlers.imports import fill as take_pages
from service.engine.loop.engine import Engine
from service.engine.tiers import lookup
from service.engine.tiers import tiers as all_tiers
from service.engine.tiers.copier import PageCopy
from service.engine.tiers.loads import LoadLimits, Record
from service.engine.tiers.page_records import layout_of, next_id
from service.engine.tiers.tiers import Tiers
from service.families import MISSES
from service.metrics import Metrics
from tests.engine.handlers.test_engine_prefix import PAGE, begin, check, keep
from tests.engine.harness import (
    Caller,
    NewCall,
    Refused,
    Reply,
    creation,
    outcome,
    until,
    with_engine,
)
from tests.engine.pool_model import CPU_GEOMETRY, KIND

T = TypeVar("T")
GEOMETRY: Final = replace(CPU_GEOMETRY, num_pages=12)
BLOCK: Final = layout_of(GEOMETRY, "m").block_bytes
HOST: Final = CacheSettings(host_bytes=64 * BLOCK)
PROMPTS: Final = [[1000 * number + at for at in range(4 * PAGE)] for number in range(1, 20)]


def on_disk(path: Path, **settings: Any) -> CacheSettings:
    given = {"disk_path": str(path), "disk_bytes": 64 * BLOCK, "model": "m"} | settings
    return CacheSettings(**given)


def run(
    scenario: Callable[[Caller], Coroutine[Any, Any, T]], cache: CacheSettings, **how: Any
) -> T:
    """A scenario on an engine of its own with a pool of 12 pages: three prompts."""
    backend = make_backend(KIND, GEOMETRY, poison=True)
    return with_engine(backend, scenario, cache=cache, **how)


async def create(caller: Caller, name: str, prompt: list[int], **prefix: Any) -> dict[str, Any]:
    """A new sequence with a prompt's cached beginning, as the answer describes it."""
    new = {"id": name, "prefix": {"token_ids": prompt} | prefix}
    reply = await caller.submit(creation(new))
    found: dict[str, Any] = reply.fields["sequences"][0]
    return found


async def fill(caller: Caller, prompts: list[list[int]] = PROMPTS[:6]) -> None:
    """Compute and cache prompts, more than the pool has pages for."""
    for number, prompt in enumerate(prompts):
        assert await keep(caller, f"fill-{number}", prompt) == 0


async def check_all(caller: Caller, prompts: list[list[int]] = PROMPTS[:6]) -> list[int]:
    """Begin each prompt from the cache and check their rows; the cached tokens of each."""
    lens = []
    for number, prompt in enumerate(prompts):
        found = await create(caller, f"check-{number}", prompt)
        lens.append(found["cached_len"])
        assert sum(found["cached"].values()) == found["cached_len"]
        if found["cached_len"]:
            await check(caller, f"check-{number}", prompt[: found["cached_len"]])
        await caller.call("delete_sequence", {"id": f"check-{number}"})
    pool = await caller.pool()
    assert (pool["integrity"], pool["sequences"]) == ("ok", 0)
    return lens


def test_pages_that_the_pool_evicted_come_back_from_host_memory() -> None:
    async def scenario(caller: Caller) -> None:
        await fill(caller)
        assert await check_all(caller) == [4 * PAGE] * 6
        assert await check_all(caller) == [4 * PAGE] * 6
        loading = caller.engine.store.loading
        assert loading is not None
        await until(lambda: not loading.tiers.is_copying)
        assert {entry.holds for entry in loading.tiers.host} == {0}

    run(scenario, HOST)


@pytest.mark.parametrize("host_bytes", [0, 64 * BLOCK])
@pytest.mark.parametrize("shared_s", [0.0, 3600.0])
def test_ends_of_copies_are_noticed_without_threads_unless_calls_may_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host_bytes: int, shared_s: float
) -> None:
    """As on a GPU: the engine's thread looks for them."""
    monkeypatch.setattr(all_tiers, "SHARED_S", shared_s)
    copy, threads = HostPageCopies._copy, set()

    def begin(self: HostPageCopies, pages: Any, places: PagePlaces, _: object, way: bool) -> Any:
        looks = iter(range(3))

        def wait() -> list[bytes]:
            threads.add(threading.current_thread().name)
            return copy(self, pages, places, way)

        return EndOfCopies(wait, lambda: next(looks, None) is None)

    monkeypatch.setattr(HostPageCopies, "read", partialmethod(begin, way=False))
    monkeypatch.setattr(HostPageCopies, "write", partialmethod(begin, way=True))

    async def scenario(caller: Caller) -> None:
        await fill(caller)
        assert await check_all(caller) == [4 * PAGE] * 6
        waits = {name for name in threads if name in ("tiers-copier", "tiers-loader")}
        assert bool(waits) == (shared_s > 0.0)

    run(scenario, on_disk(tmp_path, host_bytes=host_bytes))


def test_a_match_with_a_lease_loads_and_one_without_counts(tmp_path: Path) -> None:
    async def scenario(caller: Caller) -> None:
        await fill(caller)
        named = {"token_ids": PROMPTS[0]}
        reply = await caller.call("match_prefix", named | {"lease_s": 0.0})
        where = {"pool": 0, "host": 4 * PAGE, "disk": 0}
        assert (reply.fields["matched_len"], reply.fields["cached"]) == (4 * PAGE, where)
        assert caller.metric('attnd_tier_pages_moved_total{tier="host",way="in"}') > 0
        reply = await caller.call("match_prefix", named)
        assert (reply.fields["matched_len"], reply.fields["cached"]) == (4 * PAGE, where)
        assert reply.fields["lease"] is not None
        reply = await caller.call("match_prefix", named | {"lease_s": 0.0})
        assert reply.fields["cached"] == {"pool": 4 * PAGE, "host": 0, "disk": 0}

    run(scenario, HOST)


@pytest.mark.parametrize("way", ["match", "prefetch first"])
def test_leases_that_load_leave_an_equal_part_of_the_pool_to_others(way: str) -> None:
    """A key that can only read would otherwise hold all pages, for as long as leases last."""
    keys = {
        "a": ("a", ["read", "append"]),
        "reads": ("a", ["read"]),
        "b": ("b", ["read", "append"]),
    }

    async def scenario(caller: Caller) -> None:
        await fill(caller)
        async with caller.another("reads") as reader, caller.another("b") as other:
            held = []
            for prompt in PROMPTS[:6]:
                if way != "match":
                    await reader.call("prefetch", {"token_ids": prompt})
                reply = await reader.call("match_prefix", {"token_ids": prompt, "lease_s": 60.0})
                held.append(reply.fields["num_pages"])
                assert (reply.fields["lease"] is None) == (reply.fields["num_pages"] == 0)
            assert sum(held) == GEOMETRY.num_pages // 2
            assert (await caller.pool())["referenced"] == GEOMETRY.num_pages // 2
            assert await keep(other, "x", PROMPTS[0]) == 0
            again = {"token_ids": PROMPTS[0], "lease_s": 60.0}
            reply = await reader.call("match_prefix", again)
            assert reply.fields["num_pages"] == held[0], "what is held can be leased again"

    run(scenario, HOST, keys=keys, key="a")


def test_a_prefetch_stays_within_its_limits(tmp_path: Path) -> None:
    async def scenario(caller: Caller) -> None:
        await fill(caller)
        named = {"token_ids": PROMPTS[0]}
        reply = await caller.call("prefetch", named | {"tiers": ["pool", "disk"]})
        assert reply.fields["num_pages"] == 0
        reply = await caller.call("prefetch", named | {"max_load_pages": 3})
        assert (reply.fields["num_pages"], reply.fields["matched_len"]) == (3, 3 * PAGE)
        assert reply.fields["cached"] == {"pool": 0, "host": 3 * PAGE, "disk": 0}
        reply = await caller.call("prefetch", named)
        assert reply.fields["cached"] == {"pool": 3 * PAGE, "host": PAGE, "disk": 0}

    run(scenario, HOST)


def test_what_was_written_down_survives_a_restart(tmp_path: Path) -> None:
    async def before(caller: Caller) -> None:
        await fill(caller)

    async def after(caller: Caller) -> list[int]:
        return await check_all(caller)

    run(before, on_disk(tmp_path))
    assert run(after, on_disk(tmp_path)) == [4 * PAGE] * 6, "a graceful stop writes all down"


def test_commits_are_durable_when_they_say_so(tmp_path: Path) -> None:
    cache = on_disk(tmp_path, write="commit")

    async def before(caller: Caller) -> None:
        for number, prompt in enumerate(PROMPTS[:3]):
            await begin(caller, f"a{number}", prompt)
        fields = {"id": "a0", "token_ids": PROMPTS[0]}
        assert (await caller.call("commit", fields)).fields["durable"] is True
        both = {"sequences": ["a1", "a2"], "token_ids": PROMPTS[1] + PROMPTS[2]}
        both["names_indptr"] = [0, 4 * PAGE, 8 * PAGE]  # type: ignore[assignment]
        assert (await caller.call("commit_sequences", both)).fields["durable"] is True

    async def after(caller: Caller) -> list[int]:
        return await check_all(caller, PROMPTS[:3])

    run(before, cache)
    assert run(after, cache) == [4 * PAGE] * 3


def test_further_keys_stay_with_their_pages_in_every_tier(tmp_path: Path) -> None:
    full = [{"first_token": at, "key": "0c" * 32} for at in range(PAGE, PAGE + 4)]
    cat, dog = ([full[0] | {"key": key}, *full[1:]] for key in ("0c", "0d"))

    async def before(caller: Caller) -> None:
        for number, extra in enumerate((cat, dog)):
            assert await begin(caller, "a", PROMPTS[0], extra=extra) == PAGE * number
            await caller.call("commit", {"id": "a", "token_ids": PROMPTS[0], "extra": extra})
            await caller.call("delete_sequence", {"id": "a"})
        await fill(caller, PROMPTS[11:16])
        await after(caller)
        page = {"after": 0, "limit": 1000}
        events = (await caller.call("events", page)).fields["events"]
        keys = [
            one["extra_keys"]
            for one in events
            if one.get("medium") == "DISK" and one.get("extra_keys")
        ]
        wanted = [
            [[one | {"first_token": at} for at, one in enumerate(extra)]] for extra in (cat, dog)
        ]
        assert sorted(keys, key=str) == wanted

    async def after(caller: Caller) -> None:
        for extra, length in ((cat, 4), (dog, 4), (full, 1), (None, 1)):
            found = await create(caller, "b", PROMPTS[0], **({"extra": extra} if extra else {}))
            assert found["cached_len"] == length * PAGE
            await check(caller, "b", PROMPTS[0][: length * PAGE])
            await caller.call("delete_sequence", {"id": "b"})
            assert (await caller.pool())["integrity"] == "ok"

    run(before, on_disk(tmp_path, write="commit", host_bytes=64 * BLOCK))
    run(after, on_disk(tmp_path))


def test_pages_named_by_keys_come_back_too(tmp_path: Path) -> None:
    keys = [bytes([number] * 16).hex() for number in range(4)]

    async def scenario(caller: Caller) -> None:
        await begin(caller, "a", PROMPTS[10])
        await caller.call("commit", {"id": "a", "page_keys": keys})
        await caller.call("delete_sequence", {"id": "a"})
        await fill(caller)
        reply = await caller.submit(creation({"id": "b", "prefix": {"page_keys": keys}}))
        assert reply.fields["sequences"][0]["cached_len"] == 4 * PAGE
        await check(caller, "b", PROMPTS[10])
        await caller.call("delete_sequence", {"id": "b"})
        await fill(caller, PROMPTS[11:16])
        swapped = [keys[1], keys[0], *keys[2:]]
        reply = await caller.submit(creation({"id": "b", "prefix": {"page_keys": swapped}}))
        assert reply.fields["sequences"][0]["cached_len"] == 0
        other = {"prefix": {"page_keys": [keys[0], *keys[2:]]}, "id": "c"}
        reply = await caller.submit(creation(other))
        assert reply.fields["sequences"][0]["cached_len"] == PAGE, "on another path it is another"

    run(scenario, HOST)


def test_a_clear_reaches_all_tiers(tmp_path: Path) -> None:
    keys = {"key-a": ("a", ["read", "append"]), "key-b": ("b", ["read", "append"])}

    async def before(caller: Caller) -> None:
        await fill(caller)
        async with caller.another("key-b") as other:
            await fill(other, PROMPTS[:3])
            await fill(caller, PROMPTS[6:9])
            await caller.call("clear")
            assert await check_all(caller) == [0] * 6
            assert await check_all(other, PROMPTS[:3]) == [4 * PAGE] * 3

    async def after(caller: Caller) -> None:
        assert await check_all(caller) == [0] * 6

    cache = on_disk(tmp_path, host_bytes=32 * BLOCK)
    run(before, cache, keys=keys, key="key-a")
    run(after, cache, keys=keys, key="key-a")


@pytest.mark.parametrize("name", ["clear", "evict"])
def test_gauges_follow_what_a_caller_erases(tmp_path: Path, name: str) -> None:
    async def scenario(caller: Caller) -> None:
        await fill(caller, PROMPTS[:5])
        loading = caller.engine.store.loading
        assert loading is not None
        tiers = loading.tiers
        await until(lambda: not tiers.is_copying)
        before = tiers.num_records
        await caller.call(name, {"num_pages": 12} if name == "evict" else {})
        await until(lambda: not tiers.is_copying)
        for tier, left in tiers.num_records.items():
            assert caller.metric(f'attnd_tier_records{{tier="{tier}"}}') == left < before[tier]

    run(scenario, on_disk(tmp_path, host_bytes=64 * BLOCK))


def test_an_eviction_by_a_caller_reaches_all_tiers(tmp_path: Path) -> None:
    async def scenario(caller: Caller) -> None:
        await fill(caller, PROMPTS[:2])
        assert (await caller.call("evict", {"num_pages": 5})).fields["num_pages"] == 5
        await fill(caller, PROMPTS[6:9])
        assert await check_all(caller, PROMPTS[:2]) == [0, 3 * PAGE]

    run(scenario, on_disk(tmp_path, write="commit"))


def test_records_keep_their_priority_when_their_pages_leave_the_pool(tmp_path: Path) -> None:
    async def scenario(caller: Caller) -> None:
        await keep(caller, "high", PROMPTS[0], priority=90)
        await keep(caller, "low", PROMPTS[1], priority=10)
        await begin(caller, "large", list(range(12 * PAGE)))  # takes all pages of the pool
        await caller.call("delete_sequence", {"id": "large"})
        await fill(caller, PROMPTS[2:4])
        assert await check_all(caller, PROMPTS[:2]) == [4 * PAGE, 0]

    run(scenario, on_disk(tmp_path, write="commit", disk_bytes=8 * BLOCK))


def test_another_model_finds_nothing(tmp_path: Path) -> None:
    async def before(caller: Caller) -> None:
        await fill(caller)

    async def after(caller: Caller) -> None:
        assert (await caller.call("events", {"after": 0})).fields["events"] == []
        assert await check_all(caller) == [0] * 6

    run(before, on_disk(tmp_path))
    run(after, on_disk(tmp_path, model="other"))


def test_misses_are_counted_by_reason(tmp_path: Path) -> None:
    def count(caller: Caller) -> dict[str, float]:
        found = {why: caller.metric(f'attnd_tier_misses_total{{reason="{why}"}}') for why in MISSES}
        return {why: number for why, number in found.items() if number}

    async def before(caller: Caller) -> None:
        await create(caller, "a", PROMPTS[0])
        assert count(caller) == {"never_stored": 1}
        await caller.call("delete_sequence", {"id": "a"})
        await fill(caller, PROMPTS[:1])
        await create(caller, "a", PROMPTS[0], cache_salt="x")
        assert count(caller) == {"never_stored": 2, "other_salt": 1}
        await create(caller, "b", [*PROMPTS[0], *PROMPTS[1]])
        assert count(caller) == {"never_stored": 3, "other_salt": 1}
        await caller.call("delete_sequences", {"prefix": ""})
        await fill(caller, PROMPTS[1:10])  # disk and pool have 12 pages each
        loading = caller.engine.store.loading
        assert loading is not None
        tiers = loading.tiers
        await until(lambda: not tiers.is_copying)
        before = count(caller)
        await create(caller, "a", PROMPTS[0])
        assert count(caller)["evicted"] == before.get("evicted", 0) + 1

    async def after(caller: Caller) -> None:
        await create(caller, "a", PROMPTS[9])
        assert count(caller) == {"other_model": 1}

    run(before, on_disk(tmp_path, disk_bytes=12 * BLOCK))
    run(after, on_disk(tmp_path, disk_bytes=12 * BLOCK, model="other"))


def test_records_of_another_namespace_leave_no_trace(tmp_path: Path) -> None:
    """Replies to prompts that another namespace has in a lower tier equal those to prompts that
    no namespace has, after the same work; nor is a record loaded or looked at."""
    keys = {"key-a": ("a", ["read", "append"]), "key-b": ("b", ["read", "append"])}
    names = [[bytes([base + at] * 16).hex() for at in range(4)] for base in (10, 20)]

    looked_up: list[bytes] = []

    def work(caller: Caller) -> tuple[float, int]:
        """Slices and lookups so far: what a reply's time depends on."""
        return caller.metric("attnd_slices_total"), len(looked_up)

    async def found_by(other: Caller, named: dict[str, Any]) -> list[Any]:
        replies: list[Any] = []
        before = work(other)
        for name, fields in (
            ("match_prefix", named),
            ("match_prefix", named | {"lease_s": 0.0}),
            ("prefetch", named),
            ("prefetch", named | {"tiers": ["host", "disk"]}),
            ("pin", {"page_key": named.get("page_keys", ["ab" * 16])[-1]}),
            ("evict", {"num_pages": 4}),
        ):
            found = await outcome(other.call(name, fields))
            text = found.fields if isinstance(found, Reply) else str(found)
            replies.append(str(text).replace(str(fields.get("page_key")), "KEY"))
        new = {"id": "x", "prefix": named}
        made = (await other.submit(creation(new))).fields["sequences"][0]
        await other.call("delete_sequence", {"id": "x"})
        done = [after - first for first, after in zip(before, work(other), strict=True)]
        assert done[1] > 0
        return [*replies, made, done]

    async def scenario(caller: Caller) -> None:
        await fill(caller)
        await begin(caller, "named", PROMPTS[12])
        await caller.call("commit", {"id": "named", "page_keys": names[0]})
        await caller.call("delete_sequence", {"id": "named"})
        await fill(caller, PROMPTS[13:18])
        loading = caller.engine.store.loading
        assert loading is not None
        verified, find = [], loading.lookup._record

        def record(record_id: bytes, key: bytes, limits: LoadLimits) -> Record | None:
            looked_up.append(record_id)
            return find(record_id, key, limits)

        loading.fetcher._verify = lambda *args: verified.append(args)  # type: ignore[method-assign]
        loading.lookup._record = record  # type: ignore[method-assign]
        async with caller.another("key-b") as other:
            for kind, has, none in (
                ("token_ids", PROMPTS[0], PROMPTS[18]),
                ("page_keys", names[0], names[1]),
            ):
                assert await found_by(other, {kind: has}) == await found_by(other, {kind: none})
        assert not verified

    run(scenario, on_disk(tmp_path, host_bytes=64 * BLOCK), keys=keys, key="key-a")


def test_flipped_bits_are_misses_and_are_counted(tmp_path: Path) -> None:
    async def before(caller: Caller) -> None:
        await fill(caller)

    async def after(caller: Caller) -> None:
        data = next(tmp_path.glob("*.data"))
        blocks = bytearray(data.read_bytes())
        chosen = random.Random(3)
        for at in range(0, len(blocks), BLOCK):
            bit = chosen.randrange(8 * BLOCK)
            blocks[at + bit // 8] ^= 1 << bit % 8
        data.write_bytes(blocks)
        assert await check_all(caller) == [0] * 6
        assert caller.metric('attnd_tier_misses_total{reason="corrupt"}') >= 3
        await fill(caller, PROMPTS[10:14])
        assert await check_all(caller, PROMPTS[10:12]) == [4 * PAGE] * 2

    run(before, on_disk(tmp_path))
    run(after, on_disk(tmp_path))


PAIRS: Final = 1500
SIGMAS: Final = 4.5
"""By which the sign test of `PAIRS` pairs of times is off once in 10^5 runs."""


@pytest.mark.timing
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_the_time_of_a_reply_does_not_depend_on_another_namespaces_records(
    tmp_path: Path, tier: str
) -> None:
    """Of two prompts in turn, one that another namespace has in a tier and one that none has, the
    one takes longer as often as the other. The namespace that has it sees the difference."""
    keys = {"key-a": ("a", ["read", "append"]), "key-b": ("b", ["read", "append"])}
    chance = random.Random(1)

    async def slower(caller: Caller, name: str) -> float:
        """How often a prompt that is there takes longer, in standard deviations of a fair coin."""
        count = 0
        for number in range(PAIRS):
            prompts = PROMPTS[number % 2], PROMPTS[7 + number % 2]  # of as many digits
            order, times = chance.sample((0, 1), 2), [0.0, 0.0]
            for which in order:
                new = {"id": "x", "prefix": {"token_ids": prompts[which]}}
                begun = time.perf_counter()
                if name == "create":
                    await caller.submit(creation(new))
                else:
                    await caller.call(name, {"token_ids": prompts[which]})
                times[which] = time.perf_counter() - begun
                if name == "create":
                    await caller.call("delete_sequence", {"id": "x"})
            count += times[0] > times[1]
        return (2 * count - PAIRS) / PAIRS**0.5

    async def scenario(caller: Caller) -> None:
        await fill(caller)
        async with caller.another("key-b") as other:
            for name in ("match_prefix", "prefetch", "create"):
                found = await slower(other, name)
                print(f"{name}: {found:.1f} standard deviations")
                assert abs(found) < SIGMAS, name
        assert await slower(caller, "match_prefix") > SIGMAS

    run(scenario, on_disk(tmp_path) if tier == "disk" else HOST, keys=keys, key="key-a")


def test_the_engine_sleeps_only_while_a_load_waits_for_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not between the pieces of its own work: a millisecond each."""
    monkeypatch.setattr(lookup, "LOOKED_UP", 1)

    async def scenario(caller: Caller) -> None:
        await fill(caller)
        engine, waits = caller.engine, []

        def wait_s() -> float:
            found = Engine.wait_s(engine)
            if engine.scheduler.long_work.num_ready:
                waits.append(found)
            return found

        monkeypatch.setattr(engine, "wait_s", wait_s)
        assert (await create(caller, "a", PROMPTS[0]))["cached"]["host"] == 4 * PAGE
        assert len(waits) >= 4
        assert not any(waits)
        assert not engine.scheduler.long_work.num_ready

    run(scenario, HOST)


def test_a_turn_starts_a_batch_of_copies_at_most() -> None:
    """A turn that evicts pages, and a round of the engine: more would take milliseconds."""

    async def scenario(caller: Caller) -> None:
        loading = caller.engine.store.loading
        assert loading is not None
        copier, batches, begun = loading.tiers.copier, list[int](), list[int]()
        loading.tiers.at_once = 2
        begin, copy_next = copier._begin, copier.copy_next

        def counted(copies: Sequence[PageCopy], places: PagePlaces) -> None:
            begun.append(len(copies))
            begin(copies, places)

        def a_turn(nodes: Iterable[Node]) -> bool:
            before = len(begun)
            found = copy_next(nodes)
            batches.append(len(begun) - before)
            return found

        copier._begin, copier.copy_next = counted, a_turn  # type: ignore[method-assign]
        await fill(caller)
        assert await check_all(caller) == [4 * PAGE] * 6
        assert max(begun) == 2 and max(batches) == 1

    run(scenario, HOST)


def test_pages_are_not_copied_for_ever() -> None:
    """In a full tier a new copy takes the place of another one, whose page then has none again."""
    backend = make_backend(KIND, GEOMETRY)
    tree = PrefixTree(GEOMETRY.num_pages, PAGE, GEOMETRY.num_layers)
    host = (layout_of(GEOMETRY, "m"), 6, lambda: None, Metrics())
    tiers = Tiers(tree, backend.page_copies, *host)
    tiers.at_once, begun, begin = 2, list[int](), tiers.copier._begin

    def counted(copies: Sequence[PageCopy], places: PagePlaces) -> None:
        begun.append(len(copies))
        begin(copies, places)

    tiers.copier._begin = counted  # type: ignore[method-assign]
    length = GEOMETRY.num_pages * PAGE
    tree.create([NewSpec("new")])
    take_pages(tree, "new", [length] * tree.num_layers)
    tree.commits.commit("new", Prefix(np.arange(length, dtype=np.uint32)))
    tree.free(["new"])
    for _ in range(200):
        tiers.advance()
        time.sleep(1e-3)
    assert 0 < sum(begun) <= GEOMETRY.num_pages
    tiers.close(writes_pool=False, ends=time.monotonic() + 10.0)
    backend.close()


def test_a_page_is_copied_once_where_host_memory_is_full() -> None:
    """Copies of pages that are evicted next do not take each other's places."""

    async def scenario(caller: Caller) -> None:
        await fill(caller, PROMPTS[:16])
        moved = caller.metric('attnd_tier_pages_moved_total{tier="host",way="in"}')
        assert (16 - 3) * 4 <= moved <= 16 * 4
        assert await check_all(caller, PROMPTS[12:16]) == [4 * PAGE] * 4

    run(scenario, CacheSettings(host_bytes=16 * BLOCK))


def test_a_tier_that_a_request_leaves_out_is_no_miss() -> None:
    async def scenario(caller: Caller) -> None:
        await fill(caller)
        reasons = [f'attnd_tier_misses_total{{reason="{why}"}}' for why in MISSES]
        before = [caller.metric(one) for one in reasons]
        reply = await caller.call("prefetch", {"token_ids": PROMPTS[0], "tiers": ["pool"]})
        assert reply.fields["matched_len"] == 0
        assert [caller.metric(one) for one in reasons] == before

    run(scenario, HOST)


@pytest.mark.parametrize(("shared_s", "taken"), [(0.0, [4, 4, 4]), (3600.0, [1, 2, 3])])
def test_work_for_tiers_comes_in_single_pieces_where_calls_may_come(
    monkeypatch: pytest.MonkeyPatch, shared_s: float, taken: list[int]
) -> None:
    monkeypatch.setattr(all_tiers, "SHARED_S", shared_s)

    async def scenario(caller: Caller) -> None:
        await fill(caller)
        store, ended = caller.engine.store, list[int]()
        loading = store.loading
        assert loading is not None
        await until(lambda: not loading.tiers.is_copying)
        store.loading = None  # the engine's own rounds take no pieces meanwhile
        monkeypatch.setattr(loading.tiers, "is_awaited", lambda: False)
        for number in range(4):
            worker = (loading.fetcher._workers["host"], loading.tiers.copier._copier)[number // 2]
            worker.add(lambda number=number: partial(ended.append, number), lambda: True)
        counts = []
        for _ in range(3):
            loading.advance()
            counts.append(len(ended))
        assert counts == taken
        loading._waiting = 1
        before = len(ended)
        for _ in range(2):  # a load that waits has every other piece
            loading.advance()
        assert len(ended) == before
        loading._waiting, store.loading = 0, loading

    run(scenario, HOST)


def test_a_call_goes_to_the_device_before_work_for_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(caller: Caller) -> None:
        await begin(caller, "a", PROMPTS[0])
        engine, order = caller.engine, list[str]()
        loading, launches = engine.store.loading, engine.scheduler.launches
        assert loading is not None
        start, advance = launches._start, loading.advance
        monkeypatch.setattr(launches, "_start", lambda group: order.append("call") or start(group))
        monkeypatch.setattr(loading, "advance", lambda: order.append("tiers") or advance())
        receive = engine._receive
        monkeypatch.setattr(engine, "_receive", lambda *a: order.append("round") or receive(*a))
        await check(caller, "a", PROMPTS[0])
        rounds = " ".join(order).split("round")
        assert any("call" in one for one in rounds)
        assert all(one.split()[:1] == ["call"] for one in rounds if "call" in one)

    run(scenario, HOST)


def test_a_bit_that_flips_in_host_memory_is_a_miss_from_its_page_on() -> None:
    async def scenario(caller: Caller) -> None:
        await fill(caller)
        loading = caller.engine.store.loading
        assert loading is not None
        tiers, record_id = loading.tiers, root_key("default", "")
        for at, key in enumerate(Prefix(np.array(PROMPTS[0], np.uint32)).chain(record_id, PAGE)):
            record_id = next_id(record_id, key)
            if at == 2:
                entry = tiers.host.find(record_id)
        assert entry is not None
        tiers.records[entry.slot, -1] ^= 16
        assert await check_all(caller, PROMPTS[:2]) == [2 * PAGE, 4 * PAGE]
        assert caller.metric('attnd_tier_misses_total{reason="corrupt"}') == 1
        assert tiers.host.find(entry.key) is None

    run(scenario, HOST)


def test_concurrent_requests_load_a_record_once(tmp_path: Path) -> None:
    async def scenario(caller: Caller) -> None:
        await fill(caller)
        both = [
            caller.start(creation({"id": f"s{n}", "prefix": {"token_ids": PROMPTS[0]}}))
            for n in range(5)
        ]
        replies = await asyncio.gather(*both)
        assert {one.fields["sequences"][0]["cached_len"] for one in replies} == {4 * PAGE}
        assert caller.metric('attnd_tier_pages_moved_total{tier="host",way="out"}') == 4
        for number in range(5):
            await check(caller, f"s{number}", PROMPTS[0])

    run(scenario, HOST)


def test_requests_that_wait_for_another_ones_load_do_not_look_up_again(tmp_path: Path) -> None:
    async def scenario(caller: Caller) -> None:
        await fill(caller)
        loading, looked_up = caller.engine.store.loading, []
        assert loading is not None and loading.tiers.disk.store is not None
        find, gate = loading.lookup.find, threading.Event()
        loading.lookup.find = lambda *a: looked_up.append(a) or find(*a)  # type: ignore
        read = loading.tiers.disk.store.read
        loading.tiers.disk.store.read = lambda *a: gate.wait(30.0) and read(*a)  # type: ignore
        named = {"token_ids": PROMPTS[0]}
        calls = [caller.start(NewCall("prefetch", named), deadline_s=30.0) for _ in range(5)]
        await until(lambda: loading.fetcher.count > 0)
        await asyncio.sleep(0.2)
        assert len(looked_up) <= 3 * len(calls)
        gate.set()
        for call in calls:
            assert (await call).fields["matched_len"] == 4 * PAGE

    run(scenario, on_disk(tmp_path))


def test_a_quota_holds_in_every_tier_and_survives_a_restart(tmp_path: Path) -> None:
    cache = on_disk(tmp_path, host_bytes=32 * BLOCK)
    quota = {"name": "default", "max_host_bytes": 8 * BLOCK, "max_disk_bytes": 10 * BLOCK}

    async def before(caller: Caller) -> None:
        reply = await caller.call("set_namespace", quota | {"max_pages": 11})
        assert reply.fields["max_disk_bytes"] == 10 * BLOCK
        await fill(caller, PROMPTS[:10])
        assert caller.metric('attnd_tier_records{tier="host"}') <= 8
        assert caller.metric('attnd_tier_records{tier="disk"}') <= 10

    async def after(caller: Caller) -> None:
        reply = await caller.call("get_namespace", {"name": "default"})
        assert quota.items() <= reply.fields.items()
        assert reply.fields["max_pages"] == 11

    run(before, cache)
    run(after, cache)


def test_info_describes_the_tiers(tmp_path: Path) -> None:
    async def scenario(caller: Caller) -> None:
        await fill(caller)
        await check_all(caller)
        loading = caller.engine.store.loading
        assert loading is not None
        await until(lambda: not loading.tiers.is_copying)
        host, disk = (await caller.call("info")).fields["tiers"]
        assert (host["name"], host["total_bytes"]) == ("host", 64 * BLOCK)
        assert (disk["name"], disk["total_bytes"]) == ("disk", 64 * BLOCK)
        assert host["store_s"] > 0 and host["load_s"] > 0 and disk["store_s"] > 0

    run(scenario, on_disk(tmp_path, host_bytes=64 * BLOCK))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"host_bytes": BLOCK - 1}, "one page with its header takes"),
        ({"host_bytes": 2**60}, "free bytes: lower it"),
        ({"disk_bytes": 2**60}, "are free at"),
        ({"disk_path": "/tmp/" + 300 * "a"}, "File name too long: name another path"),
        ({"disk_path": "/tmp/\0"}, "null byte: name another path"),
    ],
)
def test_settings_that_cannot_be_met_stop_the_start(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    async def scenario(caller: Caller) -> None: ...

    with pytest.raises(RuntimeError, match=message) as raised:
        run(scenario, on_disk(tmp_path, **settings))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("cache", "field", "setting"),
    [
        (CacheSettings(), "max_host_bytes", "host_bytes"),
        (CacheSettings(), "max_disk_bytes", "host_bytes"),
        (HOST, "max_disk_bytes", "disk_path"),
    ],
)
def test_a_quota_for_a_tier_that_is_not_there_is_refused(
    cache: CacheSettings, field: str, setting: str
) -> None:
    async def scenario(caller: Caller) -> None:
        with pytest.raises(Refused, match=rf"set cache\.{setting}") as refused:
            await caller.call("set_namespace", {"name": "a", "max_pages": 3, field: 1})
        assert (refused.value.problem["field"], refused.value.problem["value"]) == (field, 1)
        assert (await caller.call("get_namespace", {"name": "a"})).fields["max_pages"] is None

    run(scenario, cache)


def test_a_pin_whose_records_are_missing_ends_with_the_restart(tmp_path: Path) -> None:
    async def before(caller: Caller) -> None:
        await begin(caller, "a", PROMPTS[0])
        reply = await caller.call("commit", {"id": "a", "token_ids": PROMPTS[0]})
        await caller.call("pin", {"page_key": reply.fields["last_key"], "hard": True})
        await asyncio.sleep(0.1)

    async def after(caller: Caller) -> None:
        await asyncio.sleep(0.2)
        assert (await caller.call("holds")).fields["holds"] == []
        assert (await caller.pool())["integrity"] == "ok"

    run(before, on_disk(tmp_path))
    for data in tmp_path.glob("*.data"):
        data.write_bytes(bytes(data.stat().st_size))
    run(after, on_disk(tmp_path))


def test_a_snapshot_counts_the_pages_of_each_tier(tmp_path: Path) -> None:
    async def scenario(caller: Caller) -> None:
        await fill(caller, PROMPTS[:5])
        fields = (await caller.call("snapshot")).fields
        assert fields["host"] >= 8 and fields["disk"] <= fields["host"]

    run(scenario, on_disk(tmp_path, host_bytes=64 * BLOCK))


def test_a_namespace_without_room_in_host_memory_delays_no_other(tmp_path: Path) -> None:
    keys = {"key-a": ("a", ["read", "append", "admin"]), "key-b": ("b", ["read", "append"])}
    cache = on_disk(tmp_path, host_bytes=64 * BLOCK, write="commit")

    async def committed(caller: Caller, name: str, prompt: list[int]) -> bool:
        await begin(caller, name, prompt)
        commit = NewCall("commit", {"id": name, "token_ids": prompt})
        return bool((await caller.submit(commit, deadline_s=60.0)).fields["durable"])

    async def scenario(caller: Caller) -> None:
        await caller.call("set_namespace", {"name": "a", "max_host_bytes": 0})
        began = time.monotonic()
        assert not await committed(caller, "x", PROMPTS[0])
        async with caller.another("key-b") as other:
            assert await committed(other, "x", PROMPTS[1])
        await caller.call("set_namespace", {"name": "a", "max_host_bytes": BLOCK})
        assert await committed(caller, "y", PROMPTS[2]), "one page after the other"
        assert time.monotonic() - began < 30.0, "no call waits until a deadline"

    run(scenario, cache, keys=keys, key="key-a")
