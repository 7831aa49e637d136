"""Requests that become calls on the road: the engine's view, and the client's reply."""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from images import write_image
from scripted import (
    JSON,
    PROBLEM,
    SAFETENSORS,
    Heard,
    Running,
    decode_body,
    post,
    replies,
    request,
    serving,
    wait_for,
)

from service.errors import AnswerTooLarge, AttndError, LengthMismatch, Overloaded

BINARY = {"content-type": SAFETENSORS}


@pytest.mark.parametrize("rows", [1, 1000, 100_000])
def test_an_image_reaches_the_engine_and_its_answer_the_client_byte_for_byte(
    door: Running, client: httpx.Client, rows: int
) -> None:
    body = decode_body(rows)
    response = post(client, "/v1/decode", body)
    assert response.status_code == 200
    assert response.headers["content-type"] == SAFETENSORS
    (heard,) = door.engine.heard
    assert (heard.operation, heard.image) == ("decode", body)
    assert response.content == write_image(heard.fields, heard.tensors, "response")


def test_a_body_in_chunks_is_the_same_body(door: Running, client: httpx.Client) -> None:
    body = decode_body(50_000)

    def chunks() -> Iterator[bytes]:
        for at in range(0, len(body), 99_991):
            yield body[at : at + 99_991]

    response = client.post("/v1/decode", content=chunks(), headers=BINARY)
    assert response.status_code == 200
    assert door.engine.heard[0].image == body


def test_a_json_request_is_an_image_for_the_engine_and_its_answer_is_json(
    door: Running, client: httpx.Client
) -> None:
    q = {"dtype": "F32", "shape": [1, 1, 2], "data": [1.5, "-Infinity"]}
    fields = {"layer": 0, "sequences": ["a"]}
    response = client.post("/v1/decode", json={**fields, "tensors": {"q": q}})
    assert response.json() == {**fields, "tensors": {"q": q}}
    (heard,) = door.engine.heard
    assert heard.fields == fields
    np.testing.assert_array_equal(heard.tensors["q"], np.array([[[1.5, -np.inf]]], "f4"))


@pytest.mark.parametrize(
    ("sent", "accept", "answered"),
    [
        (SAFETENSORS, JSON, JSON),
        (JSON, SAFETENSORS, SAFETENSORS),
        (JSON, "text/html, application/json;q=0.9", JSON),
        (SAFETENSORS, "*/*", SAFETENSORS),
    ],
)
def test_accept_chooses_the_form_of_the_answer(
    client: httpx.Client, sent: str, accept: str, answered: str
) -> None:
    body = decode_body() if sent == SAFETENSORS else b'{"layer": 0}'
    headers = {"content-type": sent, "accept": accept}
    response = client.post("/v1/decode", content=body, headers=headers)
    assert (response.status_code, response.headers["content-type"]) == (200, answered)


def test_path_and_query_are_fields(door: Running, client: httpx.Client) -> None:
    client.get("/v1/sequences", params={"after": "a", "limit": "7"})
    client.get("/v1/sequences/chat-1")
    client.post("/v1/sequences/chat-2/truncate", json={"length": 3})
    reply = [(heard.operation, heard.fields) for heard in door.engine.heard]
    assert reply == [
        ("list_sequences", {"after": "a", "limit": 7}),
        ("get_sequence", {"id": "chat-1"}),
        ("truncate", {"id": "chat-2", "length": 3}),
    ]


def test_the_status_is_the_operations_own(door: Running, client: httpx.Client) -> None:
    made = client.post("/v1/sequences", json={"sequences": [{}]})
    assert (made.status_code, made.json()) == (201, {"sequences": [{}]})
    deleted = client.delete("/v1/sequences/a")
    assert (deleted.status_code, deleted.content) == (204, b"")
    assert "content-length" not in deleted.headers and "content-type" not in deleted.headers
    assert client.get("/v1/pool").status_code == 200, "and the connection stays open"


def test_an_answer_that_does_not_fit_is_asked_for_again(
    door: Running, client: httpx.Client
) -> None:
    k = np.zeros((500_000, 1, 2), np.float32)
    answer = write_image({"kv_indptr": [0, 500_000]}, {"k": k}, "response")
    door.engine.script = lambda heard: answer
    response = post(client, "/v1/gather", write_image({"layer": 0, "sequences": ["a"]}))
    assert response.content == answer
    first, second = door.engine.heard
    assert first.capacity < len(answer) <= second.capacity
    assert first.image == second.image


