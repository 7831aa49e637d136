"""`AttndL2Adapter`: LMCache's tasks end once each, and what is not exactly there is a miss."""

from __future__ import annotations

import select
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engines.records import OPTIONS, Records


@dataclass(frozen=True)
class Key:
    chunk_hash: bytes = b"hash"
    model_name: str = "model"
    kv_rank: int = 0
    object_group_id: int = 0
    cache_salt: str = ""


def memory(values: np.ndarray, dtype: str = "bf16") -> SimpleNamespace:
    metadata = SimpleNamespace(
        shape=values.shape, dtype=dtype, shapes=None, dtypes=None, fmt="KV_2LTD"
    )
    return SimpleNamespace(
        metadata=metadata, byte_array=memoryview(values), get_size=lambda: values.nbytes
    )


@pytest.fixture
def adapter(engines: None, records: Records, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    module = import_module("attnd.lmcache.adapter")
    monkeypatch.setattr(module, "version", lambda _: "0.5.6")
    one = module.AttndL2Adapter(OPTIONS)
    yield one
    one.close()


def await_event(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    assert poll.poll(10_000), "no event within 10 s"


def store(adapter: Any, keys: Sequence[Key], values: Sequence[np.ndarray]) -> int:
    task = adapter.submit_store_task([*keys], [*map(memory, values)])
    await_event(adapter.get_store_event_fd())
    adapter._workers.drain()
    results = adapter.pop_completed_store_tasks()
    assert adapter.pop_completed_store_tasks() == {} and [*results] == [task]
    return int(results[task])


def look_up(adapter: Any, keys: Sequence[Key]) -> list[bool]:
    task = adapter.submit_lookup_and_lock_task([*keys], {})
    await_event(adapter.get_lookup_and_lock_event_fd())
    adapter._workers.drain()
    found = adapter.query_lookup_and_lock_result(task)
    assert adapter.query_lookup_and_lock_result(task) is None
    return list(found.bits)


def load(adapter: Any, keys: Sequence[Key], objects: Sequence[SimpleNamespace]) -> list[bool]:
    task = adapter.submit_load_task([*keys], [*objects])
    await_event(adapter.get_load_event_fd())
    adapter._workers.drain()
    found = adapter.query_load_result(task)
    assert adapter.query_load_result(task) is None
    return list(found.bits)


def test_objects_that_are_stored_are_found_and_loaded(adapter: Any) -> None:
    rng = np.random.default_rng(1)
    keys = [Key(bytes([at])) for at in range(20)]
    values = [rng.integers(0, 256, (4, 50), np.uint8) for _ in keys]
    assert store(adapter, keys[::2], values[::2]) == 10 * 200
    assert store(adapter, keys[::2], values[::2]) == 0  # there already: no bytes are sent
    assert look_up(adapter, keys) == [True, False] * 10
    places = [np.full((4, 50), 255, np.uint8) for _ in keys]
    assert load(adapter, keys, [*map(memory, places)]) == [True, False] * 10
    for at, place in enumerate(places):
        assert np.array_equal(place, values[at]) if at % 2 == 0 else (place == 255).all()
    assert adapter.accessed == keys[::2] and adapter.stored == dict.fromkeys(keys[::2], 200)


@pytest.mark.parametrize(
    "other",
    [
        Key(chunk_hash=b"hash2"),
        Key(model_name="mode", chunk_hash=b"hashl"),
        Key(kv_rank=1),
        Key(object_group_id=1),
        Key(cache_salt="a tenant"),
    ],
)
def test_every_part_of_a_key_counts(adapter: Any, other: Key) -> None:
    store(adapter, [Key()], [np.zeros(10, np.uint8)])
    assert look_up(adapter, [Key(), other]) == [True, False]


def test_an_object_of_another_dtype_is_a_miss_and_can_be_stored_again(adapter: Any) -> None:
    store(adapter, [Key()], [np.zeros(10, np.uint8)])
    place = np.full(10, 255, np.uint8)
    assert load(adapter, [Key()], [memory(place, "fp16")]) == [False]
    assert (place == 255).all() and adapter.stored == {}
    assert store(adapter, [Key()], [np.ones(10, np.uint8)]) == 10
    assert load(adapter, [Key()], [memory(place)]) == [True] and (place == 1).all()


def test_the_lease_of_a_lookup_ends_when_its_last_key_is_unlocked(
    adapter: Any, records: Records
) -> None:
    keys = [Key(bytes([at])) for at in range(3)]
    store(adapter, keys, [np.zeros(10, np.uint8)] * 3)
    look_up(adapter, keys)
    look_up(adapter, keys[:1])
    assert len(records.leases) == 2 and adapter.report_status()["locked_key_count"] == 4
    adapter.submit_unlock([Key(b"never locked"), *keys[:2]])
    adapter._workers.drain()
    assert len(records.leases) == 2
    adapter.submit_unlock(keys[2:])
    adapter.submit_unlock(keys[:1])
    adapter.submit_unlock(keys)
    adapter._workers.drain()
    assert not records.leases and adapter.report_status()["locked_key_count"] == 0


def test_a_service_that_is_away_is_a_miss_and_no_error(adapter: Any, records: Records) -> None:
    store(adapter, [Key()], [np.zeros(10, np.uint8)])
    records.hangs()
    place = np.full(10, 255, np.uint8)
    assert look_up(adapter, [Key()]) == [False]
    assert load(adapter, [Key()], [memory(place)]) == [False] and (place == 255).all()
    assert store(adapter, [Key(b"b")], [place]) == -1
    status = adapter.report_status()
    assert not status["is_healthy"] and status["get unreachable"] == 1


def test_a_corrupt_object_is_a_miss_whose_reason_is_counted(adapter: Any, records: Records) -> None:
    store(adapter, [Key()], [np.zeros(10, np.uint8)])
    records.corrupt |= {key for _, key in records.held}
    assert load(adapter, [Key()], [memory(np.zeros(10, np.uint8))]) == [False]
    assert adapter.report_status()["get corrupt"] == 1


def test_a_store_without_room_fails_and_counts_what_was_stored(
    adapter: Any, records: Records
) -> None:
    records.room = 60
    assert store(adapter, [Key(b"a"), Key(b"b")], [np.zeros(20, np.uint8)] * 2) == -1
    assert adapter.stored == {Key(b"a"): 20}


def test_a_deleted_object_is_gone_and_not_counted(adapter: Any) -> None:
    store(adapter, [Key()], [np.zeros(10, np.uint8)])
    adapter.delete([Key(), Key(b"other")])
    assert look_up(adapter, [Key()]) == [False] and adapter.stored == {}


def test_an_object_that_attnd_has_evicted_is_counted_no_more(
    adapter: Any, records: Records
) -> None:
    store(adapter, [Key()], [np.zeros(10, np.uint8)])
    records.held.clear()
    look_up(adapter, [Key()])
    assert adapter.stored == {}


def test_a_bug_in_a_task_fails_the_task_alone(adapter: Any) -> None:
    broken = replace(Key(), model_name=None)  # type: ignore[arg-type]
    assert look_up(adapter, [broken]) == [False]
    assert load(adapter, [broken], [memory(np.zeros(10, np.uint8))]) == [False]
    assert look_up(adapter, [Key()]) == [False]


def test_the_three_descriptors_differ(adapter: Any) -> None:
    found = {
        adapter.get_store_event_fd(),
        adapter.get_lookup_and_lock_event_fd(),
        adapter.get_load_event_fd(),
    }
    assert len(found) == 3


def test_an_adapter_without_a_revision_does_not_start(engines: None, records: Records) -> None:
    adapter = import_module("attnd.lmcache.adapter").AttndL2Adapter
    with pytest.raises(ValueError, match="revision is missing"):
        adapter({"url": "http://127.0.0.1:1"})
