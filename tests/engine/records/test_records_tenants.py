"""Records of several namespaces: none sees, evicts or holds up what is another's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from attnd import Forbidden, Overloaded, Session, Unauthorized

from tests.engine.records.rig import MIB, STAMP, Rig, keys_of, read, records

ALL = ["read", "append", "admin"]
KEYS = {
    "root": ("ops", ALL),
    "a": ("alice", ["read", "append"]),
    "b": ("bob", ["read", "append"]),
    "r": ("alice", ["read"]),
}
PLACE = bytes(range(256)) * 256


class Tenants:
    """Sessions of an engine by their keys."""

    def __init__(self, rig: Rig, stack: ExitStack) -> None:
        self.rig, self._stack = rig, stack

    def __getitem__(self, key: str) -> Session:
        return self._stack.enter_context(self.rig.by(key))


@pytest.fixture
def tenants(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Tenants]:
    given: dict[str, Any] = getattr(request, "param", {})
    with records(tmp_path, keys=KEYS, **given) as rig, ExitStack() as stack:
        yield Tenants(rig, stack)


def test_namespaces_do_not_see_each_others_records(tenants: Tenants) -> None:
    a, b = tenants["a"], tenants["b"]
    a.put_records([b"k"], [b"alice"], stamp=STAMP)
    assert read(b, [b"k"]) == {b"k": "never_stored"}
    b.put_records([b"k"], [b"bob"], stamp=STAMP)
    assert read(a, [b"k"]) == {b"k": b"alice"} and read(b, [b"k"]) == {b"k": b"bob"}
    assert b.delete_records([b"k"], stamp=STAMP).num_found == 1
    assert b.clear_records() == 0
    assert read(a, [b"k"]) == {b"k": b"alice"}


def test_a_key_that_may_read_changes_nothing(tenants: Tenants) -> None:
    reader, a = tenants["r"], tenants["a"]
    a.put_records([b"k"], [b"1"], stamp=STAMP)
    assert read(reader, [b"k"]) == {b"k": b"1"}
    for call in (
        lambda: reader.put_records([b"x"], [b"1"], stamp=STAMP),
        lambda: reader.delete_records([b"k"], stamp=STAMP),
        reader.clear_records,
    ):
        with pytest.raises(Forbidden):
            call()
    with pytest.raises(Unauthorized):
        tenants["unknown"].contains_records([b"k"], stamp=STAMP)


def test_a_quota_limits_a_namespace_also_after_a_restart(tmp_path: Path) -> None:
    values = [PLACE] * 8
    for is_restarted in (False, True):
        with records(tmp_path, keys=KEYS) as rig, rig.by("root") as root, rig.by("a") as a:
            if not is_restarted:
                root.set_namespace("alice", max_host_bytes=4 * 2**16, max_disk_bytes=6 * 2**16)
            keys = keys_of(8, f"restarted-{is_restarted}")
            stored = [a.put_records([key], [PLACE], stamp=STAMP, durable=True) for key in keys]
            assert {one.outcomes for one in stored} == {("stored",)}
            assert a.contains_records(keys, stamp=STAMP).outcomes.count("found") <= 6
            assert len([*rig.pool.host.own("alice")]) <= 4
            too_large = a.put_records([b"large"], [bytes(5 * 2**16)], stamp=STAMP)
            assert too_large.outcomes == ("no_room",)
            with rig.by("b") as b:
                found = b.put_records(keys, values, stamp=STAMP)
                assert set(found.outcomes) <= {"stored", "present"}


@pytest.mark.parametrize("tenants", [{"host_bytes": 4 * MIB}], indirect=True)
def test_a_flood_evicts_no_other_namespaces_share(tenants: Tenants) -> None:
    a, b = tenants["a"], tenants["b"]
    own = keys_of(30)
    b.put_records(own, [PLACE] * 30, stamp=STAMP)
    for number in range(5):
        a.put_records(keys_of(40, f"flood-{number}"), [PLACE] * 40, stamp=STAMP)
    assert len([*tenants.rig.pool.host.own("bob")]) == 30
    assert read(b, own) == dict.fromkeys(own, PLACE)


@pytest.mark.parametrize(
    "tenants", [{"host_bytes": 4 * MIB, "namespace_share": 0.5}], indirect=True
)
def test_jobs_of_one_namespace_leave_room_for_others(tenants: Tenants) -> None:
    """Of 1,024 places on disk jobs hold half, a namespace half of that, and none in memory."""
    a, b = tenants["a"], tenants["b"]
    for number in range(6):
        keys = keys_of(50, f"held-{number}")
        a.put_records(keys, [PLACE] * 50, stamp=STAMP, durable=True)
        if number < 5:
            a.contains_records(keys, stamp=STAMP, job=f"job-{number}", lease_s=3600.0)
            continue
        with pytest.raises(Overloaded, match="places of records held by jobs"):
            a.contains_records(keys, stamp=STAMP, job="job", lease_s=3600.0)
        assert tenants.rig.pool.leases.count("alice") == 5, "nothing is held"
    assert not tenants.rig.pool.host.pinned()
    keys = keys_of(20, "own")
    stored = b.put_records(keys, [PLACE] * 20, stamp=STAMP, durable=True)
    assert set(stored.outcomes) == {"stored"} and all(stored.durable)
    b.contains_records(keys, stamp=STAMP, job="job-1", lease_s=60.0)
    a.release_records("job-1")
    assert tenants.rig.pool.leases.count("alice") == 4
    assert tenants.rig.pool.leases.count("bob") == 1, "jobs of equal names are others"


def test_what_waits_for_a_slow_disk_takes_no_others_memory(tmp_path: Path) -> None:
    """The disk is stuck: one namespace fills half of host memory, and another still stores."""
    leave, entered = threading.Event(), threading.Event()
    with records(tmp_path, keys=KEYS, host_bytes=8 * MIB) as rig, rig.by("a") as a:
        store = rig.pool.disk.store
        assert store is not None
        real = store.put

        def stuck(*args: Any, **kwargs: Any) -> Any:
            entered.set()
            assert leave.wait(60.0)
            return real(*args, **kwargs)

        store.put = stuck  # type: ignore[method-assign]
        try:
            outcomes: list[str] = []
            for number in range(4):
                with_deadline = a.with_options(deadline=0.5)
                keys = keys_of(30, f"a-{number}")
                outcomes += with_deadline.put_records(keys, [PLACE] * 30, stamp=STAMP).outcomes
            assert entered.is_set()
            assert outcomes.count("stored") == 64, "half of the 128 places"
            with rig.by("b") as b:
                keys = keys_of(40, "b")
                assert set(b.put_records(keys, [PLACE] * 40, stamp=STAMP).outcomes) == {"stored"}
                assert read(b, keys) == dict.fromkeys(keys, PLACE)
        finally:
            leave.set()


def test_a_durable_record_waits_for_few_of_another_namespace(tmp_path: Path) -> None:
    """While one namespace has many records on their way, another's is in the next write."""
    leave, entered = threading.Event(), threading.Event()
    with records(tmp_path, keys=KEYS, host_bytes=64 * MIB) as rig, rig.by("a") as a:
        store = rig.pool.disk.store
        assert store is not None
        real, order = store.put, list[str]()

        def noted(given: Any, *args: Any, **kwargs: Any) -> Any:
            entered.set()
            assert leave.wait(60.0)
            order.extend(one.namespace for one in given)
            return real(given, *args, **kwargs)

        store.put = noted  # type: ignore[method-assign]
        value = bytes(MIB)
        a.put_records(keys_of(30, "a"), [value] * 30, stamp=STAMP)
        assert entered.wait(20.0)
        results: list[Any] = []

        def durable() -> None:
            with rig.by("b") as b:
                results.append(b.put_records([b"b"], [value], stamp=STAMP, durable=True))

        thread = threading.Thread(target=durable)
        thread.start()
        while rig.pool.host.count("bob") == 0 or rig.pool.copies.is_busy:
            pass
        leave.set()
        thread.join(60.0)
        assert results[0].durable == (True,)
        assert order.index("bob") <= 30, order
        assert set(order[order.index("bob") + 1 :]) == {"alice"} or len(order) == 31
