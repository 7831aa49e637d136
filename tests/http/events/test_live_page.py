"""The live page without a browser: its files, its stream, one feed for all, and whose it is."""

from __future__ import annotations

import base64
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from http_messages import (
    PAGE_SIZE,
    PAGES,
    check_problem,
    create,
    fill,
    post,
    rows,
    streaming,
)
from http_secrets import bearer, keys_file, write_keys
from http_service import Service, serving

from service.doors.http.live import page, samples
from tests.harness.waiting import wait_for

STREAM = "/live/stream"


@contextmanager
def watching(client: httpx.Client, **how: Any) -> Iterator[Iterator[tuple[str, Any]]]:
    """The stream's events: (name, value)."""
    with streaming(client, STREAM, **how) as events:
        yield ((one["event"], json.loads(one["data"])) for one in events)


def first(stream: Iterator[tuple[str, Any]], name: str, **fields: Any) -> Any:
    """The next event of that name with these fields."""
    for found, value in stream:
        if found == name and all(value[key] == wanted for key, wanted in fields.items()):
            return value
    raise AssertionError(f"the stream ended before {name} {fields}")


def feed_of(service: Service) -> Any:
    routes = {one.path: one for one in service.routes_app.router.routes}
    return routes["/live/stream"].endpoint.by_method["GET"].__self__.feed


def unpacked(pages: dict[str, Any]) -> np.ndarray:
    packed = np.frombuffer(base64.b64decode(pages["states"]), np.uint8)
    states: np.ndarray = (packed[:, None] >> np.array([0, 2, 4, 6])) & 3
    return states.reshape(-1)[: pages["count"]]


def test_the_page_and_its_files_come_with_a_strict_policy(client: httpx.Client) -> None:
    names = {"live.html", "live.css", "live.js", "icon.svg", "map.js", "tree.js", "chart.js"}
    assert names <= set(page.files())
    for path in ("/live", *(f"/live/{name}" for name in page.files())):
        answer = client.get(path)
        assert answer.status_code == 200, path
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        for word in ("://", "innerHTML", "eval(", " style=", "onclick"):
            reply = answer.text.replace("http://www.w3.org/2000/svg", "")
            assert word not in reply, f"{path} has {word}"
    assert client.get("/live").headers["content-type"].startswith("text/html")
    assert client.get("/live/live.js").headers["content-type"].startswith("text/javascript")


def test_no_other_file_is_served(client: httpx.Client) -> None:
    for path in ("/live/", "/live/page.py", "/live/..%2fpage.py", "/live/none.js"):
        check_problem(client.get(path), 404, "not_found")
    check_problem(client.get("/live?x=1"), 422, "invalid_request")
    check_problem(client.get(f"{STREAM}?x=1"), 422, "invalid_request")
    check_problem(client.post(STREAM), 405, "method_not_allowed")
    stream = client.head(STREAM)
    assert stream.status_code == 200
    assert stream.headers["x-accel-buffering"] == "no", "nginx keeps its pictures back"


def test_the_stream_begins_with_everything_and_continues_with_what_changes(
    client: httpx.Client, rng: np.random.Generator
) -> None:
    with watching(client) as reply:
        service = first(reply, "service")
        assert (service["num_pages"], service["page_size"]) == (PAGES, PAGE_SIZE)
        assert service["columns"] == list(samples.COLUMNS)
        assert not unpacked(first(reply, "pages")).any()
        pool = first(reply, "pool", sequences=0)
        assert (pool["free"], pool["total"]) == (PAGES, PAGES)
        fill(client, rng, "a", 3 * PAGE_SIZE)
        pages = first(reply, "pages")
        tree = first(reply, "tree")
        pool = first(reply, "pool")
        assert unpacked(pages).sum() == tree["totals"][0] == pool["referenced"] == 3
        one = client.get("/v1/pool").json()
        assert {name: one[name] for name in pool if name in one} == {
            name: pool[name] for name in pool if name in one
        }


def test_load_and_totals_equal_the_metrics(client: httpx.Client, rng: np.random.Generator) -> None:
    fill(client, rng, "a", 5)
    text = client.get("/metrics").text
    appended = re.search(r"^attnd_tokens_appended_total (\S+)$", text, re.MULTILINE)
    assert appended
    with watching(client) as reply:
        assert first(reply, "load")["sessions"] == 1
        summary = first(reply, "summary")
        while summary["totals"]["tokens"] != float(appended[1]):
            summary = first(reply, "summary")
    assert set(summary["latency"]) == set(samples.TIMES)


