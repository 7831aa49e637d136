"""`AttndTier`: vLLM's scheduler never waits, and a block that is not there is computed."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engines.records import OPTIONS, Records

SLOTS, BYTES = 40, 64
REQUEST = SimpleNamespace(req_id="one")


@dataclass(frozen=True)
class Group:
    tokens_per_block: int = 16
    layer_names: tuple[str, ...] = ("a", "b")
    group_id: int = 0


def spec(**changed: Any) -> SimpleNamespace:
    """vLLM's configuration; `changed` by names, those of a part with a dot."""
    parallel = {"world_size": 2, "tp_size": 2, "pp_size": 1, "pcp_size": 1, "dcp_size": 1}
    config = SimpleNamespace(
        model=SimpleNamespace(name="org/model", dtype="bfloat16"),
        cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=1),
        groups=(Group(),),
        parallel=SimpleNamespace(**parallel),
        worker_kv_bytes_per_block=32,
        kv_cache_layout="LBHNC",
        canonical_layout=False,
        replicated_layout=False,
    )
    for name, value in changed.items():
        *parts, last = name.split("__")
        place: Any = config
        for part in parts:
            place = getattr(place, part)
        delattr(place, last) if value is None else setattr(place, last, value)
    return SimpleNamespace(config=config)


@dataclass
class Job:
    job_id: int
    keys: list[bytes]
    chunk_ids: np.ndarray
    is_promotion: bool


class Driver:
    """A tier, the host cache above it, and the scheduler's calls."""

    def __init__(self, module: Any, records: Records, **options: Any) -> None:
        self.module, self.records, self.num_jobs = module, records, 0
        self.slots = np.full((SLOTS, BYTES), 255, np.uint8)
        view = memoryview(self.slots.view(np.int8))
        self.tier = module.AttndTier(spec(), view, "AttndTier", **(options or OPTIONS))

    def submit(self, keys: list[bytes], slots: list[int], *, load: bool) -> int:
        self.num_jobs += 1
        job = Job(self.num_jobs, keys, np.array(slots, np.int32), load)
        (self.tier.submit_load if load else self.tier.submit_store)(job)
        return self.num_jobs

    def finish(self, keys: list[bytes], slots: list[int], *, load: bool) -> Any:
        number = self.submit(keys, slots, load=load)
        self.tier.drain_jobs()
        (result,) = self.tier.get_finished_jobs()
        assert result.job_id == number and self.tier.get_finished_jobs() == []
        return result

    def look_up(self, key: bytes) -> str:
        return str(self.tier.lookup(key, REQUEST).name)

    def step(self) -> None:
        self.tier.on_schedule_end(None)
        self.tier.drain_jobs()


