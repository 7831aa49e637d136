"""Sequences, page tables, info, pool, health, metrics and docs over a real socket."""

from __future__ import annotations

import httpx
import numpy as np
from http_messages import (
    HEAD_DIM,
    JSON,
    KIND,
    KV_HEADS,
    LAYERS,
    PAGE_SIZE,
    PAGES,
    POOL_DTYPE,
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


def test_an_id_is_made_when_none_is_given(client: httpx.Client) -> None:
    made = create(client, {}, {})
    assert len({one["id"] for one in made}) == 2
    assert all(one["id"] for one in made)


def test_the_list_comes_in_pages(client: httpx.Client) -> None:
    names = [f"s{i}" for i in range(5)]
    create(client, *names)
    seen: list[str] = []
    after: dict[str, str] = {}
    while True:
        page = client.get("/v1/sequences", params={"limit": 2, **after}).json()
        seen += [one["id"] for one in page["sequences"]]
        if page["next"] is None:
            break
        after = {"after": page["next"]}
    assert seen == names


def test_truncate_cuts_every_layer(client: httpx.Client, rng: np.random.Generator) -> None:
    create(client, "a")
    for layer in range(LAYERS):
        append(client, layer, "a", rows(rng, 7), rows(rng, 7))
    reply = client.post("/v1/sequences/a/truncate", json={"length": 3}).json()
    assert (reply["length"], reply["lengths"], reply["pages"]) == (3, [3, 3], 1), reply


def test_the_page_table_has_csr_rows_and_levels(
    client: httpx.Client, rng: np.random.Generator
) -> None:
    create(client, "a")
    for layer in range(LAYERS):
        append(client, layer, "a", rows(rng, 8), rows(rng, 8))
    create(client, {"id": "b", "parent": "a"}, {"id": "c", "parent": "a"}, "empty")
    append(client, 0, "c", rows(rng, 1), rows(rng, 1))
    fields = {"sequences": ["c", "empty", "b"], "layer": 0}
    table = client.post("/v1/page-table", json=fields).json()
    assert table["kv_indptr"] == [0, 3, 3, 5]
    assert table["kv_last_page_len"] == [1, 0, PAGE_SIZE]
    assert table["kv_indices"][:2] == table["kv_indices"][3:], "b and c share two pages"
    assert sorted(table["order"]) == [0, 1, 2]
    shared = table["levels"][0]
    assert shared["kv_indices"] == table["kv_indices"][:2]
    for level in table["levels"]:
        assert level["qo_indptr"][0] == 0 and level["qo_indptr"][-1] == 3, level


def test_info_has_geometry_limits_and_identity(client: httpx.Client) -> None:
    info = client.get("/v1/info").json()
    assert info["backend"] == KIND
    assert info["dtype"] == POOL_DTYPE
    reply = (info["num_layers"], info["num_kv_heads"], info["head_dim"], info["page_size"])
    assert reply == (LAYERS, KV_HEADS, HEAD_DIM, PAGE_SIZE)
    assert info["num_pages"] == PAGES
    assert info["instance_id"] == client.get("/v1/info").json()["instance_id"]
    assert info["tensor_dtypes"] == ["F32", "F16", "BF16"]
    assert set(info["limits"]) == {
        "max_body_bytes",
        "max_json_body_bytes",
        "max_answer_bytes",
        "max_sequences",
        "relative_score_error",
        "queue_depth",
        "deadline_s",
    }
    assert info["version"] and info["device"] and isinstance(info["unsupported"], list)


def test_pool_counts_pages_and_sequences(client: httpx.Client, rng: np.random.Generator) -> None:
    create(client, "a")
    append(client, 0, "a", rows(rng, 5), rows(rng, 5))
    pool = client.get("/v1/pool").json()
    assert (pool["free"], pool["referenced"], pool["total"]) == (PAGES - 2, 2, PAGES)
    assert (pool["sequences"], pool["sharing_ratio"], pool["integrity"]) == (1, 1.0, "ok")


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