def test_a_problem_of_the_engine_is_passed_on_with_its_headers(
    door: Running, client: httpx.Client
) -> None:
    door.engine.script = lambda heard: LengthMismatch({"a": 3})
    response = post(client, "/v1/decode", decode_body())
    assert (response.status_code, response.headers["content-type"]) == (409, PROBLEM)
    assert response.json()["lengths"] == {"a": 3}
    door.engine.script = lambda heard: Overloaded("full", retry_after_s=1.2)
    response = post(client, "/v1/decode", decode_body())
    assert (response.status_code, response.headers["retry-after"]) == (429, "2")


def test_a_deadline_goes_with_the_call(door: Running, client: httpx.Client) -> None:
    post(client, "/v1/decode", decode_body(), x_attnd_deadline_ms="1500")
    post(client, "/v1/decode", decode_body())
    assert [heard.deadline_s for heard in door.engine.heard] == [1.5, 30.0]


@pytest.mark.parametrize("deadline", ["0", "0.5", "-1", "soon", "nan", "inf", "1e9", ""])
def test_a_deadline_that_is_none_is_refused(client: httpx.Client, deadline: str) -> None:
    response = post(client, "/v1/decode", decode_body(), x_attnd_deadline_ms=deadline)
    problem = response.json()
    assert (problem["code"], problem["field"]) == ("invalid_request", "X-Attnd-Deadline-Ms")


def test_the_request_id_is_echoed_and_goes_with_the_call(
    door: Running, client: httpx.Client
) -> None:
    for name in ("find-me", "0123456789abcdef0123456789ABCDEF"):
        response = post(client, "/v1/decode", decode_body(), x_request_id=name)
        assert response.headers["x-request-id"] == name
    digest = blake2b(b"find-me", digest_size=16).digest()
    in_hex = bytes.fromhex("0123456789abcdef0123456789ABCDEF")
    assert [heard.request_id for heard in door.engine.heard] == [digest, in_hex]


@pytest.mark.parametrize("name", ["", "a b", "\x7f", "x" * 129])
def test_a_request_id_that_no_log_should_have_is_replaced(door: Running, name: str) -> None:
    (reply,) = replies(
        door.say(request("/v1/decode", decode_body(), x_request_id=name, connection="close"))
    )
    made = reply.headers["x-request-id"]
    assert len(made) == 32 and int(made, 16) >= 0


def test_server_timing_has_the_stages_in_milliseconds(client: httpx.Client) -> None:
    reply = post(client, "/v1/decode", decode_body()).headers["server-timing"]
    assert reply == (
        "queue;dur=1.000, plan;dur=2.000, copy-in;dur=3.000, kernel;dur=4.000, "
        "copy-out;dur=5.000, encode;dur=6.000"
    )


# refused before the engine sees it


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/v1/decode", "POST"),
        ("PUT", "/v1/sequences", "GET, HEAD, POST"),
        ("POST", "/v1/sequences/a", "DELETE, GET, HEAD"),
        ("OPTIONS", "/v1/pool", "GET, HEAD"),
        ("POST", "/health/live", "GET, HEAD"),
    ],
)
def test_other_methods_get_the_list_of_allowed_ones(
    door: Running, client: httpx.Client, method: str, path: str, allow: str
) -> None:
    response = client.request(method, path)
    assert (response.status_code, response.headers["allow"]) == (405, allow)
    assert response.json()["allow"] == allow.split(", ")
    assert door.engine.heard == []


def test_head_is_answered_where_get_is(door: Running, client: httpx.Client) -> None:
    door.engine.push_state("ready")  # else it would have been silent for too long
    for path in ("/health/live", "/health/ready", "/v1/pool", "/metrics", "/docs"):
        got, head = client.get(path), client.head(path)
        assert (head.status_code, head.content) == (200, b""), path
        assert int(head.headers["content-length"]) > 0, path
        if path != "/metrics":
            assert head.headers["content-length"] == got.headers["content-length"], path


@pytest.mark.parametrize("path", ["/v1", "/v1/sequences/", "/v1/sequences/a/b", "/v2/decode"])
def test_no_such_route(client: httpx.Client, path: str) -> None:
    response = client.get(path)
    assert (response.status_code, response.json()["code"]) == (404, "not_found")


@pytest.mark.parametrize("content_type", ["", "text/plain", "application/x-safetensors"])
@pytest.mark.parametrize(
    ("path", "supported"),
    [
        ("/v1/decode", [SAFETENSORS, JSON]),
        ("/v1/gather", [SAFETENSORS, JSON]),
        ("/v1/sequences", [SAFETENSORS, JSON]),
        ("/v1/sequences/a/truncate", [JSON]),
    ],
)
def test_other_media_types_are_refused(
    client: httpx.Client, path: str, supported: list[str], content_type: str
) -> None:
    response = client.post(path, content=b"{}", headers={"content-type": content_type})
    assert response.status_code == 415
    assert response.json()["supported"] == supported