@pytest.fixture
def module(engines: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    found = import_module("attnd.vllm.tier")
    monkeypatch.setattr(found, "version", lambda _: "0.32.0")
    return found


@pytest.fixture
def driver(module: Any, records: Records) -> Iterator[Driver]:
    one = Driver(module, records)
    yield one
    one.tier.shutdown()


def test_a_block_is_stored_found_in_a_later_step_and_loaded(driver: Driver) -> None:
    rng = np.random.default_rng(1)
    values = rng.integers(0, 256, (3, BYTES), np.uint8)
    driver.slots[[5, 9, 2]] = values
    assert driver.finish([b"a", b"b", b"c"], [5, 9, 2], load=False).success
    driver.slots[:] = 255
    assert [driver.look_up(key) for key in (b"a", b"z")] == ["RETRY", "RETRY"]
    driver.step()
    assert [driver.look_up(key) for key in (b"a", b"z")] == ["HIT", "MISS"]
    result = driver.finish([b"c", b"a"], [7, 1], load=True)
    assert result.success and result.transfer_bytes == 2 * BYTES
    assert np.array_equal(driver.slots[[7, 1]], values[[2, 0]])
    assert (np.delete(driver.slots, [7, 1], axis=0) == 255).all()


def test_blocks_that_cannot_be_loaded_are_misses_and_the_others_are_kept(driver: Driver) -> None:
    driver.slots[:3] = 1
    driver.finish([b"a", b"b", b"c"], [0, 1, 2], load=False)
    for key in (b"a", b"b", b"c"):
        driver.look_up(key)
    driver.step()
    driver.records.corrupt.add(b"b")
    result = driver.finish([b"a", b"b", b"c"], [10, 11, 12], load=True)
    assert not result.success and result.successful_keys == (b"a", b"c")
    assert (driver.slots[11] == 255).all() and (driver.slots[[10, 12]] == 1).all()
    assert [driver.look_up(key) for key in (b"a", b"b", b"c")] == ["HIT", "MISS", "HIT"]


def test_a_service_that_is_away_is_a_miss(driver: Driver) -> None:
    driver.finish([b"a"], [0], load=False)
    driver.records.hangs()
    driver.look_up(b"a")
    driver.step()
    assert driver.look_up(b"a") == "MISS"
    assert not driver.finish([b"a"], [3], load=True).success
    assert not driver.finish([b"b"], [3], load=False).success
    assert (driver.slots[3] == 255).all()


def test_a_block_that_is_there_is_not_sent_again(driver: Driver) -> None:
    driver.finish([b"a"], [0], load=False)
    driver.records.calls.clear()
    assert driver.finish([b"a"], [1], load=False).success
    assert driver.records.calls == ["contains"]


def test_stores_hold_no_more_than_a_share_of_the_slots(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, contains = threading.Event(), driver.records.contains_records

    def slow(keys: list[bytes], **options: Any) -> Any:
        assert go_on.wait(10)
        return contains(keys, **options)

    monkeypatch.setattr(driver.records, "contains_records", slow)
    numbers = [driver.submit([bytes([at])], [at], load=False) for at in range(20)]
    go_on.set()
    driver.tier.drain_jobs()
    ends = {one.job_id: one.success for one in driver.tier.get_finished_jobs()}
    assert ends == {number: at < SLOTS // 4 for at, number in enumerate(numbers)}
    assert driver.finish([b"later"], [0], load=False).success


def test_a_store_larger_than_the_share_is_stored_where_it_is_alone(driver: Driver) -> None:
    keys = [bytes([at]) for at in range(30)]
    assert driver.finish(keys, [*range(30)], load=False).success


def test_blocks_that_are_used_above_are_touched_once_a_step(driver: Driver) -> None:
    driver.tier.touch([b"a", b"b"], REQUEST)
    driver.tier.touch([b"b"], REQUEST)
    driver.step()
    driver.step()
    assert driver.records.calls.count("touch") == 1
    assert driver.tier._store.counts["touch never_stored"] == 2


def test_metrics_are_what_is_new_by_operation_and_outcome(driver: Driver, module: Any) -> None:
    (definition,) = driver.tier.build_metric_definitions({}).values()
    assert definition.labelnames == ("tier", "operation", "outcome")
    driver.finish([b"a"], [0], load=False)
    assert driver.tier.get_stats().counts == {
        ("AttndTier", "contains", "never_stored"): 1,
        ("AttndTier", "put", "stored"): 1,
    }
    assert driver.tier.get_stats() is None
    driver.finish([b"a", b"z"], [1, 2], load=True)
    assert driver.tier.get_stats().counts == {
        ("AttndTier", "get", "found"): 1,
        ("AttndTier", "get", "never_stored"): 1,
    }


def test_a_job_that_has_a_bug_fails_alone(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(driver.records, "get_records", None)
        assert not driver.finish([b"a"], [0], load=True).success
    assert driver.finish([b"a"], [0], load=False).success


def test_the_host_cache_is_released_at_the_end(module: Any, records: Records) -> None:
    one = Driver(module, records)
    one.tier.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        one.submit([b"a"], [0], load=True)
    assert records.is_closed


CHANGES: dict[str, Any] = {
    "model__name": "other",
    "model__dtype": "float16",
    "cache__tokens_per_hash": 8,
    "cache__blocks_per_chunk": 2,
    "groups": (Group(32),),
    "worker_kv_bytes_per_block": 16,
    "kv_cache_layout": "other",
    "canonical_layout": True,
    "replicated_layout": True,
    "parallel__tp_size": 1,
    "parallel__pp_size": 2,
    "parallel__pcp_size": 2,
    "parallel__dcp_size": 2,
    "parallel__world_size": 4,
}


def stamp(module: Any, options: dict[str, str], **changed: Any) -> str:
    view = memoryview(np.zeros((SLOTS, BYTES), np.int8))
    tier = module.AttndTier(spec(**changed), view, "AttndTier", **options)
    tier.shutdown()
    return str(tier._store.stamp)


def test_the_stamp_has_all_that_bytes_depend_on(
    module: Any, records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [stamp(module, OPTIONS, **{name: value}) for name, value in CHANGES.items()]
    found += [stamp(module, OPTIONS), stamp(module, OPTIONS | {"revision": "two"})]
    monkeypatch.setattr(module, "version", lambda _: "0.33.0")
    found.append(stamp(module, OPTIONS))
    assert len(set(found)) == len(found), json.dumps(found, indent=1)
    assert stamp(module, OPTIONS | {"threads": 2}) == found[-1]  # type: ignore[dict-item]


@pytest.mark.parametrize("missing", ["parallel__tp_size", "kv_cache_layout", "groups"])
def test_a_release_that_does_not_say_what_its_blocks_are_is_refused(
    module: Any, records: Records, missing: str
) -> None:
    with pytest.raises(ValueError, match="does not say what its blocks look like"):
        stamp(module, OPTIONS, **{missing: None})


def test_a_release_whose_keys_lack_the_path_of_a_lora_is_refused(
    module: Any, records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "version", lambda _: "0.31.0")
    with pytest.raises(ValueError, match=r"vLLM 0\.31\.0, whose keys name a LoRA"):
        stamp(module, OPTIONS)


def test_a_model_whose_weights_are_unknown_is_refused(module: Any, records: Records) -> None:
    with pytest.raises(ValueError, match="revision is missing"):
        stamp(module, {"url": OPTIONS["url"]})


@pytest.mark.parametrize(
    "view",
    [
        memoryview(bytearray(64)),
        memoryview(np.zeros((4, 4), np.float32)),
        memoryview(np.zeros((4, 8), np.int8)[:, :4]),
    ],
    ids=["one dimension", "floats", "gaps"],
)
def test_a_host_cache_of_another_form_is_refused(
    module: Any, records: Records, view: memoryview
) -> None:
    with pytest.raises(ValueError, match="host cache is a view"):
        module.AttndTier(spec(), view, "AttndTier", **OPTIONS)
