"""Sequences, page tables, info, pool, health, metrics and docs over a real socket."""

from __future__ import annotations

import httpx
import numpy as np
from http_messages import (
    JSON,
    LAYERS,
    QO_HEADS,
    append,
    ask,
    check_common_headers,
    create,
    post,
    rows,
)


def test_sequences_are_made_forked_described_and_deleted(
    client: httpx.Client, rng: np.random.Generator
) -> None:
    (made,) = create(client, "a")
    empty = {"length": 0, "lengths": [0, 0], "pages": 0, "last_page_len": 0, "parent": None}
    assert made == {"id": "a", **empty, "ttl_s": None, "cached_len": 0}
    for layer in range(LAYERS):
        append(client, layer, "a", rows(rng, 6), rows(rng, 6))
    fork, own = create(client, {"id": "b", "parent": "a", "length": 5}, {"parent": "b"})
    assert (fork["length"], fork["pages"], fork["last_page_len"]) == (5, 2, 1), fork
    assert (own["length"], own["parent"]) == (5, "b"), own
    reply = client.get("/v1/sequences/a").json()
    assert reply == {
        "id": "a",
        "length": 6,
        "lengths": [6, 6],
        "pages": 2,
        "last_page_len": 2,
        "parent": None,
        "ttl_s": None,
    }
    response = client.delete("/v1/sequences/a")
    assert (response.status_code, response.content) == (204, b"")
    check_common_headers(response)
    assert client.get("/v1/sequences/a").status_code == 404
    assert client.get("/v1/sequences/b").json()["length"] == 5


def test_health_says_live_and_ready(client: httpx.Client) -> None:
    assert client.get("/health/live").json() == {"status": "live"}
    assert client.get("/health/ready").json() == {"status": "ready"}


def test_metrics_count_operations_and_tokens(
    client: httpx.Client, rng: np.random.Generator
) -> None:
    create(client, "a")
    append(client, 0, "a", rows(rng, 5), rows(rng, 5))
    ask(client, "/v1/decode", {"layer": 0, "sequences": ["a"]}, {"q": rows(rng, 1, QO_HEADS)})
    response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    values = {
        line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1])
        for line in response.text.splitlines()
        if not line.startswith("#")
    }
    assert values['attnd_requests_total{code="ok",op="append"}'] >= 1
    assert values['attnd_requests_total{code="ok",op="decode"}'] >= 1
    assert values["attnd_tokens_appended_total"] >= 5
    assert values['attnd_kv_pages{state="referenced"}'] == 2
    assert values["attnd_inflight"] == 0


def test_server_timing_shows_where_the_time_went(
    client: httpx.Client, rng: np.random.Generator, media: str
) -> None:
    create(client, "a")
    append(client, 0, "a", rows(rng, 5), rows(rng, 5))
    fields = {"layer": 0, "sequences": ["a"]}
    response = post(client, "/v1/decode", fields, {"q": rows(rng, 1, QO_HEADS)}, media)
    check_common_headers(response)
    entries = [one.strip().split(";dur=") for one in response.headers["server-timing"].split(",")]
    spent = {name: float(value) for name, value in entries}
    assert spent["kernel"] > 0 and spent["plan"] > 0, spent
    assert (spent["encode"] > 0) == (media == JSON), "an image is laid in its place, not encoded"