def test_all_who_look_share_one_feed_that_ends_with_them(
    client: httpx.Client, service: Service
) -> None:
    with watching(client) as one, watching(client) as other:
        first(one, "pool"), first(other, "pool")
        feed = feed_of(service)
        wait_for(lambda: feed.viewers == 2, "viewers of earlier tests to leave")
    wait_for(lambda: feed_of(service) is None, "the feed's end")
    wait_for(lambda: not service.door.active, "the streams' end")


def test_an_engine_that_is_busy_is_said_to_be_and_not_waited_for() -> None:
    with serving() as running, running.client() as client:
        create(client, "a")
        q = {"q": rows(np.random.default_rng(0), 1, 4)}
        body = {"layer": 0, "sequences": ["a"]}
        asking = threading.Thread(target=post, args=(client, "/v1/decode", body, q))
        with watching(client) as reply:
            first(reply, "pool")
            with running.gate_closed():
                asking.start()
                wait_for(running.backend.entered.is_set, "the attention")
                ends = time.monotonic() + 20.0
                while first(reply, "load")["age_s"] < 0.5:
                    assert time.monotonic() < ends
            asking.join()
            while first(reply, "load")["age_s"] > 0.5:
                assert time.monotonic() < ends


def test_the_stream_ends_with_the_drain_and_is_refused_then() -> None:
    with serving() as running, running.client() as client:
        with watching(client) as reply:
            first(reply, "pool")
            running.drain()
            assert all(name != "pages" for name, _ in reply)
        wait_for(lambda: running.is_over, "the end of the drain")


def test_a_service_may_show_nothing_live() -> None:
    with serving("--server.live", "false") as running, running.client() as client:
        for path in ("/live", "/live/live.js", STREAM):
            check_problem(client.get(path), 404, "not_found")
        check_problem(client.get("/v1/snapshot"), 422, "invalid_request", field="server.live")


KEYS = {"user": ("red", ["read", "append"]), "operator": ("ops", ["admin"])}


def test_with_keys_the_page_is_open_and_its_data_needs_the_scope_admin(tmp_path: Path) -> None:
    with serving(*keys_file(tmp_path, KEYS)) as running, running.client() as client:
        assert client.get("/live").status_code == client.get("/live/live.js").status_code == 200
        check_problem(client.get(STREAM), 401, "unauthorized")
        check_problem(client.get(STREAM, headers=bearer("user")), 403, "forbidden", scope="admin")
        made = client.post(
            "/v1/sequences", json={"sequences": [{"id": "secret"}]}, headers=bearer("user")
        )
        assert made.status_code == 201
        with watching(client, headers=bearer("operator")) as reply:
            pool = first(reply, "pool", sequences=1)
            assert "secret" not in json.dumps(pool)
            write_keys(tmp_path / "keys", "user", keys=KEYS)
            running.read_again()
            assert "secret" not in str(list(reply))  # to its end, with the key


def test_with_keys_it_may_be_opened_to_everybody(tmp_path: Path) -> None:
    arguments = (*keys_file(tmp_path, KEYS), "--auth.open-live", "true")
    with serving(*arguments) as running, running.client() as client:
        with watching(client) as reply:
            first(reply, "pool", free=PAGES)
        check_problem(client.get("/v1/snapshot"), 401, "unauthorized")


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([0.0] * 18, [0.0, 0.0]),
        ([4.0] + [0.0] * 17, [0.05, 0.099]),
        ([0.0] * 17 + [9.0], [30000.0, 30000.0]),
        ([0.0, 2.0, 2.0] + [0.0] * 15, [0.25, 0.495]),
    ],
)
def test_quantiles_are_within_their_buckets(counts: list[float], expected: list[float]) -> None:
    found = samples.latency_of([*counts, 0.0])
    assert found[0] == sum(counts) and found[2:] == pytest.approx(expected, rel=0.01)


def test_rows_that_are_not_kept_any_more_are_passed_over() -> None:
    class Loop:
        def call_later(self, *_: Any) -> None: ...

    class Counted:
        def totals(self, names: Any) -> dict[Any, list[float]]:
            return {("tokens_appended",): [1.0]}

    kept = samples.Samples(Counted(), Loop())  # type: ignore[arg-type]
    assert kept.after(0) == (1, [])
    for _ in range(samples.KEPT + 5):
        kept._look()
    number, reply = kept.after(0)
    assert (number, len(reply), kept.newest) == (6, samples.KEPT, samples.KEPT + 5)
    assert kept.after(kept.newest - 2)[0] == kept.newest - 1
    assert len(kept.after(kept.newest - 2)[1]) == 2
    assert kept.after(kept.newest)[1] == []
    assert len(json.loads(reply[0])) == len(samples.COLUMNS)
