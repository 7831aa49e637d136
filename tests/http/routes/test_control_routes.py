"""Control routes over a real socket: the prefix cache, health, timing; paths that give fields."""

from __future__ import annotations

import httpx
import numpy as np
from http_messages import (
    JSON,
    LAYERS,
    PAGE_SIZE,
    QO_HEADS,
    SAFETENSORS,
    append,
    check_common_headers,
    create,
    fill,
    post,
    rows,
)

from service.image.writing import image


def test_health_says_live_and_ready(client: httpx.Client) -> None:
    assert client.get("/health/live").json() == {"status": "live"}
    assert client.get("/health/ready").json() == {"status": "ready"}


def test_server_timing_shows_where_the_time_went(
    client: httpx.Client, rng: np.random.Generator, media: str
) -> None:
    fill(client, rng, "a", 5)
    fields = {"layer": 0, "sequences": ["a"]}
    response = post(client, "/v1/decode", fields, {"q": rows(rng, 1, QO_HEADS)}, media)
    check_common_headers(response)
    entries = [one.strip().split(";dur=") for one in response.headers["server-timing"].split(",")]
    spent = {name: float(value) for name, value in entries}
    assert spent["kernel"] > 0 and spent["plan"] > 0, spent
    assert (spent["encode"] > 0) == (media == JSON), "an image is laid in its place, not encoded"


IDS = list(range(2 * PAGE_SIZE))


def test_every_verb_has_its_route(client: httpx.Client, rng: np.random.Generator) -> None:
    create(client, "a")
    for layer in range(LAYERS):
        append(client, layer, "a", rows(rng, 2 * PAGE_SIZE), rows(rng, 2 * PAGE_SIZE))
    named = {"token_ids": IDS}
    reply = client.post("/v1/sequences/a/commit", json=named).json()
    assert (reply["committed_len"], reply["num_pages"]) == (2 * PAGE_SIZE, 2)
    key = reply["last_key"]
    assert client.delete("/v1/sequences/a").status_code == 204
    found = client.post("/v1/prefix/match", json=named).json()
    assert found["matched_len"] == 2 * PAGE_SIZE
    lease = f"/v1/leases/{found['lease']['id']}"
    assert client.post(lease, json={"lease_s": 5.0}).json()["id"] == found["lease"]["id"]
    assert client.delete(lease).status_code == 204
    assert client.delete(lease).json()["code"] == "unknown_lease"
    assert client.put("/v1/prefix/pin", json={"page_key": key, "hard": True}).json() == {
        "num_pages": 2
    }
    assert client.post("/v1/prefix/evict", json={"num_pages": 9}).json() == {"num_pages": 0}
    unpin = f"/v1/prefix/pin?page_key={key}"
    assert client.delete(unpin).status_code == 204
    assert client.delete(unpin).json()["code"] == "unknown_page"
    made = client.post("/v1/sequences", json={"sequences": [{"id": "b", "prefix": named}]})
    assert made.json()["sequences"][0]["cached_len"] == 2 * PAGE_SIZE
    assert client.post("/v1/sequences/delete", json={"prefix": "b"}).json() == {"num_deleted": 1}
    assert client.get("/v1/namespaces/default").json()["cached"] == 2
    quota = {"max_pages": None, "reserved_pages": 0}
    assert client.put("/v1/namespaces/default", json=quota).json()["max_pages"] is None
    assert client.post("/v1/prefix/clear", json={}).json() == {"num_pages": 2}


def test_a_sequence_called_delete_is_one_like_any_other(client: httpx.Client) -> None:
    assert client.post("/v1/sequences", json={"sequences": [{"id": "delete"}]}).is_success
    assert client.get("/v1/sequences/delete").json()["id"] == "delete"
    assert client.post("/v1/sequences/delete", json={"ids": ["else"]}).json()["num_deleted"] == 0
    assert client.delete("/v1/sequences/delete").status_code == 204
    assert client.delete("/v1/sequences/delete").status_code == 404


def test_a_path_gives_fields_to_a_safetensors_body(client: httpx.Client) -> None:
    headers = {"content-type": SAFETENSORS, "accept": JSON}
    ids = np.zeros(4, np.uint32)
    body = b"".join(image("request", "{}", {"token_ids": ids}))
    answer = client.post("/v1/sequences/unknown/commit", content=body, headers=headers)
    assert (answer.status_code, answer.json()["sequences"]) == (404, ["unknown"])
    body = b"".join(image("request", '{"id": "b"}', {"token_ids": ids}))
    answer = client.post("/v1/sequences/unknown/commit", content=body, headers=headers)
    assert (answer.status_code, answer.json()["field"]) == (422, "id")
    for broken in (b"", b"\0" * 8, b"\2" + b"\0" * 7 + b"[]", body[:40]):
        answer = client.post("/v1/sequences/unknown/commit", content=broken, headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (400, "malformed_body"), broken