def test_encoded_bodies_are_refused(client: httpx.Client) -> None:
    response = post(client, "/v1/decode", b"x", content_encoding="gzip")
    assert (response.status_code, response.json()["code"]) == (415, "unsupported_media_type")
    response = post(client, "/v1/decode", b"x", content_encoding="Identity")
    assert (response.status_code, response.json()["code"]) == (400, "malformed_body")


def test_an_empty_body_is_malformed(client: httpx.Client) -> None:
    for content_type in (SAFETENSORS, JSON):
        response = client.post("/v1/decode", headers={"content-type": content_type})
        assert (response.status_code, response.json()["code"]) == (400, "malformed_body")


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/info?x=1", "query"),
        ("/v1/sequences/a?id=a", "query"),
        ("/v1/sequences?x=1", "x"),
        ("/v1/sequences?limit=1&limit=2", "limit"),
        ("/health/live?x", "query"),
    ],
)
def test_query_parameters_that_a_route_does_not_take_are_refused(
    client: httpx.Client, path: str, field: str
) -> None:
    response = client.get(path)
    assert (response.status_code, response.json()["field"]) == (422, field)


def test_a_query_on_a_post_is_refused(door: Running, client: httpx.Client) -> None:
    response = post(client, "/v1/decode?causal=true", decode_body())
    assert response.json()["code"] == "invalid_request"
    assert door.engine.heard == []


# memory


def test_no_request_leaves_anything_in_the_arena(tmp_path: Path) -> None:
    def script(heard: Heard) -> bytes | AttndError:
        many = np.zeros((200_000, 2), np.float32)
        if heard.operation == "gather":
            return write_image({}, {"k": many}, "response")
        return LengthMismatch({"a": 1})

    with serving(tmp_path, script=script) as running, running.client() as client:
        for _ in range(5):
            post(client, "/v1/append", decode_body(100_000))
            post(client, "/v1/gather", write_image({"layer": 0}))
            post(client, "/v1/nothing", decode_body(100_000))
            post(client, "/v1/append", decode_body(100_000), content_encoding="gzip")
        client.post("/v1/gather", json={"layer": 0})
        in_all = running.door.link.arena.slots

        def all_is_free() -> bool:
            running.on_loop(running.door.link.arena.spare.free)
            return bool(in_all.free() == running.door.link.arena.mapping.size)

        wait_for(all_is_free, "all slots to come back")


def test_a_request_without_room_in_the_arena_gets_429_and_retry_after(tmp_path: Path) -> None:
    small = ("--server.max-inflight-bytes", str(4 * 2**20))
    limits = ("--server.max-body-bytes", str(2 * 2**20), "--server.max-answer-bytes", "2000000")
    body = decode_body(60_000)
    with serving(tmp_path, *small, *limits) as running, running.client() as client:
        running.engine.close_gate()
        with running.connect() as first:
            first.sendall(request("/v1/decode", body))
            wait_for(lambda: running.engine.waiting, "the first call")
            response = post(client, "/v1/decode", body)
            assert (response.status_code, response.json()["code"]) == (429, "overloaded")
            assert "server.max_inflight_bytes" in response.json()["detail"]
            assert response.headers["retry-after"] == "1"
            assert client.get("/health/live").status_code == 200
            running.engine.open_gate()
            assert first.recv(12) == b"HTTP/1.1 200"
        wait_for(lambda: post(client, "/v1/decode", body).status_code == 200, "room again")


def test_the_arena_grows_up_to_its_limit(tmp_path: Path) -> None:
    body = decode_body(2_000_000)
    with serving(tmp_path) as running, running.client() as client:
        before = running.door.link.arena.mapping.size
        assert post(client, "/v1/decode", body).status_code == 200
        assert running.door.link.arena.mapping.size > before


def test_an_answer_beyond_the_limit_says_how_large_it_would_be(tmp_path: Path) -> None:
    answer = write_image({}, {"k": np.zeros((200_000, 2), np.float32)}, "response")
    with (
        serving(
            tmp_path, "--server.max-answer-bytes", "1000000", script=lambda heard: answer
        ) as running,
        running.client() as client,
    ):
        problem = post(client, "/v1/gather", write_image({"layer": 0})).json()
        assert (problem["status"], problem["code"]) == (413, "answer_too_large")
        assert (problem["size"], problem["limit"]) == (len(answer), 1_000_000)


def test_an_error_of_the_engine_about_its_own_limit_is_passed_on(
    door: Running, client: httpx.Client
) -> None:
    door.engine.script = lambda heard: AnswerTooLarge(10, 5, "ask for less")
    problem: Any = json.loads(post(client, "/v1/gather", write_image({"layer": 0})).content)
    assert (problem["code"], problem["size"]) == ("answer_too_large", 10)
    assert len(door.engine.heard) == 1
