"""Jobs of an engine: each ends once, and none is aborted."""

from __future__ import annotations

import threading
import time

import pytest
from attnd.engines.workers import Workers


def fail() -> str:
    raise ValueError("a bug")


def test_each_job_ends_once_with_its_result_or_none(caplog: pytest.LogCaptureFixture) -> None:
    workers = Workers(1)
    ended: list[str | None] = []
    workers.submit("load", lambda: "done", ended.append)
    workers.submit("load", fail, ended.append)
    workers.drain()
    assert ended == ["done", None]
    assert "a job of the cache failed" in caplog.text
    workers.close()


def test_a_close_fails_what_has_not_begun_and_waits_for_what_has() -> None:
    workers = Workers(1)
    begun, go_on = threading.Event(), threading.Event()
    ended: dict[int, str | None] = {}

    def slow() -> str:
        begun.set()
        assert go_on.wait(10)
        return "done"

    workers.submit("load", slow, lambda result: ended.update({0: result}))
    assert begun.wait(10)
    for number in range(1, 5):
        workers.submit("load", lambda: "late", lambda result, n=number: ended.update({n: result}))
    closing = threading.Thread(target=workers.close)
    closing.start()
    time.sleep(0.05)
    assert closing.is_alive()
    go_on.set()
    closing.join(10)
    assert not closing.is_alive()
    assert ended == {0: "done", 1: None, 2: None, 3: None, 4: None}


def test_a_load_waits_for_no_store_and_a_lookup_for_no_load() -> None:
    workers = Workers(2)
    go_on, ended = threading.Event(), list[str | None]()
    for kind in ("store", "store", "store", "load", "load", "load"):
        workers.submit(kind, lambda: str(go_on.wait(10)), lambda _: None)  # type: ignore[arg-type]
    workers.submit("lookup", lambda: "found", ended.append)
    ends = time.monotonic() + 10
    while not ended:
        assert time.monotonic() < ends
        time.sleep(0.01)
    go_on.set()
    workers.close()
    assert ended == ["found"]
