"""Calls of records for an engine: what is stored is found, and every failure is a miss."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from attnd.engines import store as store_module
from attnd.engines.options import StoreOptions, revision_of, stamp_of
from attnd.engines.store import MAX_BATCH_BYTES, MAX_RECORD_BYTES, EngineStore, batches
from engines.records import OPTIONS, Records


def rows(rng: np.random.Generator, sizes: Sequence[int]) -> list[list[np.ndarray]]:
    return [[rng.integers(0, 256, size, np.uint8)] for size in sizes]


def nans(sizes: Sequence[int]) -> list[list[np.ndarray]]:
    return [[np.full(size, 255, np.uint8)] for size in sizes]


def test_records_of_any_sizes_come_back_as_they_were(store: EngineStore) -> None:
    rng = np.random.default_rng(1)
    held: dict[bytes, np.ndarray] = {}
    for _ in range(50):
        keys = [bytes([one]) for one in rng.choice(40, 12, replace=False)]
        sizes = [int(key[0]) % 3 * 100 + 1 for key in keys]
        if rng.random() < 0.5:
            given = rows(rng, sizes)
            new = {key: part for key, (part,) in zip(keys, given, strict=True) if key not in held}
            expected = ["stored" if key in new else "present" for key in keys]
            assert store.put(keys, given) == expected
            held |= new
        else:
            places = nans(sizes)
            assert store.get(keys, places) == store.contains(keys) == [key in held for key in keys]
            for key, (place,) in zip(keys, places, strict=True):
                expected = held.get(key, np.full(len(place), 255, np.uint8))
                assert np.array_equal(place, expected)


def test_a_record_is_gathered_from_pieces_and_scattered_to_others(store: EngineStore) -> None:
    whole = np.arange(100, dtype=np.uint8)
    assert store.put([b"a"], [[whole[:30], b"seal", whole[30:]]]) == ["stored"]
    first, second = np.zeros(70, np.uint8), np.zeros(30, np.uint8)
    assert store.get([b"a"], [[second, b"seal", first]]) == [True]
    assert np.array_equal(np.concatenate([second, first]), whole)


@pytest.mark.parametrize(
    "pieces",
    [
        [np.full(8, 7, np.uint8), b"seaL"],
        [np.full(9, 7, np.uint8), b"seal"],
        [np.full(12, 7, np.uint8), b"seal"],
        [b"seal", np.full(8, 7, np.uint8)],
    ],
    ids=["other seal", "longer", "much longer", "other place"],
)
def test_other_bytes_than_expected_are_a_miss_and_are_deleted(
    store: EngineStore, records: Records, pieces: list[bytes | np.ndarray]
) -> None:
    store.put([b"a"], [[np.zeros(8, np.uint8), b"seal"]])
    assert store.get([b"a"], [pieces]) == [False]
    assert all(isinstance(one, bytes) or (one == 7).all() for one in pieces)
    assert store.counts["get foreign"] == 1 and not records.held


def test_a_call_has_no_key_twice_equal_sizes_and_a_bounded_number_of_bytes() -> None:
    rng = np.random.default_rng(2)
    big = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), (MAX_BATCH_BYTES // 3,), (0,))
    for _ in range(200):
        keys = [bytes([one]) for one in rng.integers(0, 200, rng.integers(0, 30))]
        given = [[big if rng.random() < 0.7 else big[:10]] for _ in keys]
        found = list(batches(keys, given))
        assert [at for batch, _ in found for at in batch] == [*range(len(keys))]
        for batch, size in found:
            assert {len(given[at][0]) for at in batch} == {size}
            assert len({keys[at] for at in batch}) == len(batch)
            assert len(batch) * size <= MAX_BATCH_BYTES
    many = [at.to_bytes(2, "big") for at in range(3000)]
    assert [len(batch) for batch, _ in batches(many, [[big[:1]]] * 3000)] == [1024, 1024, 952]


def test_a_service_that_hangs_costs_one_call_and_is_asked_again_later(
    store: EngineStore, records: Records, caplog: pytest.LogCaptureFixture
) -> None:
    store.put([b"a"], [[np.zeros(8, np.uint8)]])
    records.hangs()
    records.calls.clear()
    for _ in range(10):
        assert store.contains([b"a"]) == store.get([b"a"], nans([8])) == [False]
        assert store.put([b"b"], nans([8])) == ["unreachable"]
    assert records.calls == ["contains"]
    assert sum("no reply in 2 s" in one.message for one in caplog.records) == 1
    records.fails = None
    ends = time.monotonic() + 10
    while not store.contains([b"a"])[0]:
        assert time.monotonic() < ends
        time.sleep(0.05)
    assert not store.outage.holds and store.outage.pause_s == 0


def test_pauses_double_up_to_a_limit(store: EngineStore, records: Records) -> None:
    records.hangs()
    pauses = []
    for _ in range(9):
        store.outage.ends = 0.0
        store.contains([b"a"])
        pauses.append(store.outage.pause_s)
    assert pauses == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]


def test_a_busy_service_is_asked_again_at_once(store: EngineStore, records: Records) -> None:
    records.is_busy()
    assert store.contains([b"a"]) == [False]
    records.fails = None
    store.put([b"a"], nans([8]))
    assert store.contains([b"a"]) == [True] and store.counts["contains overloaded"] == 1


def test_where_a_lease_is_refused_records_are_found_without_one(
    store: EngineStore, records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put([b"a"], nans([8]))
    plain = records.contains_records

    def contains(keys: Sequence[bytes], *, stamp: str, **held: object) -> object:
        if held:
            records.is_busy()
            assert records.fails is not None
            raise records.fails
        records.fails = None
        return plain(keys, stamp=stamp)

    monkeypatch.setattr(records, "contains_records", contains)
    assert store.contains([b"a"], "job") == [True]


def test_a_service_without_records_is_refused_at_the_start(
    store: EngineStore, records: Records
) -> None:
    records.has_none()
    with pytest.raises(ValueError, match="has no records: no tier"):
        store.check()


def test_a_service_that_is_away_at_the_start_is_no_error(
    store: EngineStore, records: Records
) -> None:
    records.hangs()
    store.check()
    assert store.outage.holds and "no reply" in store.outage.reason


def test_blocks_that_are_larger_than_a_record_are_refused(store: EngineStore) -> None:
    store.check(MAX_RECORD_BYTES)
    with pytest.raises(ValueError, match=f"{MAX_RECORD_BYTES + 1} bytes"):
        store.check(MAX_RECORD_BYTES + 1)


def test_after_the_close_everything_is_a_miss(store: EngineStore, records: Records) -> None:
    store.put([b"a"], nans([8]))
    store.close()
    assert records.is_closed and store.contains([b"a"]) == [False]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"url": ""}, "url is missing"),
        ({"url": 7}, "url is 7, expected str"),
        ({"uri": "x"}, "unknown options uri; there are api_key"),
        ({"deadline_s": 0}, "deadline_s is 0, expected more than 0"),
        ({"deadline_s": "2"}, "deadline_s is '2', expected float"),
        ({"threads": True}, "threads is True, expected int"),
        ({"threads": 1.5}, "threads is 1.5, expected int"),
        ({"lease_s": float("nan")}, "lease_s is nan"),
    ],
)
def test_options_that_are_wrong_are_refused(changed: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        StoreOptions.read(OPTIONS | changed)


def test_the_key_comes_from_its_file_and_is_not_shown(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("secret\n")
    options = StoreOptions.read({**OPTIONS, "api_key": "other", "api_key_file": str(file)})
    assert options.key() == "secret" and "other" not in repr(options)


def test_a_stamp_changes_with_each_fact_and_is_short() -> None:
    facts = {"revision": "a", "dtype": "bf16", "groups": [{"tokens": 16}]}
    stamps = [
        stamp_of("vllm", "model", facts),
        stamp_of("sglang", "model", facts),
        stamp_of("vllm", "Model", facts),
        *(stamp_of("vllm", "model", facts | {name: "b"}) for name in facts),
        stamp_of("vllm", "model", facts | {"more": None}),
        stamp_of("vllm", "é" * 400, facts),
        stamp_of("vllm", "è" * 400, facts),
    ]
    assert len(set(stamps)) == len(stamps)
    assert all(one.isascii() and len(one) <= 256 for one in stamps)


def test_the_digest_of_weights_changes_with_one_bit_and_with_the_configuration(
    tmp_path: Path,
) -> None:
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    weights.write_bytes(bytes(100_000))
    config.write_text("{}")
    found = [revision_of(str(tmp_path), "")]
    weights.write_bytes(bytes(50_000) + b"\1" + bytes(49_999))
    found.append(revision_of(str(tmp_path), ""))
    config.write_text('{"rope_theta": 1}')
    found.append(revision_of(str(tmp_path), ""))
    os.rename(weights, tmp_path / "other.safetensors")
    found.append(revision_of(str(tmp_path), ""))
    assert len(set(found)) == 4
    assert revision_of(str(tmp_path), "given") == "given"


@pytest.mark.parametrize("model", ["org/model", "", "empty"])
def test_a_model_whose_weights_are_not_here_needs_a_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="revision is missing"):
        revision_of(model, "")


def test_another_host_is_reached_over_http_and_a_socket_by_a_session(tmp_path: Path) -> None:
    made = [
        store_module.connect(StoreOptions.read(OPTIONS | {"url": url}))
        for url in ("http://192.0.2.1:8080", "http://127.0.0.1:1", str(tmp_path / "engine.sock"))
    ]
    try:
        assert [type(one).__name__ for one in made] == ["Client", "Client", "Session"]
    finally:
        for one in made:
            one.close()
