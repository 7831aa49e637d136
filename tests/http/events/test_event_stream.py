"""The stream of events over a real socket: live, replayed, bounded, ended, one namespace's only."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from http_messages import PAGE_SIZE, append, create, rows, store, streaming
from http_secrets import both, keys_file, write_keys
from http_service import Service, serving

from service.doors.http.endpoints import events
from tests.harness.waiting import wait_for

IDS = list(range(3 * PAGE_SIZE))
FEW = ("--cache.events-history", "4")


def clear(client: httpx.Client) -> None:
    assert client.post("/v1/prefix/clear", json={}).is_success


@contextmanager
def listening(client: httpx.Client, **how: Any) -> Iterator[Iterator[dict[str, Any]]]:
    """The stream's events as dicts, `kind` their name and `number` their id."""
    with streaming(client, "/v1/events", **how) as events:
        yield (
            json.loads(one["data"]) | {"kind": one["event"], "number": int(one["id"])}
            for one in events
        )


def page(client: httpx.Client, after: int) -> dict[str, Any]:
    answer = client.get(f"/v1/events/page?after={after}")
    assert answer.is_success, answer.text
    return dict(answer.json())


def test_stored_removed_and_cleared_pages_are_reported_at_once(client: httpx.Client) -> None:
    clear(client)
    with listening(client) as reply:
        store(client, IDS)
        stored = next(reply)
        clear(client)
        removed, cleared = next(reply), next(reply)
    assert [one["kind"] for one in (stored, removed, cleared)] == ["stored", "removed", "cleared"]
    assert stored["token_ids"] == IDS and stored["page_size"] == PAGE_SIZE
    assert stored["page_keys"] == removed["page_keys"] and len(stored["page_keys"]) == 3
    assert stored["namespace"] == "default" and len(stored["parent_key"]) == 32
    assert removed["number"] == removed["id"] == stored["id"] + 1 == cleared["id"] - 1


def test_a_client_that_reconnects_gets_the_events_that_it_missed(client: httpx.Client) -> None:
    last = page(client, -1)["next"]
    store(client, IDS)
    clear(client)
    with listening(client, headers={"Last-Event-ID": str(last + 1)}) as reply:
        assert next(reply)["kind"] == "removed"
    with listening(client, params={"after": last}) as reply:
        assert [next(reply)["id"] for _ in range(3)] == [last + 1, last + 2, last + 3]
        store(client, IDS)
        assert next(reply)["id"] == last + 4
    assert page(client, last + 4) == {"events": [], "next": last + 4, "too_old": False}
    assert len(client.get(f"/v1/events/page?after={last}&limit=2").json()["events"]) == 2
    clear(client)


def test_many_listeners_share_one_poll_that_ends_with_them(
    client: httpx.Client, service: Service
) -> None:
    with listening(client) as first, listening(client) as second:
        clear(client)
        assert next(first) == next(second)
        routes = {one.path: one for one in service.routes_app.router.routes}
        feeds = routes["/v1/events"].endpoint.by_method["GET"].__self__.feeds
        wait_for(
            lambda: [feed.listeners for feed in feeds.values()] == [2],
            "listeners of earlier tests to leave",
        )
    wait_for(lambda: not feeds, "the poll's end")
    wait_for(lambda: not service.door.active, "the streams' end")


def test_events_lost_from_the_history_are_reported_first() -> None:
    with serving(*FEW) as running, running.client() as client:
        first = page(client, -1)["next"]
        assert page(client, 0)["too_old"] is False
        for _ in range(2):
            store(client, IDS)
            clear(client)
        reply = page(client, first)
        assert reply["too_old"] and reply["next"] == first + 6
        assert [one["type"] for one in reply["events"]] == ["removed", "cleared"]
        assert page(client, 0)["too_old"] and page(client, first + 99)["too_old"]
        assert not page(client, first + 4)["too_old"]
        with listening(client, headers={"last-event-id": str(first)}) as stream:
            kinds = [next(stream)["kind"] for _ in range(3)]
        assert kinds == ["too_old", "removed", "cleared"]


def test_the_pressure_of_the_pool_is_reported_when_it_changes() -> None:
    arguments = ("--cache.high-watermark", "0.25")
    with serving(*arguments) as running, running.client() as client:
        rng = np.random.default_rng(0)
        with listening(client) as reply:
            create(client, "a")
            count = 20 * PAGE_SIZE
            append(client, 0, "a", rows(rng, count), rows(rng, count))
            high = next(reply)
            client.delete("/v1/sequences/a")
            low = next(reply)
        assert (high["type"], high["is_high"], high["free"]) == ("pressure", True, 44)
        assert (low["type"], low["is_high"], low["free"]) == ("pressure", False, 64)


def test_an_idle_stream_is_kept_alive_and_ends_with_the_drain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(events, "KEEP_ALIVE_S", 0.05)
    with serving() as running, running.client() as client:
        with client.stream("GET", "/v1/events") as response:
            lines = response.iter_lines()
            assert next(lines) == ": still here"
            running.drain()
            assert set(lines) <= {": still here", ""}
        wait_for(lambda: running.is_over, "the end of the drain")


@pytest.mark.parametrize(
    ("how", "field"),
    [
        ({"params": {"after": "x"}}, "after"),
        ({"params": {"after": "-2"}}, "after"),
        ({"params": {"limit": "1"}}, "limit"),
        ({"headers": {"Last-Event-ID": "9" * 30}}, "Last-Event-ID"),
    ],
)
def test_an_invalid_event_number_is_refused(client: httpx.Client, how: Any, field: str) -> None:
    answer = client.get("/v1/events", **how)
    assert (answer.status_code, answer.json()["field"]) == (422, field)


def test_other_methods_are_refused_and_head_has_no_events(client: httpx.Client) -> None:
    assert client.post("/v1/events").status_code == 405
    head = client.head("/v1/events")
    assert (head.status_code, head.headers["content-type"]) == (200, "text/event-stream")


def test_a_service_without_a_history_says_so() -> None:
    with serving("--cache.events-history", "0") as running, running.client() as client:
        for path in ("/v1/events", "/v1/events/page"):
            answer = client.get(path)
            assert (answer.status_code, answer.json()["field"]) == (422, "cache.events_history")


def test_events_belong_to_the_keys_namespace_and_end_with_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "KEEP_ALIVE_S", 0.1)
    keys = {**both("read", "append"), "mute": ("red", ["append"])}
    with (
        serving(*keys_file(tmp_path, keys)) as running,
        running.client("red") as red,
        running.client("blue") as blue,
        running.client("mute") as mute,
    ):
        with running.client() as stranger:
            assert stranger.get("/v1/events").status_code == 401
        assert mute.get("/v1/events").status_code == 403
        with listening(red) as reply:
            store(blue, IDS)
            store(red, IDS[:PAGE_SIZE])
            found = next(reply)
            assert (found["namespace"], found["token_ids"]) == ("red", IDS[:PAGE_SIZE])
            assert page(red, 0)["next"] == found["id"]
            write_keys(tmp_path / "keys", "blue", "mute", keys=keys)
            running.read_again()
            assert list(reply) == []
